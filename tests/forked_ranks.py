"""Gloo ranks for tests: `start` runs a worker script, which makes them by `fork`, so that torch is imported once."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

TESTS = Path(__file__).parent


def start(worker: ModuleType, folder: Path, *arguments: object) -> Path:
    """Runs `python WORKER FOLDER ARGUMENTS...` to its end, with the tests' own modules at hand; returns the folder."""
    here = Path(str(worker.__file__))
    paths = [str(here.parent), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(here), str(folder), *map(str, arguments)]
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def fork(folder: Path, sizes: Sequence[int], work: Callable[[int, int], None]) -> None:
    """`work(rank, size)` in `size` processes of one group, for one size after the other. Exits with 1 if one fails."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    for size in sizes:
        ranks = [context.Process(target=_run, args=(folder, work, rank, size)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(1)


def _run(folder: Path, work: Callable[[int, int], None], rank: int, size: int) -> None:
    store = folder / f"store-{size}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    work(rank, size)
    dist.barrier()
    dist.destroy_process_group()
