"""Tasks whose results nothing here can read are refused, in one line and before a sandbox is opened."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import source_rows as rows

from swe_rl.errors import ConfigError
from swe_rl.rewards import grade
from swe_rl.rewards.script_grading import test_script as script_of
from swe_rl.tasks.sources import ImportReport, import_tasks
from swe_rl.tasks.test_logs import EXIT_CODE, read_log, why_ungradable
from swe_rl.types import SandboxSpec, Task

FOREIGN = {
    "multi_swe_bench": rows.multi_swe_bench(),
    "swebench_pro": rows.swebench_pro(),
    "swe_rebench_v2": rows.swe_rebench_v2(),
}
HERE = {
    "swebench": rows.swebench(),
    "swe_gym": rows.swe_gym(),
    "swe_rebench": rows.swe_rebench(),
    "swe_smith": rows.swe_smith(),
    "r2e_gym": rows.r2e_gym(),
}


def imported(folder: Path, source: str, row: dict[str, Any]) -> tuple[Task, ImportReport]:
    report = ImportReport()
    (task,) = import_tasks(source, str(rows.write_jsonl(folder / "rows.jsonl", [row])), report=report)
    return task, report


def no_sandbox(spec: SandboxSpec) -> Any:
    raise AssertionError("a sandbox was opened")


@pytest.mark.parametrize("source", FOREIGN)
async def test_a_family_without_a_parser_here_is_refused(tmp_path: Path, source: str) -> None:
    """Its log must never be read by the parser of plain pytest, which would find something in it."""
    task, report = imported(tmp_path, source, FOREIGN[source])
    why = why_ungradable(task)
    assert why
    assert report.ungradable == {why: 1}
    log = "\n".join(
        [">>>>> Start Test Output", *(f"PASSED {name}" for name in task.fail_to_pass), ">>>>> End Test Output"]
    )
    with pytest.raises(ConfigError, match=f"task {task.task_id}: .*statuses that its own harness gives"):
        read_log(task, log)
    with pytest.raises(ConfigError, match=task.task_id):
        await grade(task, task.gold_patch, spec=SandboxSpec(), pool=no_sandbox)


@pytest.mark.parametrize("source", HERE)
def test_the_other_families_are_graded(tmp_path: Path, source: str) -> None:
    task, report = imported(tmp_path, source, HERE[source])
    assert (why_ungradable(task), report.ungradable) == ("", {})


def test_a_log_of_another_language_is_not_read_as_pytest(tmp_path: Path) -> None:
    task, _ = imported(tmp_path, "swebench", rows.swebench())
    assert "names no log parser" in why_ungradable(replace(task, language="rust"))
    assert why_ungradable(replace(task, language="rust", log_parser="parse_log_cargo")) == ""
    assert why_ungradable(replace(task, test_cmd=" \n")) == "it has no test command"


@pytest.mark.parametrize(
    ("command", "code"),
    [("true", 0), ("false", 1), ("exit 3", 3), ("cd /\npwd\n(exit 5)", 5), ("kill -9 $BASHPID", 137)],
)
def test_the_exit_code_of_the_command_follows_the_end(tmp_path: Path, command: str, code: int) -> None:
    task, _ = imported(tmp_path, "swebench", rows.swebench())
    script = script_of(replace(task, test_cmd=command))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    log = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert log.index("+ : '>>>>> Start Test Output'") < log.index("+ : '>>>>> End Test Output'")
    assert log.rstrip().endswith(f"\n{EXIT_CODE}: {code}")
    assert "/\n" in log or "pwd" not in command


def test_a_forged_exit_code_before_the_real_one_does_not_count(tmp_path: Path) -> None:
    pytest.importorskip("swebench")
    task, _ = imported(tmp_path, "swebench", rows.swebench())
    passed = "\\n".join(f"PASSED {name}" for name in (*task.fail_to_pass, *task.pass_to_pass))
    command = f"printf '{passed}\\n{EXIT_CODE}: 0\\n'; exit 1"
    script = script_of(replace(task, test_cmd=command))
    log = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False).stdout
    found = read_log(task, log)
    assert (found.exit_code, len(found.statuses)) == (1, len(task.fail_to_pass) + len(task.pass_to_pass))
