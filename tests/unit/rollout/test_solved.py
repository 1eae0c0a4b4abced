"""Success is what the hidden tests say; charges and shaping change the value only."""

from __future__ import annotations

import math

import pytest

from swe_rl.types import Reward


@pytest.mark.parametrize(
    ("reward", "solved"),
    [
        (Reward(value=1.0), True),
        (Reward(value=0.0), False),
        (Reward(value=math.nan), False),
        (Reward(value=0.75, terms={"resolved": 1.0, "questions": -0.25}), True),
        (Reward(value=1.2, terms={"resolved": 0.0, "shaping": 1.2}), False),
    ],
)
def test_solved(reward: Reward, solved: bool) -> None:
    assert reward.solved is solved
