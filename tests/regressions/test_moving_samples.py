"""Rollouts without a gradient are not computed, on whichever rank they are: the step is that of all rollouts.

Two ranks, of which one has no rollout that moves a weight, data parallel and computing rows together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moving_samples_worker as worker
import pytest
import torch
from forked_ranks import start
from torch import Tensor

from swe_rl.algorithms.sequences import gspo_old
from swe_rl.batching.layout import lay_out
from swe_rl.training.step_batches import weigh

Results = list[tuple[worker.Job, list[dict[str, Any]]]]  # of each job those of both ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = start(worker, tmp_path_factory.mktemp("ranks"), 2)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return [(job, [found[number] for found in ranks]) for number, job in enumerate(worker.jobs())]


def gradients_of_all(job: worker.Job) -> tuple[dict[str, Tensor], float]:
    """(gradients, loss) of every rollout in one process, one by one."""
    alone = replace(job, context=1, sharded=False)
    backend = worker.trainer(alone)
    every = weigh([*worker.samples(job, 0), *worker.samples(job, 1)], alone.config())
    rows = lay_out(every, max_tokens=40).batches
    if job.rule == "gspo":
        rows = gspo_old(rows, backend.logprobs(rows))
    loss = backend.backward(rows, objective="policy_gradient")
    gradients = {name: grad.clone() for name, grad in backend.gradients().items()}
    finished = loss.finish(step=1, policy_version=0, grad_norm=0.0, skipped=False, seconds=1.0, peak_memory=0)
    return gradients, finished.loss


def test_the_gradient_is_that_of_all_rollouts(results: Results) -> None:
    for job, ranks in results:
        if not job.moving:
            continue
        want, loss = gradients_of_all(job)
        moving = [s for s in worker.samples(job, 0) if any(s.advantages)]
        if job.rule == "gspo":  # means are over all tokens of a rollout
            names = {s.trajectory_id for s in moving}
            moving = [s for s in worker.samples(job, 0) if s.trajectory_id in names]
        for found in ranks:
            stats = found["stats"]
            assert stats.loss == pytest.approx(loss, rel=1e-10)
            assert stats.num_loss_tokens == sum(sum(s.loss_mask) for s in moving), "rank 1 computes nothing of its own"
            assert set(found["gradients"]) == set(want)
            for name, expected in want.items():
                assert expected.norm() > 1e-8, "a zero gradient proves nothing"
                error = (found["gradients"][name] - expected).norm() / expected.norm()
                assert error <= 1e-10, f"{job}: {name}: {error:.1e}"


def test_a_step_without_a_gradient_anywhere_stays_one(results: Results) -> None:
    """One rollout stands for those of all ranks; momentum and decay act alike everywhere."""
    for job, ranks in results:
        if job.moving:
            continue
        every = [s for rank in range(2) for s in worker.samples(job, rank)]
        first = min(s.trajectory_id for s in every if any(s.loss_mask))
        trained = sum(sum(s.loss_mask) for s in every if s.trajectory_id == first)
        for found in ranks:
            stats = found["stats"]
            assert (stats.skipped, stats.policy_version, stats.grad_norm) == (False, 1, 0.0)
            assert stats.num_loss_tokens == trained
            for name, weight in ranks[0]["weights"].items():
                assert torch.equal(found["weights"][name], weight)
