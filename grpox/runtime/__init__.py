"""This process and those beside it: ranks, launchers, signals, waiting, files.

`launch` and `launchers` read from the environment which rank this process is, `rendezvous` settles where
the ranks meet, and `world` joins them: rank, size, device, and the few collectives that the core needs.
`collective_errors` lets what fails on one rank fail on all, and tells of a rank that is lost. `phases` knows
what the process is doing, `watchdog` ends it when that stalls, and `signals` and `out_of_memory` turn what the
outside does into errors with a cure. `child` asks processes that can be killed, `logs` shows and keeps
messages, `files` writes files whole or not at all, `run_lock` lets one process write into a run's folder, and
`setup` and `lazy_imports` make a start quick and quiet.
"""
