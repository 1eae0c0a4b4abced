"""Every normaliser of the loss, folded into one weight per token. Kernels and trainers know none of them.

Counts are GLOBAL: over all ranks and all micro-batches of the optimiser step, taken from the FINAL masks before the
first backward pass. Then the summed gradient does not depend on packing, micro-batches or ranks.
Letters: B rows (trajectories), B' rows with a trained token, L_i trained tokens of row i, T_i turns of row i with a
trained token, len_it tokens of such a turn, K = max_tokens, a constant of the configuration and never a padded width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from swe_rl.errors import ConfigError, InvariantError
from swe_rl.types import TrainSample

MODES = ("token_mean", "seq_mean", "seq_sum", "seq_sum_const", "sum_const", "turn_mean")
COUNT_EVERY_ROW = ("seq_sum_const",)


def count_tokens(samples: Sequence[TrainSample]) -> int:
    """Trained tokens of these samples; summed over ranks it is `num_tokens_global`."""
    return sum(sum(sample.loss_mask) for sample in samples)


def count_rows(samples: Sequence[TrainSample], mode: str) -> int:
    """Rows as `mode` counts them; summed over ranks it is `num_rows_global`.

    A row is a trajectory, however many samples it was split into. seq_sum_const counts every row, fully masked ones
    too; the other modes count rows with a trained token (token_mean and sum_const use no count of rows).
    """
    _check(mode)
    if mode in COUNT_EVERY_ROW:
        return len({sample.trajectory_id for sample in samples})
    return len({sample.trajectory_id for sample in samples if any(sample.loss_mask)})


def token_weights(
    samples: Sequence[TrainSample], mode: str, *, max_tokens: int, num_rows_global: int, num_tokens_global: int
) -> list[TrainSample]:
    """The samples with `token_weights` filled: 0.0 on masked tokens, and on trained ones

    - token_mean: 1 / num_tokens_global (DAPO);
    - seq_mean: 1 / (B' L_i) (GRPO);
    - seq_sum: 1 / B' (verl's seq-mean-token-sum);
    - seq_sum_const: 1 / (B K), all rows (GRPO++: constant length normaliser);
    - sum_const: 1 / K (Dr.GRPO, arXiv:2503.20783, as verl's seq-mean-token-sum-norm);
    - turn_mean: 1 / (B' T_i len_it) (arXiv:2508.03501, Eq. 7): every turn of a row counts alike.

    Raises ConfigError for an unknown mode, InvariantError if a count is smaller than what these samples alone hold.
    """
    _check(mode)
    if num_tokens_global < count_tokens(samples) or num_rows_global < count_rows(samples, mode):
        raise InvariantError("global counts are smaller than this rank's own: they must be summed over all ranks")
    lengths: Counter[str] = Counter()
    turns: Counter[tuple[str, int]] = Counter()
    for sample in samples:
        lengths[sample.trajectory_id] += sum(sample.loss_mask)
        turns.update((sample.trajectory_id, t) for t, m in zip(sample.turn_ids, sample.loss_mask, strict=True) if m)
    num_turns = Counter(name for name, _ in turns)

    def weight(sample: TrainSample, turn: int) -> float:
        name = sample.trajectory_id
        return (
            1.0
            / {
                "token_mean": num_tokens_global,
                "seq_mean": num_rows_global * lengths[name],
                "seq_sum": num_rows_global,
                "seq_sum_const": num_rows_global * max_tokens,
                "sum_const": max_tokens,
                "turn_mean": num_rows_global * num_turns[name] * turns[name, turn],
            }[mode]
        )

    filled = []
    for sample in samples:
        known: dict[int, float] = {}  # by turn
        weights = [0.0] * len(sample.loss_mask)  # a fully masked row has no token to weigh: no 0/0
        for place, (turn, trains) in enumerate(zip(sample.turn_ids, sample.loss_mask, strict=True)):
            if trains:
                if turn not in known:
                    known[turn] = weight(sample, turn)
                weights[place] = known[turn]
        filled.append(replace(sample, token_weights=weights))
    return filled


def _check(mode: str) -> None:
    if mode not in MODES:
        raise ConfigError(f"algo.aggregation={mode!r} is unknown: use one of {', '.join(MODES)}")
