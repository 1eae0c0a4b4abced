"""Which trajectories of an iteration belong to which optimiser step: a pure function of their names and a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence


def minibatch_of(trajectory_ids: Sequence[str], *, size: int, seed: str) -> tuple[int, dict[str, int]]:
    """(number of mini-batches, place of each trajectory): ceil(rows / size) shuffled parts, equal within one row.

    `trajectory_ids` are those of all ranks, in any order: the parts do not depend on how ranks share the work.
    size 0 is one part. Every part holds a row, unless there is none at all.
    """
    names = sorted(set(trajectory_ids))
    count = max(1, -(-len(names) // size)) if size else 1
    if count > 1:
        random.Random(seed).shuffle(names)
    return count, {name: index * count // len(names) for index, name in enumerate(names)}
