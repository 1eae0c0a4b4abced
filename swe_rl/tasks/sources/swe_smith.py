"""SWE-smith: synthetic bugs. `patch` INTRODUCES the bug; what solves the task is its reverse.

In the image a branch per instance has the bug at its head, with the tests that catch it removed; its parent commit has
those tests. Upstream counts a required test that is absent from the log as passed, because it runs subsets.
"""

from __future__ import annotations

import shlex

from swe_rl.tasks.sources import swebench
from swe_rl.tasks.sources.fields import Row, SkipRow
from swe_rl.tasks.sources.kept import keep_row
from swe_rl.tasks.sources.reverse_patch import NotReversible, reverse_patch
from swe_rl.tasks.sources.test_commands import CONDA_ENV
from swe_rl.types import Task

TIMEOUT_S = 120.0
_PYTEST = "pytest --disable-warnings --color=no --tb=no --verbose"


def read(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One row as a task, with the reversed patch as the solution."""
    row.know(swebench.WRAPPING)
    instance_id = row.name("instance_id")
    fail_to_pass = row.texts("FAIL_TO_PASS")
    if not fail_to_pass:
        raise SkipRow("no FAIL_TO_PASS test: nothing would be rewarded")
    try:
        gold = reverse_patch(row.full_text("patch").encode("utf-8", "surrogatepass"))
    except NotReversible as error:
        raise row.wrong("patch", f"a diff that can be reversed ({error})") from error
    files = tuple(dict.fromkeys(name.partition("::")[0] for name in fail_to_pass))
    quoted = " ".join(map(shlex.quote, files))
    task = Task(
        task_id=instance_id,
        source=source,
        split=split,
        repo=row.name("repo"),
        base_commit=row.text("base_commit", "") or instance_id,
        problem_statement=swebench.issue_text(row),
        fail_to_pass=fail_to_pass,
        pass_to_pass=row.texts("PASS_TO_PASS"),
        gold_patch=gold,
        test_files=files,
        image=image_name(row.name("image_name")),
        setup_cmd=f"git checkout {shlex.quote(instance_id)}",
        test_runner="script",
        test_cmd=f"git checkout {shlex.quote(instance_id)}~1 -- {quoted}\n{_PYTEST} {quoted}",
        log_parser="pytest_verbose",
        pass_rule="f2p_p2p_absent_ok",
        timeout_s=TIMEOUT_S,
        created_at=row.time("created_at"),
        meta={"strategy": _strategy(instance_id), "env": CONDA_ENV},
    )
    row.finish(keep_unknown=keep_unknown)
    return keep_row(task, row.values)


def image_name(name: str) -> str:
    """Rows name it with or without its owner and tag; the registry has `_1776_` for `__`."""
    if "/" not in name:
        name = f"jyangballin/{name.replace('__', '_1776_')}".lower()
    return name if ":" in name else f"{name}:latest"


def _strategy(instance_id: str) -> str:
    """How the bug was made, from the last part of the id: "func_pm_ctrl_invert_if", "combine_file", "pr", ..."""
    return instance_id.rpartition(".")[2].rpartition("__")[0] or instance_id.rpartition(".")[2].rpartition("_")[0]
