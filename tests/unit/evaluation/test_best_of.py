"""Selectors and Best@k, against enumeration and the known mistakes of such scripts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swe_rl.errors import ConfigError
from swe_rl.evaluation import pass_at_k
from swe_rl.evaluation.best_of import best_at_k, curve, is_exact, powers_of_two, subsets
from swe_rl.evaluation.candidates import Candidate, by_task
from swe_rl.evaluation.selection import SELECTORS, available, best_after_gate, check_scores, select_one


def candidate(index: int, *, task: str = "t", **values: object) -> Candidate:
    fields: dict[str, object] = {"patch_digest": f"d{index}", "patch": "+x", "num_turns": index % 5 + 1, **values}
    return Candidate(trajectory_id=f"e/0/{task}/{index:02d}", task_id=task, repository="r", **fields)  # type: ignore[arg-type]


def drawn(draw: random.Random, count: int, *, task: str = "t") -> list[Candidate]:
    """Candidates with many ties in every field."""
    return [
        candidate(
            i,
            task=task,
            passed=draw.random() < 0.4,
            ef_score=draw.choice([0.1, 0.5, 0.5, 0.9]),
            regression={f"r{j}": draw.choice(["passed", "failed"]) for j in range(2)},
            reproduction={f"w{j}": draw.choice(["resolved", "unresolved"]) for j in range(2)},
            patch_digest=draw.choice(["a", "b", "c", ""]),
            num_turns=draw.choice([2, 3]),
            num_tokens=draw.choice([10, 20]),
        )
        for i in range(count)
    ]


def hybrid_by_permutations(items: Sequence[Candidate], keep: int) -> list[float]:
    """Every order in which ties could be broken, each equally likely."""
    weights, orders = [0.0] * len(items), list(itertools.permutations(range(len(items))))
    for order in orders:
        kept = sorted(order, key=lambda i: -(items[i].ef_score or 0.0))[:keep]  # stable: ties by the order
        best = max(kept, key=lambda i: (items[i].regression_passed, items[i].reproduction_resolved, items[i].ef_score))
        top = [
            i
            for i in kept
            if (items[i].regression_passed, items[i].reproduction_resolved, items[i].ef_score)
            == (items[best].regression_passed, items[best].reproduction_resolved, items[best].ef_score)
        ]
        for i in top:
            weights[i] += 1.0 / len(top) / len(orders)
    return weights


@pytest.mark.parametrize("seed", range(12))
def test_hybrid_averages_ties_as_all_orders_do(seed: int) -> None:
    draw = random.Random(seed)
    for count in range(1, 7):
        items = drawn(draw, count)
        for keep in (1, 3):
            want = hybrid_by_permutations(items, max(keep, count // 2))
            assert SELECTORS["hybrid"].weights(items, keep=keep) == pytest.approx(want, abs=1e-12)


def test_a_gate_that_keeps_all_is_no_gate() -> None:
    assert best_after_gate([1.0, 2.0], [(0.0,), (0.0,)], keep=7) == [0.5, 0.5]
    assert best_after_gate([1.0, 2.0], [(9.0,), (0.0,)], keep=1) == [0.0, 1.0]


@pytest.mark.parametrize("name", list(SELECTORS))
@pytest.mark.parametrize("seed", range(6))
def test_best_at_k_against_enumeration(name: str, seed: int) -> None:
    items = drawn(random.Random(seed), 7)
    for k in range(1, 8):
        rates = []
        for subset in itertools.combinations(items, k):
            weights = SELECTORS[name].weights(subset)
            assert sum(weights) == pytest.approx(1.0)
            rates.append(sum(w * bool(c.passed) for w, c in zip(weights, subset, strict=True)))
        assert best_at_k(SELECTORS[name], items, k) == pytest.approx(sum(rates) / len(rates), abs=1e-12)


def test_random_is_pass_at_1_and_the_oracle_is_pass_at_k() -> None:
    items = drawn(random.Random(9), 16)
    passed = sum(bool(item.passed) for item in items)
    for k in (1, 2, 5, 16):
        assert best_at_k(SELECTORS["random"], items, k) == pytest.approx(passed / 16)
        assert best_at_k(SELECTORS["oracle"], items, k) == pytest.approx(pass_at_k(16, passed, k))
    for name in SELECTORS:
        assert best_at_k(SELECTORS[name], items, 1) == pytest.approx(passed / 16), "of one there is no choice"


def test_sampled_subsets_come_near_all_of_them() -> None:
    items = drawn(random.Random(3), 12)
    every = best_at_k(SELECTORS["hybrid"], items, 6, max_subsets=1000)
    some = best_at_k(SELECTORS["hybrid"], items, 6, max_subsets=400)
    assert not is_exact(SELECTORS["hybrid"], 12, 6, max_subsets=400)
    assert is_exact(SELECTORS["hybrid"], 12, 6, max_subsets=1000)
    assert some == pytest.approx(every, abs=0.08)
    assert some == best_at_k(SELECTORS["hybrid"], items, 6, max_subsets=400), "the same seed draws the same"
    assert len(list(subsets(12, 6, max_subsets=400, seed="x"))) == 400


@pytest.mark.parametrize("name", list(SELECTORS))
def test_the_order_in_which_rollouts_finish_decides_nothing(name: str) -> None:
    items = drawn(random.Random(4), 9)
    shuffled = items[:]
    random.Random(5).shuffle(shuffled)
    assert select_one(SELECTORS[name], items) == select_one(SELECTORS[name], shuffled)
    assert by_task(items) == by_task(shuffled)
    first = dict(zip([i.trajectory_id for i in items], SELECTORS[name].weights(items), strict=True))
    second = dict(zip([i.trajectory_id for i in shuffled], SELECTORS[name].weights(shuffled), strict=True))
    assert first == pytest.approx(second)


@pytest.mark.parametrize("name", list(SELECTORS))
def test_one_rollout_is_a_choice(name: str) -> None:
    item = candidate(0, passed=True, ef_score=0.3, regression={}, reproduction={})
    assert SELECTORS[name].weights([item]) == [1.0]
    with pytest.raises(ValueError, match="nothing to select"):
        SELECTORS[name].weights([])


def test_two_tasks_of_one_repository_and_image_do_not_share_scores() -> None:
    """Upstream keeps reproduction scores by image, right only while a file holds one rollout per task."""
    first = [candidate(i, task="a", ef_score=0.5, regression={"t": "passed" if i else "failed"}) for i in range(3)]
    second = [candidate(i, task="b", ef_score=0.5, regression={"t": "failed" if i else "passed"}) for i in range(3)]
    grouped = by_task([*second, *first])
    assert SELECTORS["eb"].weights(grouped["a"]) == [0.0, 0.5, 0.5]
    assert SELECTORS["eb"].weights(grouped["b"]) == [1.0, 0.0, 0.0]


def test_unresolved_is_not_resolved() -> None:
    items = [
        candidate(0, regression={}, reproduction={"a": "unresolved", "b": "unresolved"}),
        candidate(1, regression={}, reproduction={"a": "resolved", "b": "other issues"}),
    ]
    assert SELECTORS["eb"].weights(items) == [0.0, 1.0]


def test_a_missing_score_ranks_last_and_is_counted() -> None:
    """Neither answer among the likely tokens, or a written test that does not apply: no score is no good score."""
    items = [candidate(0, ef_score=None), candidate(1, ef_score=0.0, ef_flag="no answer"), candidate(2, ef_score=0.2)]
    assert SELECTORS["ef"].weights(items) == [0.0, 0.0, 1.0]
    assert check_scores("ef", items) == 2
    nothing = [replace(item, ef_score=None) for item in items]
    with pytest.raises(ConfigError, match="selector ef needs ef_score"):
        check_scores("ef", nothing)
    assert "ef" in available(items)
    assert available(nothing) == ["majority", "shortest", "random"]
    assert SELECTORS["hybrid"].weights(nothing) == pytest.approx([1 / 3] * 3)


def test_a_flagged_score_is_no_score_however_high() -> None:
    """What a verifier said without meaning it, or of a log that gave the answer away."""
    tests = {"t": "passed"}
    items = [
        candidate(0, ef_score=0.9, ef_flag="mass 1.2e-05", regression=tests, passed=False),
        candidate(1, ef_score=0.2, regression=tests, passed=True),
        candidate(2, ef_score=0.1, regression={"t": "failed"}, passed=False),
        candidate(3, ef_score=0.99, ef_flag="leak: x", regression=tests, passed=False),
    ]
    assert SELECTORS["ef"].weights(items) == [0.0, 1.0, 0.0, 0.0]
    assert SELECTORS["hybrid"].weights(items) == [0.0, 1.0, 0.0, 0.0]
    assert SELECTORS["hybrid"].weights(items, keep=4) == [0.0, 1.0, 0.0, 0.0]  # of equal tests the one with a score
    assert best_at_k(SELECTORS["ef"], items, 4) == 1.0
    assert check_scores("hybrid", items) == 2
    flagged = [replace(item, ef_flag="too long") for item in items]
    with pytest.raises(ConfigError, match=r"no candidate has \(all are flagged: too long\)"):
        check_scores("ef", flagged)
    assert available(flagged) == ["eb", "majority", "shortest", "random", "oracle"]


def test_majority_is_of_answers_and_no_change_is_none() -> None:
    items = [candidate(i, patch_digest=d) for i, d in enumerate(["", "", "", "a", "b", "b", "a"])]
    assert SELECTORS["majority"].weights(items) == [0, 0, 0, 0.25, 0.25, 0.25, 0.25]
    assert SELECTORS["majority"].weights(items[:3]) == pytest.approx([1 / 3] * 3)


def test_shortest_takes_turns_then_tokens() -> None:
    items = [candidate(i, num_turns=t, num_tokens=n) for i, (t, n) in enumerate([(3, 1), (2, 9), (2, 8), (2, 8)])]
    assert SELECTORS["shortest"].weights(items) == [0, 0, 0.5, 0.5]


def test_curves_are_paired_with_pass_at_1_and_leave_out_what_no_task_reaches() -> None:
    tasks = {f"t{i}": drawn(random.Random(i), 4 + i % 2, task=f"t{i}") for i in range(12)}
    points = curve(tasks, "oracle", [1, 4, 5, 9])
    assert [point.k for point in points] == [1, 4, 5]
    assert [point.num_tasks for point in points] == [12, 12, 6]
    assert points[0].gain.mean == pytest.approx(0.0)
    rates = [best_at_k(SELECTORS["oracle"], items, 4) for items in tasks.values()]
    singles = [sum(bool(i.passed) for i in items) / len(items) for items in tasks.values()]
    assert points[1].rate == pytest.approx(sum(rates) / 12)
    assert points[1].gain.mean == pytest.approx((sum(rates) - sum(singles)) / 12)
    assert points[1].low < points[1].rate < points[1].high
    assert powers_of_two(12) == [1, 2, 4, 8, 12]
    assert powers_of_two(0) == []


def test_what_was_not_graded_has_no_rate() -> None:
    with pytest.raises(ValueError, match="was not graded"):
        best_at_k(SELECTORS["random"], [candidate(0)], 1)
    with pytest.raises(ValueError, match="1 <= k <= n"):
        best_at_k(SELECTORS["random"], [candidate(0, passed=True)], 2)
    assert not math.isnan(best_at_k(SELECTORS["random"], [candidate(0, passed=True)], 1))
