"""From differences between trainer and engine to what most likely made them.

Each rule looks for the mark that its fault leaves (recipes of published failures): the same numbers one place further,
numbers that fit at another temperature, none that is too small, only prompts that were seen before, growth with the
context, noise without a sign. A rule gives a weight from 0 to 1; the causes come in the order of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swe_rl.models.contract import PolicyContract

EXPLAINED = 0.25  # what is left of the difference when a rule's repair fits
NOISE = 0.1  # nats: rounding in bf16 stays below, wrong weights do not
MIN_WEIGHT = 0.05  # of a cause that is named


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTokens:
    """Logprobs of the sampled tokens of one episode, in order."""

    engine: list[float]
    trainer: list[float]
    turns: list[int]  # index of the turn that each belongs to

    @property
    def differences(self) -> list[float]:
        """Trainer minus engine."""
        return [t - e for t, e in zip(self.trainer, self.engine, strict=True)]


Pairs = Mapping[str, PairedTokens]  # by session: parity/<length>/<fixed or fresh>/<seed>


def likely_causes(pairs: Pairs, tempered: Mapping[float, Pairs], contract: PolicyContract) -> list[str]:
    """What to look at, most likely first. `tempered` holds the trainer's scores at other temperatures."""
    weighed = [rule(pairs, tempered, contract) for rule in RULES]
    named = [(weight, text) for weight, text in weighed if weight >= MIN_WEIGHT]
    return [text for _, text in sorted(named, key=lambda found: -found[0])]


def shifted(pairs: Pairs, tempered: Mapping[float, Pairs], contract: PolicyContract) -> tuple[float, str]:
    """The engine's number for a token is the trainer's for its neighbour."""
    now = _size(pairs)
    places = {}
    for step in (-1, 1):
        moved = [
            abs(pair.trainer[i + step] - pair.engine[i])
            for pair in pairs.values()
            for i in range(len(pair.engine))
            if 0 <= i + step < len(pair.engine) and pair.turns[i] == pair.turns[i + step]
        ]
        places[step] = _mean(moved)
    return _fit(min(places.values()), now), (
        "logprobs are shifted by one token: each must belong to the token at its own place"
    )


def temperature(pairs: Pairs, tempered: Mapping[float, Pairs], contract: PolicyContract) -> tuple[float, str]:
    """The trainer's numbers fit at another temperature."""
    now = _size(pairs)
    sizes = {value: _size(found) for value, found in tempered.items() if value != contract.temperature}
    best = min(sizes, key=lambda value: sizes[value])
    raw = " (raw logprobs: logprobs_mode must be processed_logprobs)" if best == 1.0 else ""
    return _fit(sizes[best], now), (
        f"temperature: the engine's numbers fit at about {best:g}, the contract says {contract.temperature:g}{raw}"
    )


def filtered(pairs: Pairs, tempered: Mapping[float, Pairs], contract: PolicyContract) -> tuple[float, str]:
    """The engine's distribution is cut and renormalised: no sampled token is less likely there."""
    differences = _differences(pairs)
    above = [d for d in differences if d > contract.bound]
    one_sided = not above and _mean(differences) < -contract.bound
    return (0.9 if one_sided else 0.0), (
        "top_k, top_p or min_p is on in the engine: every sampled token is more likely there "
        "(generation_config must be vllm, top_k 0, top_p 1, min_p 0)"
    )


def stale_cache(pairs: Pairs, tempered: Mapping[float, Pairs], contract: PolicyContract) -> tuple[float, str]:
    """Only prompts that the engine has seen under older weights are off."""
    fixed, fresh = _part(pairs, "fixed"), _part(pairs, "fresh")
    share = 1.0 - min(1.0, _size(fresh) / max(_size(fixed), 1e-12))
    return (0.95 * share if _size(fixed) > contract.bound else 0.0), (
        "stale prefix cache: only prompts that were seen before the last weight update are off "
        "(reset it, and verify that the reset took place)"
    )


def rope(pairs: Pairs, tempered: Mapping[float, Pairs], contract: PolicyContract) -> tuple[float, str]:
    """The difference grows with the context."""
    sizes = [_size(_of_length(pairs, name)) for name in ("short", "middle", "long")]
    growth = sum(b > 1.15 * a for a, b in pairwise(sizes)) / 2
    stretched = 0.2 if contract.original_context else 0.0
    grown = min(1.0, sizes[2] / max(sizes[0], 1e-12) / 4)
    return (0.6 * growth * grown + stretched * (sizes[2] > contract.bound)), (
        f"rotary embedding: off by {sizes[0]:.1e} at short, {sizes[2]:.1e} at long contexts "
        "(YaRN and its attention factor must be the same on both sides)"
    )


def precision(pairs: Pairs, tempered: Mapping[float, Pairs], contract: PolicyContract) -> tuple[float, str]:
    """Small, without a sign, the same at every length."""
    differences, now = _differences(pairs), _size(pairs)
    signed = abs(_mean(differences)) / max(now, 1e-12)
    sizes = [_size(_of_length(pairs, name)) for name in ("short", "middle", "long")]
    even = min(sizes) / max(max(sizes), 1e-12)
    small = 1.0 if now < NOISE else 0.0
    return small * max(0.0, 1.0 - 2 * signed) * min(1.0, 0.3 + even), (
        f"precision: the output head or the body is not computed in {contract.head_dtype} and "
        f"{contract.engine_dtype} on both sides"
    )


def weights(pairs: Pairs, tempered: Mapping[float, Pairs], contract: PolicyContract) -> tuple[float, str]:
    """Large everywhere, at short contexts and at fresh prompts too."""
    everywhere = min(_size(_of_length(_part(pairs, "fresh"), name)) for name in ("short", "middle", "long"))
    return min(0.55, everywhere / NOISE * 0.3), (
        "weights: the engine does not have the trainer's (not published, or shards or tensors swapped on the way)"
    )


Rule = Callable[[Pairs, Mapping[float, Pairs], PolicyContract], tuple[float, str]]
RULES: Sequence[Rule] = (shifted, temperature, filtered, stale_cache, rope, precision, weights)


def _fit(left: float, now: float) -> float:
    """1 when a repair leaves nothing of the difference, 0 when it leaves a quarter or more."""
    return max(0.0, 1.0 - left / max(EXPLAINED * now, 1e-12))


def _differences(pairs: Pairs) -> list[float]:
    return [d for pair in pairs.values() for d in pair.differences]


def _size(pairs: Pairs) -> float:
    return _mean([abs(d) for d in _differences(pairs)])


def _part(pairs: Pairs, kind: str) -> Pairs:
    return {key: pair for key, pair in pairs.items() if key.split("/")[2] == kind}


def _of_length(pairs: Pairs, name: str) -> Pairs:
    return {key: pair for key, pair in pairs.items() if key.split("/")[1] == name}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
