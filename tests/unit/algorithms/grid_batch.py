"""One batch of ragged groups, as rows of the reference and as rollouts of the package, and the path from one to the
other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from episodes import episode, group_of
from loss_reference import Case, Row
from torch import Tensor

from swe_rl.algorithms import Scores
from swe_rl.algorithms.sequences import gspo_old
from swe_rl.batching.packing import assign_rows, pack_row
from swe_rl.config import AlgoConfig, PhaseConfig, TrainConfig
from swe_rl.ops.token_loss import token_loss
from swe_rl.sample_streams import with_credit
from swe_rl.training.policy_model import loss_columns, loss_rules
from swe_rl.training.step_batches import optimizer_steps, weigh
from swe_rl.types import PackedBatch, StopReason, TrainSample, TrajectoryGroup

# group, reward, lengths of turns, masked; the first two of g0 share their first action, so they share a later state
SHAPES = (
    ("g0", 1.0, (2, 3, 1), False),
    ("g0", 0.0, (2, 4), False),
    ("g0", 0.0, (5,), True),
    ("g0", 0.25, (1, 1, 2, 3), False),
    ("g1", 1.0, (7,), False),
    ("g1", 1.0, (2, 2), False),
    ("g1", 0.0, (3,), False),
    ("g2", 1.0, (2,), False),
    ("g2", 1.0, (6, 1), False),
)
PHASE = PhaseConfig(name="rl", data="rollouts", steps=1)


def make_rows(seed: int = 0) -> list[Row]:
    """Logprobs with ratios on both sides of every bound."""
    rng = random.Random(seed)

    def near(values: Sequence[float], spread: float) -> list[float]:
        return [v + rng.gauss(0, spread) for v in values]

    rows = []
    for number, (group, reward, lengths, masked) in enumerate(SHAPES):
        count = sum(lengths)
        engine = [-rng.uniform(0.5, 3) for _ in range(count)]
        old = near(engine, 0.05 if number % 3 else 0.5)
        shared = number in (0, 1)
        states = [
            f"{group}/start",
            *(f"{'shared' if shared and t == 1 else number}/{t}" for t in range(1, len(lengths))),
        ]
        rows.append(
            Row(
                group=group,
                reward=reward,
                lengths=list(lengths),
                states=states,
                current=torch.tensor(near(old, 0.3), dtype=torch.float64, requires_grad=True),
                old=torch.tensor(old, dtype=torch.float64),
                engine=torch.tensor(engine, dtype=torch.float64),
                ref=torch.tensor(near(old, 0.4), dtype=torch.float64),
                entropy=torch.tensor(
                    [rng.uniform(0, 2) for _ in range(count)], dtype=torch.float64, requires_grad=True
                ),
                values=[rng.uniform(-0.5, 1) for _ in lengths],
                masked=masked,
            )
        )
    return rows


def tokens_of(number: int, row: Row) -> list[tuple[list[int], list[int]]]:
    """Ids of each turn such that two turns have the same context exactly where `states` says so."""
    turns: list[tuple[list[int], list[int]]] = []
    place = 0
    for turn, length in enumerate(row.lengths):
        shared_start = number in (0, 1) and turn == 0
        own = [100 if shared_start else 200 + 20 * number + place + k for k in range(length)]
        turns.append(([7, 8] if turn == 0 else [9], own))
        place += length
    return turns


def make_groups(rows: Sequence[Row]) -> list[TrajectoryGroup]:
    members = []
    for number, row in enumerate(rows):
        logprobs = [part.tolist() for part in row.engine.split(row.lengths)]
        stop = StopReason.MAX_TURNS if row.masked else StopReason.SUBMITTED
        turns = tokens_of(number, row)
        members.append(episode(f"t{number}", row.reward, turns, group=row.group, stop=stop, logprobs=logprobs))
    lost = episode("lost", None, [([1], [2])], group="g1", stop=StopReason.INFRA_ERROR)
    unscored = episode("unscored", None, [([1], [2, 3])], group="g1")
    names = dict.fromkeys(row.group for row in rows)
    return [group_of(*(m for m in (*members, lost, unscored) if m.group_id == name), name=name) for name in names]


def algo_of(case: Case, **changes: object) -> AlgoConfig:
    """The configuration that should compute `case`."""
    settings = {
        "advantage": case.advantage,
        "ratio_rule": case.ratio,
        "correction": case.correction,
        "aggregation": case.aggregation,
        "clip_low": case.low,
        "clip_high": case.high,
        "dual_clip": case.dual,
        "correction_low": case.correction_low,
        "correction_cap": case.correction_cap,
        "count_rejected": not case.rejected_leave,
        "normalizer_tokens": int(case.constant),
        "kl_coeff": case.kl,
        "kl_estimator": case.estimator,
        "entropy_coeff": case.entropy,
        "gamma": case.gamma,
        "gae_lambda": case.lam,
        "negative_scale": case.negative,
        "epochs": 2,  # so that the old policy is not the current one
    }
    return AlgoConfig(**{**settings, **changes})  # type: ignore[arg-type]


class Table:
    """Plays the trainer: scores are looked up."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {f"t{i}": row for i, row in enumerate(rows)}

    def look_up(self, batch: PackedBatch, column: str) -> Tensor:
        """[T] fp64 of a row's column at its trained labels, NaN elsewhere."""
        found = torch.full((len(batch.input_ids),), torch.nan, dtype=torch.float64)
        bounds = batch.cu_seqlens_host
        for name, start, stop in zip(batch.trajectory_ids, bounds, bounds[1:], strict=False):
            mask = batch.loss_mask[start:stop]
            if mask.any():
                found[start:stop][mask] = getattr(self.rows[name], column).detach()
        return found

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [self.look_up(batch, "old") for batch in batches]

    def ref_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [self.look_up(batch, "ref") for batch in batches]

    def scores(self, trajectories: Sequence[object]) -> dict[str, Scores]:
        return {name: Scores(values=row.values) for name, row in self.rows.items()}


