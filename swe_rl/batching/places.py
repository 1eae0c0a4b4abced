"""Where the tokens of samples stand in packed rows, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swe_rl.types import TrainSample


@dataclass(frozen=True, slots=True)
class Place:
    """Token positions[j] of sample `sample` is target start + j of its row."""

    sample: int
    start: int
    positions: Sequence[int]


def unpack(
    values: Sequence[Tensor], samples: Sequence[TrainSample], places: Sequence[Sequence[Place]], *, fill: float
) -> list[list[float]]:
    """Results of each packed row ([T], or [E] of trees) back to one list [N] per sample, in the order of `samples`: the
    inverse of the label shift. `fill` stands where no row has a target, as on the first token of a sample."""
    found = [[fill] * len(sample.input_ids) for sample in samples]
    for value, row in zip(values, places, strict=True):
        flat = value.tolist()
        for place in row:
            mine = found[place.sample]
            for position, got in zip(place.positions, flat[place.start :], strict=False):
                mine[position] = got
    return found
