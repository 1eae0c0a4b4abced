"""What an interruption or damage leaves of a task set must not look complete, and says what it is."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import source_rows as rows

from swe_rl.errors import ConfigError
from swe_rl.tasks import export, load_tasks, read_tasks, write_tasks
from swe_rl.tasks.export import export_tasks
from swe_rl.tasks.sources import RowError, import_tasks
from swe_rl.tasks.store import iter_tasks
from swe_rl.types import Task


def some(count: int = 3) -> list[Task]:
    return load_tasks("minirepo", split="train", num_tasks=count, seed=0)


def interrupted(tasks: list[Task]) -> Iterator[Task]:
    yield tasks[0]
    raise KeyboardInterrupt


def test_an_interrupted_export_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tasks(some(), tmp_path / "set")
    out = tmp_path / "out" / "rows.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(export, "iter_tasks", lambda path: interrupted(list(iter_tasks(path))))
        with pytest.raises(KeyboardInterrupt):
            export_tasks(tmp_path / "set", out)
    assert [path.name for path in out.parent.iterdir()] == ["trees"]
    with pytest.raises(ConfigError, match="came from no row"):
        export_tasks(tmp_path / "set", out, form="source")
    assert export_tasks(tmp_path / "set", out) == 3  # nothing is in the way of the next try


def test_an_interrupted_import_leaves_no_set(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_tasks(interrupted(some()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trees"]
    write_tasks(some(), tmp_path)
    assert len(read_tasks(tmp_path)) == 3


@pytest.mark.parametrize("damage", ["cut", "turned", "no tar"])
def test_a_damaged_tar_is_named_by_its_line(tmp_path: Path, damage: str) -> None:
    write_tasks(some(1), tmp_path)
    for tar in (tmp_path / "trees").iterdir():
        data = tar.read_bytes()
        tar.write_bytes(
            {"cut": data[: len(data) // 2], "turned": data[:40] + bytes(60), "no tar": gzip.compress(b"")}[damage]
        )
    with pytest.raises(ConfigError, match="line 1 is not a task"):
        read_tasks(tmp_path)


@pytest.mark.parametrize("line", ["[]", "null", "{}", "[" * 100_000, "\ufeff{}", "NaN", '{"instance_id": 1}'])
def test_a_line_that_is_no_task_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1 is not a task"):
        read_tasks(tmp_path)


def test_mounts_stay_relative_wherever_a_set_is_copied_to(tmp_path: Path) -> None:
    (tmp_path / "one" / "packages").mkdir(parents=True)
    task = replace(some(1)[0], meta={"mounts": [["packages", "/opt/packages"]]})
    write_tasks([task], tmp_path / "one")
    write_tasks(read_tasks(tmp_path / "one"), tmp_path / "two")
    row = json.loads((tmp_path / "two" / "tasks.jsonl").read_text())
    assert row["meta"]["mounts"] == [["../one/packages", "/opt/packages"]]
    (found,) = read_tasks(tmp_path / "two")
    assert found.meta["mounts"] == [[str(tmp_path / "one" / "packages"), "/opt/packages"]]


DEEP = "[" * 100_000
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("swebench", rows.swebench(FAIL_TO_PASS=DEEP), "FAIL_TO_PASS"),
    ("multi_swe_bench", rows.multi_swe_bench(number=math.nan), "number"),
    ("multi_swe_bench", rows.multi_swe_bench(number=math.inf), "number"),
    ("swe_rebench_v2", rows.swe_rebench_v2(meta={"llm_metadata": -1}), "llm_metadata"),
    ("swe_rebench_v2", rows.swe_rebench_v2(meta={"llm_metadata": {"a": 1}}), "llm_metadata"),
    ("swe_rebench_v2", rows.swe_rebench_v2(meta={"llm_metadata": [{"pr_categories": 3}]}), "pr_categories"),
    ("swe_rebench", rows.swe_rebench(meta={"llm_score": [1]}), "llm_score"),
    ("swe_rebench", rows.swe_rebench(meta={"llm_score": {"difficulty_score": "hard"}}), "difficulty_score"),
    ("swe_rebench", rows.swe_rebench(meta={"failed_lite_validators": [7]}), "failed_lite_validators"),
    ("swe_rebench", rows.swe_rebench(install_config={"log_parser": 5, "test_cmd": "pytest"}), "log_parser"),
]


@pytest.mark.parametrize(("source", "row", "field"), WRONG, ids=[f"{source} {field}" for source, _, field in WRONG])
def test_a_field_of_another_type_is_named_with_its_row(
    tmp_path: Path, source: str, row: dict[str, Any], field: str
) -> None:
    path = rows.write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(RowError, match=rf"rows.jsonl row 1.*field .*{field} .*expected"):
        list(import_tasks(source, str(path)))


def test_scores_given_as_text_of_an_object_are_read(tmp_path: Path) -> None:
    """Filters read them from the task: there they are values."""
    row = rows.swe_rebench(meta={"llm_score": '{"difficulty_score": 2}', "failed_lite_validators": '["has_media"]'})
    (task,) = import_tasks("swe_rebench", str(rows.write_jsonl(tmp_path / "rows.jsonl", [row])))
    assert task.meta["quality"] == {"llm_score": {"difficulty_score": 2}, "failed_lite_validators": ["has_media"]}
    assert task.meta["difficulty"] == "2 of 3"


def test_rows_nested_without_end_are_no_json(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.json"):
        (tmp_path / name).write_text(DEEP)
        with pytest.raises(ConfigError, match="is not JSON"):
            list(import_tasks("swebench", str(tmp_path / name)))
