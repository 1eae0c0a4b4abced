"""Scalars by name, and where they go: a JSONL file, TensorBoard, the terminal.

Names are "stage/name_unit" in lower case: rollout/reward_mean, train/grad_norm, engine/tokens_per_s. A step is one
optimiser step, counted from 1 within its phase. The caller opens a logger with `open_metrics` and closes it in
`finally` (or uses `with`); only rank 0 has sinks. Importing this file needs the standard library and rich only.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tb"
NAME = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9_]+)+")
HEADLINES = (  # what one console line per step shows, where present
    "rollout/success",
    "rollout/reward_mean",
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "train/kl_rollout",
    "train/tokens_per_s",
    "engine/tokens_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The scalars of one step."""

    phase: str
    step: int  # optimiser step within the phase; 0 belongs to the time before the first one
    values: Mapping[str, float]
    time_s: float = field(default_factory=time.time)  # seconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a phase stands right now; shown, never stored."""

    phase: str
    step: int = 0  # under way, from 1
    num_steps: int = 0  # 0: not known
    rollouts_done: int = 0  # of the step (or of the evaluation) under way
    rollouts_total: int = 0
    success: float | None = None  # share of the finished rollouts whose hidden tests pass
    tokens_per_s: float | None = None


class Sink:
    """One place where metrics go. Progress and messages are shown, not stored: most sinks leave them out."""

    def write(self, record: Record) -> None:
        """Takes the scalars of one step."""

    def progress(self, progress: Progress) -> None:
        """Takes where the phase stands."""

    def message(self, text: str) -> None:
        """Takes a line for people."""

    def close(self) -> None:
        """Flushes and frees."""


