"""`python -m swe_rl COMMAND ...` and `torchrun ... -m swe_rl COMMAND ...`: the same as `swe-rl COMMAND ...`."""

import os
import signal
import sys
from typing import NoReturn

from swe_rl.cli import main


def entry() -> NoReturn:
    """The process of a command, from its first argument to its exit code."""
    code = main()
    for number in (signal.SIGINT, signal.SIGTERM):  # all is written and closed: what is left is the interpreter's end
        signal.signal(number, signal.SIG_IGN)
    if "RANK" in os.environ and "torch.distributed" in sys.modules:
        from swe_rl.training import mesh

        mesh.exit_rank(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
