"""The value head: what it learns, where its gradient goes, and that its state survives a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swe_rl.batching import pack
from swe_rl.batching.samples import to_samples
from swe_rl.config import AgentConfig, AlgoConfig, BatchingConfig, PhaseConfig, TrainConfig
from swe_rl.sample_streams import with_credit
from swe_rl.training import checkpoint
from swe_rl.training.rollout_scores import rollout_scores
from swe_rl.training.step_batches import optimizer_steps, packed_step
from swe_rl.types import Completion, Reward, StopReason, Trajectory, TrajectoryGroup, Turn

PHASE = PhaseConfig(name="rl", data="rollouts", steps=1)
GAE = AlgoConfig(advantage="gae", value_learning_rate=3e-2, aggregation="token_mean")


def rollout(name: str, reward: float, prompt: int, *, turns: int = 2) -> Trajectory:
    completion = Completion(
        token_ids=[5, 6], rollout_logprobs=[-4.0, -4.0], finish_reason="stop", policy_version=0, policy_version_max=0
    )
    return Trajectory(
        trajectory_id=name,
        task_id=name,
        group_id=name,
        rollout_index=0,
        turns=[
            Turn(context_ids=[prompt, 7], completion=completion, tool_call=None, observation="") for _ in range(turns)
        ],
        stop_reason=StopReason.SUBMITTED,
        temperature=1.0,
        reward=Reward(value=reward),
    )


def solvable_by_the_first_token() -> list[TrajectoryGroup]:
    """A task that begins with 10 is always solved, one with 11 never: the value of a state is known from its start."""
    made = [rollout(f"win{i}", 1.0, 10, turns=1 + i % 3) for i in range(4)]
    made += [rollout(f"lose{i}", 0.0, 11, turns=1 + i % 3) for i in range(4)]
    return [TrajectoryGroup(group_id=t.group_id, task_id=t.task_id, trajectories=[t]) for t in made]


def config(algo: AlgoConfig = GAE) -> TrainConfig:
    return TrainConfig(algo=algo, agent=AgentConfig(), batching=BatchingConfig(max_tokens_per_batch=24))


def one_step(backend: Any, cfg: TrainConfig, step: int = 0) -> Any:
    found = with_credit(
        solvable_by_the_first_token(),
        cfg.algo,
        step=step,
        seed=0,
        score=lambda rollouts: rollout_scores(rollouts, cfg, backend=backend),
    )
    (part,) = optimizer_steps(found.samples, PHASE, cfg, step=step, backend=backend).parts
    return backend.train_step(packed_step(part, PHASE, cfg, backend=backend), learning_rate=1e-4)


def test_the_value_error_falls(make_backend: Any) -> None:
    backend, cfg = make_backend(algo=GAE), config()
    errors = [one_step(backend, cfg, step).details["train/value_error"] for step in range(40)]
    assert errors[0] == pytest.approx(0.5)  # V = 0, targets 1 and 0
    assert errors[-1] < 0.1 * errors[0]
    assert one_step(backend, cfg).details["train/value_explained_variance"] > 0.8


def test_values_are_those_of_the_state_before_each_turn(make_backend: Any) -> None:
    """A linear head on the hidden state of the last token before the turn, computed here without packing."""
    backend = make_backend(algo=GAE)
    head = backend.policy.value_head
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, head.weight.shape[1])[None])
    trajectory = rollout("t", 1.0, 10, turns=3)
    found = rollout_scores([trajectory, rollout("other", 0.0, 11)], config(), backend=backend)["t"].values
    (sample,) = pack(to_samples(trajectory, 0.0), max_tokens=1000)
    from swe_rl.models.forward import packed_forward

    with torch.no_grad():
        hidden = packed_forward(backend.model, sample)
        want = [float(head(hidden[place])) for place in (1, 5, 9)]
    assert found == pytest.approx(want, abs=1e-6)


def test_without_trunk_gradient_the_model_sees_only_the_policy_loss(make_backend: Any) -> None:
    gradients = {}
    for name, algo in {
        "plain": AlgoConfig(advantage="gae", value_coeff=0.5),
        "strong": AlgoConfig(advantage="gae", value_coeff=50.0),
        "shared": AlgoConfig(advantage="gae", value_coeff=50.0, value_trunk_grad=True),
    }.items():
        backend, cfg = make_backend(algo=algo), config(algo)
        with torch.no_grad():
            backend.policy.value_head.weight.fill_(0.1)
        samples = with_credit(
            solvable_by_the_first_token(),
            algo,
            step=0,
            seed=0,
            score=lambda rollouts, cfg=cfg, backend=backend: rollout_scores(rollouts, cfg, backend=backend),
        ).samples
        backend.backward(packed_step(samples, PHASE, cfg, backend=backend), objective="policy_gradient")
        gradients[name] = {n: g.clone() for n, g in backend.gradients().items()}
    for name, grad in gradients["plain"].items():
        assert torch.equal(grad, gradients["strong"][name])
    assert any(not torch.allclose(g, gradients["shared"][n]) for n, g in gradients["plain"].items())


def test_the_value_loss_does_not_depend_on_micro_batches(make_backend: Any) -> None:
    found = []
    for max_tokens in (10, 1000):
        backend, cfg = make_backend(algo=GAE), config()
        cfg.batching.max_tokens_per_batch = max_tokens
        samples = with_credit(
            solvable_by_the_first_token(),
            GAE,
            step=0,
            seed=0,
            score=lambda rollouts, cfg=cfg, backend=backend: rollout_scores(rollouts, cfg, backend=backend),
        ).samples
        totals = backend.backward(packed_step(samples, PHASE, cfg, backend=backend), objective="policy_gradient")
        found.append((backend.policy.value_head.weight.grad.clone(), totals.num_loss_tokens))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-7)
    assert found[0][1] == found[1][1]


def test_a_resumed_run_has_the_value_head_of_the_checkpoint(make_backend: Any, tmp_path: Any) -> None:
    backend, cfg = make_backend(algo=GAE), config()
    for step in range(3):
        one_step(backend, cfg, step)
    path = checkpoint.save(tmp_path, backend.state_dict(), step=3)
    again = make_backend(algo=GAE, seed=1)
    again.load_state_dict(checkpoint.load(path).backend)
    assert "value_head.weight" not in checkpoint.load_weights(path), "the exported model is a plain language model"
    first, second = one_step(backend, cfg, 3), one_step(again, cfg, 3)
    assert first.loss == second.loss
    for name, value in backend.policy.value_head.named_parameters():
        assert torch.equal(value, dict(again.policy.value_head.named_parameters())[name])


def test_masked_rollouts_have_no_value_target(make_backend: Any) -> None:
    """What does not train the policy does not train the value either."""
    cfg = config()
    long = rollout("long", 0.0, 10, turns=3)
    object.__setattr__(long, "stop_reason", StopReason.MAX_TURNS)
    group = TrajectoryGroup(group_id="long", task_id="long", trajectories=[long])
    backend = make_backend(algo=GAE)
    (sample,) = with_credit(
        [group], GAE, step=0, seed=0, score=lambda rollouts: rollout_scores(rollouts, cfg, backend=backend)
    ).samples
    assert sample.value_targets == []
    assert not any(math.isfinite(v) for v in sample.value_targets)
