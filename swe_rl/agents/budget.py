"""All limits of an episode in one object: turns, sampled tokens, context tokens, wall clock, time in tools.

Hard limits end the episode with a StopReason. Soft ones are reminders that the policy reads below its observations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swe_rl.config import AgentConfig
from swe_rl.types import Completion, StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class End:
    """Why an episode is over."""

    reason: StopReason
    detail: str = ""


class OutOfTime(Exception):
    """A clock of the episode ran out; `end` says which and where."""

    def __init__(self, end: End) -> None:
        super().__init__(end.detail)
        self.end = end


@dataclass(slots=True)
class Budget:
    """What the episode has used. `context_tokens` counts all that the policy sees: prompt, sampled tokens,
    observations; `generated_tokens` all that it sampled, also what has left the context since."""

    limits: AgentConfig
    context_tokens: int = 0
    generated_tokens: int = 0
    turns: int = 0
    tool_s: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def after(cls, limits: AgentConfig, earlier: Trajectory) -> Budget:
        """What is left after the turns of `earlier`, its seconds included: a resumed or forked episode goes on with
        it."""
        budget = cls(limits)
        for turn in earlier.turns:
            if turn.kept_context is not None:
                budget.context_tokens = turn.kept_context
            budget.context_tokens += len(turn.context_ids) + len(turn.completion.token_ids)
            budget.generated_tokens += len(turn.completion.token_ids)
        budget.turns = len(earlier.turns)
        budget.tool_s = earlier.timings_s.get("environment", 0.0)
        budget.started -= earlier.timings_s.get("episode", 0.0)
        return budget

    def admit(self, num_tokens: int, *, kept: int | None = None) -> End | None:
        """Counts context tokens about to be appended, to the whole context or to its first `kept` ids. An End when
        nothing can be sampled after them."""
        used = num_tokens + (self.context_tokens if kept is None else kept)
        if used >= self.limits.max_context_tokens:
            reason = StopReason.CONTEXT_LIMIT if self.turns else StopReason.PROMPT_TOO_LONG
            limit = f"agent.max_context_tokens={self.limits.max_context_tokens}"
            return End(reason, f"{used} tokens before sampling, {limit}")
        if self._generated_left() <= 0:
            return End(StopReason.MAX_TOKENS, f"agent.max_generated_tokens={self.limits.max_generated_tokens}")
        if self._tool_s_left() <= 0:
            return End(StopReason.ENV_TIMEOUT, f"agent.tool_s={self.limits.tool_s} over in turn {self.turns}")
        self.context_tokens = used
        return None

    def room(self) -> int:
        """Tokens that the coming turn may sample, at least 1 after a successful `admit`."""
        return min(self.limits.max_turn_tokens, self._context_left(), self._generated_left())

    def spend(self, completion: Completion) -> End | None:
        """Counts a sampled turn. An End when it was cut because the context or the episode's tokens were used up, not
        because of the turn's own limit."""
        self.context_tokens += len(completion.token_ids)
        self.generated_tokens += len(completion.token_ids)
        self.turns += 1
        if completion.finish_reason == "length" and min(self._context_left(), self._generated_left()) <= 0:
            return End(StopReason.MAX_TOKENS, f"cut after {self.context_tokens} tokens in turn {self.turns}")
        return None

    def last_turn(self) -> End | None:
        """An End after the last allowed turn."""
        if self.turns < self.limits.max_turns:
            return None
        return End(StopReason.MAX_TURNS, f"agent.max_turns={self.limits.max_turns}")

    def reminder(self) -> str:
        """What the policy should know about its limits now, on lines of their own; "" when there is nothing."""
        return "\n".join(line for line in (self._turns_reminder(), self._tokens_reminder()) if line)

    @asynccontextmanager
    async def clock(self, reason: StopReason) -> AsyncIterator[None]:
        """Bounds the block by the episode's wall clock. Raises OutOfTime with `reason`."""
        left = self.limits.episode_s - (time.monotonic() - self.started)
        async with _bounded(left, End(reason, f"agent.episode_s={self.limits.episode_s} over in turn {self.turns}")):
            yield

    @asynccontextmanager
    async def tool_clock(self) -> AsyncIterator[None]:
        """Bounds a tool call by the wall clock and by the time in tools, and counts it. Raises OutOfTime
        (ENV_TIMEOUT)."""
        start = time.monotonic()
        end = End(StopReason.ENV_TIMEOUT, f"agent.tool_s={self.limits.tool_s} over in turn {self.turns}")
        try:
            async with self.clock(StopReason.ENV_TIMEOUT), _bounded(self._tool_s_left(), end):
                yield
        finally:
            self.tool_s += time.monotonic() - start

    def _turns_reminder(self) -> str:
        total = self.limits.soft_turns or self.limits.max_turns
        left = max(total - self.turns, 0)
        if left > self.limits.remind_turns or not self.limits.remind_turns:
            return ""
        return f"Steps remaining: {left}." + (" Submit now, this is the end of your budget." if left <= 1 else "")

    def _tokens_reminder(self) -> str:
        if not self.limits.remind_tokens or self.context_tokens < self.limits.remind_tokens:
            return ""
        left = min(self._context_left(), self._generated_left())
        return f"Tokens remaining: about {left}. You are running out of them: finish and submit."

    def _context_left(self) -> int:
        return self.limits.max_context_tokens - self.context_tokens

    def _generated_left(self) -> int:
        """Of the episode's sampled tokens; without a limit of their own the context bounds them."""
        limit = self.limits.max_generated_tokens or self.generated_tokens + self.limits.max_context_tokens
        return limit - self.generated_tokens

    def _tool_s_left(self) -> float:
        """Of the time in tools; without a limit of its own the wall clock bounds it."""
        return (self.limits.tool_s or self.tool_s + self.limits.episode_s) - self.tool_s


@asynccontextmanager
async def _bounded(seconds: float, end: End) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError as err:
        if not scope.expired():
            raise
        raise OutOfTime(end) from err
