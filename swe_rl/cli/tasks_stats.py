"""`swe-rl tasks stats`: a task set as tables, and as one HTML file with plots."""

from __future__ import annotations

from argparse import Namespace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_rl.cli.svg import bar_chart
from swe_rl.cli.text_table import text_table

if TYPE_CHECKING:
    from swe_rl.curation.stats import TaskStats

EXAMPLE = "swe-rl tasks stats --path tasks/verified --html verified.html"
_SHOWN = 15  # values per group
_STYLE = (
    "body{font:14px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}table{border-collapse:collapse}"
    "th{text-align:left;font-weight:normal;padding-right:1em}td.bar{width:22em}i{display:inline-block;height:.8em}"
    ".b0{background:#2a78d6}.b1{background:#eb6834}pre{overflow:auto}.key{display:none}"
)


def add_command(commands: Any) -> None:
    """Adds the subcommand to those of `swe-rl tasks`."""
    parser = commands.add_parser(
        "stats",
        help="describe a task set",
        description="Counts tasks by source, language, difficulty and repository, and gives the spread of their sizes.",
        example=EXAMPLE,
    )
    parser.add_argument("--path", type=Path, required=True, metavar="DIR", help="a task set")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write tables and plots as one HTML file")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    from swe_rl.curation.stats import collect
    from swe_rl.tasks.store import iter_tasks

    stats = collect(iter_tasks(arguments.path))
    print(stats_text(stats))
    if arguments.html:
        arguments.html.parent.mkdir(parents=True, exist_ok=True)
        arguments.html.write_text(stats_html(stats, title=str(arguments.path)), encoding="utf-8")
        print(f"{arguments.html} written")
    return 0


def stats_text(stats: TaskStats) -> str:
    """Tables: the groups with more than one value, then quantiles of the sizes."""
    lines = [f"{stats.num_tasks} tasks, {stats.images} images"]
    for what, count in (("patch", stats.without_patch), ("test command", stats.without_test_command)):
        lines += [f"{count} without a {what}"] if count else []
    for name, counts in stats.groups.items():
        rows = [[value, str(count), f"{100 * count / stats.num_tasks:.1f} %"] for value, count in counts.most_common()]
        rest = len(rows) - _SHOWN
        lines += ["", text_table([[name, "tasks", "share"], *rows[:_SHOWN]])]
        lines += [f"and {rest} more"] if rest > 0 else []
    return "\n".join([*lines, "", _size_table(stats)])


def _size_table(stats: TaskStats) -> str:
    from swe_rl.curation.stats import QUANTILES, quantiles

    heading = ["per task", *(f"{q:.0%}" for q in QUANTILES)]
    rows = [[name, *map(str, quantiles(values))] for name, values in stats.sizes.items() if values]
    return text_table([heading, *rows])


def stats_html(stats: TaskStats, *, title: str) -> str:
    """One page: a bar chart per group, histograms of the sizes, the tables."""
    figures = [
        _bars(name, counts.most_common(_SHOWN), stats.num_tasks)
        for name, counts in stats.groups.items()
        if len(counts) > 1
    ]
    figures += [_bars(name, histogram(values), stats.num_tasks) for name, values in stats.sizes.items()]
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(title)}</h1>{''.join(figures)}<pre>{escape(stats_text(stats))}</pre>\n"
    )


def histogram(values: list[int]) -> list[tuple[str, int]]:
    """(range, count) with ranges that double: 0, 1, 2-3, 4-7, ..."""
    counts: dict[int, int] = {}
    for value in values:
        counts[value.bit_length()] = counts.get(value.bit_length(), 0) + 1
    return [(_range(bits), counts.get(bits, 0)) for bits in range(max(counts, default=-1) + 1)]


def _range(bits: int) -> str:
    low, high = (1 << bits) >> 1, (1 << bits) - 1
    return str(low) if low == high or bits == 0 else f"{low}-{high}"


def _bars(name: str, counts: list[tuple[str, int]], total: int) -> str:
    """Bars as wide as the share of the largest count; the second, empty part fills the row."""
    widest = max((count for _, count in counts), default=0) or total or 1
    chart = bar_chart(name, [(label, (count, widest - count)) for label, count in counts], keys=(name, ""))
    return chart.replace('class="b1"', "")
