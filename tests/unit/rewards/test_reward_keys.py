"""Every key of the group `reward` takes effect, one at a time: the grade, the step or the configuration changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from host_sandbox import HostSandbox
from test_extract_patch import write_base
from test_grade_faults import ALL_PASS, GOOD, PATCH, TASK, Script, ScriptedSandbox, result
from test_shaping import EPISODE

from swe_rl.algorithms.credit import Scores
from swe_rl.config import RewardConfig, TrainConfig, validate
from swe_rl.config.phase import PhaseConfig
from swe_rl.errors import ConfigError, PatchError, SandboxError
from swe_rl.rollout import wiring
from swe_rl.sample_streams import with_credit, with_potential
from swe_rl.types import ExecResult, Reward, SandboxSpec, TrajectoryGroup


def config(**changes: Any) -> TrainConfig:
    phases = [PhaseConfig(name="rl", data="rollouts", steps=1)]
    return TrainConfig(reward=RewardConfig(**changes), phases=phases)


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Any]]:
    """Grades as a run with this configuration would, in scripted sandboxes."""

    async def no_tree(*_: Any) -> SandboxSpec:
        return SandboxSpec()

    monkeypatch.setattr(wiring, "_spec", no_tree)
    monkeypatch.setattr("swe_rl.rewards.grading.RETRY_PAUSE_S", 0.0)

    async def grade(cfg: TrainConfig, *behaviours: Any, make: Any = Script, patch: bytes = PATCH) -> Any:
        pool: Any = Lanes(make(*behaviours))
        parts = wiring.rollout_parts(cfg, pool=pool, renderer=None, trees="")  # type: ignore[arg-type]
        try:
            return parts.shape(await parts.grade(TASK, patch), EPISODE).value
        except SandboxError as err:
            return repr(err)

    return grade


class Lanes:
    """A pool whose lanes are all one script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def lease(self, spec: SandboxSpec, **_: Any) -> Any:
        return self.script.lease(spec)

    def snapshot(self) -> Any:
        raise AssertionError("nobody asks in these tests")


class Watching(ScriptedSandbox):
    """Tests that need ten seconds, and pass only when no process is shared."""

    async def exec(self, command: str, *, timeout_s=None, cwd=None, stdin=None) -> ExecResult:
        if "git" not in command and timeout_s is not None and timeout_s < 10:
            return result(outcome="timeout", exit_code=137)
        apart = "git" in command or "--per-file" in command
        self.behaviour = GOOD if apart else {"status": dict.fromkeys(ALL_PASS, "failed")}
        return await super().exec(command, timeout_s=timeout_s, cwd=cwd, stdin=stdin)


class WatchingScript(Script):
    def lease(self, spec: SandboxSpec) -> Any:
        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def opened():
            yield Watching(GOOD)

        return opened()


FLAKY = ({"status": {**ALL_PASS, TASK.pass_to_pass[0]: "failed"}}, GOOD)
HALF = {"status": {**ALL_PASS, TASK.fail_to_pass[0]: "failed"}}
TAMPERING = PATCH + PATCH.replace(b"m.py", b"conftest.py")
GRADED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {  # key -> other value, sandboxes, options
    "grade_s": (2.0, (), {"make": WatchingScript}),
    "strong": (False, (), {"make": WatchingScript}),
    "grade_retries": (0, (SandboxError("no"), GOOD), {}),
    "rerun": (False, FLAKY, {}),
    "value": ("fraction", (HALF,), {}),
    "patch_line_cost": (0.01, (GOOD,), {}),
    "tamper_cost": (0.5, (GOOD,), {"patch": TAMPERING}),
    "test_bonus": (0.25, (GOOD,), {}),
}
OTHERS = ("max_patch_bytes", "potential_weight", "verifier", "verifier_weight")  # below


def test_every_key_is_looked_at() -> None:
    assert {field.name for field in fields(RewardConfig)} == {*GRADED, *OTHERS}


@pytest.mark.parametrize("key", GRADED)
async def test_another_value_is_another_reward(graded: Callable[..., Awaitable[Any]], key: str) -> None:
    value, behaviours, options = GRADED[key]
    usual = await graded(config(), *behaviours, **options)
    changed = await graded(config(**{key: value}), *behaviours, **options)
    assert usual != changed, (usual, changed)


async def test_max_patch_bytes(tmp_path: Path) -> None:
    base = write_base(tmp_path)
    (tmp_path / "pkg/mod.py").write_text("def f(x):\n    return x + 1\n")
    task = replace(TASK, workdir=str(tmp_path), base_commit=base, tree={})

    async def patch(cfg: TrainConfig) -> bytes:
        pool: Any = Lanes(Script())
        parts = wiring.rollout_parts(cfg, pool=pool, renderer=None, trees="")  # type: ignore[arg-type]
        return await parts.extract_patch(HostSandbox(), task)

    assert b"+    return x + 1" in await patch(config())
    with pytest.raises(PatchError, match="too_large"):
        await patch(config(max_patch_bytes=50))


@pytest.mark.parametrize("changes", [{"verifier": "DIR"}, {"verifier_weight": 0.2}])
def test_verifier_and_its_weight_need_each_other(changes: dict[str, Any]) -> None:
    """What they change of a reward: tests/unit/evaluation/test_verifier_reward.py."""
    validate(config(verifier="DIR", verifier_weight=0.2))
    with pytest.raises(ConfigError, match=r"reward\.verifier=.* and reward\.verifier_weight=.*: set both, or none"):
        validate(config(**changes))


def test_potential_weight_needs_credit_per_turn_and_moves_it() -> None:
    with pytest.raises(
        ConfigError, match=r"reward.potential_weight=0.5 does nothing with algo.advantage=leave_one_out"
    ):
        validate(config(potential_weight=0.5))

    def advantages(weight: float) -> list[list[float]]:
        cfg = config(potential_weight=weight)
        cfg.algo.advantage = "gae"
        validate(cfg)
        played = replace(EPISODE, reward=Reward(value=1.0))
        groups = [TrajectoryGroup(group_id="g", task_id="t", trajectories=[played])]
        score = with_potential(lambda ts: {t.trajectory_id: Scores(values=[0.5] * len(t.turns)) for t in ts}, cfg)
        samples = with_credit(groups, cfg.algo, step=0, seed=0, score=score).samples
        return [[a for a, m in zip(s.advantages, s.loss_mask, strict=True) if m] for s in samples]

    plain, shaped = advantages(0.0), advantages(0.5)
    assert plain != shaped
    # gamma = lambda = 1: from turn t on the shaping adds up to minus the potential before it
    potentials = [0.0, 0.0, 0.5, 0.5, 0.75, 0.75, 1.0]
    assert shaped[0] == pytest.approx([a - 0.5 * phi for a, phi in zip(plain[0], potentials, strict=True)])
