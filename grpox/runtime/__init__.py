"""This process and those beside it: ranks, launchers, signals, waiting, files.

`launch` reads from the environment which rank this process is, and `world` joins the ranks: where they meet,
rank, size, device, and the few collectives that the core needs. It lets what fails on one rank fail on all,
and tells of a rank that is lost. `phases` knows what the process is doing and where memory ran out,
`watchdog` ends it when that stalls or another machine is gone, and `signals` turns those that come into
errors. `child` asks processes that can be killed, `logs` shows and keeps messages, `files` writes files whole
or not at all, `run_lock` lets one process write into a run's folder, and `setup` and `lazy_imports` make a
start quick and quiet.
"""
