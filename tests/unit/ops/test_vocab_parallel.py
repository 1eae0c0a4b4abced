"""The head split over 1, 2 and 4 gloo processes against the formulas on the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import head_formulas as formulas
import pytest
import torch
import vocab_parallel_worker as worker
from forked_ranks import start
from head_formulas import relative
from torch import Tensor
from vocab_parallel_worker import Job

from swe_rl import ops
from swe_rl.errors import ConfigError
from swe_rl.ops.vocab_parallel import VocabShard

SIZES = (1, 2, 4)
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
RAGGED = 97  # columns: 2 shards of 49 and 4 of 25 end in padding
PADDING = 51  # 4 shards of 25: the last one is all padding


def jobs(size: int) -> list[Job]:
    """Every job under both precisions and with every number of ranks."""
    even, uneven = (6,) * size, tuple(range(7, 7 + size))
    shard_rows = -(-RAGGED // size)
    mixed = (0.6,) * (size - 1) + (0.0,) if size > 1 else (0.6,)  # the last rank selects nothing
    made = []
    for dtype in BOUNDS:
        made += [
            Job(dtype, RAGGED, shard_rows, even, (0.6,) * size),
            Job(dtype, min(PADDING, size * shard_rows), shard_rows, even, (0.6,) * size, case="cross entropy"),
            Job(dtype, RAGGED, shard_rows, even, (0.0,) * size),
            Job(dtype, RAGGED, shard_rows, uneven, mixed, sequence_parallel=True),
            Job(dtype, RAGGED, shard_rows, uneven, tuple(reversed(mixed)), sequence_parallel=True, case="ppo"),
            Job(dtype, RAGGED, shard_rows, (*uneven[1:], 0), (1.0,) * size, sequence_parallel=True),
            Job(dtype, RAGGED, shard_rows, uneven, (0.0,) * size, sequence_parallel=True),
        ]
    return made


@pytest.fixture(scope="module")
def folder_of_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of all sizes have written."""
    folder = tmp_path_factory.mktemp("ranks")
    for size in SIZES:
        torch.save([asdict(job) for job in jobs(size)], folder / f"jobs-{size}.pt")
    return start(worker, folder, *SIZES)


def whole_answer(job: Job, size: int) -> tuple[formulas.Answer, dict[str, Tensor]]:
    """(of the loss, of the scores) on one rank, in fp64."""
    head, columns = job.head(size)
    scaling: dict[str, Any] = {"temperature": job.temperature(), "vocab_size": job.vocab_size}
    loss = formulas.answer(head, columns, formulas.RULES[job.case][1], **scaling)
    hidden, weight = formulas.wide_leaves(head)
    scores, entropy, _ = formulas.softmax_summary(formulas.scaled_logits(hidden, weight, **scaling), head.labels)
    weights = torch.linspace(-1, 1, len(scores), dtype=job.dtype)
    ((scores + 0.5 * entropy) * weights).sum().backward()
    return loss, {"scores": scores.detach(), "score_hidden": hidden.grad, "score_weight": weight.grad}


def joined(parts: Sequence[dict[str, Any]], job: Job) -> dict[str, Tensor]:
    """Results of all ranks as those of one; what every rank has must be bitwise equal on all."""
    split = {"grad_weight", "score_weight"}
    if job.sequence_parallel:
        split |= {"logprobs", "entropy", "ratio", "grad_hidden"}
    found = {}
    for name, first in parts[0].items():
        if name in split:
            found[name] = torch.cat([part[name] for part in parts])
        elif name != "clipped":
            assert all(torch.equal(part[name], first) for part in parts), f"{name} differs between ranks"
            found[name] = first
    return found


@pytest.mark.parametrize("size", SIZES)
def test_ranks_together_give_the_whole_head(size: int, folder_of_results: Path) -> None:
    """The loss was scaled by 3 before backward."""
    ranks = [torch.load(folder_of_results / f"{size}-{rank}.pt") for rank in range(size)]
    for number, job in enumerate(jobs(size)):
        got = joined([rank[number] for rank in ranks], job)
        want, scores = whole_answer(job, size)
        want = want._replace(grad_hidden=3 * want.grad_hidden, grad_weight=3 * want.grad_weight)
        for name, value in {**want._asdict(), **scores}.items():
            error = relative(got[name], value)
            assert error <= BOUNDS[job.dtype], f"{job}: {name}: relative error {error:.1e}"
        assert not got["grad_weight"][job.vocab_size :].any()


def test_which_columns_a_shard_has() -> None:
    labels = torch.tensor([0, 9, 10, 14, 15, 19, 20])
    shard = VocabShard(None, rank=1, size=2, start=10, num_valid=5)
    assert shard.local_labels(labels).tolist() == [-1, -1, 0, 4, -1, -1, -1]


def test_the_reference_does_not_split(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        head, group = formulas.make_head(3, 9, 4, torch.float32), torch.distributed.group.WORLD
        with pytest.raises(ConfigError, match="does not split the vocabulary"):
            ops.linear_logprob(*head, tp_group=group, impl="reference")
        with pytest.raises(ValueError, match="between 1 and the 9 rows"):
            ops.linear_logprob(*head, tp_group=group, vocab_size=10)
    finally:
        torch.distributed.destroy_process_group()
