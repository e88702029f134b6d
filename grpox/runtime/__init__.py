"""This process and the other processes of a run: ranks, launchers, signals, waiting, files.

`launch` reads the rank of this process from the environment. `world` connects the ranks and has the few
collectives that the core needs; an error on one rank ends all ranks, and a lost rank is reported. `phases`
records the current phase and the place where memory ran out. `watchdog` ends a process that stalls or whose
peer machine is lost. `signals` turns signals into exceptions. `child` runs processes that can be killed, `logs`
shows and writes messages, `files` writes files whole or not at all, `run_lock` lets only one process write into
a run's folder, and `setup` and `lazy_imports` make the start fast and quiet.
"""
