"""What all tests need."""

import signal

# A shell that starts a job in the background has it ignore Ctrl-C, which the commands under test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
