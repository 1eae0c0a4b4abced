"""The parts of a report. A section is a function (RunData) -> HTML, "" when there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from swe_rl.cli.report_data import RunData, SampleTrajectory
from swe_rl.cli.svg import Series, bar_chart, line_chart

MAX_TEXT = 6000  # characters of one prompt, action, observation or patch


@dataclass(frozen=True, slots=True)
class Curve:
    title: str
    names: tuple[str, ...]  # drawn in one chart, a colour each; a single one has a colour per phase


CURVES: tuple[Curve, ...] = (
    Curve("rollouts: share that passes, and mean reward", ("rollout/success", "rollout/reward_mean")),
    Curve("groups solved: none, some, all", ("rollout/solve_none", "rollout/solve_partial", "rollout/solve_all")),
    Curve("loss", ("train/loss",)),
    Curve("entropy (nats per trained token)", ("train/entropy",)),
    Curve("gradient norm", ("train/grad_norm",)),
    Curve("drift between engine and trainer (nats)", ("train/kl_rollout",)),
    Curve("engine against trainer: mean |Δ logprob|", ("train/logprob_abs_diff",)),
    Curve("tokens per second (training)", ("train/tokens_per_s",)),
    Curve("tokens of the samples / tokens computed (trees)", ("train/tree_token_ratio",)),
    Curve("tokens per second (generation)", ("engine/tokens_per_s",)),
    Curve("share of clipped ratios", ("train/ratio_clip_frac",)),
)


def final_table(run: RunData) -> str:
    """Success per phase (rows) and held-out split and mode (columns), each with its standard error."""
    if not run.results:
        return ""
    columns = list(dict.fromkeys((str(r["split"]), str(r["mode"])) for r in run.results))
    cells = {(str(r["phase"]), str(r["split"]), str(r["mode"])): _success(r) for r in run.results}
    head = "".join(f"<th>{escape(split)}, {escape(mode)}</th>" for split, mode in columns)
    rows = []
    for phase in dict.fromkeys(str(r["phase"]) for r in run.results):
        values = "".join(f"<td>{cells.get((phase, split, mode), '–')}</td>" for split, mode in columns)
        rows.append(f"<tr><th>{escape(phase)}</th>{values}</tr>")
    note = "<p>Share of held-out tasks solved ± standard error; sampled is at temperature 1.</p>"
    return f"{note}<table><tr><th>after</th>{head}</tr>{''.join(rows)}</table>"


def curves(run: RunData) -> str:
    """The scalars that tell whether training is healthy, phase after phase on one axis."""
    charts = [_chart(run, curve.title, curve.names) for curve in CURVES]
    return _grid(charts)


def other_curves(run: RunData) -> str:
    """Every other scalar that was logged, folded away."""
    shown = {name for curve in CURVES for name in curve.names}
    names = sorted({name for record in run.records for name in record.values} - shown)
    charts = _grid([_chart(run, name, (name,)) for name in names])
    return f"<details><summary>{len(names)} more</summary>{charts}</details>" if charts else ""


def stop_reasons(run: RunData) -> str:
    """How episodes ended, per phase."""
    totals: dict[str, int] = {}
    for counts in run.stop_reasons.values():
        for reason, number in counts.items():
            totals[reason] = totals.get(reason, 0) + number
    reasons = sorted(totals, key=lambda reason: -totals[reason])
    if not reasons:
        return ""
    rows = [(phase, [float(counts[r]) for r in reasons]) for phase, counts in run.stop_reasons.items()]
    return bar_chart("rollouts by stop reason", rows, keys=reasons)


def sample_trajectories(run: RunData) -> str:
    """One rollout that passed and one that did not, from the last step of each phase."""
    return "".join(_trajectory(sample) for sample in run.samples)


def configuration(run: RunData) -> str:
    """The resolved configuration as the run stored it."""
    if not run.config_yaml:
        return ""
    return f"<details><summary>config.yaml</summary><pre>{escape(run.config_yaml)}</pre></details>"


def _success(row: dict[str, Any]) -> str:
    number = row.get("num_tasks")
    count = f" <small>n={int(number)}</small>" if number is not None else ""
    error = float(row.get("stderr", math.nan))
    spread = f" ± {error:.3f}" if math.isfinite(error) else ""
    return f"{float(row['success']):.3f}{spread}{count}"


def _chart(run: RunData, title: str, names: Sequence[str]) -> str:
    """Optimiser steps of one phase on the x axis; with several phases, an equal part of the axis for each."""
    having = [p for p in run.phases if any(r.phase == p and set(names) & set(r.values) for r in run.records)]
    last = {phase: max(r.step for r in run.records if r.phase == phase) for phase in having}
    series = []
    for index, name in enumerate(names):
        for band, phase in enumerate(having):
            points = [(r.step, r.values[name]) for r in run.records if r.phase == phase and name in r.values]
            x = [step if len(having) == 1 else band + step / max(last[phase], 1) for step, _ in points]
            label, colour = (name.split("/", 1)[1], index) if len(names) > 1 else ("", run.phases.index(phase))
            series.append(Series(label=label, x=x, y=[value for _, value in points], colour=colour))
    bands = [f"{phase}, {last[phase]} steps" for phase in having] if len(having) > 1 else []
    return line_chart(title, series, bands=bands)


def _grid(charts: Sequence[str]) -> str:
    drawn = [chart for chart in charts if chart]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _trajectory(sample: SampleTrajectory) -> str:
    reward = "not scored" if sample.reward is None else f"reward {sample.reward:g}"
    summary = f"{sample.phase}: {sample.task_id} — {reward}, {sample.stop_reason}, {len(sample.turns)} turns"
    body = "".join(
        (_block("prompt", turn.context) if number == 1 else "")
        + _block(f"action {number}", turn.action)
        + _block(f"observation {number}", turn.observation)
        for number, turn in enumerate(sample.turns, 1)
    )
    detail = _block("detail", sample.detail)
    return f"<details><summary>{escape(summary)}</summary>{body}{detail}{_block('patch', sample.patch)}</details>"


def _block(label: str, text: str) -> str:
    if not text.strip():
        return ""
    cut = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n… ({len(text) - MAX_TEXT} characters more)"
    return f"<h4>{escape(label)}</h4><pre>{escape(cut)}</pre>"
