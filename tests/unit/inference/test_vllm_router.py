"""Which replica a session goes to."""

from __future__ import annotations

import random

from swe_rl.inference.vllm.router import Router


def ready(num_replicas: int, max_skew: int) -> Router:
    router = Router(num_replicas, max_skew)
    router.usable = [True] * num_replicas
    return router


def test_sessions_spread_and_stay() -> None:
    router = ready(3, max_skew=4)
    homes = {name: router.take(name) for name in "abcdef"}
    assert sorted(homes.values()) == [0, 0, 1, 1, 2, 2]  # type: ignore[type-var]
    for home in homes.values():
        router.give_back(home)  # type: ignore[arg-type]
    for name in "fdbace":
        assert router.take(name) == homes[name]
        router.give_back(homes[name])  # type: ignore[arg-type]
    assert router.escapes == 0


def test_new_sessions_go_where_few_live_even_when_nothing_runs() -> None:
    router = ready(2, max_skew=4)
    taken = []
    for name in "abcd":
        taken.append(router.take(name))
        router.give_back(taken[-1])  # type: ignore[arg-type]
    assert taken == [0, 1, 0, 1]


def test_a_session_leaves_a_busy_home_at_the_skew_and_not_before() -> None:
    router = ready(2, max_skew=3)
    assert router.take("a") == 0
    router.give_back(0)
    router.running = [2, 0]
    assert router.take("a") == 0
    router.running = [3, 0]
    assert router.take("a") == 1
    assert router.escapes == 1
    router.running = [0, 1]
    assert router.take("a") == 1  # its new home


def test_an_unusable_home_is_left_and_none_is_taken_without_any() -> None:
    router = ready(2, max_skew=8)
    assert router.take("a") == 0
    router.usable[0] = False
    assert router.take("a") == 1
    router.usable[1] = False
    assert router.take("a") is None
    router.forget("a")
    router.forget("a")
    router.usable = [True, True]
    router.running = [5, 0]
    assert router.take("a") == 1


def test_counts_never_drift() -> None:
    """Random traffic: running counts are those of open requests, and imbalance stays below the skew plus one."""
    random_ = random.Random(5)
    router, open_ = ready(4, max_skew=3), []
    for step in range(2000):
        if open_ and random_.random() < 0.5:
            router.give_back(open_.pop(random_.randrange(len(open_))))
        else:
            open_.append(router.take(f"s{random_.randrange(40)}"))
        if step % 97 == 0:
            router.forget(f"s{random_.randrange(40)}")
        assert router.running == [open_.count(index) for index in range(4)]
