"""Host side of the test runners: the script, its command line, its input, and how to read its report.

    nonce = new_nonce()
    await sandbox.write_file(RUNNER_PATH, runner_source(task.test_runner).encode())
    result = await sandbox.exec(command_line(task, remove_tests=True), stdin=run_input(nonce, ids), ...)
    results = parse_report(result.stdout, nonce=nonce, ids=ids)

The scripts, and what each of them protects against: swe_rl/tasks/runner.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swe_rl.tasks import runner
from swe_rl.types import Task

if TYPE_CHECKING:
    RUNNER_SOURCE: str  # text of the script for plain test functions

RUNNER_PATH = "/tmp/.runner.py"


@dataclass(frozen=True, slots=True)
class Verdict:
    status: str  # passed | failed | error | missing (skipped tests too)
    message: str = ""  # one short line


def __getattr__(name: str) -> str:
    """RUNNER_SOURCE is read at its first use: nothing happens at import time."""
    if name == "RUNNER_SOURCE":
        return runner_source("functions")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def runner_source(test_runner: str) -> str:
    """Text of the script for Task.test_runner. Raises ConfigError for an unknown one."""
    return runner.bundle(test_runner)


def new_nonce() -> str:
    return secrets.token_hex(16)


def command_line(task: Task, *, remove_tests: bool = False, path: str = RUNNER_PATH) -> str:
    """Starts the script, which reads `run_input` from its standard input.

    remove_tests deletes the named test files once they are read, so that code under test cannot look up what is
    expected; "functions" only, pytest reads files while it runs.
    """
    removal = ["--remove-tests"] if remove_tests and task.test_runner == "functions" else []
    return shlex.join(["python3", "-I", "-S", path, "--root", task.workdir, *removal, "-"])


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