class MetricsLogger:
    """Hands every record to every sink. A failing sink fails the run: metrics are never lost in silence."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def log(self, values: Mapping[str, float], *, phase: str, step: int) -> None:
        """Records the scalars of one step. ValueError for a name that is not "stage/name_unit"."""
        for name in values:
            if not NAME.fullmatch(name):
                raise ValueError(f"metric name {name!r} is not of the form stage/name_unit")
        record = Record(phase=phase, step=step, values={name: float(value) for name, value in values.items()})
        for sink in self._sinks:
            sink.write(record)

    def progress(self, progress: Progress) -> None:
        """Shows where the phase stands; cheap enough to call after every rollout."""
        for sink in self._sinks:
            sink.progress(progress)

    def message(self, text: str) -> None:
        """Shows a line that is worth reading once."""
        for sink in self._sinks:
            sink.message(text)

    def close(self) -> None:
        """Closes every sink, also when one of them fails. Idempotent."""
        sinks, self._sinks = self._sinks, []
        with ExitStack() as stack:
            for sink in sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_metrics(
    run_dir: Path | None = None, *, console: bool = True, tensorboard: bool = True, rank: int = 0
) -> MetricsLogger:
    """The sinks of a run: files below `run_dir` (appended to when they exist) and the terminal; none beyond rank 0."""
    if rank != 0:
        return MetricsLogger()
    sinks: list[Sink] = []
    if run_dir is not None:
        sinks.append(JsonlSink(run_dir / METRICS_FILE))
        if tensorboard:
            sinks.append(TensorBoardSink(run_dir / TENSORBOARD_DIR))
    if console:
        sinks.append(ConsoleSink())
    return MetricsLogger(sinks)


class JsonlSink(Sink):
    """One line per record: {"phase", "step", "time_s", "values": {name: number, or null if not finite}}."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = open(path, "a", encoding="utf-8")

    def write(self, record: Record) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
        line = {"phase": record.phase, "step": record.step, "time_s": round(record.time_s, 3), "values": values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()  # a killed run keeps every finished step

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """Records in the order of their steps as written; of a step logged twice (resumed run) the later values win.

    A torn last line, as a kill leaves it, is left out; null comes back as NaN.
    """
    merged: dict[tuple[str, int], Record] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    for line in lines:
        if not line.endswith("\n"):
            break
        raw: dict[str, Any] = json.loads(line)
        key = (raw["phase"], raw["step"])
        values = {name: math.nan if value is None else float(value) for name, value in raw["values"].items()}
        earlier = merged.get(key)
        merged[key] = Record(
            phase=key[0], step=key[1], values={**(earlier.values if earlier else {}), **values}, time_s=raw["time_s"]
        )
    return list(merged.values())


class TensorBoardSink(Sink):
    """Event files through TensorBoard's own writer (no torch). Tags are phase/stage/name: steps restart per phase."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: EventFileWriter | None = None

    def write(self, record: Record) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [
            Summary.Value(tag=f"{record.phase}/{name}", simple_value=value) for name, value in record.values.items()
        ]
        event = Event(wall_time=record.time_s, step=record.step, summary=Summary(value=scalars))
        self._open().add_event(event)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> EventFileWriter:
        if self._writer is None:  # opened by the first record: the import takes a third of a second
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._directory))
        return self._writer


class ConsoleSink(Sink):
    """A live line on a terminal, elsewhere a plain line every `plain_every_s` seconds; above it, lines of steps.

    Fast steps (a supervised phase) print at most one line every `step_every_s` seconds; the files have them all.
    """

    def __init__(
        self, console: Console | None = None, *, plain_every_s: float = 15.0, step_every_s: float = 3.0
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._plain_every_s = plain_every_s
        self._live: Live | None = None
        self._clock = PhaseClock()
        self._last_line = -math.inf  # time.monotonic() of the last plain progress line
        self._step_every_s = step_every_s
        self._last_step = ("", -math.inf)  # phase and time.monotonic() of the last step line

    def write(self, record: Record) -> None:
        if record.phase == self._last_step[0] and time.monotonic() - self._last_step[1] < self._step_every_s:
            return
        self._last_step = (record.phase, time.monotonic())
        shown = [name for name in HEADLINES if name in record.values] or list(record.values)[:6]
        values = "  ".join(f"{name.split('/', 1)[1]} {short(record.values[name])}" for name in shown)
        self.message(f"{record.phase} step {record.step}  {values}")

    def progress(self, progress: Progress) -> None:
        line = progress_line(progress, remaining_s=self._clock.remaining_s(progress))
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True))
        elif time.monotonic() - self._last_line >= self._plain_every_s:
            self._last_line = time.monotonic()
            self.message(line)

    def message(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class PhaseClock:
    """Time left in a phase, from the share done and the time since its first progress report."""

    def __init__(self) -> None:
        self._phase = ""
        self._started = 0.0
        self._share_at_start = 0.0  # of a resumed phase

    def remaining_s(self, progress: Progress) -> float | None:
        """Seconds, or None while nothing can be said."""
        share = _share_done(progress)
        if progress.phase != self._phase:
            self._phase, self._started, self._share_at_start = progress.phase, time.monotonic(), share
        gained = share - self._share_at_start
        if gained <= 0:
            return None
        return (1 - share) * (time.monotonic() - self._started) / gained


def progress_line(progress: Progress, *, remaining_s: float | None = None) -> str:
    """`rl  step 3/14  rollouts 40/96  success 52%  810 tok/s  4:05 left`; what is not known is left out."""
    parts = [progress.phase]
    if progress.num_steps:
        parts.append(f"step {progress.step}/{progress.num_steps}")
    if progress.rollouts_total:
        parts.append(f"rollouts {progress.rollouts_done}/{progress.rollouts_total}")
    if progress.success is not None:
        parts.append(f"success {progress.success:.0%}")
    if progress.tokens_per_s is not None:
        parts.append(f"{progress.tokens_per_s:,.0f} tok/s")
    if remaining_s is not None:
        parts.append(f"{clock(remaining_s)} left")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """4:05, or 1:02:03 from an hour on."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def short(value: float) -> str:
    """A number in at most about seven characters."""
    return f"{value:,.0f}" if abs(value) >= 1000 and math.isfinite(value) else f"{value:.4g}"


def _share_done(progress: Progress) -> float:
    within = progress.rollouts_done / progress.rollouts_total if progress.rollouts_total else 0.0
    if not progress.num_steps:
        return within
    return min(1.0, (max(progress.step - 1, 0) + within) / progress.num_steps)


def _drop_torn_line(path: Path) -> None:
    """Cuts what a kill left of an unfinished line, so that the next record starts on a line of its own."""
    data = path.read_bytes() if path.exists() else b""
    if not data.endswith(b"\n") and data:
        os.truncate(path, data.rfind(b"\n") + 1)
