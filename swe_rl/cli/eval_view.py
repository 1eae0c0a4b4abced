"""What an evaluation shows while it runs: a table on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swe_rl.evaluation.attempt import is_resolved
from swe_rl.metrics import clock
from swe_rl.types import Task, Trajectory

PLAIN_EVERY_S = 15.0


@dataclass(slots=True)
class Part:
    """One split in one mode, so far."""

    label: str
    total: int
    started: float
    done: int = 0
    passed: int = 0
    lost: int = 0
    turns: int = 0
    tokens: int = 0  # sampled
    stop_reasons: Counter[str] = field(default_factory=Counter)
    first: int = 0  # of `done`, those that were there at once: from the journal

    @property
    def success(self) -> float:
        return self.passed / self.done if self.done else math.nan

    def remaining_s(self, now: float) -> float | None:
        """Seconds to go, by the pace so far; None while nothing can be said."""
        played = self.done - self.first
        return (now - self.started) / played * (self.total - self.done) if played > 0 else None

    def cells(self, now: float) -> tuple[str, ...]:
        remaining = self.remaining_s(now)
        shown = f"{100 * self.success:.1f} %" if self.done else "-"
        elapsed = now - self.started
        return (
            self.label,
            f"{self.done}/{self.total}",
            shown,
            f"{self.turns / self.done:.1f}" if self.done else "-",
            f"{self.tokens / elapsed:,.0f}" if elapsed > 1 else "-",
            str(self.lost),
            clock(remaining) if remaining is not None and self.done < self.total else "-",
        )

    def line(self, now: float) -> str:
        label, done, shown, turns, pace, lost, remaining = self.cells(now)
        parts = [f"{label}: {done} rollouts, success {shown}, {turns} turns, {pace} tokens/s"]
        parts += [f"{lost} lost"] if self.lost else []
        parts += [f"{remaining} left"] if remaining != "-" else []
        return ", ".join(parts)


class LiveView:
    """Give its `add` to a collector; a context manager."""

    def __init__(self, console: Console | None = None, *, plain_every_s: float = PLAIN_EVERY_S) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._plain_every_s = plain_every_s
        self._parts: list[Part] = []
        self._live: Live | None = None
        self._last_line = -math.inf

    def begin(self, label: str, rollouts: int) -> None:
        """The next part, of so many rollouts; the one before is complete."""
        if self._parts and not self._console.is_terminal:
            self.message(self._parts[-1].line(time.monotonic()))
        self._parts.append(Part(label, rollouts, time.monotonic()))

    def add(self, task: Task, trajectory: Trajectory) -> None:
        """One more rollout, played or found in the journal."""
        part = self._parts[-1]
        if trajectory.stop_reason.is_infra:
            part.lost += 1
        else:
            part.done += 1
            part.passed += is_resolved(trajectory)
            part.turns += len(trajectory.turns)
            part.tokens += trajectory.num_sampled_tokens
            part.stop_reasons[str(trajectory.stop_reason)] += 1
        now = time.monotonic()
        if now - part.started < 1.0:
            part.first = part.done
        self._show(now)

    def message(self, text: str) -> None:
        """A line that stays."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Leaves the terminal as it was. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _show(self, now: float) -> None:
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(self.table(now))
        elif now - self._last_line >= self._plain_every_s:
            self._last_line = now
            self.message(self._parts[-1].line(now))

    def table(self, now: float) -> Table:
        """All parts so far; the stop reasons of the latest below."""
        reasons = self._parts[-1].stop_reasons.most_common(6)
        table = Table(
            *("part", "rollouts", "success", "turns", "tokens/s", "lost", "left"),
            caption="  ".join(f"{name} {count}" for name, count in reasons),
            box=None,
        )
        for part in self._parts:
            table.add_row(*part.cells(now))
        return table
