"""Filters: the published rules at their limits, caps and subsets by seed, and reports that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swe_rl.curation.filters import (
    FilterPlan,
    apply_filter,
    cap_per_repo,
    difficulty,
    nebius,
    r2e_commit,
    run_plan,
    subset,
)
from swe_rl.errors import ConfigError
from swe_rl.tasks import write_tasks
from swe_rl.types import Task


def patch(files: int = 1, lines: int = 1, *, path: str = "pkg/m{}.py", width: int = 6) -> bytes:
    """A diff that adds `lines` lines to each of `files` files."""
    parts = []
    for number in range(files):
        name = path.format(number)
        body = "".join(f"+{str(line).zfill(width)}\n" for line in range(lines))
        parts.append(f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -0,0 +1,{lines} @@\n{body}")
    return "".join(parts).encode()


def task(task_id: str = "t", *, repo: str = "o/r", gold: bytes | None = None, issue: str = "words", **meta) -> Task:
    return Task(
        task_id=task_id,
        source="test",
        split="train",
        repo=repo,
        base_commit="",
        problem_statement=issue,
        fail_to_pass=("a::b",),
        pass_to_pass=(),
        gold_patch=patch() if gold is None else gold,
        meta=meta,
    )


@pytest.mark.parametrize(
    ("gold", "meta", "reason"),
    [
        (patch(files=7, lines=71), {}, ""),  # 497 lines
        (patch(files=8), {}, "more than 7 files"),
        (patch(files=1, lines=499), {}, ""),
        (patch(files=1, lines=500), {}, "500 changed lines or more"),
        (patch(), {"llm_score": {"difficulty_score": 2.9, "issue_text_score": 0, "test_score": 1}}, ""),
        (patch(), {"llm_score": {"difficulty_score": 3}}, "worst difficulty_score"),
        (patch(), {"llm_score": {"issue_text_score": 3.0, "test_score": None}}, "worst issue_text_score"),
        (patch(), {"failed_lite_validators": ["has_hyperlinks"]}, ""),
        (patch(), {"failed_lite_validators": ["has_hyperlinks", "ImportError"]}, "validator ImportError"),
        (patch(), {"failed_lite_validators": ["has_attribute_error"]}, "validator has_attribute_error"),
        (patch(), {"llm_score": None, "failed_lite_validators": None}, ""),
    ],
)
def test_nebius(gold, meta, reason):
    assert nebius(task(gold=gold, quality=meta)) == reason


@pytest.mark.parametrize(
    ("gold", "entities", "reason"),
    [
        (patch(files=5, lines=2), {}, ""),
        (patch(files=6), {}, "more than 5 files"),
        (patch(files=5) + patch(files=9, path="tests/test_{}.py"), {}, ""),  # tests do not count
        (patch(lines=100), {}, ""),
        (patch(lines=101), {}, "more than 100 edited lines"),
        (patch(lines=90, width=40), {}, "patch over 2,000 characters"),
        (patch(), {"deleted": 1, "added": 3, "modified": 3, "statements": 10}, ""),
        (patch(), {"deleted": 2}, "more than 1 deleted"),
        (patch(), {"added": 4}, "more than 3 added"),
        (patch(), {"modified": 4}, "more than 3 modified"),
        (patch(), {"statements": 11}, "more than 10 statements"),
    ],
)
def test_r2e_commits(gold, entities, reason):
    assert r2e_commit(task(gold=gold, entities=entities)) == reason


@pytest.mark.parametrize(
    ("gold", "meta", "label"),
    [
        (b"", {}, "no patch"),
        (patch(lines=5), {}, "<= 5 lines"),
        (patch(lines=6), {}, "<= 20 lines"),
        (patch(lines=100), {}, "<= 100 lines"),
        (patch(lines=101), {}, "> 100 lines"),
        (patch(lines=101), {"difficulty": "easy"}, "easy"),
        (patch(), {"difficulty": 0}, "0"),
    ],
)
def test_difficulty_is_stated_or_the_size_of_the_solution(gold, meta, label):
    assert difficulty(task(gold=gold, **meta)) == label


def test_a_report_counts_by_difficulty_and_repository():
    tasks = [task(str(n), repo=f"o/{n % 3}", difficulty="hard" if n < 4 else "easy") for n in range(10)]
    kept, report = apply_filter(tasks, lambda t: "odd" if int(t.task_id) % 2 else "", "even only")
    assert [t.task_id for t in kept] == ["0", "2", "4", "6", "8"]
    assert (report.num_seen, report.num_removed) == (10, 5)
    assert report.reasons == {"odd": 5}
    assert report.shares("difficulty") == [("easy", 6, 3), ("hard", 4, 2)]
    assert report.shares("repo") == [("o/0", 4, 2), ("o/1", 3, 2), ("o/2", 3, 1)]


def test_caps_per_repository_are_drawn_by_the_seed():
    tasks = [task(f"{repo}-{n}", repo=repo) for repo in ("big", "small") for n in range(40 if repo == "big" else 3)]
    ids = {}
    for seed in (0, 1):
        kept, (report,) = run_plan(tasks, FilterPlan(per_repo=10, seed=seed))
        assert [t for t in tasks if t in kept] == kept  # in their order
        assert sorted({t.repo: sum(k.repo == t.repo for k in kept) for t in kept}.items()) == [
            ("big", 10),
            ("small", 3),
        ]
        assert report.reasons == {"over 10 of its repository": 30}
        ids[seed] = {t.task_id for t in kept}
        assert run_plan(tasks, FilterPlan(per_repo=10, seed=seed))[0] == kept
    assert ids[0] != ids[1]


def test_subsets_are_seeded_nested_and_stable_when_the_set_grows():
    tasks = [task(str(n)) for n in range(200)]
    ten, _ = subset(tasks, 10, seed=3)
    fifty, report = subset(tasks, 50, seed=3)
    assert {t.task_id for t in ten} < {t.task_id for t in fifty}
    assert report.num_removed == 150
    assert subset(tasks, 10, seed=3)[0] == ten
    assert subset(tasks, 10, seed=4)[0] != ten
    reordered, _ = subset(list(reversed(tasks)), 10, seed=3)
    assert {t.task_id for t in reordered} == {t.task_id for t in ten}
    grown, _ = subset(tasks + [task(f"new {n}") for n in range(20)], 50, seed=3)
    assert len({t.task_id for t in grown} & {t.task_id for t in fifty}) >= 40


def test_a_plan_runs_its_filters_in_order(tmp_path):
    evaluation = task("eval", repo="o/evaluated", issue="the quick brown fox jumps over the lazy dog again")
    write_tasks([evaluation], tmp_path)
    tasks = [
        task("large", gold=patch(files=8)),
        task("same repo", repo="o/evaluated", gold=patch(lines=3, width=9)),
        task("django", repo="django/django"),
        *[task(f"good {n}", gold=patch(lines=2, width=10 + n)) for n in range(6)],
    ]
    plan = FilterPlan(nebius=True, swebench_repos=True, against=(str(tmp_path),), per_repo=4, subset=3)
    kept, reports = run_plan(tasks, plan)
    assert [report.num_removed for report in reports] == [1, 2, 2, 1]
    assert reports[1].reasons == {"repository of the evaluation set": 2}
    assert len(kept) == 3
    assert all(t.task_id.startswith("good") for t in kept)


def test_validators_by_name():
    tasks = [task(name, quality={"failed_lite_validators": [name]}) for name in ("has_media", "has_hyperlinks")]
    kept, (report,) = run_plan([*tasks, task("none")], FilterPlan(validators=("has_media", "other")))
    assert [t.task_id for t in kept] == ["has_hyperlinks", "none"]
    assert report.reasons == {"validator has_media": 1}


def test_nonsense_is_refused():
    for bad, message in (
        (FilterPlan(), "no filter was asked for"),
        (FilterPlan(nebius=True, similarity=0.0), "similarity=0.0"),
        (FilterPlan(per_repo=0), "per-repo=0"),
        (FilterPlan(subset=0), "subset=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_plan([task()], bad)
    with pytest.raises(ConfigError, match="per-repo=-1"):
        cap_per_repo(-1)


def test_filters_keep_the_tasks_themselves():
    one = replace(task("x"), created_at="2020-01-01")
    assert apply_filter([one], nebius, "n")[0][0] is one
