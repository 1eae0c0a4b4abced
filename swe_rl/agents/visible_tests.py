"""The `test` tool: runs the tests that the agent can see and answers in one or a few short lines."""

from __future__ import annotations

from collections.abc import Mapping

from swe_rl.agents.observation import describe
from swe_rl.protocols import Sandbox
from swe_rl.tasks.test_runner import TestResult, parse_report, runner_call, visible_test_files
from swe_rl.types import Task

MAX_FAILURES = 3  # listed one by one


async def run_visible_tests(sandbox: Sandbox, *, task: Task) -> str:
    """Runs the base tree's test files as they are now, edits by the agent included. Raises SandboxError."""
    files = visible_test_files(task)
    if not files:
        return "no tests"
    call = runner_call(task, files)
    await sandbox.write_file(call.path, call.source.encode())
    result = await sandbox.exec(call.command, cwd=task.workdir, timeout_s=call.timeout_s, stdin=call.stdin)
    report = result.stdout
    if call.report_file and result.outcome in ("ok", "nonzero"):
        report = await sandbox.read_file(call.report_file)
    results = parse_report(report, nonce=call.nonce, ids=call.tests)
    return describe(result) if results is None else summarize(results)


def summarize(results: Mapping[str, TestResult]) -> str:
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
