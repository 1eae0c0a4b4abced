"""Command line: one small file per command, and the table of commands in dispatch.py."""

from swe_rl.cli.dispatch import main

__all__ = ["main"]
