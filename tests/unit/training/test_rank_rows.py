"""The layout that a configuration asks for, and rows shared out between ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import rank_rows_worker as worker
import torch
from forked_ranks import start
from tree_groups import random_group

from swe_rl.batching.layout import batch_cost
from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import BatchingConfig, TrainConfig, validate
from swe_rl.errors import ConfigError
from swe_rl.training.rank_rows import laid_out


@pytest.mark.parametrize(("layout", "tree"), [("sequence", False), ("tree", True), ("auto", True)])
def test_the_key_decides_the_layout(layout: str, tree: bool) -> None:
    cfg = TrainConfig(batching=BatchingConfig(layout=layout, max_tokens_per_batch=64))
    found = laid_out(random_group(random.Random(2), size=4), cfg, backend=worker.Price(1e-6))
    assert all((batch.target_rows is not None) == tree for batch in found.batches)


@pytest.mark.parametrize("layout", ["sequence", "tree"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_that_one_rank_can_hold_are_not_shared(layout: str, ranks: int) -> None:
    """Short samples one by one are packed for one rank, longer ones for all: no more of them than without."""
    cfg = TrainConfig(batching=BatchingConfig(layout=layout, max_tokens_per_batch=48))
    cfg.trainer.context_parallel = ranks
    samples = random_group(random.Random(4), size=9)
    found = laid_out(samples, cfg, backend=worker.Price())
    share = 48 // ranks if ranks > 1 else 0
    for batch in found.batches:
        assert batch.alone == (len(batch.input_ids) <= share)
    if layout == "sequence":
        short = [len(s.input_ids) for s in samples if len(s.input_ids) <= share]
        assert sum(len(batch.input_ids) for batch in found.batches if batch.alone) == sum(short)
    values = [batch.labels.double() for batch in found.batches]
    for sample, got in zip(samples, found.unpack(values, fill=-1.0), strict=True):
        trained = [place for place, mask in enumerate(sample.loss_mask) if mask]
        assert [got[place] for place in trained] == [sample.input_ids[place] for place in trained]


@pytest.mark.parametrize("layout", ["sequence", "tree", "auto"])
def test_the_group_batching_chooses_it_and_keeps_the_budget_of_the_experiment(layout: str) -> None:
    config = compose_config(TrainConfig, "train", ["experiment=quickstart_smoke", f"batching={layout}"])
    validate(config)
    assert (config.batching.layout, config.batching.max_tokens_per_batch) == (layout, 10240)


def test_an_unknown_layout_is_refused() -> None:
    config = compose_config(TrainConfig, "train", ["experiment=quickstart_smoke", "batching.layout=forest"])
    with pytest.raises(ConfigError, match=r"batching\.layout='forest' is unknown: use one of sequence, tree, auto"):
        validate(config)


def test_the_busiest_group_gives_rows_away_and_none_is_lost(tmp_path: Path) -> None:
    """Two ranks, and two groups of two: there a row keeps its place in the group."""
    start(worker, tmp_path, 2, 4)
    for size in (2, 4):
        group = size // 2
        costs, ids = zip(*(torch.load(tmp_path / f"{size}-{rank}.pt") for rank in range(size)), strict=True)
        before = [[batch.input_ids.tolist() for batch in worker.rows_of(rank)] for rank in range(size)]
        for place in range(group):
            assert sorted(ids[place] + ids[place + group]) == sorted(before[place] + before[place + group])
        assert all(mine == sorted(mine, reverse=True) for mine in costs), "the most expensive row first"
        loads = [sum(sum(mine) for mine in costs[first : first + group]) for first in (0, group)]
        every = [[batch_cost(b, pair_cost=0.01) for b in worker.rows_of(rank)] for rank in range(size)]
        homes = [sum(sum(mine) for mine in every[first : first + group]) for first in (0, group)]
        assert max(homes) > 2 * min(homes)
        assert max(loads) - min(loads) <= max(max(mine) for mine in every)
