"""One episode: prompt, sampled ids, one action, its observation, and again, until something ends it.

Token in, token out: the context grows by rendered deltas and by sampled ids, so the prompt of turn n+1 starts with the
exact ids of turn n, unless a turn says that it left something out (agents/context.py). Sampled ids are decoded to find
the action and are never encoded again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from swe_rl.agents.budget import Budget, End, OutOfTime
from swe_rl.agents.context import Context, Delta
from swe_rl.agents.formats import ActionFormat, FormatError, ParsedAction
from swe_rl.agents.rendering import Renderer
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
    renderer: Renderer,
    action_format: ActionFormat,
    limits: AgentConfig,
    trajectory_id: str,
    group_id: str,
    rollout_index: int,
    seeds: Callable[[int], int],
    temperature: float = 1.0,
    earlier: Trajectory | None = None,
) -> Trajectory:
    """Plays `task` once; `seeds(turn)` seeds the sampling of each turn. The patch and the reward are still None.

    With `earlier` its turns come first and its budget is what is left of: a resumed episode, or one that branches off.
    `env` must then be in the state after them (a fork); it is not reset.
    Every ending is a StopReason: trouble of the sandbox or the engine is INFRA_ERROR with the turns so far. Only
    cancellation, InvariantError and EngineDead pass through. The session `trajectory_id` is released always.
    """
    budget = Budget.after(limits, earlier) if earlier else Budget(limits)
    episode = _Episode(env, policy, renderer, action_format, budget, trajectory_id, seeds, temperature)
    if earlier:
        episode.turns = list(earlier.turns)
        episode.timings |= {key: earlier.timings_s.get(key, 0.0) for key in episode.timings}
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
    renderer: Renderer
    action_format: ActionFormat
    budget: Budget
    session: str
    seeds: Callable[[int], int]
    temperature: float
    turns: list[Turn] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=lambda: {"policy": 0.0, "environment": 0.0})
    errors: list[FormatError] = field(default_factory=list)  # in a row

    async def play(self, task: Task) -> End:
        limits = self.budget.limits
        context = Context.after(self.renderer, limits, self.turns)
        if self.turns:
            self.errors = self._errors_so_far()
            delta = context.observation(self.turns[-1].observation, self.turns[-1].completion.token_ids)
        else:
            delta = Delta(self.renderer.initial_ids(await self._reset(task)))
        end = self.budget.last_turn() if self.turns else None
        while (end := end or self.budget.admit(len(delta.ids), kept=delta.kept)) is None:
            context.append(delta)
            completion = await self._sample(context.ids)
            context.ids += completion.token_ids
            step = await self._act(delta, completion)
            if isinstance(step, End):
                return step
            observation = self.renderer.cut(step.observation, max_tokens=limits.max_observation_tokens)
            observation = "\n".join(text for text in (observation, self.budget.reminder()) if text)
            self.turns[-1] = replace(self.turns[-1], observation=observation)
            delta = context.observation(observation, completion.token_ids)
        return end

    async def _reset(self, task: Task) -> list[Mapping[str, str]]:
        with self._timed("environment"):
            async with self.budget.clock(StopReason.ENV_TIMEOUT):
                return await self.env.reset(task)

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

    async def _act(self, delta: Delta, completion: Completion) -> EnvStep | End:
        """Records the turn, runs its action, and says what the policy sees next or why the episode is over."""
        action = self._parse(completion)
        self.turns.append(_turn(delta, completion, action))
        if completion.finish_reason == "cancelled":
            return End(StopReason.CANCELLED, "the engine cancelled the request")
        cut = self.budget.spend(completion)
        if isinstance(action, FormatError):
            self.errors.append(action)
            tries_left = self.budget.limits.max_format_errors - len(self.errors)
            step = EnvStep(observation=self._explain(action, tries_left))
            if cut is None and tries_left <= 0:
                return _too_many(self.errors)
        else:
            self.errors.clear()
            with self._timed("environment"):
                async with self.budget.tool_clock():
                    step = await self.env.step(action.tool_call)
        if step.done:
            return End(StopReason(step.stop_reason or StopReason.SUBMITTED), step.observation)
        return cut or self.budget.last_turn() or step

    def _parse(self, completion: Completion) -> ParsedAction | FormatError:
        text = self.renderer.text(completion.token_ids)
        return self.action_format.parse(text, cut=completion.finish_reason == "length")

    def _explain(self, error: FormatError, tries_left: int) -> str:
        return error.explain(tries_left=tries_left) if self.budget.limits.explain_errors else error.message

    def _errors_so_far(self) -> list[FormatError]:
        """The format errors that end the turns so far, in a row."""
        errors: list[FormatError] = []
        for turn in reversed(self.turns):
            action = self._parse(turn.completion)
            if not isinstance(action, FormatError):
                break
            errors.insert(0, action)
        return errors

    @contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        """Adds the seconds of the block to `timings[key]`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.timings[key] += time.monotonic() - start


def _turn(delta: Delta, completion: Completion, action: ParsedAction | FormatError) -> Turn:
    parsed = None if isinstance(action, FormatError) else action
    return Turn(
        context_ids=delta.ids,
        completion=completion,
        tool_call=parsed.tool_call if parsed else None,
        observation="",
        format_error=parsed is None,
        repaired=parsed.repaired if parsed else "",
        kept_context=delta.kept,
    )


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
