"""`swe-rl tasks filter`: a cleaned, decontaminated, capped or smaller task set out of one."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from swe_rl.cli.text_table import text_table
from swe_rl.errors import ConfigError

EXAMPLE = "swe-rl tasks filter --path tasks/rebench --nebius --swebench-repos --per-repo 50 --out tasks/rebench-clean"
_SHOWN = 8  # difficulties and repositories per filter


def add_command(commands: Any) -> None:
    """Adds the subcommand to those of `swe-rl tasks`."""
    parser = commands.add_parser(
        "filter",
        help="clean, decontaminate, cap or sample a task set",
        description="Applies filters in the order of these options and writes what is left, with a report of what each "
        "one removed, by difficulty and repository, in DIR/filter_report.json.",
        example=EXAMPLE,
    )
    parser.add_argument("--path", type=Path, required=True, metavar="DIR", help="a task set")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="written for task.source=DIR")
    parser.add_argument(
        "--nebius", action="store_true", help="at most 7 files, under 500 lines, no worst quality score"
    )
    parser.add_argument(
        "--validator", action="append", default=[], metavar="NAME",
        help="remove what failed this validator of SWE-rebench, such as has_media; may be repeated",
    )  # fmt: skip
    parser.add_argument("--r2e", action="store_true", help="R2E-Gym's filter for commits: small patches only")
    parser.add_argument("--swebench-repos", action="store_true", help="remove SWE-bench's twelve repositories")
    parser.add_argument("--against", action="append", default=[], metavar="DIR",
                        help="remove the repositories, solutions and issues of this set; may be repeated")  # fmt: skip
    parser.add_argument("--similarity", type=float, default=0.5, help="from which on texts count as the same (0.5)")
    parser.add_argument("--per-repo", type=int, metavar="N", help="at most N tasks of a repository, drawn by the seed")
    parser.add_argument("--subset", type=int, metavar="N", help="N tasks, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0, help="of --per-repo and --subset (default 0)")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    from swe_rl.curation.filters import FilterPlan, run_plan
    from swe_rl.tasks.store import iter_tasks, write_tasks

    plan = FilterPlan(
        nebius=arguments.nebius,
        validators=tuple(arguments.validator),
        r2e=arguments.r2e,
        swebench_repos=arguments.swebench_repos,
        against=tuple(arguments.against),
        similarity=arguments.similarity,
        per_repo=arguments.per_repo,
        subset=arguments.subset,
        seed=arguments.seed,
    )
    if (arguments.out / "tasks.jsonl").exists():
        raise ConfigError(f"--out={arguments.out} has a task set already: choose another directory")
    kept, reports = run_plan(iter_tasks(arguments.path), plan, brief=True)
    for report in reports:
        print(report_text(report))
    if not kept:
        raise ConfigError("no task is left: loosen the filters")
    chosen = {task.task_id for task in kept}
    write_tasks((task for task in iter_tasks(arguments.path) if task.task_id in chosen), arguments.out)
    text = json.dumps([as_json(report) for report in reports], indent=1, ensure_ascii=False)
    (arguments.out / "filter_report.json").write_text(text + "\n", encoding="utf-8")
    print(f"{arguments.out}: {len(kept)} tasks; use it with task.source={arguments.out}")
    return 0


def report_text(report: Any) -> str:
    """What one filter removed, as text: reasons, then shares by difficulty and repository."""
    lines = [f"{report.name}: {report.num_removed} of {report.num_seen} tasks removed"]
    lines += [f"  {count}: {reason}" for reason, count in report.reasons.most_common()]
    if report.num_removed:
        for what in ("difficulty", "repo"):
            rows = [
                [value, str(seen), str(removed), f"{100 * removed / seen:.0f} %"]
                for value, seen, removed in report.shares(what)[:_SHOWN]
            ]
            lines += ["  " + line for line in text_table([[what, "tasks", "removed", "share"], *rows]).splitlines()]
    return "\n".join(lines)


def as_json(report: Any) -> dict[str, Any]:
    """Everything in a filter's report, for a file."""
    shares = {
        what: {value: {"tasks": seen, "removed": removed} for value, seen, removed in report.shares(what)}
        for what in ("difficulty", "repo")
    }
    return {
        "filter": report.name,
        "tasks": report.num_seen,
        "removed": report.num_removed,
        "reasons": dict(report.reasons.most_common()),
        **shares,
    }
