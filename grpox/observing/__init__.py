"""What follows a run: its local record, the terminal, and whoever implements a lifecycle hook."""
