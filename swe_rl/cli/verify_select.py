"""`swe-rl verify select RUN`: chooses among the candidates of each task, and measures what choosing brings.

OUT/selection.csv, selection.png  Best@k of every selector, with bands
OUT/abstention.csv, .png          risk against coverage, by verifier score, policy entropy and episode length
OUT/sequential.csv                stopping when the verifier is confident: success against rollouts and tokens
OUT/tokens.csv, tokens.png        rollouts against tokens per rollout
OUT/<selector>.jsonl              the choice as predictions in SWE-bench's form, for each --by
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from swe_rl.cli.arguments import ArgumentParser
from swe_rl.cli.eval_table import between, percent
from swe_rl.cli.text_table import text_table
from swe_rl.cli.verify_files import (
    abstention_rows,
    abstention_summary,
    default_limits,
    point_rows,
    risk_curves,
    sequential_rows,
    token_cells,
    token_rows,
    token_table,
    write_csv,
)
from swe_rl.errors import ConfigError
from swe_rl.evaluation.best_of import MAX_SUBSETS, Point, curve, powers_of_two
from swe_rl.evaluation.budget import Cell
from swe_rl.evaluation.candidates import Candidate, by_task, read_candidates
from swe_rl.evaluation.predictions import write_one
from swe_rl.evaluation.selection import SELECTORS, available, check_scores, select_one

Tasks = Mapping[str, Sequence[Candidate]]


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code. Raises ConfigError for bad input."""
    arguments = _parser().parse_args(argv)
    _check(arguments)
    tasks = by_task(gather(arguments.runs))
    names = arguments.by or available([item for items in tasks.values() for item in items])
    for name in names:
        lacking = check_scores(name, [item for items in tasks.values() for item in items])
        if lacking:
            print(f"{name}: {lacking} candidates lack a score that it needs and rank last")
    out: Path = arguments.out or arguments.runs[0] / "selection"
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name not in ("random", "oracle"):
            chosen = [select_one(SELECTORS[name], items, keep=arguments.keep) for items in tasks.values()]
            write_one(out / f"{name}.jsonl", chosen, model=arguments.name or name)
    graded = {task: items for task, items in tasks.items() if all(item.passed is not None for item in items)}
    if not graded:
        print(f"{len(tasks)} tasks, none of them graded: choices are in {out}, nothing can be measured")
        return 0
    points = _measure(graded, names, arguments)
    print(table(points))
    print(abstention_summary(graded))
    limits = arguments.limits or default_limits(graded)
    cells = token_cells(graded, limits) if limits else []
    if cells:
        print(token_table(cells))
    _write_studies(graded, out, cells)
    write_csv(out / "selection.csv", point_rows(points))
    print(_draw(points, graded, out, cells))
    return 0


def gather(runs: Sequence[Path]) -> list[Candidate]:
    """Candidates of all runs, as samples of the same tasks. Of several runs each id is told apart by its run.

    ConfigError when a run is named twice, or there is nothing.
    """
    if len({run.resolve() for run in runs}) != len(runs):
        raise ConfigError("a run is named twice: its candidates would count double")
    found = [
        replace(item, trajectory_id=f"{run}:{item.trajectory_id}") if len(runs) > 1 else item
        for run in runs
        for item in read_candidates(run)
    ]
    if not found:
        raise ConfigError(f"{runs[0]} has no candidates")
    return found


def table(points: Sequence[Point]) -> str:
    """Selectors down, k across; below, the gain over one random rollout at the largest k."""
    ks = sorted({point.k for point in points})
    names = list(dict.fromkeys(point.selector for point in points))
    found = {(point.selector, point.k): point for point in points}
    rows = [["Best@k, %", *map(str, ks), "gain over pass@1, points"]]
    for name in names:
        last = found[name, max(k for k in ks if (name, k) in found)]
        gain = f"{100 * last.gain.mean:+.1f} {between(last.gain.low, last.gain.high)}"
        rows.append([name, *(percent(found[name, k].rate) if (name, k) in found else "-" for k in ks), gain])
    sizes = {point.k: point.num_tasks for point in points}
    rows.append(["tasks", *(str(sizes[k]) for k in ks), ""])
    return text_table(rows)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="swe-rl verify select",
        description="Chooses one candidate per task by each selector and, where hidden tests graded them, measures "
        "Best@k with 95 % bands: hybrid, ef, eb, majority, shortest, random (pass@1), oracle (pass@k).",
        example="swe-rl verify select runs/RUN --by hybrid --by ef",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories with candidates.jsonl")
    parser.add_argument("--by", action="append", choices=SELECTORS, help="selector, repeatable (default: all possible)")
    parser.add_argument("--k", type=int, action="append", help="size of the choice, repeatable (default: 1, 2, 4, ...)")
    parser.add_argument("--keep", type=int, default=1, help="hybrid keeps max(KEEP, n/2) by score (1; R2E-Gym: 3)")
    parser.add_argument("--subsets", type=int, default=MAX_SUBSETS, help=f"of a task and a k ({MAX_SUBSETS})")
    parser.add_argument("--seed", type=int, default=0, help="of sampled subsets (0)")
    parser.add_argument("--limits", type=int, action="append", help="token limit to study, repeatable (by the longest)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where files go (default: RUN/selection)")
    parser.add_argument("--name", default="", help="model name in predictions (default: the selector)")
    return parser


def _check(arguments: Namespace) -> None:
    for name in ("keep", "subsets"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} must be 1 or more, got {getattr(arguments, name)}")
    for name in ("k", "limits"):
        if any(value < 1 for value in getattr(arguments, name) or ()):
            raise ConfigError(f"--{name} must be 1 or more, got {min(getattr(arguments, name))}")


def _measure(graded: Tasks, names: Sequence[str], arguments: Namespace) -> list[Point]:
    most = max(len(items) for items in graded.values())
    ks = sorted(set(arguments.k)) if arguments.k else powers_of_two(most)
    if ks[-1] > most:
        raise ConfigError(f"--k {ks[-1]}: no task has more than {most} candidates")
    options = {"keep": arguments.keep, "max_subsets": arguments.subsets, "seed": arguments.seed}
    return [point for name in names for point in curve(graded, name, ks, **options)]


def _write_studies(graded: Tasks, out: Path, cells: Sequence[Cell]) -> None:
    write_csv(out / "abstention.csv", abstention_rows(graded))
    if any(item.trusted_score is not None for items in graded.values() for item in items):
        write_csv(out / "sequential.csv", sequential_rows(graded))
    write_csv(out / "tokens.csv", token_rows(cells))


def _draw(points: Sequence[Point], graded: Tasks, out: Path, cells: Sequence[Cell]) -> str:
    """A line that says where the pictures are, or why there are none."""
    try:
        from swe_rl.cli.verify_plot import plot, plot_risk, plot_tokens

        plot_risk(risk_curves(graded), out / "abstention.png")
        if cells:
            plot_tokens(cells, out / "tokens.png")
        return f"curves: {plot(points, out / 'selection.png')}, numbers: {out}"
    except ImportError:
        return f"numbers: {out}; no picture without matplotlib: pip install 'swe-rl[plot]'"
