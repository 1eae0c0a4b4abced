"""Command line: one small file per command."""


def main() -> int:
    """Entry point of `swe-rl`."""
    return 0
