"""Sinks: what reaches the files and the terminal, and what survives a kill."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from swe_rl import metrics
from swe_rl.metrics import ConsoleSink, JsonlSink, MetricsLogger, PhaseClock, Progress, Record, Sink


def test_records_come_back_from_the_file_in_order_with_non_finite_values_as_nan(tmp_path: Path) -> None:
    with metrics.open_metrics(tmp_path, console=False, tensorboard=False) as log:
        log.log({"train/loss": 0.5, "train/grad_norm": math.inf}, phase="rl", step=1)
        log.log({"train/loss": 0.25}, phase="rl", step=2)
        log.log({"train/loss": 1.0}, phase="next", step=1)
    records = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert [(r.phase, r.step, r.values["train/loss"]) for r in records] == [
        ("rl", 1, 0.5),
        ("rl", 2, 0.25),
        ("next", 1, 1),
    ]
    assert math.isnan(records[0].values["train/grad_norm"])
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda token: pytest.fail(f"{token} is no JSON"))


def test_a_torn_line_is_cut_and_a_step_logged_again_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLogger([JsonlSink(path)]) as log:
        log.log({"train/loss": 1.0, "rollout/reward_mean": 0.5}, phase="rl", step=1)
    with open(path, "a") as file:
        file.write('{"phase": "rl", "step": 2, "val')
    assert len(metrics.read_metrics(path)) == 1
    with MetricsLogger([JsonlSink(path)]) as log:
        log.log({"train/loss": 2.0}, phase="rl", step=1)
        log.log({"train/loss": 3.0}, phase="rl", step=2)
    records = metrics.read_metrics(path)
    assert [dict(r.values) for r in records] == [{"train/loss": 2.0, "rollout/reward_mean": 0.5}, {"train/loss": 3.0}]


def test_a_first_line_torn_by_a_kill_leaves_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"phase"')
    JsonlSink(path).close()
    assert path.read_bytes() == b""
    assert metrics.read_metrics(tmp_path / "nothing") == []


@pytest.mark.parametrize("name", ["loss", "Train/loss", "train/", "train/loss mean", "/loss"])
def test_a_name_that_is_not_stage_and_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="stage/name_unit"):
        MetricsLogger().log({name: 1.0}, phase="rl", step=1)


def test_every_sink_is_closed_even_when_one_fails() -> None:
    closed = []

    class Failing(Sink):
        def close(self) -> None:
            closed.append("failing")
            raise OSError("disk full")

    class Good(Sink):
        def close(self) -> None:
            closed.append("good")

    log = MetricsLogger([Good(), Failing(), Good()])
    with pytest.raises(OSError, match="disk full"):
        log.close()
    assert sorted(closed) == ["failing", "good", "good"]
    log.close()


def test_only_rank_0_writes(tmp_path: Path) -> None:
    with metrics.open_metrics(tmp_path / "run", rank=1) as log:
        log.log({"train/loss": 1.0}, phase="rl", step=1)
        log.progress(Progress(phase="rl"))
    assert not (tmp_path / "run").exists()


def test_tensorboard_events_carry_the_values(tmp_path: Path) -> None:
    with metrics.open_metrics(tmp_path, console=False) as log:
        log.log({"train/loss": 0.5}, phase="rl", step=1)
        log.log({"train/loss": 0.25}, phase="rl", step=7)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path / "tb"))
    accumulator.Reload()
    assert [(e.step, e.value) for e in accumulator.Scalars("rl/train/loss")] == [(1, 0.5), (7, 0.25)]


def test_plain_output_is_one_line_per_step_without_control_characters() -> None:
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, force_terminal=False, width=40), plain_every_s=0.0)
    progress = Progress(
        phase="rl", step=3, num_steps=14, rollouts_done=40, rollouts_total=96, success=0.525, tokens_per_s=1810.4
    )
    sink.progress(progress)
    sink.write(Record(phase="rl", step=3, values={"train/loss": 0.12345678, "rollout/success": 0.5, "other/x": 1.0}))
    sink.close()
    assert out.getvalue().splitlines() == [
        "rl  step 3/14  rollouts 40/96  success 52%  1,810 tok/s",
        "rl step 3  success 0.5  loss 0.1235",
    ]


def test_plain_progress_and_fast_steps_are_throttled() -> None:
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, force_terminal=False), plain_every_s=60.0, step_every_s=60.0)
    for done in range(50):
        sink.progress(Progress(phase="sft", rollouts_done=done, rollouts_total=50))
        sink.write(Record(phase="sft", step=done, values={"train/loss": 1.0}))
    sink.write(Record(phase="rl", step=1, values={"train/loss": 1.0}))
    assert out.getvalue().splitlines() == ["sft  rollouts 0/50", "sft step 0  loss 1", "rl step 1  loss 1"]


def test_a_terminal_gets_a_live_line_and_messages_above_it() -> None:
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, force_terminal=True, width=100))
    sink.progress(Progress(phase="rl", step=1, num_steps=2, rollouts_done=1, rollouts_total=4))
    sink.message("[bold]kept as written[/bold]")
    sink.progress(Progress(phase="rl", step=2, num_steps=2, rollouts_done=4, rollouts_total=4))
    sink.close()
    sink.close()
    assert "[bold]kept as written[/bold]" in out.getvalue()
    assert "step 2/2" in out.getvalue()


def test_time_left_follows_the_share_done_since_the_phase_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    phase_clock = PhaseClock()
    at = lambda step, done: Progress(phase="rl", step=step, num_steps=10, rollouts_done=done, rollouts_total=4)  # noqa: E731
    assert phase_clock.remaining_s(at(5, 0)) is None  # resumed at step 5: 40 % were done before
    now[0] += 12.0
    assert phase_clock.remaining_s(at(7, 2)) == pytest.approx(12.0 / 0.25 * 0.35)
    assert phase_clock.remaining_s(Progress(phase="eval", rollouts_done=0, rollouts_total=8)) is None
    now[0] += 3.0
    assert phase_clock.remaining_s(Progress(phase="eval", rollouts_done=6, rollouts_total=8)) == pytest.approx(1.0)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3599.6, "1:00:00"), (7325, "2:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert metrics.clock(seconds) == text
