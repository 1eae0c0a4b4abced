"""Trajectory -> TrainSample: which tokens train, with which advantage. Only ids that the engine returned can train."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swe_rl.errors import InvariantError
from swe_rl.types import TrainSample, Trajectory, Turn


def to_samples(
    trajectory: Trajectory,
    advantage: float | Sequence[float],
    *,
    mask_format_errors: bool = False,
    trained: bool = True,
) -> list[TrainSample]:
    """One sample with the trajectory's ids in order; none for a trajectory without ids.

    `advantage` is one number or one per turn, given to each trained token of the turn. `mask_format_errors` masks
    turns that could not be parsed (rejection fine-tuning); `trained=False` masks every token. A token whose rollout
    logprob is not finite is masked. Greedy rollouts (temperature 0) are scored at temperature 1.
    Raises InvariantError if ids and logprobs of a completion differ in number, the advantage is not finite, or the
    mask does not cover exactly the sampled tokens.
    """
    turns = trajectory.turns
    per_turn = [advantage] * len(turns) if isinstance(advantage, int | float) else list(advantage)
    if len(per_turn) != len(turns):
        raise InvariantError(f"{trajectory.trajectory_id}: {len(per_turn)} advantages for {len(turns)} turns")
    sample = TrainSample(
        trajectory_id=trajectory.trajectory_id,
        input_ids=trajectory.token_ids,
        loss_mask=[],
        rollout_logprobs=[],
        advantages=[],
        turn_ids=[],
        policy_version=min((turn.completion.policy_version for turn in turns), default=0),
        temperature=trajectory.temperature if trajectory.temperature > 0 else 1.0,
    )
    for index, (turn, value) in enumerate(zip(turns, per_turn, strict=True)):
        if trained and not math.isfinite(value):
            raise InvariantError(f"{trajectory.trajectory_id}: advantage {value} of turn {index} is not finite")
        _append_turn(sample, turn, index, value, trains=trained and not (mask_format_errors and turn.format_error))
    _check_mask(sample, trajectory, everything=trained and not mask_format_errors)
    return [sample] if sample.input_ids else []


def _append_turn(sample: TrainSample, turn: Turn, index: int, advantage: float, *, trains: bool) -> None:
    """Context first (never trains), then the completion."""
    completion, context = turn.completion, len(turn.context_ids)
    if len(completion.token_ids) != len(completion.rollout_logprobs):
        raise InvariantError(
            f"{sample.trajectory_id}: turn {index} has {len(completion.token_ids)} sampled ids, "
            f"{len(completion.rollout_logprobs)} logprobs"
        )
    mask = [trains and math.isfinite(value) for value in completion.rollout_logprobs]
    sample.loss_mask.extend([False] * context + mask)
    pairs = zip(completion.rollout_logprobs, mask, strict=True)
    sample.rollout_logprobs.extend([0.0] * context + [value if m else 0.0 for value, m in pairs])
    sample.advantages.extend([0.0] * context + [advantage if m else 0.0 for m in mask])
    sample.turn_ids.extend([-1] * context + [index] * len(mask))


def _check_mask(sample: TrainSample, trajectory: Trajectory, *, everything: bool) -> None:
    sampled = trajectory.num_sampled_tokens
    logprobs = (value for turn in trajectory.turns for value in turn.completion.rollout_logprobs)
    finite = sum(math.isfinite(value) for value in logprobs)
    trained = sum(sample.loss_mask)
    if len(sample.loss_mask) != len(sample.input_ids) or trained > finite or (everything and trained != finite):
        raise InvariantError(
            f"{sample.trajectory_id}: {trained} trained tokens in {len(sample.loss_mask)} mask slots, "
            f"but {sampled} sampled ({finite} with a finite logprob) of {len(sample.input_ids)}"
        )
    if sample.loss_mask and sample.loss_mask[0]:
        raise InvariantError(f"{sample.trajectory_id}: the first token would train, but nothing predicts it")
