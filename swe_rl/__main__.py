"""`python -m swe_rl COMMAND ...` and `torchrun ... -m swe_rl COMMAND ...`: the same as `swe-rl COMMAND ...`."""

import os
import sys

from swe_rl.cli import main

if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ and "torch.distributed" in sys.modules:
        from swe_rl.training import mesh

        mesh.exit_rank(code)
    sys.exit(code)
