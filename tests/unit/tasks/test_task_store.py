from __future__ import annotations

import json
from dataclasses import replace

import pytest

from swe_rl.errors import ConfigError
from swe_rl.tasks import load_tasks, materialize, read_tasks, write_tasks


def sample(num_tasks=5):
    tasks = load_tasks("minirepo", split="train", num_tasks=num_tasks, seed=0)
    tasks += load_tasks("minirepo", split="hard", num_tasks=2, seed=0)
    odd = replace(tasks[0], task_id="odd", gold_patch=b"\xff\xfe", kind="feature", test_runner="pytest", timeout_s=7.5)
    return [*tasks, odd, replace(tasks[1], task_id="image", tree={}, hidden_files={}, image="registry/x:1")]


def test_round_trip(tmp_path):
    tasks = sample()
    write_tasks(tasks, tmp_path)
    assert read_tasks(tmp_path) == tasks
    assert materialize(read_tasks(tmp_path)[0], tmp_path / "cache").is_dir()


def test_fields_are_those_of_swe_bench(tmp_path):
    tasks = sample()
    row = json.loads(write_tasks(tasks, tmp_path).read_text().splitlines()[0])
    assert json.loads(row["FAIL_TO_PASS"]) == list(tasks[0].fail_to_pass)
    assert json.loads(row["PASS_TO_PASS"]) == list(tasks[0].pass_to_pass)
    assert row["patch"].encode() == tasks[0].gold_patch
    assert row["instance_id"] == tasks[0].task_id
    assert "+def test_" in row["test_patch"]
    assert {"repo", "base_commit", "problem_statement", "version", "created_at", "test_patch"} <= set(row)


def test_bytes_depend_on_the_tasks_alone_and_equal_trees_share_a_tar(tmp_path):
    for name in ("one", "two"):
        write_tasks(sample(), tmp_path / name)
    files = [
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("one", "two")
    ]
    assert files[0] == files[1]
    assert len(list((tmp_path / "one" / "trees").iterdir())) == 2 * 7  # "odd" shares both, "image" has none


def test_load_tasks_selects_shuffles_and_cuts(tmp_path):
    write_tasks(sample(20), tmp_path)
    everything = load_tasks(str(tmp_path), split="all", num_tasks=0, seed=0)
    assert len(everything) == 24
    assert len(load_tasks(str(tmp_path), split="hard", num_tasks=0, seed=0)) == 2
    three = load_tasks(str(tmp_path), split="train", num_tasks=3, seed=0)
    assert three == load_tasks(str(tmp_path), split="train", num_tasks=3, seed=0)
    assert three != load_tasks(str(tmp_path), split="train", num_tasks=3, seed=1)
    assert [task.task_id for task in load_tasks(str(tmp_path), split="all", num_tasks=0, seed=0, kind="feature")] == [
        "odd"
    ]
    with pytest.raises(ConfigError, match="no task left"):
        load_tasks(str(tmp_path), split="heldout", num_tasks=0, seed=0)


@pytest.mark.parametrize("line", ["{}", "not json", '{"tree": "absent"}'])
def test_a_broken_set_names_the_line(tmp_path, line):
    index = write_tasks(sample(), tmp_path)
    index.write_text(index.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="line 10"):
        read_tasks(tmp_path)


def test_a_missing_tar_is_told(tmp_path):
    write_tasks(sample(), tmp_path)
    for path in (tmp_path / "trees").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="line 1"):
        read_tasks(tmp_path)