def exact(samples: Sequence[TrainSample], *, max_tokens: int = 10_000) -> list[PackedBatch]:
    """Packed rows whose columns are fp64: packing rounds them to fp32."""
    batches = []
    for row in assign_rows(samples, max_tokens=max_tokens):
        chosen = [samples[i] for i in row]
        columns = {}
        for name in (
            "advantages",
            "token_weights",
            "rollout_logprobs",
            "old_logprobs",
            "ref_logprobs",
            "sequence_coeff",
        ):
            values = [v for s in chosen for v in (*(getattr(s, name) or [0.0] * len(s.input_ids))[1:], 0.0)]
            if any(getattr(s, name) for s in chosen):
                columns[name] = torch.tensor(values, dtype=torch.float64)
        batches.append(replace(pack_row(chosen), **columns))
    return batches


def our_loss(rows: Sequence[Row], algo: AlgoConfig, *, max_tokens: int = 10_000) -> Tensor:
    """The loss of the package as a function of the rows' leaves."""
    cfg, table = TrainConfig(algo=algo), Table(rows)
    found = with_credit(make_groups(rows), algo, step=0, seed=0, score=table.scores)
    steps = optimizer_steps(found.samples, PHASE, cfg, step=0, backend=table)
    assert len(steps.parts) == 2
    batches = exact(weigh(steps.parts[1], cfg), max_tokens=max_tokens)
    if algo.ratio_rule == "gspo":
        batches = gspo_old(batches, [table.look_up(batch, "current") for batch in batches])
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        if not bool(batch.loss_mask.any()):
            continue
        names = [n for n, m in zip(batch.trajectory_ids, _segments(batch), strict=True) if m.any()]
        chosen = {
            name: value[batch.loss_mask].double()
            for name, value in loss_columns(batch, algo, "policy_gradient").items()
            if value is not None
        }
        each, _ = token_loss(
            torch.cat([table.rows[n].current for n in names]),
            entropy=torch.cat([table.rows[n].entropy for n in names]),
            advantages=batch.advantages[batch.loss_mask],
            **chosen,
            **loss_rules(algo, "policy_gradient", has_old=batch.old_logprobs is not None),
        )
        total = total + (each * batch.token_weights[batch.loss_mask]).sum()
    return total


def _segments(batch: PackedBatch) -> list[Tensor]:
    bounds = batch.cu_seqlens_host
    return [batch.loss_mask[a:b] for a, b in pairwise(bounds)]
