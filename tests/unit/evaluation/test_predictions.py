"""Predictions in SWE-bench's form, read and reported by the swebench package itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.errors import ConfigError
from swe_rl.evaluation.candidates import Candidate
from swe_rl.evaluation.compare import read_outcomes
from swe_rl.evaluation.predictions import read_predictions, write_one, write_predictions

PATCH = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a = 1\n+a = 'ü'\n"


def candidate(task: str, index: int, *, passed: bool | None, patch: str = PATCH) -> Candidate:
    return Candidate(
        trajectory_id=f"eval-policy-test-sampled/0/{task}/{index}",
        task_id=task,
        repository="o/r",
        passed=passed,
        patch=patch,
        patch_digest="d" if patch else "",
    )


SET = [  # a constructed set: resolved, not resolved, nothing changed, and one with a second run
    candidate("o__r-1", 0, passed=True),
    candidate("o__r-2", 0, passed=False),
    candidate("o__r-3", 0, passed=False, patch=""),
    candidate("o__r-4", 0, passed=True),
    candidate("o__r-4", 1, passed=False),
    candidate("o__r-5", 0, passed=False),
]


def test_one_file_per_run_over_the_tasks(tmp_path: Path) -> None:
    files = write_predictions(tmp_path / "predictions", SET, model="our/model")
    assert [file.name for file in files] == ["run00.jsonl", "run01.jsonl"]
    assert list(read_predictions(files[0])) == ["o__r-1", "o__r-2", "o__r-3", "o__r-4", "o__r-5"]
    assert read_predictions(files[1]) == {"o__r-4": PATCH.encode()}
    line = json.loads(files[0].read_text().splitlines()[0])
    assert line == {"instance_id": "o__r-1", "model_name_or_path": "our/model", "model_patch": PATCH}
    with pytest.raises(ValueError, match="one prediction per task"):
        write_one(tmp_path / "x.jsonl", SET, model="m")


def test_bytes_that_are_no_text_come_back(tmp_path: Path) -> None:
    odd = candidate("o__r-9", 0, passed=None, patch=b"+\xff\n".decode("utf-8", "surrogateescape"))
    (file,) = write_predictions(tmp_path, [odd], model="m")
    assert read_predictions(file) == {"o__r-9": b"+\xff\n"}


def test_other_forms_are_read_and_malformed_ones_refused(tmp_path: Path) -> None:
    mapping = tmp_path / "preds.json"
    mapping.write_text(json.dumps({"t": {"instance_id": "t", "model_patch": None}}))
    assert read_predictions(mapping) == {"t": b""}
    for text, words in (("[1]", "needs instance_id"), ("{", "holds no predictions")):
        mapping.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_predictions(mapping)
    double = tmp_path / "d.jsonl"
    double.write_text(2 * (json.dumps({"instance_id": "t", "model_patch": ""}) + "\n"))
    with pytest.raises(ConfigError, match="two predictions for t"):
        read_predictions(double)


def test_the_swebench_package_reads_them_and_its_report_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require(importlib.util.find_spec("swebench") is not None, "package swebench")
    from swebench.harness.constants import LOG_REPORT, RUN_EVALUATION_LOG_DIR
    from swebench.harness.reporting import make_run_report
    from swebench.harness.utils import get_predictions_from_file

    monkeypatch.chdir(tmp_path)
    first, _ = write_predictions(Path("predictions"), SET, model="our/model")
    loaded = get_predictions_from_file(str(first), "no/data-set", "test")
    assert len(loaded) == 5
    predictions = {item["instance_id"]: item for item in loaded}
    runs = [item for item in SET if item.trajectory_id.endswith("/0")]
    for item in runs:  # what its harness leaves behind for each patch that it could test
        if item.patch:
            folder = RUN_EVALUATION_LOG_DIR / "check" / "our__model" / item.task_id
            folder.mkdir(parents=True)
            (folder / LOG_REPORT).write_text(json.dumps({item.task_id: {"resolved": bool(item.passed)}}))
    data_set = [{"instance_id": item.task_id} for item in runs]
    report = make_run_report(predictions, data_set, "check")
    theirs = json.loads(Path(report).read_text())
    assert theirs["resolved_instances"] == sum(bool(item.passed) for item in runs) == 2
    assert theirs["empty_patch_ids"] == ["o__r-3"]
    assert theirs["error_instances"] == 0
    assert read_outcomes(str(report))[""] == {item.task_id: [float(bool(item.passed))] for item in runs}
