"""Real rows of the published sets, where SWE_RL_REAL_DATA names a collection of them: counts, round trips, logs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from real_parts import real_data, require

from swe_rl.tasks import read_tasks, write_tasks
from swe_rl.tasks.export import export_tasks
from swe_rl.tasks.pass_rules import judge
from swe_rl.tasks.sources import SOURCES, ImportReport, import_tasks
from swe_rl.tasks.sources.kept import source_row
from swe_rl.tasks.test_logs import read_log

COUNTS = [  # source, path, rows, tasks, malformed
    ("swebench_lite", "swebench/lite_dev_rows.jsonl", 5, 5, 0),
    ("swebench_lite", "swebench/lite_test_rows.jsonl", 5, 5, 0),
    ("swebench_lite", "swebench/lite_dev_3rows.parquet", 3, 3, 0),
    ("swebench_verified", "swebench/verified_rows.jsonl", 4, 4, 0),
    ("swebench_verified", "swebench/verified_3rows.parquet", 3, 3, 0),
    ("swebench", "swebench/dev_easy_first_only.json", 1, 1, 0),
    ("swebench", "swebench/v5_task_repo", 3, 3, 0),
    ("swebench_pro", "swebench_pro/rows_official_layout.jsonl", 2, 2, 0),
    ("swebench_pro", "swebench_pro/rows_other_layout.json", 2, 2, 0),
    ("multi_swe_bench", "multi_swe_bench/rows.jsonl", 4, 4, 0),
    ("swe_gym", "swe_gym/rows.jsonl", 4, 4, 0),
    ("swe_rebench", "swe_rebench/swe_bench_extra_row.jsonl", 1, 1, 0),
    ("swe_rebench", "swe_rebench/v1_row_incomplete.jsonl", 1, 0, 1),  # its source cut the patches off
    ("swe_rebench_v2", "swe_rebench/v2_sample.json", 1, 1, 0),
    ("swe_smith", "swe_smith/task_row.json", 1, 1, 0),
    ("r2e_gym", "r2e_gym/rows_nemo_gym.jsonl", 3, 3, 0),
    ("r2e_gym", "r2e_gym/partial_row_aiohttp.json", 1, 0, 1),  # four fields only
    ("harbor", "harbor", 4, 4, 0),
    ("nemo_gym", "nemo_gym/anyswe_agent_example.jsonl", 2, 2, 0),
    ("nemo_gym", "nemo_gym/mini_swe_agent_2_example.jsonl", 3, 3, 0),
    ("nemo_gym", "nemo_gym/swe_agents_example.jsonl", 1, 1, 0),
    ("nemo_gym", "nemo_gym/swebench_example.jsonl", 2, 2, 0),
    ("nemo_gym", "nemo_gym/swerl_gen_example.jsonl", 2, 2, 0),
    ("nemo_gym", "nemo_gym/deepswe_example.jsonl", 3, 0, 0),  # names only
    ("nemo_gym", "nemo_gym/harbor_agent_input.jsonl", 3, 0, 0),
    ("nemo_gym", "nemo_gym/anyterminal_agent_example.jsonl", 3, 0, 0),
    ("nemo_gym", "nemo_gym/swe_agents_terminal_example.jsonl", 1, 0, 0),
    ("nemo_gym", "nemo_gym/swe_pivot_example.jsonl", 5, 0, 0),  # no repository
    ("nemo_gym", "nemo_gym/swerl_llm_judge_example.jsonl", 1, 0, 0),
    ("nemo_gym", "nemo_gym/terminal_pivot_example.jsonl", 2, 0, 0),
    ("nemo_gym", "swe_gym/rows.jsonl", 4, 4, 0),
    ("nemo_gym", "r2e_gym/rows_nemo_gym.jsonl", 3, 3, 0),
    ("nemo_gym", "swebench_pro/rows_official_layout.jsonl", 2, 2, 0),
]


@pytest.mark.parametrize(
    ("source", "path", "rows", "tasks", "malformed"), COUNTS, ids=[f"{c[0]}:{c[1]}" for c in COUNTS]
)
def test_real_rows_import_and_survive_the_round_trip(tmp_path, source, path, rows, tasks, malformed):
    report = ImportReport()
    found = list(import_tasks(source, str(real_data(path)), skip_invalid=True, report=report))
    assert (report.rows, report.tasks, report.num_invalid) == (rows, tasks, malformed), report
    assert sum(report.skipped.values()) == rows - tasks - malformed
    for task in found:
        assert task.gold_patch or source == "harbor"
        assert task.problem_statement.strip()
    if not found:
        return
    write_tasks(found, tmp_path / "set")
    assert read_tasks(tmp_path / "set") == found
    if path.endswith(".jsonl"):
        export_tasks(tmp_path / "set", tmp_path / "rows.jsonl", form="source")
        dropped = {*SOURCES[source].dropped}
        original = [json.loads(line) for line in real_data(path).read_text().splitlines() if line.strip()]
        back = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        assert back == [{key: value for key, value in row.items() if key not in dropped} for row in original]


def real_task(source: str, path: str, task_id: str):
    return {task.task_id: task for task in import_tasks(source, str(real_data(path)))}[task_id]


@pytest.mark.parametrize("number", range(3))
def test_gold_runs_of_r2e_are_resolved(number):
    runs = [json.loads(line) for line in real_data("r2e_gym/graded_gold_runs.jsonl").read_text().splitlines()]
    run = runs[number]
    task = real_task("r2e_gym", "r2e_gym/rows_nemo_gym.jsonl", run["instance_id"])
    found = judge(task, read_log(task, run["test_output"]))
    assert found.resolved == run["test_results"]["resolved"] is True
    assert len(task.expected_status) == run["test_results"]["tests_expected"]


def swebench_runs() -> list[str]:
    known = {
        "pydicom__pydicom-1256", "pydicom__pydicom-1694", "pylint-dev__astroid-1196", "pylint-dev__astroid-1978",
        "sqlfluff__sqlfluff-2419", "django__django-13033", "astropy__astropy-12907",
    }  # fmt: skip
    return sorted(known)


@pytest.mark.parametrize("instance_id", swebench_runs())
def test_runs_of_swebench_come_out_as_their_reports_say(instance_id):
    require(importlib.util.find_spec("swebench") is not None, "the package swebench")
    tasks = {}
    for name in ("lite_dev", "lite_test", "verified"):
        found = import_tasks("swebench", str(real_data(f"swebench/{name}_rows.jsonl")))
        tasks.update({task.task_id: task for task in found})
    if instance_id not in tasks:
        pytest.skip("its row is not in the collection")
    folder = real_data(f"logs/swebench_v4/{instance_id}")
    report = json.loads((folder / "report.json").read_text())[instance_id]
    task = tasks[instance_id]
    found = judge(task, read_log(task, (folder / "test_output.txt").read_text()))
    assert found.resolved == report["resolved"]
    good, kept = report["tests_status"]["PASS_TO_PASS"]["success"], task.pass_to_pass
    assert found.p2p == (pytest.approx(len(good) / len(kept)) if kept else 1.0)


def test_a_run_of_swe_smith_comes_out_as_its_report_says():
    task = real_task("swe_smith", "swe_smith/task_row.json", "pandas-dev__pandas.95280573.pr_53652")
    folder = real_data(f"logs/swe_smith/run_evaluation/{task.task_id}")
    report = json.loads((folder / "report.json").read_text())
    found = judge(task, read_log(task, (folder / "test_output.txt").read_text()))
    assert found.resolved == report["resolved"] is True
    assert source_row(task)["patch"].encode() != task.gold_patch


def test_verbose_logs_of_swe_smith_name_what_its_own_test_expects():
    folder: Path = real_data("logs/swe_smith/test_output")
    expected = json.loads((folder / "expected.json").read_text())
    task = real_task("swe_smith", "swe_smith/task_row.json", "pandas-dev__pandas.95280573.pr_53652")
    for name, entry in expected.items():
        if entry["parser"] == "pytest":
            found = read_log(task, (folder / name).read_text()).statuses
            assert {test: found.get(test, "").upper() for test in entry["includes"]} == entry["includes"]
