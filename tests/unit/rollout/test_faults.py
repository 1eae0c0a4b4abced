"""Faults of the machine are invisible in what is trained: 5 % of all sandbox operations fail, real sandboxes lost.

The policy is a function of (task, rollout, turn). Ids, rewards, patches and the optimiser step are those of the
fault-free run, bit by bit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from real_parts import require

from swe_rl.agents import FORMATS, ChatRenderer
from swe_rl.config import AlgoConfig, BatchingConfig, ModelConfig, PhaseConfig, TrainConfig, TrainerConfig
from swe_rl.errors import SandboxUnavailable
from swe_rl.models.nano import build_model
from swe_rl.rollout import Collector
from swe_rl.rollout.wiring import rollout_parts
from swe_rl.sample_streams import StepSamples, with_credit
from swe_rl.sandbox import SandboxPool, open_sandbox
from swe_rl.tasks import load_tasks
from swe_rl.tasks.oracle import oracle_replacements
from swe_rl.testing import ByteTokenizer, FaultInjector, ScriptedPolicy
from swe_rl.training.step_batches import optimizer_steps, packed_step
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import SandboxSpec, Task, TrajectoryGroup

XML = FORMATS["xml"]
GROUP = 4


async def _need_sandboxes() -> None:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")


def script_of(task: Task, index: int) -> list[str]:
    """What rollout `index` does: it looks around, every second one repairs the code, and it submits."""
    calls = [
        XML.render("bash", {"command": f"ls; echo {index} > note.txt; cat note.txt"}),
        XML.render("bash", {"command": "mkdir -p work && cd work && echo more >> log && cat log && pwd"}),
        XML.render("bash", {"command": "python3 -c 'print(sum(range(100)))'; exit 3"}),
    ]
    if index % 2 == 0:
        calls += [
            XML.render("replace", {"path": edit.path, "old": edit.old, "new": edit.new})
            for edit in oracle_replacements(task)
        ]
    return [
        *calls,
        XML.render("test", {}),
        XML.render("bash", {"command": "rm -rf work note.txt"}),
        XML.render("submit", {}),
    ]


def policy_of(tasks: list[Task]) -> ScriptedPolicy:
    """Texts by (task, rollout, turn), with a word that differs between all of them."""
    by_id = {task.task_id: task for task in tasks}

    def script(session: str, turn: int) -> str:
        _phase, _step, task_id, index = session.split("/")
        calls = script_of(by_id[task_id], int(index))
        word = hashlib.blake2b(f"{session}/{turn}".encode(), digest_size=4).hexdigest()
        return f"{word} {calls[turn]}"

    return ScriptedPolicy(script)


async def collect(
    tasks: list[Task], trees: Path, *, rate: float, seed: int = 0
) -> tuple[list[TrajectoryGroup], FaultInjector]:
    cfg = TrainConfig()
    cfg.agent.max_context_tokens, cfg.agent.max_turn_tokens, cfg.agent.max_observation_tokens = 60_000, 8000, 400
    cfg.agent.max_turns = 20
    cfg.sandbox.infra_retries, cfg.reward.grade_retries = 8, 8
    async with SandboxPool(6, grading=3, retries=0) as real:
        pool = FaultInjector(real, rate=rate, seed=seed)
        parts = rollout_parts(cfg, pool=pool, renderer=ChatRenderer(ByteTokenizer()), trees=trees)  # type: ignore[arg-type]
        collector = Collector(policy_of(tasks), parts=parts, concurrency=6, seed=0)
        groups = [group async for group in collector.groups(tasks, group_size=GROUP, phase="rl", step=0, ordered=True)]
    assert collector.stats.lost == 0, collector.stats.last_loss
    return groups, pool


def trained(groups: list[TrajectoryGroup]) -> StepSamples:
    return with_credit(groups, AlgoConfig(drop_uniform_groups=False), step=0, seed=0)


def gradients(samples: StepSamples) -> dict[str, torch.Tensor]:
    """Of the real backend with a tiny model: the gradient of one optimiser step and, as "stepped/...", its weights."""
    size = ModelConfig(
        hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=24, vocab_size=259, init_seed=0
    )
    phase = PhaseConfig(name="rl", data="rollouts", steps=1)
    cfg = TrainConfig(algo=AlgoConfig(drop_uniform_groups=False), batching=BatchingConfig(max_tokens_per_batch=60_000))
    cfg.agent.max_context_tokens = 60_000
    trainer = TorchBackend(build_model(size), TrainerConfig(), algo=cfg.algo)
    (part,) = optimizer_steps(samples.samples, phase, cfg, step=0, backend=trainer).parts
    packed = packed_step(part, phase, cfg, backend=trainer)
    trainer.backward(packed, objective="policy_gradient")
    found = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    assert not trainer.train_step(packed, learning_rate=1e-3).skipped
    return found | {f"stepped/{name}": weight.clone() for name, weight in trainer.weights().items()}


@pytest.mark.slow
async def test_five_per_cent_of_faults_change_nothing_that_is_trained(tmp_path: Path) -> None:
    await _need_sandboxes()
    tasks = load_tasks("minirepo", split="train", num_tasks=4, seed=0)
    calm, no_faults = await collect(tasks, tmp_path, rate=0.0)
    rough, faults = await collect(tasks, tmp_path, rate=0.05, seed=3)
    assert no_faults.injected.total() == 0
    assert faults.injected.total() >= 10, faults.injected
    assert set(faults.injected) >= {"exec", "open"}
    assert faults.counts["replays"] >= 5
    assert faults.counts["ended_by_agent"] == 0
    for group, again in zip(calm, rough, strict=True):
        assert [t.trajectory_id for t in group.trajectories] == [t.trajectory_id for t in again.trajectories]
        for left, right in zip(group.trajectories, again.trajectories, strict=True):
            assert left.token_ids == right.token_ids, left.trajectory_id
            assert (left.patch, left.reward, left.stop_reason) == (right.patch, right.reward, right.stop_reason)
    assert {t.reward.value for group in calm for t in group.trajectories if t.reward} == {0.0, 1.0}
    before, after = trained(calm), trained(rough)
    assert before.samples == after.samples
    torch.set_num_threads(1)
    one, other = gradients(before), gradients(after)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(float(value.abs().sum()) > 0 for name, value in one.items() if "stepped/" not in name)
    print(
        f"\n{faults.operations} operations, injected {dict(faults.injected)}, {faults.counts['replays']} replays of "
        f"{faults.counts['replayed_actions']} actions, {faults.counts['replay_mismatches']} outputs differ"
    )
    assert faults.snapshot()["started"] == faults.snapshot()["ended"]
