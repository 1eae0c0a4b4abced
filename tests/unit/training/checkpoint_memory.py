"""What loading a checkpoint takes of a process, in one that has no freed memory to use again: `checkpoint_memory.py
CHECKPOINT` prints the bytes after reading all of it and after copying one tensor."""

from __future__ import annotations

import sys
from pathlib import Path

from swe_rl.training import checkpoint


def private_bytes() -> int:
    """Memory that this process shares with no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def main() -> None:
    before = private_bytes()
    loaded = checkpoint.load(Path(sys.argv[1])).backend
    assert float(loaded["model"]["w"].sum()) == loaded["model"]["w"].numel()
    assert float(loaded["optimizer"]["w"]["m"].sum()) == 2 * loaded["optimizer"]["w"]["m"].numel()
    read = private_bytes() - before
    copied = loaded["optimizer"]["w"]["m"].clone()
    print(read, private_bytes() - before, copied.nbytes)


if __name__ == "__main__":
    main()
