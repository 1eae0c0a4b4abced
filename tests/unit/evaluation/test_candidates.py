"""The file of scored candidates, and when two patches are the same answer."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
from pathlib import Path

import pytest

from swe_rl.errors import ConfigError
from swe_rl.evaluation.apply_diff import apply_diff
from swe_rl.evaluation.candidates import (
    Candidate,
    by_task,
    candidate_of,
    read_candidates,
    update_candidates,
    write_candidates,
)
from swe_rl.evaluation.equivalence import normal_patch, patch_digest
from swe_rl.tasks import load_tasks, tree_diff
from swe_rl.types import Completion, Reward, StopReason, Trajectory, Turn

BASE = {"a.py": b"def f(x):\n    return x\n", "b.txt": b"one\ntwo\nthree", "p/c.py": b"VALUE = 1\n"}


def candidate(name: str, **values: object) -> Candidate:
    return Candidate(trajectory_id=name, task_id="t", repository="r", **values)  # type: ignore[arg-type]


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = [
        candidate("x/0", passed=True, patch="+ü\udcff\n", ef_score=0.25, regression={"a": "passed", "b": "failed"}),
        candidate("x/1", passed=None, ef_flag="no answer", reproduction={"t1": "unresolved", "t2": "resolved"}),
    ]
    write_candidates(tmp_path / "candidates.jsonl", written)
    assert read_candidates(tmp_path) == written
    assert written[0].regression_passed == 1
    assert written[1].reproduction_resolved == 1, "unresolved is not resolved"
    assert written[1].regression_passed is None


def test_scores_go_by_id_whatever_the_order(tmp_path: Path) -> None:
    items = [candidate(f"x/{i}") for i in range(20)]
    write_candidates(tmp_path / "candidates.jsonl", items)
    ids = [item.trajectory_id for item in items]
    random.Random(1).shuffle(ids)
    update_candidates(tmp_path, {name: {"ef_score": int(name[2:]) / 100} for name in ids})
    assert [item.ef_score for item in read_candidates(tmp_path)] == [i / 100 for i in range(20)]


def test_an_unknown_id_a_double_one_and_a_malformed_line_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "candidates.jsonl"
    with pytest.raises(ConfigError, match="swe-rl eval"):
        read_candidates(tmp_path)
    write_candidates(file, [candidate("x/0")])
    with pytest.raises(ConfigError, match="no candidate x/1"):
        update_candidates(file, {"x/1": {"ef_score": 1.0}})
    with pytest.raises(ConfigError, match="twice"):
        write_candidates(file, [candidate("x/0"), candidate("x/0")])
    with pytest.raises(TypeError):
        update_candidates(file, {"x/0": {"score": 1.0}})
    line = json.dumps(dataclasses.asdict(candidate("x/0")))
    for bad, message in (("{", "no candidate"), ('{"passed": true}', "no candidate"), (line + "\n" + line, "twice")):
        file.write_text(bad + "\n")
        with pytest.raises(ConfigError, match=message):
            read_candidates(file)


def test_tasks_are_ordered_by_id_not_by_completion() -> None:
    items = [candidate(f"x/{i}") for i in range(7)]
    random.Random(2).shuffle(items)
    assert [item.trajectory_id for item in by_task(items)["t"]] == [f"x/{i}" for i in range(7)]


def _trajectory(**values: object) -> Trajectory:
    completion = Completion(
        token_ids=[1, 2], rollout_logprobs=[-1.0, -3.0], finish_reason="stop", policy_version=0, policy_version_max=0
    )
    fields: dict[str, object] = {
        "trajectory_id": "p/0/x/0",
        "task_id": "x",
        "group_id": "p/0/x",
        "rollout_index": 0,
        "turns": [Turn(context_ids=[5], completion=completion, tool_call=None, observation="")],
        "stop_reason": StopReason.SUBMITTED,
        "temperature": 1.0,
        "timings_s": {"episode": 2.5},
    }
    return Trajectory(**{**fields, **values})  # type: ignore[arg-type]


def test_a_candidate_of_a_rollout() -> None:
    task = load_tasks("minirepo", split="train", num_tasks=1, seed=0)[0]
    made = candidate_of(
        _trajectory(task_id=task.task_id, patch=task.gold_patch, reward=Reward(value=1.0, terms={"resolved": 1.0})),
        task,
    )
    assert (made.passed, made.num_turns, made.num_tokens, made.mean_logprob) == (True, 1, 2, -2.0)
    assert made.seconds == 2.5
    assert made.patch_digest == patch_digest(task.gold_patch, base=task.tree) != ""
    with pytest.raises(ValueError, match="of task"):
        candidate_of(_trajectory(), task)
    with pytest.raises(ValueError, match="lost to the machine"):
        candidate_of(_trajectory(task_id=task.task_id, stop_reason=StopReason.INFRA_ERROR), task)


@pytest.mark.parametrize("content", [b"def f(x):\n    # a comment\n    return (x) + 1\n\n\n", b"def f(x): return x+1"])
def test_layout_and_comments_make_no_other_answer(content: bytes) -> None:
    first = tree_diff(BASE, {**BASE, "a.py": b"def f(x):\n    return x + 1\n"})
    second = tree_diff(BASE, {**BASE, "a.py": content})
    assert patch_digest(first, base=BASE) == patch_digest(second, base=BASE)
    assert patch_digest(first) != patch_digest(second), "without the tree the lines count"


def test_other_answers_differ_and_no_change_is_empty() -> None:
    trees = [
        {**BASE, "a.py": b"def f(x):\n    return x + 2\n"},
        {**BASE, "b.txt": b"one\ntwo\nthree\n"},
        {**BASE, "n.py": b"X = 1\n"},
        {path: data for path, data in BASE.items() if path != "b.txt"},
        {**BASE, "a.py": b"def f(x:\n"},
    ]
    digests = {patch_digest(tree_diff(BASE, tree), base=BASE) for tree in trees}
    assert len(digests) == len(trees)
    assert "" not in digests
    assert patch_digest(b"") == patch_digest(b"", base=BASE) == ""
    only_comment = tree_diff(BASE, {**BASE, "a.py": b"def f(x):\n    return x  # same\n"})
    assert patch_digest(only_comment, base=BASE) == ""


def test_line_numbers_and_order_of_files_do_not_count_without_the_tree() -> None:
    new = {**BASE, "a.py": b"def f(x):\n    return 0\n", "p/c.py": b"VALUE = 2\n"}
    parts = tree_diff(BASE, new).split(b"diff --git ")[1:]
    swapped = b"".join(b"diff --git " + part for part in reversed(parts)).replace(b"@@ -1 +1 @@", b"@@ -7 +7 @@")
    assert patch_digest(swapped) == patch_digest(tree_diff(BASE, new))
    assert normal_patch(b"no diff at all") == b"no diff at all"


def test_applying_agrees_with_git(tmp_path: Path) -> None:
    """Random edits of random files, diffed by Git itself."""
    draw = random.Random(7)
    for case in range(25):
        folder = tmp_path / str(case)
        folder.mkdir()
        base = {
            f"f{i}.txt": b"".join(
                b"%d\r\n" % draw.randrange(9) if draw.random() < 0.2 else b"%d\n" % draw.randrange(9)
                for _ in range(draw.randrange(30))
            )
            + draw.choice([b"", b"end"])
            for i in range(3)
        }
        new = dict(base)
        for path in list(new):
            lines = new[path].split(b"\n")
            for _ in range(draw.randrange(4)):
                lines[draw.randrange(len(lines))] = b"new %d" % draw.randrange(100)
            new[path] = b"\n".join(lines)
        if draw.random() < 0.5:
            del new["f1.txt"]
        if draw.random() < 0.5:
            new["added.txt"] = draw.choice([b"x", b"x\ny\n", b""])
        patch = _git_diff(folder, base, new)
        expected = {path: new.get(path) for path in {*base, *new} if base.get(path) != new.get(path)}
        assert apply_diff(base, patch) == expected


def test_what_does_not_fit_is_not_applied() -> None:
    patch = tree_diff(BASE, {**BASE, "a.py": b"def f(x):\n    return 0\n"})
    assert apply_diff({"a.py": b"def g(x):\n    return x\n"}, patch) is None
    assert apply_diff({}, patch) is None
    assert apply_diff(BASE, b"nonsense\n") is None
    assert apply_diff(BASE, b"") == {}


def _git_diff(folder: Path, base: dict[str, bytes], new: dict[str, bytes]) -> bytes:
    def git(*words: str) -> bytes:
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
        identity = ["-c", "user.name=n", "-c", "user.email=e@e", "-c", "core.autocrlf=false"]
        return subprocess.run(
            ["git", *identity, *words], cwd=folder, env=environment, capture_output=True, check=True
        ).stdout

    git("init", "-q")
    for path, data in base.items():
        (folder / path).write_bytes(data)
    git("add", "-A")
    git("commit", "-qm", "base")
    for path in base:
        (folder / path).unlink()
    for path, data in new.items():
        (folder / path).write_bytes(data)
    git("add", "-A")
    return git("diff", "--cached", "--binary", "--full-index")
