"""Grading by a data set's own test command, whose output its own parser reads and its own rule judges.

What this cannot exclude: the output is text, and code under test may print lines that look like results; these data
sets come with nothing better. Their commands also fetch test files from the image's Git history, so it is there while
they run: a patch that reads it is flagged (suspect.py), not stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from swe_rl.protocols import Sandbox
from swe_rl.tasks.pass_rules import Judgement, judge
from swe_rl.tasks.test_logs import END, EXIT_CODE, START, read_log
from swe_rl.types import ExecResult, Task

LOG_BYTES = 16 << 20  # kept of a log; one that is longer is incomplete
REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # Harbor's, the first one that is there


def test_script(task: Task) -> str:
    """The command in SWE-bench's markers, with its exit code after the end, both streams together; a script that has
    them stays as it is. A subshell: a command that exits must not take the end marker along."""
    if START in task.test_cmd:
        return f"exec 2>&1\n{task.test_cmd}"
    return (
        f"exec 2>&1\nset -x\n: '{START}'\n{{ set +x; }} 2>/dev/null\n(\n{task.test_cmd}\n)\nstatus=$?\n"
        f"set -x\n: '{END}'\n{{ set +x; }} 2>/dev/null\necho '{EXIT_CODE}:' $status\n"
    )


def applies_tests_itself(task: Task) -> bool:
    """A whole evaluation script of SWE-bench resets the test files and applies the test patch."""
    return START in task.test_cmd


async def run_script(sandbox: Sandbox, task: Task, *, limit_s: float) -> tuple[ExecResult, Judgement | None]:
    """How the command ended, and what its output says; None when it came to no end or its output was cut.

    Raises ConfigError for a parser that is not there.
    """
    result = await sandbox.exec(test_script(task), cwd=task.workdir, timeout_s=limit_s)
    if result.outcome not in ("ok", "nonzero"):
        return result, None
    if task.pass_rule == "reward_file":
        return result, await _reward_file(sandbox, task)
    if result.stdout_bytes > len(result.stdout):
        return result, None
    return result, judge(task, read_log(task, result.stdout.decode("utf-8", "replace")))


async def _reward_file(sandbox: Sandbox, task: Task) -> Judgement | None:
    for path in REWARD_FILES:
        try:
            text = await sandbox.read_file(path)
        except OSError:
            continue
        value = _number(text)
        return None if value is None else Judgement(resolved=value >= 1.0, f2p=min(max(value, 0.0), 1.0), p2p=1.0)
    return None


def _number(text: bytes) -> float | None:
    """None for what is no finite number: code under test runs beside the verifier, so it may be its doing."""
    try:
        found = json.loads(text)
        value = float(found["reward"] if isinstance(found, Mapping) else found)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return value if math.isfinite(value) else None
