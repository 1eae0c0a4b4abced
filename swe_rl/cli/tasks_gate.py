"""`swe-rl tasks gate`: which tasks are fit for training."""

from __future__ import annotations

import asyncio
from argparse import Namespace, _SubParsersAction
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from swe_rl.cli.arguments import ArgumentParser
from swe_rl.cli.paths import cache_dir
from swe_rl.errors import ConfigError
from swe_rl.types import Limits, SandboxSpec, Task

EXAMPLE = "swe-rl tasks gate --source tasks/pypi --out tasks/pypi-gated"


def add_command(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Adds the subcommand to the parser of `swe-rl tasks`."""
    gate = commands.add_parser(
        "gate",
        help="keep the tasks that are solvable, unsolved, steady, quick and without their answer",
        description="Grades nothing done (must be 0) and the gold patch (must be 1) several times, the last time in "
        "shuffled order, and looks for the answer in all that a sandbox can read. One verdict per task with the "
        "reason, kept in a record: a killed run goes on, and a second one has nothing to do.",
        example=EXAMPLE,
    )
    gate.add_argument("--source", required=True, metavar="DIR", help="a task set, or minirepo")
    gate.add_argument("--split", default="all", help="of the source (default all)")
    gate.add_argument("--num-tasks", type=int, default=0, metavar="N", help="at most so many (default 0: all)")
    gate.add_argument("--task", action="append", default=[], metavar="ID", help="only this one; may be repeated")
    gate.add_argument("--out", type=Path, metavar="DIR", help="written for task.source=DIR: the tasks that pass")
    gate.add_argument("--record", type=Path, metavar="FILE", help="verdicts (default SOURCE/gate.jsonl)")
    gate.add_argument("--repeats", type=int, default=3, help="runs of each of the two patches (default 3)")
    gate.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="of the tests of a run (default 60)")
    gate.add_argument("--concurrency", type=int, default=2, help="tasks looked at together (default 2)")
    gate.add_argument("--memory", type=int, default=1024, metavar="MIB", help="of a sandbox (default 1024)")
    gate.add_argument("--backend", default="local", help="of the sandboxes: local or docker (default local)")
    gate.add_argument("--no-scan", action="store_true", help="do not look for the answer inside sandboxes")
    gate.set_defaults(run=run_gate)


def run_gate(arguments: Namespace) -> int:
    """0 when every task has a verdict, 1 when the machine left some undecided. Raises ConfigError for bad input."""
    from swe_rl.curation.gate import GateOptions, gate_tasks
    from swe_rl.sandbox import SandboxPool

    if arguments.out is not None and arguments.out.resolve() == Path(arguments.source).resolve():
        raise ConfigError(f"--out={arguments.out} is the source: its tasks that do not pass would be lost")
    tasks = _tasks(arguments)
    options = GateOptions(
        repeats=arguments.repeats,
        limit_s=arguments.time_limit,
        concurrency=arguments.concurrency,
        scan=not arguments.no_scan,
        sandbox=f"{arguments.backend}/{arguments.memory}",
    )
    limits = Limits(memory_bytes=arguments.memory << 20, pids=256, disk_bytes=256 << 20, lease_s=7200.0)
    base = SandboxSpec(backend=arguments.backend, limits=limits)
    record = arguments.record or _default_record(arguments.source)
    record.parent.mkdir(parents=True, exist_ok=True)

    async def gate():  # type: ignore[no-untyped-def]  # as gate_tasks
        async with SandboxPool(max(1, arguments.concurrency)) as pool:
            return await gate_tasks(
                tasks, options=options, record=record, spec_of=partial(_spec, base=base), pool=pool, report=_say
            )

    result = asyncio.run(gate())
    kept = {row.task_id for row in result.verdicts if row.passed}
    if arguments.out is not None:
        _write([task for task in tasks if task.task_id in kept], arguments.out)
    counts = Counter(row.verdict for row in result.verdicts)
    found = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    reused = f", {result.reused} of them from {record}" if result.reused else ""
    print(f"{len(result.verdicts)} verdicts{reused}: {found or 'none'}")
    if arguments.out is not None:
        print(f"{arguments.out}: use it with task.source={arguments.out}")
    for task_id, reason in sorted(result.undecided.items()):
        print(f"{task_id} undecided: {reason}")
    return 1 if result.undecided else 0


def _tasks(arguments: Namespace) -> list[Task]:
    from swe_rl.tasks import load_tasks

    split = "train" if arguments.source == "minirepo" and arguments.split == "all" else arguments.split
    tasks = load_tasks(arguments.source, split=split, num_tasks=arguments.num_tasks, seed=0)
    wanted = set(arguments.task)
    if missing := sorted(wanted - {task.task_id for task in tasks}):
        raise ConfigError(f"--task {missing[0]} is not among the {len(tasks)} tasks of {arguments.source}")
    return [task for task in tasks if not wanted or task.task_id in wanted]


def _default_record(source: str) -> Path:
    return cache_dir() / "gate-minirepo.jsonl" if source == "minirepo" else Path(source) / "gate.jsonl"


def _spec(task: Task, *, base: SandboxSpec) -> SandboxSpec:
    from swe_rl.tasks import materialize, task_spec

    tree = materialize(task, cache_dir() / "trees") if task.tree else None
    return task_spec(task, base, tree=tree)


def _write(tasks: Sequence[Task], out: Path) -> None:
    from swe_rl.tasks import write_tasks

    if not tasks:
        raise ConfigError(f"no task passed, so nothing is written to {out}: see the verdicts")
    write_tasks(tasks, out)


def _say(line: str) -> None:
    print(line, flush=True)
