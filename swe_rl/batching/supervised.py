"""Mini-batches for supervised phases (demonstrations, rejection fine-tuning): pure functions of seed and step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from swe_rl.types import TrainSample


def num_supervised_steps(num_samples: int, *, batch_size: int, epochs: int) -> int:
    """Optimiser steps of `epochs` passes; each pass ends with a smaller batch if need be."""
    return epochs * math.ceil(num_samples / batch_size)


def supervised_batch(
    samples: Sequence[TrainSample], *, step: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
) -> list[TrainSample]:
    """This rank's share of the samples of optimiser step `step` (0 is the first). Every pass has its own order.

    The union over ranks does not depend on `world_size`; a resumed run gets the same batches.
    """
    per_epoch = math.ceil(len(samples) / batch_size)
    epoch, place = divmod(step, per_epoch)
    order = list(range(len(samples)))
    random.Random(f"supervised/{seed}/{epoch}").shuffle(order)
    return [samples[i] for i in order[place * batch_size : (place + 1) * batch_size][rank::world_size]]
