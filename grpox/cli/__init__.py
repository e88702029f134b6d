"""The command line."""

from grpox.cli.app import main

__all__ = ["main"]
