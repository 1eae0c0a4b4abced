"""The tables and pictures of `swe-rl verify select`."""

from __future__ import annotations

import csv
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.cli.verify_files import (
    abstention_rows,
    abstention_summary,
    default_limits,
    risk_curves,
    sequential_rows,
    token_cells,
    token_rows,
    token_table,
    write_csv,
)
from swe_rl.cli.verify_select import gather, table
from swe_rl.errors import ConfigError
from swe_rl.evaluation.best_of import curve
from swe_rl.evaluation.candidates import Candidate, by_task, write_candidates

ITEMS = [
    Candidate(
        trajectory_id=f"e/0/t{task}/{i}",
        task_id=f"t{task}",
        repository="r",
        passed=(i + task) % 3 == 0,
        patch="+x",
        patch_digest=f"d{i % 2}",
        num_turns=2 + i,
        num_tokens=10,
        ef_score=0.9 if (i + task) % 3 == 0 else 0.1 * i,
        mean_logprob=-0.5,
    )
    for task in range(5)
    for i in range(4)
]


def test_curves_and_table() -> None:
    tasks = by_task(ITEMS)
    points = [point for name in ("ef", "random", "oracle") for point in curve(tasks, name, [1, 2, 4])]
    text = table(points).splitlines()
    assert text[0].split() == ["Best@k,", "%", "1", "2", "4", "gain", "over", "pass@1,", "points"]
    assert [line.split()[0] for line in text[1:]] == ["ef", "random", "oracle", "tasks"]
    assert text[1].split()[1:4] == text[3].split()[1:4], "this verifier is never wrong"


def test_pictures(tmp_path: Path) -> None:
    require(importlib.util.find_spec("matplotlib") is not None, "package matplotlib")
    from swe_rl.cli.verify_plot import plot, plot_risk

    tasks = by_task(ITEMS)
    points = [point for name in ("ef", "random") for point in curve(tasks, name, [1, 4])]
    for file in (plot(points, tmp_path / "a.png"), plot_risk(risk_curves(tasks), tmp_path / "b.png")):
        assert file.read_bytes().startswith(b"\x89PNG")


def test_abstention_in_words_and_rows() -> None:
    tasks = by_task(ITEMS)
    text = abstention_summary(tasks)
    passed = sum(bool(item.passed) for item in ITEMS)
    assert f"none {1 - passed / 20:.3f}" in text
    assert "20 of 20 rollouts changed something" in text
    assert "abstained" not in text
    perfect = text.split("perfect ")[1].split(",")[0]
    assert f"verifier {perfect}" in text, "this verifier is never wrong"
    rows = abstention_rows(tasks)
    assert {row["confidence"] for row in rows} == {"verifier", "entropy", "short"}
    gone = by_task([replace(ITEMS[0], stop_reason="abstained"), *ITEMS[1:]])
    assert "abstained in 1 of 20 rollouts" in abstention_summary(gone)
    assert abstention_summary(by_task([replace(ITEMS[0], patch="")])) == "abstention: nothing was answered"


def test_rollouts_against_tokens(tmp_path: Path) -> None:
    items = [replace(item, num_context_tokens=100 * (place % 4 + 1)) for place, item in enumerate(ITEMS)]
    tasks = by_task(items)
    assert default_limits(tasks) == [50, 100, 200, 400]
    assert default_limits(by_task([replace(item, num_context_tokens=0) for item in items])) == []
    cells = token_cells(tasks, [100, 400, 400])
    assert [(cell.limit, cell.k) for cell in cells] == [(100, 1), (100, 2), (100, 4), (400, 1), (400, 2), (400, 4)]
    assert cells[0].tokens == 100.0
    assert cells[3].tokens == 250.0
    rows = token_rows(cells)
    assert list(rows[0]) == ["limit", "k", "tokens", "pass_at_k", "best_at_k"]
    shown = token_table(cells).splitlines()
    assert shown[0].split()[-3:] == ["1", "2", "4"]
    passed = sum(bool(item.passed) for item in items) / len(items)
    assert f"{100 * passed:.1f} / {100 * passed:.1f} (250)" in shown[2]
    unscored = token_cells(by_task([replace(item, ef_score=None) for item in items]), [400])
    assert all(row["best_at_k"] == "" for row in token_rows(unscored))
    assert " / " not in token_table(unscored).splitlines()[1]
    require(importlib.util.find_spec("matplotlib") is not None, "package matplotlib")
    from swe_rl.cli.verify_plot import plot_tokens

    assert plot_tokens(cells, tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_the_stopping_rule(tmp_path: Path) -> None:
    rows = sequential_rows(by_task(ITEMS))
    assert {row["most"] for row in rows} == {1, 2, 4}
    write_csv(tmp_path / "x.csv", rows)
    with (tmp_path / "x.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    write_csv(tmp_path / "none.csv", [])
    assert (tmp_path / "none.csv").read_text() == ""


def test_several_runs_are_samples_of_the_same_tasks(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_candidates(tmp_path / name / "candidates.jsonl", ITEMS)
    both = by_task(gather([tmp_path / "one", tmp_path / "two"]))
    assert {len(items) for items in both.values()} == {8}
    with pytest.raises(ConfigError, match="named twice"):
        gather([tmp_path / "one", tmp_path / "one" / ".." / "one"])
    write_candidates(tmp_path / "one" / "candidates.jsonl", [])
    with pytest.raises(ConfigError, match="has no candidates"):
        gather([tmp_path / "one"])
