"""Groups of rollouts. All concurrency of sampling lives here.

A rollout that is lost to trouble of the machine leaves its group, and another one with a new index takes its place: it
never gets a reward. Every other rollout is graded, also those that training masks (turns, tokens or time used up):
their success is a statistic, and what a stop reason means for training is decided later, by algo.stop_reasons.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swe_rl.protocols import Policy
from swe_rl.rollout.journal import Journal, RolloutKey
from swe_rl.rollout.runner import RolloutParts, RolloutRunner
from swe_rl.types import StopReason, Task, Trajectory, TrajectoryGroup


@dataclass(slots=True)
class CollectorStats:
    """Totals since the collector was made. Counts include rollouts taken from the journal, seconds do not.
    What an earlier process lost is in none of them."""

    finished: int = 0
    reused: int = 0  # of them, from the journal
    lost: int = 0  # rollouts that left their group
    last_loss: str = ""  # what the latest of them was lost to
    passed: int = 0
    # With spare rollouts: those kept and those cut because their group was full, and how long they ran (seconds).
    kept: int = 0
    kept_s: float = 0.0
    cut: int = 0
    cut_s: float = 0.0
    sampled_tokens: int = 0
    tokens: int = 0  # context and sampled
    stop_reasons: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)  # summed over rollouts, by part of Trajectory.timings_s


class Runner(Protocol):
    """Plays and grades single rollouts: RolloutRunner in this process, ray_rollouts.RemoteRunner on other nodes."""

    @property
    def retried(self) -> int:
        """Attempts repeated after trouble of the machine."""
        ...

    async def play(self, task: Task, key: RolloutKey, *, temperature: float) -> Trajectory: ...
    async def grade(self, task: Task, trajectory: Trajectory) -> Trajectory: ...
    async def expect(self, tasks: Sequence[Task], copies: int) -> None: ...
    def sandbox_counts(self) -> Counter[str]: ...


class Drained(Exception):
    """`Collector.drain` was called: this rollout had not begun and will not."""


class Collector:
    """Samples rollouts and groups of them with one policy. Any number of calls may run at a time."""

    def __init__(
        self,
        policy: Policy,
        *,
        parts: RolloutParts,
        concurrency: int,
        seed: int,
        journal: Journal | None = None,
        on_rollout: Callable[[Task, Trajectory], None] | None = None,
        runner: Runner | None = None,
    ) -> None:
        """`concurrency` bounds the episodes that run at a time; `on_rollout` is called after each finished rollout.
        `runner` plays them elsewhere, instead of with `policy` and `parts` in this process."""
        self._runner: Runner = runner or RolloutRunner(policy, parts=parts, run_seed=seed)
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._journal = journal
        self._on_rollout = on_rollout
        self._draining = False
        self.stats = CollectorStats()

    @property
    def retried(self) -> int:
        """Attempts repeated after trouble of the machine."""
        return self._runner.retried

    def sandbox_counts(self) -> Counter[str]:
        """What the sandboxes did so far; see sandbox/stats.py."""
        return self._runner.sandbox_counts()

    async def expect(self, tasks: Sequence[Task], *, group_size: int) -> None:
        """These tasks come next, in this order: their sandboxes are started ahead where sandbox.warm allows."""
        await self._runner.expect(tasks, group_size)

    async def groups(
        self,
        tasks: Iterable[Task],
        *,
        group_size: int,
        phase: str,
        step: int,
        temperature: float = 1.0,
        ordered: bool = False,
        spare: int = 0,
    ) -> AsyncGenerator[TrajectoryGroup, None]:
        """Groups of all tasks as they finish, or in the order of `tasks`. Task ids must differ within a step.

        Only as many groups as fill `concurrency` are under way. After `drain` the iteration ends early; what finished
        is in the journal. A crash in one group cancels the others and is raised here. Close the iterator
        (contextlib.aclosing) when leaving it early: that cancels the rest and waits until it is gone.
        """
        ahead = -(-self._concurrency // (group_size + spare)) + 1
        waiting = iter(tasks)
        running: list[asyncio.Task[TrajectoryGroup]] = []
        try:
            while True:
                while len(running) < ahead and not self._draining and (task := next(waiting, None)) is not None:
                    group = self.collect_group(
                        task, group_size, phase=phase, step=step, temperature=temperature, spare=spare
                    )
                    running.append(asyncio.create_task(group, name=f"group {task.task_id}"))
                if not running:
                    return
                ready = list(itertools.takewhile(_is_done, running) if ordered else filter(_is_done, running))
                if not ready:  # wait for any: a crash behind the first group must not wait for that group
                    _raise_crash(running)
                    waited = [item for item in running if not item.done()]
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    continue
                for item in ready:
                    running.remove(item)
                    if not isinstance(item.exception(), Drained):
                        yield item.result()
        finally:
            await _cancel_all(running)

    async def collect_group(
        self, task: Task, group_size: int, *, phase: str, step: int, temperature: float = 1.0, spare: int = 0
    ) -> TrajectoryGroup:
        """`group_size` finished rollouts of one task, ordered by index.

        Lost ones are replaced by new indices, `group_size` at most; after that the group is smaller, and `dropped` says
        so when it is empty. Losses of an earlier process do not count: a resume after an outage goes on with new
        indices. With `spare`, so many more begin at once; the first `group_size` to finish are kept and the rest is
        cut, which favours short episodes (`stats` tells how much). Raises Drained, after the rollouts that had begun
        are finished and in the journal.
        """
        finished: list[Trajectory] = []
        unused = self._indices(task, phase=phase, step=step)
        budget = 2 * group_size
        while (missing := min(group_size - len(finished), budget)) > 0:
            keys = list(itertools.islice(unused, missing + spare))
            budget -= missing
            results = await self._first_of(task, keys, temperature, wanted=missing)
            if None in results:
                raise Drained
            finished += [item for item in results if item is not None and not item.stop_reason.is_infra]
        return TrajectoryGroup(
            group_id=RolloutKey(phase, step, task.task_id, 0).group_id,
            task_id=task.task_id,
            trajectories=finished,
            dropped=None if finished else "infrastructure",
        )

    async def _first_of(
        self, task: Task, keys: Sequence[RolloutKey], temperature: float, *, wanted: int
    ) -> list[Trajectory | None]:
        """Results by index until `wanted` rollouts have finished; None for one that did not begin. The rest is cut."""
        work = [self._run_unless_draining(task, key, temperature) for key in keys]
        if len(keys) <= wanted:
            return await _all(work)
        running = [asyncio.create_task(item) for item in work]
        began = time.monotonic()
        try:
            while sum(map(_is_whole, running)) < wanted and not all(map(_is_done, running)):
                await asyncio.wait([item for item in running if not item.done()], return_when=asyncio.FIRST_COMPLETED)
                for item in running:
                    if item.done():
                        item.result()  # a crash is raised at once
            done = [item.result() for item in running if item.done()]
            cut = [item for item in running if not item.done()]
        finally:
            await _cancel_all(running)
        whole = [item for item in done if item is not None and not item.stop_reason.is_infra][:wanted]
        self.stats.kept += len(whole)
        self.stats.kept_s += sum(_duration_s(item) for item in whole)
        self.stats.cut += len(cut)
        self.stats.cut_s += len(cut) * (time.monotonic() - began)
        return [*whole, *([None] if len(whole) < wanted and None in done else [])]

    async def run_one(
        self, task: Task, rollout_index: int, *, phase: str, step: int, temperature: float = 1.0
    ) -> Trajectory:
        """One rollout with patch and reward, from the journal if it is there. INFRA_ERROR without reward when all
        attempts failed. Raises Drained when it had not begun before `drain`."""
        key = RolloutKey(phase, step, task.task_id, rollout_index)
        if self._journal is not None and (known := self._journal.get(key)) is not None:
            return self._counted(task, known, reused=True)
        async with self._places:
            if self._draining:
                raise Drained
            trajectory = await self._runner.play(task, key, temperature=temperature)
        trajectory = await self._runner.grade(task, trajectory)  # outside: the next episode starts meanwhile
        if self._journal is not None and trajectory.stop_reason is not StopReason.CANCELLED:
            await asyncio.to_thread(self._journal.append, key, trajectory)
        return self._counted(task, trajectory, reused=False)

    def _indices(self, task: Task, *, phase: str, step: int) -> Iterator[RolloutKey]:
        """Keys of a group by index, without those that an earlier process lost."""
        for index in itertools.count():
            key = RolloutKey(phase, step, task.task_id, index)
            known = None if self._journal is None else self._journal.get(key)
            if known is None or not known.stop_reason.is_infra:
                yield key

    def drain(self) -> None:
        """No further rollout begins; those under way go on to their end."""
        self._draining = True

    async def _run_unless_draining(self, task: Task, key: RolloutKey, temperature: float) -> Trajectory | None:
        try:
            return await self.run_one(task, key.rollout_index, phase=key.phase, step=key.step, temperature=temperature)
        except Drained:
            return None

    def _counted(self, task: Task, trajectory: Trajectory, *, reused: bool) -> Trajectory:
        stats = self.stats
        stats.stop_reasons[str(trajectory.stop_reason)] += 1
        if trajectory.stop_reason.is_infra:
            stats.lost += 1
            stats.last_loss = trajectory.detail
        else:
            stats.finished += 1
            stats.reused += reused
            stats.passed += trajectory.reward is not None and trajectory.reward.solved
            stats.sampled_tokens += trajectory.num_sampled_tokens
            stats.tokens += len(trajectory.token_ids)
        if not reused:
            stats.seconds.update(trajectory.timings_s)
        if self._on_rollout is not None:
            self._on_rollout(task, trajectory)
        return trajectory


async def _all(work: Sequence[Coroutine[Any, Any, Trajectory | None]]) -> list[Trajectory | None]:
    """Results in order. When one fails, the others are cancelled and waited for before its exception is raised."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel_all(tasks)


def _is_whole(item: asyncio.Task[Trajectory | None]) -> bool:
    """Finished, and not lost."""
    if not item.done() or item.cancelled() or item.exception() is not None:
        return False
    found = item.result()
    return found is not None and not found.stop_reason.is_infra


def _duration_s(trajectory: Trajectory) -> float:
    """Seconds from the wait for a sandbox to the grade."""
    return sum(trajectory.timings_s.get(part, 0.0) for part in ("open_sandbox", "episode", "patch", "grade"))


def _is_done(item: asyncio.Task[Any]) -> bool:
    return item.done()


def _raise_crash(groups: Iterable[asyncio.Task[TrajectoryGroup]]) -> None:
    """Raises what any finished group failed with."""
    for item in groups:
        if item.done() and not isinstance(item.exception(), Drained):
            item.result()


async def _cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels what runs and waits until it is gone, so that sandboxes are closed and sessions released before going
    on."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # retrieved: the first failure is raised already
