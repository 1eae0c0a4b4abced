"""`swe-rl tasks import | export | filter | stats` from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from swe_rl.cli.dispatch import BAD_INPUT, DONE, main
from swe_rl.cli.tasks_stats import histogram
from swe_rl.tasks import load_tasks, read_tasks

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
import source_rows as rows


def many(count: int) -> list[dict]:
    return [
        rows.swe_rebench(instance_id=f"org__repo{n % 5}-{n}", repo=f"org/repo{n % 5}", version=str(n))
        for n in range(count)
    ]


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["tasks", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def imported(tmp_path, capsys):
    path = rows.write_jsonl(tmp_path / "rows.jsonl", [*many(20), rows.swe_rebench(FAIL_TO_PASS=[])])
    code, out, _ = run(capsys, "import", "--source", "swe_rebench", "--path", path, "--out", tmp_path / "set")
    assert code == DONE
    return tmp_path, out


def test_import_reports_what_was_skipped_and_why(imported):
    folder, out = imported
    assert "20 tasks from 21 rows of 5 repositories" in out
    assert "skipped 1: no FAIL_TO_PASS test: nothing would be rewarded" in out
    report = json.loads((folder / "set/import_report.json").read_text())
    assert (report["rows"], report["tasks"], report["malformed"]) == (21, 20, 0)
    assert report["repos"]["org/repo0"] == 4
    assert len(load_tasks(str(folder / "set"), split="train", num_tasks=0, seed=0, repo="org/repo0")) == 4


def test_export_gives_the_rows_back(imported, capsys):
    folder, _ = imported
    code, out, _ = run(capsys, "export", "--path", folder / "set", "--out", folder / "back.jsonl")
    assert (code, out) == (DONE, f"{folder}/back.jsonl: 20 rows of form swebench\n")
    assert [json.loads(line) for line in (folder / "back.jsonl").read_text().splitlines()] == many(20)
    code, _, err = run(capsys, "export", "--path", folder / "set", "--out", folder / "back.jsonl")
    assert (code, "must be a new file" in err) == (BAD_INPUT, True)


def test_filter_prints_and_writes_what_it_removed(imported, capsys):
    folder, _ = imported
    command = ["filter", "--path", folder / "set", "--out", folder / "small", "--per-repo", 2, "--subset", 7]
    code, out, _ = run(capsys, *command)
    assert code == DONE
    assert "at most 2 per repository, seed 0: 10 of 20 tasks removed" in out
    assert "subset, seed 0: 3 of 10 tasks removed" in out
    assert "1 of 3" in out  # a difficulty
    assert len(read_tasks(folder / "small")) == 7
    report = json.loads((folder / "small/filter_report.json").read_text())
    assert report[0]["difficulty"] == {"1 of 3": {"tasks": 20, "removed": 10}}
    assert report[0]["repo"]["org/repo1"] == {"tasks": 4, "removed": 2}
    code, _, err = run(capsys, *command)
    assert (code, "has a task set already" in err) == (BAD_INPUT, True)


def test_stats_as_table_and_page(imported, capsys):
    folder, _ = imported
    code, out, _ = run(capsys, "stats", "--path", folder / "set", "--html", folder / "stats.html")
    assert code == DONE
    assert out.startswith("20 tasks, 1 images")
    assert ["org/repo0", "4", "20.0", "%"] in [line.split() for line in out.splitlines()]
    assert "patch_lines" in out
    page = (folder / "stats.html").read_text()
    assert page.count("<figure>") >= 6
    assert "org/repo4" in page
    assert "http" not in page


def test_histograms_double():
    assert histogram([]) == []
    assert histogram([0, 1, 1, 2, 3, 4, 7, 8]) == [("0", 1), ("1", 2), ("2-3", 2), ("4-7", 2), ("8-15", 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "--source", "swe_rebench", "--path", "nowhere.jsonl", "--out", "x"], "nowhere.jsonl is neither"),
        (["import", "--source", "nope", "--out", "x"], "invalid choice: 'nope'"),
        (["stats", "--path", "nowhere"], "no task set: nowhere/tasks.jsonl is missing"),
        (["filter", "--path", "nowhere", "--out", "x", "--nebius"], "no task set"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == BAD_INPUT
    assert message in err
    assert len(err.splitlines()) == 1


def test_malformed_rows_stop_or_are_counted(tmp_path, capsys):
    path = rows.write_jsonl(tmp_path / "rows.jsonl", [*many(2), rows.swe_rebench(patch=4)])
    command = ["import", "--source", "swe_rebench", "--path", path, "--out", tmp_path / "set"]
    code, _, err = run(capsys, *command)
    assert code == BAD_INPUT
    assert "rows.jsonl row 3: field patch is 4 (int), expected a string" in err
    assert not (tmp_path / "set/tasks.jsonl").exists()
    code, out, _ = run(capsys, *command, "--skip-invalid")
    assert code == DONE
    assert "malformed 1, such as rows.jsonl row 3" in out
