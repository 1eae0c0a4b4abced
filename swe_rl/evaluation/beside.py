"""Evaluation beside training: at chosen steps held-out tasks are played while the next step's rollouts are.

Both are served by one engine, whose weights stay as they are until the evaluation is done: only the next update waits
for it, rollouts never do. Training is not changed by it: rollouts draw by their own seeds, whatever else is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swe_rl.errors import EngineDead, InvariantError, SweRlError
from swe_rl.evaluation.benchmark import EvalResult
from swe_rl.rollout.collector import Collector

Play = Callable[[Collector, str], Awaitable[list[EvalResult] | None]]  # (collector, name) -> as `evaluate_splits`


@dataclass(slots=True, kw_only=True)
class SideEvaluation:
    """At most one at a time. Every rank makes the same calls; `begin` waits for nobody."""

    every: int  # steps; 0: never
    play: Play  # of this rank's tasks, without any exchange between ranks
    make_collector: Callable[[], Collector]
    gather: Callable[[list[Any]], list[Any]] = list  # concatenates lists over ranks
    name: str = ""  # of the latest
    trouble: str = ""  # why the latest has no results of this rank
    collector: Collector | None = None
    running: asyncio.Task[list[EvalResult] | None] | None = field(default=None, repr=False)

    def due(self, step: int) -> bool:
        """Whether the weights after so many steps are evaluated."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def begin(self, name: str) -> None:
        """Starts to play; `finish` the one before it first."""
        assert self.running is None, "an evaluation is under way"
        self.name, self.collector = name, self.make_collector()
        self.running = asyncio.create_task(self._play(self.collector), name=f"evaluation {name}")

    async def _play(self, collector: Collector) -> list[EvalResult] | None:
        return await self.play(collector, self.name)

    async def finish(self) -> list[EvalResult]:
        """The results of all ranks as soon as they are there; [] where none is under way, it was drained, or the
        machine lost all of it, which is no reason to stop training. Raises what is one: EngineDead, InvariantError.
        Collective while one is under way."""
        if self.running is None:
            return []
        task, self.running, self.trouble = self.running, None, ""
        try:
            own = await task
        except (EngineDead, InvariantError):
            raise
        except SweRlError as err:  # nothing but losses on this rank
            own, self.trouble = [], str(err)
        parts: list[list[EvalResult] | None] = await asyncio.to_thread(self.gather, [own])
        if None in parts:
            return []
        return _merged([result for part in parts for result in part or ()])

    def drain(self) -> None:
        """No further rollout begins; what is finished is in the journal."""
        if self.collector is not None:
            self.collector.drain()

    async def close(self) -> None:
        """Ends one that is under way, and its sandboxes with it. Idempotent."""
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait([self.running])
            self.running = None


def _merged(results: Sequence[EvalResult]) -> list[EvalResult]:
    """One per split and mode, in their order; none of those without a single attempt."""
    found: dict[tuple[str, str], EvalResult] = {}
    for result in results:
        key = (result.split, result.mode)
        before = found.get(key, replace(result, attempts=[], num_lost=0))
        attempts, lost = [*before.attempts, *result.attempts], before.num_lost + result.num_lost
        found[key] = replace(before, attempts=attempts, num_lost=lost)
    return [result for result in found.values() if result.attempts]
