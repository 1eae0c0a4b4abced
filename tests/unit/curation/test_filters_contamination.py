"""Decontamination: by repository with its mirrors, by the same change, by a similar issue."""

from __future__ import annotations

import random

import pytest

from swe_rl.curation.decontaminate import SWEBENCH_REPOS, Contamination, issue_shingles, patch_shingles
from swe_rl.types import Task

WORDS = [f"word{n}" for n in range(400)]


def task(task_id: str = "t", *, repo: str = "other/place", issue: str = "", gold: str = "") -> Task:
    return Task(
        task_id=task_id,
        source="test",
        split="train",
        repo=repo,
        base_commit="",
        problem_statement=issue,
        fail_to_pass=(),
        pass_to_pass=(),
        gold_patch=gold.encode(),
    )


def text(seed: int, count: int = 60) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def diff(*lines: str, path: str = "a.py", start: int = 1) -> str:
    return f"--- a/{path}\n+++ b/{path}\n@@ -{start},1 +{start},{len(lines)} @@\n context\n" + "".join(
        f"+{line}\n" for line in lines
    )


@pytest.mark.parametrize("repo", ["sympy/sympy", "SymPy/SymPy", "sympy", "swesmith/sympy__sympy.1a2b3c4d"])
def test_repositories_and_their_mirrors(repo):
    held = Contamination()
    held.add_repos(SWEBENCH_REPOS)
    assert held.reason(task(repo=repo)) == "repository of the evaluation set"


@pytest.mark.parametrize(
    "repo", ["sympy/sympy_gamma", "lumen/lumen", "pandas", "swesmith/lumen__sympy.1a2b3c4d", "a/b"]
)
def test_other_repositories(repo):
    held = Contamination()
    held.add_repos(SWEBENCH_REPOS)
    assert held.reason(task(repo=repo)) == ""


def test_all_twelve_are_listed():
    assert len(set(SWEBENCH_REPOS)) == 12


def test_the_same_change_elsewhere_is_found_wherever_it_lies():
    held = Contamination()
    lines = [f"value = compute_{n}(  x )" for n in range(6)]
    held.add(task("eval", repo="up/stream", gold=diff(*lines)), repo=False)
    moved = diff(*(line.replace("  x ", "x") for line in lines), path="vendored/b.py", start=90)
    assert held.reason(task(gold=moved)) == "solution like one of the evaluation set"
    assert held.reason(task(gold=diff(*lines[:2], "other = 1", "more = 2", "last = 3"))) == ""
    assert held.reason(task(gold="")) == ""


def test_similar_issues_from_the_threshold_on():
    base = text(0)
    held = Contamination()
    held.add(task("eval", issue=" ".join(base)), repo=False)
    assert held.reason(task(issue="\n".join(base).upper())) == "issue like one of the evaluation set"
    assert held.reason(task(issue=" ".join([*base[:50], *text(1, 10)]))) == "issue like one of the evaluation set"
    assert held.reason(task(issue=" ".join([*base[:20], *text(2, 40)]))) == ""
    assert held.reason(task(issue=" ".join(text(3)))) == ""


def test_similarity_is_the_jaccard_index_of_shingles():
    """Against a direct computation, for pairs with every overlap."""
    base = text(4, 30)
    held = Contamination()
    held.add(task("eval", issue=" ".join(base)), repo=False)
    for shared in range(0, 31, 3):
        other = [*base[:shared], *text(100 + shared, 30 - shared)]
        ours = {tuple(other[i : i + 5]) for i in range(26)}
        theirs = {tuple(base[i : i + 5]) for i in range(26)}
        expected = len(ours & theirs) / len(ours | theirs)
        found, _name = held._issues.nearest(issue_shingles(" ".join(other)))
        assert found == pytest.approx(expected)


def test_shingles_of_short_and_empty_texts():
    assert issue_shingles("") == frozenset()
    assert len(issue_shingles("Two words")) == 1
    assert issue_shingles("Two words") == issue_shingles("two -- WORDS!")
    assert patch_shingles(b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-\n+\n") == frozenset()
