"""`python -m swe_rl COMMAND ...` and `torchrun ... -m swe_rl COMMAND ...`: the same as `swe-rl COMMAND ...`."""

import sys

from swe_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
