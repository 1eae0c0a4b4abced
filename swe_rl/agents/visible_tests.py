"""The `test` tool: runs the tests that the agent can see and answers in one or a few short lines."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from swe_rl.agents.observation import describe
from swe_rl.protocols import Sandbox
from swe_rl.tasks.test_runner import Verdict, run_tests
from swe_rl.types import Task

MAX_FAILURES = 3  # listed one by one


async def run_visible_tests(sandbox: Sandbox, *, task: Task) -> str:
    """Runs the base tree's test files as they are now, edits by the agent included. Raises SandboxError."""
    files = visible_test_files(task)
    if not files:
        return "no tests"
    many = task.test_runner == "pytest"  # hundreds of tests: more than a sandbox keeps of an output
    try:
        run = await run_tests(sandbox, task, files, limit_s=task.timeout_s, to_file=many)
    except OSError as err:  # the agent filled the disk or took /tmp away
        return f"the tests cannot be run: {err.strerror}"
    if run.verdicts is None:
        return describe(run.result)
    unstable = frozenset(task.meta.get("unstable_tests", ()))  # known to fail or vary without any bug
    return summarize({name: verdict for name, verdict in run.verdicts.items() if name not in unstable})


def visible_test_files(task: Task) -> list[str]:
    """Test files of the base tree, sorted."""
    return sorted(path for path in task.tree if _is_test(posixpath.basename(path)))


def _is_test(name: str) -> bool:
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def summarize(results: Mapping[str, Verdict]) -> str:
    """`3 passed`, or `1 failed: test_x: AssertionError`, with at most MAX_FAILURES tests by name."""
    failed = {name: result for name, result in results.items() if result.status != "passed"}
    if not failed:
        return f"{len(results)} passed" if results else "no tests"
    shown = []
    for name, result in list(failed.items())[:MAX_FAILURES]:
        short = name.rpartition("::")[2] or name
        shown.append(f"{short}: {result.message}" if result.message else f"{short}: {result.status}")
    more = ["..."] if len(failed) > MAX_FAILURES else []
    passed = len(results) - len(failed)
    return f"{len(failed)} failed" + (f", {passed} passed" if passed else "") + ": " + "; ".join(shown + more)
