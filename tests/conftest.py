"""What all tests need."""

import os
import signal
import tempfile

# A shell that starts a job in the background has it ignore Ctrl-C, which the commands under test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What the tests' own plugins offer is nothing for the user's cache, nor is what is there for the tests.
CACHE = tempfile.TemporaryDirectory(prefix="grpox-tests-", ignore_cleanup_errors=True)
os.environ["GRPOX_CACHE_DIR"] = CACHE.name
