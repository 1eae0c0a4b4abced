"""Every normaliser of the loss, folded into one weight per token. Kernels and trainers know none of them.

Counts are GLOBAL: over all ranks and all micro-batches of the optimiser step, taken from the FINAL masks before the
first backward pass. Then the summed gradient does not depend on packing, micro-batches or ranks.
Letters: B rows (trajectories), L_i trained tokens of row i, L_max = max_tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from swe_rl.errors import ConfigError, InvariantError
from swe_rl.types import TrainSample

MODES = ("token_mean", "seq_mean", "seq_sum_const")


def count_tokens(samples: Sequence[TrainSample]) -> int:
    """Trained tokens of these samples; summed over ranks it is `num_tokens_global`."""
    return sum(sum(sample.loss_mask) for sample in samples)


def count_rows(samples: Sequence[TrainSample], mode: str) -> int:
    """Rows as `mode` counts them; summed over ranks it is `num_rows_global`.

    A row is a trajectory, however many samples it was split into. seq_mean counts rows with a trained token,
    the other modes count every row, fully masked ones too.
    """
    _check(mode)
    if mode == "seq_mean":
        return len({sample.trajectory_id for sample in samples if any(sample.loss_mask)})
    return len({sample.trajectory_id for sample in samples})


def token_weights(
    samples: Sequence[TrainSample], mode: str, *, max_tokens: int, num_rows_global: int, num_tokens_global: int
) -> list[TrainSample]:
    """The samples with `token_weights` filled: 0.0 on masked tokens, and on trained ones

    - token_mean: 1 / num_tokens_global (DAPO);
    - seq_mean: 1 / (num_rows_global * L_i), rows with a trained token (GRPO);
    - seq_sum_const: 1 / (num_rows_global * max_tokens), all rows (GRPO++: constant length normaliser).

    Raises ConfigError for an unknown mode, InvariantError if a count is smaller than what these samples alone hold.
    """
    _check(mode)
    if num_tokens_global < count_tokens(samples) or num_rows_global < count_rows(samples, mode):
        raise InvariantError("global counts are smaller than this rank's own: they must be summed over all ranks")
    lengths: Counter[str] = Counter()
    for sample in samples:
        lengths[sample.trajectory_id] += sum(sample.loss_mask)
    filled = []
    for sample in samples:
        length = lengths[sample.trajectory_id]
        divisor = {
            "token_mean": num_tokens_global,
            "seq_mean": num_rows_global * length,
            "seq_sum_const": num_rows_global * max_tokens,
        }[mode]
        weight = 1.0 / divisor if length else 0.0  # a fully masked row has no token to weigh: no 0/0
        filled.append(replace(sample, token_weights=[weight if m else 0.0 for m in sample.loss_mask]))
    return filled


def _check(mode: str) -> None:
    if mode not in MODES:
        raise ConfigError(f"algo.aggregation={mode!r} is unknown: use one of {', '.join(MODES)}")
