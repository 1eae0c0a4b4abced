"""A step of the trainer on a grid of data-parallel and context-parallel ranks is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import context_trainer_worker as worker
import pytest
import torch
from forked_ranks import start

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
STEPPED = {torch.float64: 1e-8, torch.float32: 1e-3}  # Adam's first step is a sign: tiny gradients are amplified


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_step_equals_that_of_one_process(tmp_path: Path, size: int) -> None:
    """Gradients, statistics, scores, values and stepped weights; the last rank brings no row, and ranks without a
    target take part in every pass."""
    compare(start(worker, tmp_path, size), size)


def compare(folder: Path, size: int) -> None:
    """What the ranks have written, against the same in this process."""
    parts = [torch.load(folder / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)]
    for number, job in enumerate(worker.jobs(size)):
        every = worker.rows(job)
        want = worker.step(job, worker.trainer(job, alone=True), every)
        places = [worker.share(range(len(every)), rank, size) for rank in range(size)]  # type: ignore[arg-type]
        assert not places[-1]
        for rank, mine in enumerate(places):
            got = parts[rank][number]
            for name in ("scores", "values", "rescored"):
                wanted = [want[name][place] for place in mine] if want[name] else []  # type: ignore[call-overload]
                assert len(got[name]) == len(wanted)
                for found, expected in zip(got[name], wanted, strict=True):
                    bound = 1e-4 if name == "rescored" and job.dtype == torch.float32 else 1e-5
                    torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)
            check_step(job, got, want)


def check_step(job: worker.Job, got: dict[str, Any], want: dict[str, Any]) -> None:
    """Of one rank: gradients and weights are full ones, statistics those of all ranks."""
    for kind, bounds in (("gradients", BOUNDS), ("weights", STEPPED)):
        assert set(got[kind]) == set(want[kind])
        for name, expected in want[kind].items():
            assert expected.norm() > 1e-6, f"{name}: a zero gradient proves nothing"
            error = (got[kind][name].double() - expected.double()).norm() / expected.double().norm()
            assert error <= bounds[job.dtype], f"{job}: {kind} of {name}: {error:.1e}"
    mine, one = got["stats"], want["stats"]
    bound = BOUNDS[job.dtype]
    assert mine.loss == pytest.approx(one.loss, rel=bound)
    assert mine.grad_norm == pytest.approx(one.grad_norm, rel=10 * bound)
    assert (mine.num_loss_tokens, mine.num_tokens) == (one.num_loss_tokens, one.num_tokens)
    ratios = [stats.details["train/tree_token_ratio"] for stats in (mine, one)]
    assert ratios[0] == pytest.approx(ratios[1])
    split = mine.details["train/context_split_frac"]
    assert 0.2 < split < 0.9 if job.context > 1 else split == 0
