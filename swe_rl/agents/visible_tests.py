"""The `test` tool: runs the tests that the agent can see and answers in one or a few short lines."""

from __future__ import annotations

import json
import posixpath
import secrets
import shlex
from typing import Any

from swe_rl.agents.observation import describe
from swe_rl.protocols import Sandbox
from swe_rl.types import Task

RUNNER_PATH = "/tmp/.runner.py"
MAX_FAILURES = 3  # listed one by one
_PYTEST = "python3 -m pytest -q --no-header --tb=line -p no:cacheprovider"


async def run_visible_tests(sandbox: Sandbox, *, task: Task) -> str:
    """Runs them as they are now in the repository, edits by the agent included. Raises SandboxError."""
    if task.test_runner == "pytest":
        return describe(await sandbox.exec(_PYTEST, cwd=task.workdir, timeout_s=task.timeout_s))
    files = visible_test_files(task)
    if not files:
        return "no tests"
    from swe_rl.tasks import test_runner

    await sandbox.write_file(RUNNER_PATH, test_runner.RUNNER_SOURCE.encode())
    nonce = secrets.token_hex(8)
    names = " ".join(shlex.quote(name) for name in files)
    command = f"SWE_RL_NONCE={nonce} python3 -I -S {RUNNER_PATH} --root {shlex.quote(task.workdir)} {names}"
    result = await sandbox.exec(command, cwd=task.workdir, timeout_s=task.timeout_s)
    records = read_report(result.stdout, nonce=nonce)
    return summarize(records) if records and result.outcome in ("ok", "nonzero") else describe(result)


def visible_test_files(task: Task) -> list[str]:
    """Test files of the base tree, sorted."""
    return sorted(path for path in task.tree if _is_test(path))


def _is_test(path: str) -> bool:
    name = posixpath.basename(path)
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def read_report(stdout: bytes, *, nonce: str) -> list[dict[str, Any]]:
    """Records of the runner; lines without the nonce are the tests' own output."""
    records = []
    for line in stdout.decode("utf-8", "replace").splitlines():
        _, found, rest = line.partition(nonce)
        if not found:
            continue
        start, end = rest.find("{"), rest.rfind("}")
        if 0 <= start < end:
            records.append(json.loads(rest[start : end + 1]))
    return records


def summarize(records: list[dict[str, Any]]) -> str:
    """`3 passed`, or `1 failed: test_x: AssertionError`, with at most MAX_FAILURES names."""
    failed = [record for record in records if record["status"] != "passed"]
    if not failed:
        return f"{len(records)} passed"
    shown = []
    for record in failed[:MAX_FAILURES]:
        name = str(record["id"]).rpartition("::")[2]
        message = str(record.get("message", "")).strip().splitlines()
        shown.append(f"{name}: {message[0]}" if message else name)
    more = ["..."] if len(failed) > MAX_FAILURES else []
    passed = len(records) - len(failed)
    return f"{len(failed)} failed" + (f", {passed} passed" if passed else "") + ": " + "; ".join(shown + more)
