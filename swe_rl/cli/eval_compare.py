"""`swe-rl eval compare A B`: the paired difference of two evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from swe_rl.cli.arguments import ArgumentParser
from swe_rl.cli.eval_table import between, percent
from swe_rl.errors import ConfigError
from swe_rl.evaluation.compare import Comparison, compare, read_outcomes

SHOWN_TASKS = 8


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code. Raises ConfigError for bad input."""
    arguments = _parser().parse_args(argv)
    first, second = read_outcomes(arguments.first), read_outcomes(arguments.second)
    if len(first) == len(second) == 1:  # whatever the two call their only part
        second = dict(zip(first, second.values(), strict=True))
    common = [part for part in first if part in second and set(first[part]) & set(second[part])]
    if not common:
        raise ConfigError(
            f"{arguments.first} and {arguments.second} have no task in common: evaluate both on the same splits"
        )
    found = {part: compare(first[part], second[part]) for part in common}
    if arguments.json:
        print(json.dumps({part: asdict(comparison) for part, comparison in found.items()}, indent=1))
        return 0
    for part, comparison in found.items():
        print(_text(part, comparison, arguments.first, arguments.second))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="swe-rl eval compare",
        description="Paired difference of two evaluations of the same tasks: bootstrap interval, sign-flip and McNemar "
        "tests, and the tasks that changed. Each of the two is a run directory (RUN:PHASE for a phase of a training "
        "run), a SWE-bench report or a JSON object task -> solved; several joined by commas are attempts of one.",
        example="swe-rl eval compare runs/AFTER runs/BEFORE",
    )
    parser.add_argument("first", metavar="A")
    parser.add_argument("second", metavar="B")
    parser.add_argument("--json", action="store_true", help="everything, every task that changed included")
    return parser


def _text(part: str, found: Comparison, first: str, second: str) -> str:
    difference = found.difference
    lines = [
        f"{part or 'all tasks'}, {difference.num_tasks} tasks: A {first}, B {second}",
        f"  A - B: {100 * difference.mean:+.1f} points, 95 % interval {between(difference.low, difference.high)} "
        f"(bootstrap over tasks), {_p(found.p_sign)} (sign flips)",
        f"  first attempts: only A {found.only_first}, only B {found.only_second}, both {found.both}, "
        f"neither {found.neither}; {_p(found.p_mcnemar)} (McNemar, exact)",
        f"  better with A ({percent(len(found.better) / difference.num_tasks)} % of tasks): {_some(found.better)}",
        f"  worse with A ({percent(len(found.worse) / difference.num_tasks)} %): {_some(found.worse)}",
    ]
    return "\n".join(lines)


def _p(value: float) -> str:
    return f"p = {value:.4f}" if value >= 0.0001 else "p < 0.0001"


def _some(tasks: Sequence[str]) -> str:
    shown = ", ".join(tasks[:SHOWN_TASKS]) or "none"
    return f"{shown}, and {len(tasks) - SHOWN_TASKS} more" if len(tasks) > SHOWN_TASKS else shown
