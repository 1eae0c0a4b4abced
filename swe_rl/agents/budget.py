"""All limits of an episode in one object: turns, context tokens, tokens of a turn, wall clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swe_rl.config import AgentConfig
from swe_rl.types import Completion, StopReason


@dataclass(frozen=True, slots=True)
class End:
    """Why an episode is over."""

    reason: StopReason
    detail: str = ""


class OutOfTime(Exception):
    """The wall clock of the episode ran out; `end` says where."""

    def __init__(self, end: End) -> None:
        super().__init__(end.detail)
        self.end = end


@dataclass(slots=True)
class Budget:
    """`context_tokens` counts everything in the context: prompt, sampled tokens, observations."""

    limits: AgentConfig
    context_tokens: int = 0
    turns: int = 0
    started: float = field(default_factory=time.monotonic)

    def admit(self, num_tokens: int) -> End | None:
        """Counts context tokens about to be appended. An End when they leave no room to sample after them."""
        used = self.context_tokens + num_tokens
        if used < self.limits.max_context_tokens:
            self.context_tokens = used
            return None
        reason = StopReason.CONTEXT_LIMIT if self.turns else StopReason.PROMPT_TOO_LONG
        return End(reason, f"{used} tokens before sampling, agent.max_context_tokens={self.limits.max_context_tokens}")

    def room(self) -> int:
        """Tokens that the coming turn may sample, at least 1 after a successful `admit`."""
        return min(self.limits.max_turn_tokens, self.limits.max_context_tokens - self.context_tokens)

    def spend(self, completion: Completion) -> End | None:
        """Counts a sampled turn. An End when it was cut because the context was full, not because of the turn's own
        limit."""
        self.context_tokens += len(completion.token_ids)
        self.turns += 1
        if completion.finish_reason == "length" and self.context_tokens >= self.limits.max_context_tokens:
            return End(StopReason.MAX_TOKENS, f"cut after {self.context_tokens} tokens in turn {self.turns}")
        return None

    def last_turn(self) -> End | None:
        """An End after the last allowed turn."""
        if self.turns < self.limits.max_turns:
            return None
        return End(StopReason.MAX_TURNS, f"agent.max_turns={self.limits.max_turns}")

    @asynccontextmanager
    async def clock(self, reason: StopReason) -> AsyncIterator[None]:
        """Bounds the block by the episode's wall clock. Raises OutOfTime with `reason`."""
        try:
            async with asyncio.timeout(self.limits.episode_s - (time.monotonic() - self.started)) as scope:
                yield
        except TimeoutError as err:
            if not scope.expired():
                raise
            raise OutOfTime(End(reason, f"agent.episode_s={self.limits.episode_s} over in turn {self.turns}")) from err
