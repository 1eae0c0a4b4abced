"""Which data-parallel rank computes which packed row, so that all have about the same to do."""

from __future__ import annotations

from collections.abc import Sequence


def balance(costs: Sequence[float], homes: Sequence[int], *, num_ranks: int) -> list[int]:
    """The rank of each row: as few rows as possible leave their home, the busiest rank gets rid of some first.

    A row moves from the busiest to the idlest rank while that lowers the larger of the two: the one whose cost is
    nearest to half the difference. Depends on the arguments only, so every rank finds the same.
    """
    ranks = list(homes)
    loads = [0.0] * num_ranks
    for cost, home in zip(costs, homes, strict=True):
        loads[home] += cost
    while True:
        busiest, idlest = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[busiest] - loads[idlest]
        movable = [i for i, rank in enumerate(ranks) if rank == busiest and 0 < costs[i] < gap * (1 - 1e-9)]
        if not movable:
            return ranks
        row = min(movable, key=lambda i: (abs(costs[i] - gap / 2), i))
        ranks[row] = idlest
        loads[busiest] -= costs[row]
        loads[idlest] += costs[row]
