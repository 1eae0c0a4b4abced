"""Trajectory -> TrainSample: which tokens train, with which advantage. Only ids that the engine returned can train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from swe_rl.errors import InvariantError
from swe_rl.models.routing import first_routing
from swe_rl.types import TrainSample, Trajectory, Turn


def to_samples(
    trajectory: Trajectory,
    advantage: float | Sequence[float],
    *,
    mask_format_errors: bool = False,
    trained: bool = True,
    value_targets: Sequence[float] = (),
) -> list[TrainSample]:
    """The trajectory's ids in order: one sample, and a further one from each turn on whose context left something out
    (`Turn.kept_context`); none for a trajectory without ids. Every sampled token trains in exactly one sample: what a
    later sample repeats of an earlier one is context there.

    `advantage` is one number or one per turn, given to each trained token of the turn. `mask_format_errors` masks
    turns that could not be parsed (rejection fine-tuning); `trained=False` masks every token. A token whose rollout
    logprob is not finite is masked. `value_targets`, one per turn or none, go to the first sampled token of each turn.
    Greedy rollouts (temperature 0) are scored at temperature 1.
    Raises InvariantError if ids and logprobs of a completion differ in number, the advantage is not finite, a turn
    keeps more context than there is, or the masks do not cover exactly the sampled tokens.
    """
    turns = trajectory.turns
    if not turns:
        return []
    per_turn = [advantage] * len(turns) if isinstance(advantage, int | float) else list(advantage)
    if len(per_turn) != len(turns):
        raise InvariantError(f"{trajectory.trajectory_id}: {len(per_turn)} advantages for {len(turns)} turns")
    targets = list(value_targets) or [math.nan] * len(turns)
    if len(targets) != len(turns):
        raise InvariantError(f"{trajectory.trajectory_id}: {len(targets)} value targets for {len(turns)} turns")
    samples: list[TrainSample] = []
    for index, (turn, value) in enumerate(zip(turns, per_turn, strict=True)):
        if trained and not math.isfinite(value):
            raise InvariantError(f"{trajectory.trajectory_id}: advantage {value} of turn {index} is not finite")
        if not samples or turn.kept_context is not None:
            samples.append(_begin(trajectory, samples[-1] if samples else None, turn, index))
        if value_targets:
            _append_target(samples[-1], turn, targets[index])
        _append_turn(samples[-1], turn, index, value, trains=trained and not (mask_format_errors and turn.format_error))
    _check_masks(samples, trajectory, everything=trained and not mask_format_errors)
    return [sample for sample in _with_versions(samples, turns) if sample.input_ids]


def _begin(trajectory: Trajectory, earlier: TrainSample | None, turn: Turn, index: int) -> TrainSample:
    """An empty sample, or one that holds as context what the turn keeps of the earlier one."""
    kept, prefix = turn.kept_context or 0, [] if earlier is None else earlier.input_ids
    if not 0 <= kept <= len(prefix):
        raise InvariantError(f"{trajectory.trajectory_id}: turn {index} keeps {kept} of {len(prefix)} context ids")
    return TrainSample(
        trajectory_id=trajectory.trajectory_id,
        input_ids=prefix[:kept],
        loss_mask=[False] * kept,
        rollout_logprobs=[0.0] * kept,
        advantages=[0.0] * kept,
        turn_ids=[-1] * kept,
        policy_version=0,  # see _with_versions
        temperature=trajectory.temperature if trajectory.temperature > 0 else 1.0,
        routing=first_routing(earlier.routing, num_tokens=kept) if earlier is not None else [],
    )


def _with_versions(samples: list[TrainSample], turns: Sequence[Turn]) -> list[TrainSample]:
    """The samples with the oldest policy version of the turns that were sampled in each."""
    starts = [index for index, turn in enumerate(turns) if index == 0 or turn.kept_context is not None]
    ends = [*starts[1:], len(turns)]
    return [
        replace(sample, policy_version=min(turn.completion.policy_version for turn in turns[start:end]))
        for sample, start, end in zip(samples, starts, ends, strict=True)
    ]


def _append_turn(sample: TrainSample, turn: Turn, index: int, advantage: float, *, trains: bool) -> None:
    """Context first (never trains), then the completion."""
    completion, context = turn.completion, len(turn.context_ids)
    sample.input_ids.extend((*turn.context_ids, *completion.token_ids))
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
    if completion.routing:
        sample.routing.append(completion.routing)


def _append_target(sample: TrainSample, turn: Turn, target: float) -> None:
    """The target stands on the first sampled token; before the ids of the turn themselves are appended."""
    length = len(sample.input_ids) + len(turn.context_ids) + len(turn.completion.token_ids)
    sample.value_targets.extend([math.nan] * (length - len(sample.value_targets)))
    if turn.completion.token_ids:
        sample.value_targets[-len(turn.completion.token_ids)] = target


def _check_masks(samples: Sequence[TrainSample], trajectory: Trajectory, *, everything: bool) -> None:
    logprobs = (value for turn in trajectory.turns for value in turn.completion.rollout_logprobs)
    finite = sum(math.isfinite(value) for value in logprobs)
    trained = sum(sum(sample.loss_mask) for sample in samples)
    aligned = all(len(sample.loss_mask) == len(sample.input_ids) for sample in samples)
    if not aligned or trained > finite or (everything and trained != finite):
        raise InvariantError(
            f"{trajectory.trajectory_id}: {trained} trained tokens in {len(samples)} samples, but "
            f"{trajectory.num_sampled_tokens} sampled ({finite} with a finite logprob)"
        )
    if any(sample.loss_mask and sample.loss_mask[0] for sample in samples):
        raise InvariantError(f"{trajectory.trajectory_id}: the first token would train, but nothing predicts it")
