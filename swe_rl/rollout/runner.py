"""One rollout: sandbox, episode, patch; then, in another sandbox, its grade. Says whose failure each ending is.

- The machine's (SandboxError, EngineError). A lost sandbox is first replaced and replayed under the episode, which goes
  on with the tokens it has (sandbox/replay.py). Where that fails: the same seeds again in a fresh sandbox; after the
  last try INFRA_ERROR and reward None. Time is not the agent's to lose either: an episode that runs out of it after a
  recovery, or after an outage of the engine, is INFRA_ERROR.
- The agent's: its command ended the sandbox (outcome "lost"), which a backend says only when it saw it, and a replayed
  sandbox only by the rule in sandbox/replay.py: the same command, two fresh sandboxes, ended from inside, no other one
  lost between. That a sandbox is lost again and again is no proof: a lease that ends or a full machine looks the same.
  ENV_KILLED, 0.
- The agent's: its tree cannot be expressed as a patch (too large, destroyed beyond reading): 0.
- The set-up's: SandboxUnavailable and EngineDead pass through, no retry would help.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from swe_rl.agents.episode import run_episode
from swe_rl.agents.formats import ActionFormat
from swe_rl.agents.rendering import Renderer
from swe_rl.agents.toolsets.abstain import abstained_reward
from swe_rl.agents.toolsets.human import charge_questions
from swe_rl.config import AgentConfig
from swe_rl.errors import EngineDead, EngineError, PatchError, SandboxError, SandboxUnavailable
from swe_rl.protocols import Environment, OutageClock, Policy, RewardFn, Sandbox
from swe_rl.rollout.journal import RolloutKey
from swe_rl.rollout.seeds import turn_seed
from swe_rl.sandbox.replay import ReplayedSandbox
from swe_rl.types import Reward, StopReason, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """What a rollout is made of; `rollout.wiring.rollout_parts` builds the real ones."""

    open_sandbox: Callable[[Task], AbstractAsyncContextManager[Sandbox]]  # with the task's tree; waits for a free place
    make_environment: Callable[[Sandbox], Environment]
    extract_patch: Callable[[Sandbox, Task], Awaitable[bytes]]
    grade: RewardFn
    renderer: Renderer
    action_format: ActionFormat
    limits: AgentConfig
    infra_retries: int  # fresh sandboxes tried after the first
    untested: frozenset[StopReason] = frozenset()  # endings that get reward 0 without a test run
    shape: Callable[[Reward, Trajectory], Reward] = lambda reward, _: reward  # what the episode adds to its grade
    expect: Callable[[Sequence[Task], int], Awaitable[None]] | None = None  # may start sandboxes of the next tasks
    sandbox_counts: Callable[[], Counter[str]] = Counter  # what the pool did so far


class RolloutRunner:
    """Plays and grades single rollouts. Holds no state between them but a counter."""

    def __init__(self, policy: Policy, *, parts: RolloutParts, run_seed: int) -> None:
        self._policy = policy
        self._parts = parts
        self._run_seed = run_seed
        self.retried = 0  # attempts repeated after trouble of the machine

    def sandbox_counts(self) -> Counter[str]:
        """What the sandboxes did so far, also those of other runners of the same pool."""
        return self._parts.sandbox_counts()

    async def expect(self, tasks: Sequence[Task], copies: int) -> None:
        """The tasks that come next, in order, with so many rollouts each: their sandboxes may be started ahead."""
        if self._parts.expect is not None:
            await self._parts.expect(tasks, copies)

    async def play(self, task: Task, key: RolloutKey, *, temperature: float) -> Trajectory:
        """The episode with its patch, or INFRA_ERROR when every attempt failed. Only ENV_KILLED has a reward
        already."""
        for attempt in range(self._parts.infra_retries + 1):
            self.retried += attempt > 0
            trajectory = await self._attempt(task, key, temperature)
            if trajectory.stop_reason is not StopReason.INFRA_ERROR:
                break
        if trajectory.stop_reason is StopReason.ENV_KILLED:
            return replace(trajectory, reward=_failed(task, "env_killed"))
        return trajectory

    async def grade(self, task: Task, trajectory: Trajectory) -> Trajectory:
        """`trajectory` with its reward; unchanged without a patch. INFRA_ERROR when grading is impossible after its
        retries."""
        if trajectory.patch is None or trajectory.reward is not None:
            return trajectory
        if trajectory.stop_reason in self._parts.untested:
            return replace(trajectory, reward=_failed(task, "untested"))
        if trajectory.stop_reason is StopReason.ABSTAINED:
            value = self._parts.limits.abstain_reward
            return replace(trajectory, reward=abstained_reward(task, value=value))
        start = time.monotonic()
        try:
            reward = await self._parts.grade(task, trajectory.patch)
        except SandboxUnavailable:
            raise
        except SandboxError as err:
            return grading_lost(trajectory, err)
        reward = charge_questions(
            self._parts.shape(reward, trajectory), trajectory, cost=self._parts.limits.question_cost
        )
        return replace(trajectory, reward=reward, timings_s={**trajectory.timings_s, "grade": time.monotonic() - start})

    async def _attempt(self, task: Task, key: RolloutKey, temperature: float) -> Trajectory:
        start = time.monotonic()
        trajectory = not_begun(key, temperature)
        try:
            async with self._parts.open_sandbox(task) as sandbox:
                wait_s = time.monotonic() - start
                trajectory = _timed_out_by_recovery(await self._episode(task, sandbox, key, temperature), sandbox)
                if not trajectory.stop_reason.is_infra and trajectory.stop_reason is not StopReason.ENV_KILLED:
                    trajectory = await self._with_patch(task, sandbox, trajectory)
                trajectory = replace(trajectory, timings_s={**trajectory.timings_s, "open_sandbox": wait_s})
        except (SandboxUnavailable, EngineDead):
            raise
        except (SandboxError, EngineError) as err:
            # Also when only the patch, the closing or the clock failed: what the agent left, or lost, is then unknown.
            return replace(trajectory, stop_reason=StopReason.INFRA_ERROR, detail=repr(err), patch=None, reward=None)
        return trajectory

    async def _episode(self, task: Task, sandbox: Sandbox, key: RolloutKey, temperature: float) -> Trajectory:
        def seed(turn: int) -> int:
            return turn_seed(
                run_seed=self._run_seed,
                phase=key.phase,
                step=key.step,
                task_id=key.task_id,
                rollout_index=key.rollout_index,
                turn=turn,
            )

        before_s = await outage_s(self._policy)
        trajectory = await run_episode(
            task,
            self._parts.make_environment(sandbox),
            self._policy,
            renderer=self._parts.renderer,
            action_format=self._parts.action_format,
            limits=self._parts.limits,
            trajectory_id=key.trajectory_id,
            group_id=key.group_id,
            rollout_index=key.rollout_index,
            seeds=seed,
            temperature=temperature,
        )
        return _timed_out_by(trajectory, await outage_s(self._policy) - before_s, "outage", "of the engine")

    async def _with_patch(self, task: Task, sandbox: Sandbox, trajectory: Trajectory) -> Trajectory:
        start = time.monotonic()
        try:
            trajectory = replace(trajectory, patch=await self._parts.extract_patch(sandbox, task))
        except PatchError as err:
            detail = f"{trajectory.detail}; {err}".lstrip("; ")
            trajectory = replace(trajectory, reward=_failed(task, f"patch_{err.reason}"), detail=detail)
        return replace(trajectory, timings_s={**trajectory.timings_s, "patch": time.monotonic() - start})


def _timed_out_by_recovery(trajectory: Trajectory, sandbox: Sandbox) -> Trajectory:
    recovery_s = sandbox.recovery_s if isinstance(sandbox, ReplayedSandbox) else 0.0
    return _timed_out_by(trajectory, recovery_s, "recovery", "from a lost sandbox")


def _timed_out_by(trajectory: Trajectory, seconds: float, key: str, what: str) -> Trajectory:
    """INFRA_ERROR instead of a time limit that seconds of the machine's own trouble counted against."""
    if not seconds:
        return trajectory
    trajectory = replace(trajectory, timings_s={**trajectory.timings_s, key: seconds})
    if trajectory.stop_reason not in (StopReason.TIMEOUT, StopReason.ENV_TIMEOUT):
        return trajectory
    detail = f"{trajectory.detail}, {seconds:.1f} s of it for {key} {what}"
    return replace(trajectory, stop_reason=StopReason.INFRA_ERROR, detail=detail)


async def outage_s(policy: Policy) -> float:
    """As protocols.OutageClock of `policy`; 0 for one that does not say."""
    return await policy.outage_s() if isinstance(policy, OutageClock) else 0.0


def not_begun(key: RolloutKey, temperature: float, *, detail: str = "") -> Trajectory:
    """A rollout that the machine lost before its first turn, or all of."""
    return Trajectory(
        trajectory_id=key.trajectory_id,
        task_id=key.task_id,
        group_id=key.group_id,
        rollout_index=key.rollout_index,
        turns=[],
        stop_reason=StopReason.INFRA_ERROR,
        temperature=temperature,
        detail=detail,
    )


def grading_lost(trajectory: Trajectory, err: SandboxError) -> Trajectory:
    """Without a verdict there is no reward, and the rollout leaves its group."""
    return replace(trajectory, stop_reason=StopReason.INFRA_ERROR, detail=f"grading: {err!r}")


def _failed(task: Task, term: str) -> Reward:
    """Reward of a failure that is the agent's own doing and leaves nothing to test."""
    return Reward(value=0.0, terms={term: 1.0}, tests_total=len(task.fail_to_pass) + len(task.pass_to_pass))
