"""Placement: environments stay where they are until that node is much busier."""

from __future__ import annotations

from collections import Counter

import pytest

from swe_rl.rollout import placement
from swe_rl.rollout.placement import NodeLoad, choose_node, environment_of
from swe_rl.testing import make_task


def test_the_first_goes_anywhere_and_the_next_follow_it_until_the_node_is_busy() -> None:
    nodes = [NodeLoad(8), NodeLoad(8)]
    chosen = []
    for _ in range(16):
        index = choose_node(nodes, "image")
        nodes[index].in_flight += 1
        nodes[index].learn("image")
        chosen.append(index)
    assert chosen[0] == 0
    assert set(chosen[:2]) == {0}
    assert Counter(chosen) == {0: 8, 1: 8}


def test_different_environments_spread_by_load_and_by_places() -> None:
    nodes = [NodeLoad(4), NodeLoad(12)]
    for number in range(16):
        nodes[choose_node(nodes, f"image-{number}")].in_flight += 1
    assert [node.in_flight for node in nodes] == [4, 12]


def test_a_busy_home_is_left() -> None:
    nodes = [NodeLoad(4, in_flight=3), NodeLoad(4, in_flight=1)]
    nodes[0].learn("image")
    assert choose_node(nodes, "image") == 1
    nodes[1].in_flight = 3
    assert choose_node(nodes, "image") == 0


def test_what_a_node_knows_is_bounded_and_without_nodes_there_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_KNOWN", 2)
    node = NodeLoad(1)
    for name in ("a", "b", "a", "c"):
        node.learn(name)
    assert list(node.known) == ["a", "c"]
    with pytest.raises(ValueError, match="no node"):
        choose_node([], "a")
    assert environment_of(make_task()) == make_task().base_commit
