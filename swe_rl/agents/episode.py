"""One episode: prompt, sampled ids, one action, its observation, and again, until something ends it.

Token in, token out: `ids` only ever grows, by a rendered delta or by sampled ids, so the prompt of turn n+1 starts with
the exact ids of turn n. Sampled ids are decoded to find the action and are never encoded again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from swe_rl.agents.budget import Budget, End, OutOfTime
from swe_rl.agents.formats import ActionFormat, FormatError
from swe_rl.agents.rendering import ChatRenderer
from swe_rl.config import AgentConfig
from swe_rl.errors import EngineDead, EngineError, InvariantError, SandboxError
from swe_rl.protocols import Environment, EnvStep, Policy, SamplingParams
from swe_rl.types import Completion, StopReason, Task, Trajectory, Turn

log = logging.getLogger(__name__)


async def run_episode(
    task: Task,
    env: Environment,
    policy: Policy,
    *,
    renderer: ChatRenderer,
    action_format: ActionFormat,
    limits: AgentConfig,
    trajectory_id: str,
    group_id: str,
    rollout_index: int,
    seeds: Callable[[int], int],
    temperature: float = 1.0,
) -> Trajectory:
    """Plays `task` once; `seeds(turn)` seeds the sampling of each turn. The patch and the reward are still None.

    Every ending is a StopReason: trouble of the sandbox or the engine is INFRA_ERROR with the turns so far. Only
    cancellation, InvariantError and EngineDead pass through. The session `trajectory_id` is released always.
    """
    episode = _Episode(env, policy, renderer, action_format, Budget(limits), trajectory_id, seeds, temperature)
    try:
        end = await episode.play(task)
    except OutOfTime as err:
        end = err.end
    except EngineDead:
        raise
    except (SandboxError, EngineError) as err:
        end = End(StopReason.INFRA_ERROR, repr(err))
    finally:
        await _release(policy, trajectory_id)
    return Trajectory(
        trajectory_id=trajectory_id,
        task_id=task.task_id,
        group_id=group_id,
        rollout_index=rollout_index,
        turns=episode.turns,
        stop_reason=end.reason,
        detail=end.detail,
        temperature=temperature,
        timings_s={**episode.timings, "episode": time.monotonic() - episode.budget.started},
    )


@dataclass(slots=True)
class _Episode:
    env: Environment
    policy: Policy
    renderer: ChatRenderer
    action_format: ActionFormat
    budget: Budget
    session: str
    seeds: Callable[[int], int]
    temperature: float
    turns: list[Turn] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=lambda: {"policy": 0.0, "environment": 0.0})
    errors: list[FormatError] = field(default_factory=list)  # in a row

    async def play(self, task: Task) -> End:
        ids: list[int] = []
        with self._timed("environment"):
            async with self.budget.clock(StopReason.ENV_TIMEOUT):
                delta = self.renderer.initial_ids(await self.env.reset(task))
        while (end := self.budget.admit(len(delta))) is None:
            ids += delta
            completion = await self._sample(ids)
            ids += completion.token_ids
            step = await self._act(delta, completion)
            if isinstance(step, End):
                return step
            limit = self.budget.limits.max_observation_tokens
            observation = self.renderer.cut(step.observation, max_tokens=limit)
            self.turns[-1] = replace(self.turns[-1], observation=observation)
            closed = completion.token_ids[-1] == self.renderer.im_end
            delta = self.renderer.observation_ids(observation, closed=closed)
        return end

    async def _sample(self, ids: list[int]) -> Completion:
        params = SamplingParams(
            temperature=self.temperature,
            max_new_tokens=self.budget.room(),
            stop_ids=self.renderer.stop_ids,
            seed=self.seeds(self.budget.turns),
        )
        with self._timed("policy"):
            async with self.budget.clock(StopReason.TIMEOUT):
                return _checked(await self.policy.generate(ids, params, session=self.session))

    async def _act(self, delta: list[int], completion: Completion) -> EnvStep | End:
        """Records the turn, runs its action, and says what the policy sees next or why the episode is over."""
        action = self.action_format.parse(self.renderer.text(completion.token_ids))
        call = None if isinstance(action, FormatError) else action.tool_call
        self.turns.append(
            Turn(context_ids=delta, completion=completion, tool_call=call, observation="", format_error=call is None)
        )
        if completion.finish_reason == "cancelled":
            return End(StopReason.CANCELLED, "the engine cancelled the request")
        cut = self.budget.spend(completion)
        if isinstance(action, FormatError):
            self.errors.append(action)
            step = EnvStep(observation=action.message)
            if cut is None and len(self.errors) >= self.budget.limits.max_format_errors:
                return _too_many(self.errors)
        else:
            self.errors.clear()
            with self._timed("environment"):
                async with self.budget.clock(StopReason.ENV_TIMEOUT):
                    step = await self.env.step(action.tool_call)
        if step.done:
            return End(StopReason(step.stop_reason or StopReason.SUBMITTED), step.observation)
        return cut or self.budget.last_turn() or step

    @contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        """Adds the seconds of the block to `timings[key]`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.timings[key] += time.monotonic() - start


async def _release(policy: Policy, session: str) -> None:
    """Also runs while a cancellation is under way. An engine that has failed holds nothing to free."""
    try:
        await asyncio.shield(policy.release(session))
    except EngineError as err:
        log.warning("session %s was not released: %s", session, err)


def _too_many(errors: list[FormatError]) -> End:
    """NO_TOOL_CALL when the policy never tried to call anything in these turns, else FORMAT_ERROR."""
    silent = all(error.kind == "no_call" for error in errors)
    reason = StopReason.NO_TOOL_CALL if silent else StopReason.FORMAT_ERROR
    return End(reason, f"{len(errors)} in a row, the last: {errors[-1].seen}")


def _checked(completion: Completion) -> Completion:
    """Raises InvariantError when ids and logprobs do not belong together, EngineError when nothing was sampled."""
    if len(completion.token_ids) != len(completion.rollout_logprobs):
        raise InvariantError(
            f"engine returned {len(completion.token_ids)} ids with {len(completion.rollout_logprobs)} logprobs"
        )
    if not completion.token_ids and completion.finish_reason != "cancelled":
        raise EngineError(f"engine returned no token, finish_reason={completion.finish_reason!r}")
    return completion
