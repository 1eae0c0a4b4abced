"""Which rollouts of an optimiser step are computed: those without a gradient are not, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swe_rl.config import AgentConfig, AlgoConfig, BatchingConfig, PhaseConfig, TrainConfig
from swe_rl.training.step_batches import optimizer_steps, packed_step, weigh, with_gradient
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import PackedBatch, TrainSample

PHASE = PhaseConfig(name="rl", data="rollouts", steps=1)


def sample(name: str, advantage: float, ids: list[int], *, value_targets: list[float] | None = None) -> TrainSample:
    mask = [False, *(i % 3 != 1 for i in range(1, len(ids)))]
    return TrainSample(
        trajectory_id=name,
        input_ids=ids,
        loss_mask=mask,
        rollout_logprobs=[-3.0 if trains else 0.0 for trains in mask],
        advantages=[advantage if trains else 0.0 for trains in mask],
        turn_ids=[0 if trains else -1 for trains in mask],
        policy_version=0,
        temperature=1.0,
        value_targets=value_targets or [],
    )


def samples() -> list[TrainSample]:
    """Two that move a weight among three that do not."""
    ids = [[3, 9, 4, 17, 8, 22, 1], [3, 9, 4, 5], [3, 9, 11, 13, 2], [40, 7], [40, 7, 6, 31, 12, 30, 29, 2, 44]]
    return [sample(f"t{i}", a, row) for i, (a, row) in enumerate(zip((0.0, 0.75, 0.0, 0.0, -0.25), ids, strict=True))]


def config(algo: AlgoConfig, layout: str = "sequence") -> TrainConfig:
    batching = BatchingConfig(layout=layout, max_tokens_per_batch=16)
    return TrainConfig(algo=algo, agent=AgentConfig(max_context_tokens=64), batching=batching)


@pytest.mark.parametrize("layout", ["sequence", "tree"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "seq_sum_const", "turn_mean"])
def test_the_gradient_is_that_of_all_rollouts(make_backend: Any, aggregation: str, layout: str) -> None:
    algo = AlgoConfig(aggregation=aggregation)
    backend, cfg = make_backend(algo=algo, dtype=torch.float64), config(algo, layout)
    found = packed_step(samples(), PHASE, cfg, backend=backend)
    assert {name for row in found for name in row.trajectory_ids} == {"t1", "t4"}
    got = gradients(backend, found)
    every = [row for each in weigh(samples(), cfg) for row in one_row(each)]
    assert sum(len(row.input_ids) for row in every) == 27
    for name, want in gradients(backend, every).items():
        torch.testing.assert_close(got[name], want, rtol=1e-10, atol=1e-14)
        assert float(want.abs().max()) > 0


def one_row(each: TrainSample) -> list[PackedBatch]:
    from swe_rl.batching import pack

    return pack([each], max_tokens=64)


def gradients(backend: TorchBackend, rows: list[PackedBatch]) -> dict[str, torch.Tensor]:
    backend.backward(rows, objective="policy_gradient")
    return {name: grad.clone() for name, grad in backend.gradients().items()}


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, ["t1", "t4"]),
        ({"ratio_rule": "gspo"}, ["t1", "t4"]),
        ({"kl_coeff": 0.1, "kl_in": "reward"}, ["t1", "t4"]),  # part of the advantage already
        ({"kl_coeff": 0.1}, ["t0", "t1", "t2", "t3", "t4"]),
        ({"entropy_coeff": 0.01}, ["t0", "t1", "t2", "t3", "t4"]),
    ],
)
def test_terms_without_an_advantage_keep_every_rollout(settings: dict[str, Any], want: list[str]) -> None:
    assert [s.trajectory_id for s in with_gradient(samples(), AlgoConfig(**settings))] == want


def test_a_value_to_learn_keeps_a_rollout() -> None:
    nan = float("nan")
    learns = sample("value", 0.0, [3, 4, 5], value_targets=[nan, 0.5, nan])
    nothing = sample("none", 0.0, [3, 4, 5], value_targets=[nan, nan, nan])
    kept = with_gradient([learns, nothing], AlgoConfig(advantage="gae"))
    assert [s.trajectory_id for s in kept] == ["value"]


def test_gspo_keeps_every_sample_of_a_rollout_that_moves() -> None:
    """Its ratio is a mean over all of them; a turn without an advantage may have a sample for itself."""
    rows = [sample("a", 0.5, [3, 4, 5]), sample("a", 0.0, [3, 4, 5, 6]), sample("b", 0.0, [3, 4])]
    assert with_gradient(rows, AlgoConfig(ratio_rule="gspo")) == rows[:2]
    assert with_gradient(rows, AlgoConfig(ratio_rule="ppo")) == rows[:1]


def test_a_step_without_any_gradient_stays_a_step(make_backend: Callable[..., TorchBackend]) -> None:
    """Momentum and decay act and the version goes on, whatever one rollout costs; a masked one could not do that."""
    backend, cfg = make_backend(algo=AlgoConfig()), config(AlgoConfig())
    masked = replace(sample("masked", 0.0, [3, 9, 4]), loss_mask=[False] * 3)
    flat = [masked, *(sample(f"t{i}", 0.0, [3, 9, 4, 5, 6]) for i in range(3))]
    stats = backend.train_step(packed_step(flat, PHASE, cfg, backend=backend), learning_rate=1e-3)
    assert (stats.skipped, stats.policy_version, stats.num_tokens, stats.grad_norm) == (False, 1, 5, 0.0)


@pytest.mark.parametrize(
    ("settings", "want"),
    [({}, ["t1", "t4"]), ({"correction": "sequence_mask"}, ["t0", "t1", "t2", "t3", "t4"])],
)
def test_old_logprobs_are_computed_where_something_moves(
    make_backend: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], want: list[str]
) -> None:
    """Elsewhere they are those of the rollout, as nothing compares with them but a step in which nothing moves; a
    correction that rejects whole rollouts compares all of them."""
    algo = AlgoConfig(epochs=2, **settings)
    backend, cfg = make_backend(algo=algo), config(algo)
    asked: list[str] = []
    score = backend.logprobs

    def noted(rows: list[PackedBatch]) -> list[torch.Tensor]:
        asked.extend(name for row in rows for name in row.trajectory_ids)
        return score(rows)

    monkeypatch.setattr(backend, "logprobs", noted)
    phase = replace(PHASE, minibatch_size=2)
    parts = optimizer_steps(samples(), phase, cfg, step=0, backend=backend).parts
    assert sorted(asked) == want
    alone = {s.trajectory_id: score(one_row(s))[0].roll(1) for s in samples()}  # rows predict the next token
    assert sorted(s.trajectory_id for part in parts for s in part) == sorted([f"t{i}" for i in range(5)] * 2)
    for each in (s for part in parts for s in part):
        mask = torch.tensor(each.loss_mask)
        found = torch.tensor(each.old_logprobs)
        assert found[~mask].count_nonzero() == 0
        expected = alone[each.trajectory_id] if each.trajectory_id in want else torch.full(mask.shape, -3.0)
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-6)


def test_supervised_phases_keep_rollouts_whatever_their_advantage(make_backend: Callable[..., TorchBackend]) -> None:
    phase = PhaseConfig(name="rft", data="passed_rollouts", num_tasks=1)
    found = packed_step(samples(), phase, config(AlgoConfig()), backend=make_backend())
    assert {name for row in found for name in row.trajectory_ids} == {"t0", "t1", "t2", "t3", "t4"}
