"""A model whose rows are split over 1, 2 and 4 gloo ranks has the loss and the gradient of one process."""

from __future__ import annotations

from pathlib import Path

import context_gradients_worker as worker
import pytest
import torch
from forked_ranks import start

SIZES = (1, 2, 4)
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def folder_of_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return start(worker, tmp_path_factory.mktemp("ranks"), *SIZES)


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_one_process(folder_of_results: Path) -> None:
    """Ranks without a target take part: a row of four tokens has one."""
    results = {size: torch.load(folder_of_results / f"{size}.pt") for size in SIZES}
    for number, job in enumerate(worker.jobs()):
        whole = worker.trainer(job)
        totals = whole.backward(worker.batches(job.layout), objective="policy_gradient")
        want = whole.gradients()
        loss = totals.finish(step=1, policy_version=0, grad_norm=0.0, skipped=False, seconds=1.0, peak_memory=0).loss
        bound = BOUNDS[job.dtype]
        for size in SIZES:
            got = results[size][number]
            assert float(got.pop("loss")) == pytest.approx(loss, rel=bound)
            assert set(got) == set(want)
            for name, expected in want.items():
                error = (got[name].double() - expected.double()).norm() / expected.double().norm()
                assert error <= bound, f"{job} on {size} ranks, {name}: {error:.1e}"
