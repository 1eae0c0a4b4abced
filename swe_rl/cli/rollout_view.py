"""An episode as spans of text that train or do not: for the terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from swe_rl.batching import to_samples
from swe_rl.types import Trajectory, Turn

Decode = Callable[[list[int]], str]

CONTEXT, TRAINED, MASKED = "dim", "black on green", "black on yellow"  # styles of rich
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


@dataclass(frozen=True, slots=True)
class Span:
    text: str
    style: str


@dataclass(frozen=True, slots=True)
class TurnView:
    title: str
    spans: list[Span]


def view(trajectory: Trajectory, *, decode: Decode, trains: bool) -> Iterator[TurnView]:
    """One entry per turn: what was added to the context, then what was sampled, by whether it trains.

    `trains`: false when the whole trajectory is masked.
    """
    masks = trained_by_turn(trajectory, trains=trains)
    sample = 1
    for number, (turn, mask) in enumerate(zip(trajectory.turns, masks, strict=True)):
        title = f"turn {number + 1}: {len(turn.context_ids)} added, {len(mask)} sampled, {sum(mask)} train"
        if turn.kept_context is not None:
            sample += 1
            title += f"; sample {sample} begins: {turn.kept_context} tokens of the context stay"
        notes = [turn.repaired and f"repaired: {turn.repaired}", turn.format_error and "no action could be read"]
        title = "; ".join([title, *(note for note in notes if note)])
        spans = [Span(printable(decode(turn.context_ids)), CONTEXT)]
        spans += [Span(printable(decode(ids)), TRAINED if m else MASKED) for m, ids in _runs(turn, mask)]
        yield TurnView(title, [span for span in spans if span.text])


def trained_by_turn(trajectory: Trajectory, *, trains: bool) -> list[list[bool]]:
    """For each turn, which of its sampled tokens train: what batching makes of the trajectory."""
    masks: list[list[bool]] = [[] for _ in trajectory.turns]
    for sample in to_samples(trajectory, 1.0, trained=trains):
        for event, mask in zip(sample.turn_ids, sample.loss_mask, strict=True):
            if event >= 0:
                masks[event].append(mask)
    return masks


def to_document(trajectory: Trajectory, *, decode: Decode, trains: bool) -> dict[str, Any]:
    """JSON-able form with texts beside ids. Numbers that JSON lacks (NaN) are null."""
    masks = trained_by_turn(trajectory, trains=trains)
    reward = trajectory.reward
    plain = ("trajectory_id", "task_id", "group_id", "rollout_index", "detail", "temperature")
    return {
        **{key: getattr(trajectory, key) for key in plain},
        "stop_reason": str(trajectory.stop_reason),
        "reward": None if reward is None else _numbers(dataclasses.asdict(reward)),
        "patch": None if trajectory.patch is None else trajectory.patch.decode("utf-8", "replace"),
        "timings_s": _numbers(dict(trajectory.timings_s)),
        "num_samples": len(to_samples(trajectory, 1.0, trained=trains)),
        "turns": [_turn(turn, mask, decode) for turn, mask in zip(trajectory.turns, masks, strict=True)],
    }


def printable(text: str) -> str:
    """Text without anything that a terminal obeys: control characters in their escaped form."""
    return text.translate(_VISIBLE)


def _turn(turn: Turn, mask: list[bool], decode: Decode) -> dict[str, Any]:
    completion = turn.completion
    return {
        "context": decode(turn.context_ids),
        "context_ids": turn.context_ids,
        "kept_context": turn.kept_context,
        "sampled": decode(completion.token_ids),
        "sampled_ids": completion.token_ids,
        "logprobs": _numbers(completion.rollout_logprobs),
        "trained": mask,
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "tool_call": None if turn.tool_call is None else dataclasses.asdict(turn.tool_call),
        "format_error": turn.format_error,
        "repaired": turn.repaired,
        "observation": turn.observation,
    }


def _runs(turn: Turn, mask: list[bool]) -> Iterator[tuple[bool, list[int]]]:
    """(trains, ids) of the longest runs of sampled tokens with the same fate."""
    run: list[int] = []
    for position, index in enumerate(turn.completion.token_ids):
        if run and mask[position] != mask[position - 1]:
            yield mask[position - 1], run
            run = []
        run.append(index)
    if run:
        yield mask[-1], run


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
