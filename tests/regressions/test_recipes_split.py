"""Whole recipes over 1, 2 and 4 data-parallel ranks, other packings and orders: the same gradient, fp64, 1e-10."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import recipes_worker as case
import torch
from torch import Tensor

from swe_rl.batching.minibatches import minibatch_of

BOUND = 1e-10


@cache
def alone(name: str) -> dict[str, Tensor]:
    """One process, everything in one row."""
    torch.set_num_threads(1)
    return case.gradients(name, case.samples_with_targets(), max_tokens=1000)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    assert any(float(grad.norm()) > 1e-6 for grad in want.values()), "a zero gradient proves nothing"
    for name, expected in want.items():
        difference = float((got[name] - expected).norm())
        assert difference <= BOUND + BOUND * float(expected.norm()), f"{name}: {difference:.2e}"


@pytest.mark.parametrize("name", case.RECIPES)
@pytest.mark.parametrize("max_tokens", [1, 40])
def test_micro_batches_and_packing(name: str, max_tokens: int) -> None:
    assert_same(case.gradients(name, case.samples_with_targets(), max_tokens=max_tokens), alone(name))


@pytest.mark.parametrize("name", case.RECIPES)
def test_order_of_rows(name: str) -> None:
    shuffled = case.samples_with_targets()[::-1]
    assert_same(case.gradients(name, shuffled[3:] + shuffled[:3], max_tokens=60), alone(name))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sharding"), [(2, "replicated"), (4, "replicated"), (2, "sharded")])
def test_data_parallel_ranks(tmp_path: Path, ranks: int, sharding: str) -> None:
    out = tmp_path / "gradients.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(case.__file__), str(out), sharding]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(out, weights_only=False)
    for name in case.RECIPES:
        assert_same(found[name], alone(name))


def test_mini_batches_do_not_depend_on_ranks() -> None:
    names = [f"t{i}" for i in range(10)]
    count, place = minibatch_of(names, size=4, seed="x")
    assert count == 3
    assert sorted(sum(p == part for p in place.values()) for part in range(3)) == [3, 3, 4]
    assert minibatch_of([*names[1::2], *names[::2]], size=4, seed="x") == (count, place)
    assert minibatch_of(names, size=4, seed="y")[1] != place
    assert minibatch_of(names, size=0, seed="x") == (1, dict.fromkeys(sorted(names), 0))
    assert minibatch_of([], size=4, seed="x") == (1, {})
    assert max(minibatch_of(names, size=3, seed="z")[1].values()) == 3
