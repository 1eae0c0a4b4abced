"""Best@k against k with bands, risk against coverage, rollouts against tokens, as pictures. Needs matplotlib:
pip install 'swe-rl[plot]'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from swe_rl.evaluation.abstention import RiskPoint
from swe_rl.evaluation.best_of import Point
from swe_rl.evaluation.budget import Cell


def plot(points: Sequence[Point], path: Path) -> Path:
    """Writes a PNG with one line per selector. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6.4, 4.2))
    for name in dict.fromkeys(point.selector for point in points):
        own = sorted((point for point in points if point.selector == name), key=lambda point: point.k)
        ks = [point.k for point in own]
        style = "--" if name in ("random", "oracle") else "-"
        (line,) = panel.plot(ks, [100 * point.rate for point in own], style, marker="o", markersize=3, label=name)
        if not any(math.isnan(point.low) for point in own):
            low, high = [100 * point.low for point in own], [100 * point.high for point in own]
            panel.fill_between(ks, low, high, color=line.get_color(), alpha=0.1, linewidth=0)
    panel.set(xscale="log", xlabel="rollouts to choose from, k", ylabel="Best@k, %", title="95 % bands over tasks")
    ticks = sorted({point.k for point in points})
    panel.set_xticks(ticks, [str(k) for k in ticks])
    panel.minorticks_off()
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def plot_risk(curves: Mapping[str, Sequence[RiskPoint]], path: Path) -> Path:
    """Writes a PNG with one line per measure of confidence. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6.4, 4.2))
    for name, points in curves.items():
        coverage, risk = [100 * p.coverage for p in points], [100 * p.risk for p in points]
        panel.step(coverage, risk, where="post", label=name)
    panel.set(xlim=(0, 100), ylim=(0, 100), xlabel="coverage: rollouts answered, %", ylabel="risk: wrong answers, %")
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def plot_tokens(cells: Sequence[Cell], path: Path) -> Path:
    """Writes a PNG with one line per token limit, over the tokens spent on a task. Raises ImportError without
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6.4, 4.2))
    for limit in sorted({cell.limit for cell in cells}):
        own = sorted((cell for cell in cells if cell.limit == limit), key=lambda cell: cell.k)
        tokens, label = [cell.tokens for cell in own], f"at most {limit:,} each"
        (line,) = panel.plot(tokens, [100 * cell.pass_at_k for cell in own], "--", marker="o", markersize=3)
        panel.plot(tokens, [100 * cell.best_at_k for cell in own], "-", color=line.get_color(), label=label)
    panel.set(xscale="log", xlabel="tokens of a task", ylabel="%", title="pass@k (dashed) and Best@k by score")
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
