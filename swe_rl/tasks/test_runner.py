"""Host side of the test runners: `run_tests` puts the script into a sandbox, starts it and reads its report.

The scripts, and what each of them protects against: swe_rl/tasks/runner.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from swe_rl.protocols import Sandbox
from swe_rl.tasks import runner
from swe_rl.types import ExecResult, Task

if TYPE_CHECKING:
    RUNNER_SOURCE: str  # text of the script for plain test functions

RUNNER_PATH, REPORT_PATH = "/tmp/.runner.py", "/tmp/.report"
FUNCTION_S = 5.0  # of one plain test function; the script's own default
MUST_FAIL = "!"  # before the id of a test that must fail ("pytest" only): it runs last in every process
PYTEST_SHARE = 0.25  # of Task.timeout_s for one test of pytest: it passed much faster when the task was made


@dataclass(frozen=True, slots=True)
class Verdict:
    # passed | failed | error | missing (skipped tests too); with per_file also ended (the process of the tests came to
    # no proper end) and forged (what it said contradicts itself)
    status: str
    message: str = ""  # one short line


@dataclass(frozen=True, slots=True)
class RunnerReport:
    """How a run of the script ended, and what it reported."""

    result: ExecResult
    verdicts: Mapping[str, Verdict] | None  # by test id; None: the run came to no end


async def run_tests(
    sandbox: Sandbox,
    task: Task,
    ids: Sequence[str],
    *,
    limit_s: float,
    remove_tests: bool = False,
    per_file: bool = False,
    order_seed: int = 0,
    to_file: bool = False,
) -> RunnerReport:
    """Runs test ids or test files in `task.workdir`, all of them within `limit_s`.

    remove_tests, per_file, order_seed: see `command_line`. to_file: the report goes through a file, for more tests than
    the sandbox keeps of an output. Raises SandboxError, and OSError when the script or the report cannot be written or
    read.
    """
    nonce = new_nonce()
    await sandbox.write_file(RUNNER_PATH, runner_source(task.test_runner).encode())
    command = command_line(task, remove_tests=remove_tests, per_file=per_file, order_seed=order_seed)
    if order_seed:
        ids = Random(order_seed).sample(list(ids), len(ids))
    if to_file:
        command += " >" + shlex.quote(_from_workdir(task, REPORT_PATH))
    result = await sandbox.exec(command, cwd=task.workdir, timeout_s=limit_s, stdin=run_input(nonce, ids))
    report = await sandbox.read_file(REPORT_PATH) if to_file else result.stdout
    return RunnerReport(result, parse_report(report, nonce=nonce, ids=ids))


def __getattr__(name: str) -> str:
    """RUNNER_SOURCE is read at its first use: nothing happens at import time."""
    if name == "RUNNER_SOURCE":
        return runner_source("functions")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def runner_source(test_runner: str) -> str:
    """Text of the script for Task.test_runner. Raises ConfigError for an unknown one."""
    return runner.bundle(test_runner)


def runner_digest(test_runner: str) -> str:
    """Names the version of a script: verdicts of another one may differ."""
    return hashlib.sha256(runner_source(test_runner).encode()).hexdigest()[:16]


def new_nonce() -> str:
    return secrets.token_hex(16)


def command_line(
    task: Task, *, remove_tests: bool = False, per_file: bool = False, order_seed: int = 0, path: str = RUNNER_PATH
) -> str:
    """Starts the script, which reads `run_input` from its standard input, in `task.workdir`. Paths are relative to
    it: a sandbox without isolation has its root elsewhere.

    remove_tests deletes the named test files once they are read, so that code under test cannot look up what is
    expected; "functions" only, pytest reads files while it runs. per_file: a process for each test file, whose exit
    code, counts and times are compared with its verdicts; "pytest" only, "functions" has a process for each test and
    trusts none. order_seed: shuffles the tests of a process; 0 keeps their order.
    """
    options = []
    if seconds_per_test(task) != FUNCTION_S:
        options += ["--test-s", f"{seconds_per_test(task):g}"]
    if task.test_runner == "functions":
        options += ["--remove-tests"] * remove_tests
    else:
        options += ["--per-file"] * per_file
        options += ["--shuffle", str(order_seed)] if order_seed else []
    return shlex.join(["python3", "-I", "-S", _from_workdir(task, path), "--root", ".", *options, "-"])


def seconds_per_test(task: Task) -> float:
    """Wall-clock limit of one test: meta["test_s"], else generous beside what a test of that kind takes."""
    by_kind = FUNCTION_S if task.test_runner == "functions" else max(FUNCTION_S, PYTEST_SHARE * task.timeout_s)
    return float(task.meta.get("test_s", by_kind))


def _from_workdir(task: Task, path: str) -> str:
    return posixpath.relpath(path, task.workdir)


def run_input(nonce: str, ids: Sequence[str]) -> bytes:
    """The nonce, then one test id or test file per line."""
    return "\n".join([nonce, *ids, ""]).encode()


def parse_report(data: bytes, *, nonce: str, ids: Sequence[str] = ()) -> dict[str, Verdict] | None:
    """Verdict per test id, None when there is no complete report (the runner died or was killed).

    Lines without the nonce are output of the code under test and are ignored. Ids that the report lacks are "missing":
    an absent result is never a pass.
    """
    prefix = nonce + " "
    lines = [line[len(prefix) :] for line in data.decode("utf-8", "replace").split("\n") if line.startswith(prefix)]
    try:
        rows = [json.loads(line) for line in lines if line.startswith("{")]
    except ValueError:
        return None  # cut: a sandbox keeps the head and tail of a long output
    if not lines or lines[-1] != f"end {len(rows)}":
        return None
    found = {row["id"]: Verdict(row["status"], row["message"]) for row in rows}
    absent = {item: Verdict("missing", "not run") for item in ids if "::" in item and item not in found}
    return found | absent
