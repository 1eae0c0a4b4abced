"""From differences between trainer and engine to what most likely made them.

Each rule looks for the mark that its fault leaves (recipes of published failures): the same numbers one place further,
numbers that fit at another temperature or without YaRN, none that is too small, only prompts that were seen before,
growth with the context, noise without a sign. A rule gives a weight from 0 to 1; the causes come in the order of their
weights.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The differences, and what the trainer's scores would be if it were wrong in the same way."""

    pairs: Pairs
    tempered: Mapping[float, Pairs]  # at other temperatures
    roped: Mapping[str, Pairs]  # by what its rotary embedding is without; empty where it is the plain one
    contract: PolicyContract


def likely_causes(evidence: Evidence) -> list[str]:
    """What to look at, most likely first."""
    weighed = [rule(evidence) for rule in RULES]
    named = [(weight, text) for weight, text in weighed if weight >= MIN_WEIGHT]
    return [text for _, text in sorted(named, key=lambda found: -found[0])]


def shifted(evidence: Evidence) -> tuple[float, str]:
    """The engine's number for a token is the trainer's for its neighbour."""
    pairs = evidence.pairs
    places = {}
    for step in (-1, 1):
        moved = [
            abs(pair.trainer[i + step] - pair.engine[i])
            for pair in pairs.values()
            for i in range(len(pair.engine))
            if 0 <= i + step < len(pair.engine) and pair.turns[i] == pair.turns[i + step]
        ]
        places[step] = _mean(moved)
    return _fit(min(places.values()), _size(pairs)), (
        "logprobs are shifted by one token: each must belong to the token at its own place"
    )


def temperature(evidence: Evidence) -> tuple[float, str]:
    """The trainer's numbers fit at another temperature."""
    asked = evidence.contract.temperature
    sizes = {value: _size(found) for value, found in evidence.tempered.items() if value != asked}
    best = min(sizes, key=lambda value: sizes[value])
    raw = " (raw logprobs: logprobs_mode must be processed_logprobs)" if best == 1.0 else ""
    return _fit(sizes[best], _size(evidence.pairs)), (
        f"temperature: the engine's numbers fit at about {best:g}, the contract says {asked:g}{raw}"
    )


def filtered(evidence: Evidence) -> tuple[float, str]:
    """The engine's distribution is cut and renormalised: no sampled token is less likely there."""
    differences, bound = _differences(evidence.pairs), evidence.contract.bound
    one_sided = max(differences) <= bound and _mean(differences) < -bound
    return (0.9 if one_sided else 0.0), (
        "top_k, top_p or min_p is on in the engine: every sampled token is more likely there "
        "(generation_config must be vllm, top_k 0, top_p 1, min_p 0)"
    )


def stale_cache(evidence: Evidence) -> tuple[float, str]:
    """Only prompts that the engine has seen under older weights are off."""
    fixed, fresh = _part(evidence.pairs, "fixed"), _part(evidence.pairs, "fresh")
    share = 1.0 - min(1.0, _size(fresh) / max(_size(fixed), 1e-12))
    return (0.95 * share if _size(fixed) > evidence.contract.bound else 0.0), (
        "stale prefix cache: only prompts that were seen before the last weight update are off "
        "(reset it, and verify that the reset took place)"
    )


def rope(evidence: Evidence) -> tuple[float, str]:
    """The trainer's numbers fit when it drops the same part of its rotary embedding; else, growth with the context."""
    pairs = evidence.pairs
    fits = {without: _fit(_size(found), _size(pairs)) for without, found in evidence.roped.items()}
    if fits and max(fits.values()) > 0:
        best = max(fits, key=lambda without: fits[without])
        return fits[best], f"rotary embedding: the engine's numbers fit without {best}, which the contract has"
    sizes = [_size(_of_length(pairs, name)) for name in ("short", "middle", "long")]
    growth = sum(b > 1.15 * a for a, b in pairwise(sizes)) / 2
    return 0.6 * growth * min(1.0, sizes[2] / max(sizes[0], 1e-12) / 4), (
        f"rotary embedding: off by {sizes[0]:.1e} at short, {sizes[2]:.1e} at long contexts "
        "(base, YaRN and its attention factor must be the same on both sides)"
    )


def precision(evidence: Evidence) -> tuple[float, str]:
    """Small, without a sign, the same at every length."""
    pairs, contract = evidence.pairs, evidence.contract
    differences, now = _differences(pairs), _size(pairs)
    signed = abs(_mean(differences)) / max(now, 1e-12)
    sizes = [_size(_of_length(pairs, name)) for name in ("short", "middle", "long")]
    even = min(sizes) / max(max(sizes), 1e-12)
    small = 1.0 if now < NOISE else 0.0
    return small * max(0.0, 1.0 - 2 * signed) * min(1.0, 0.3 + even), (
        f"precision: the output head or the body is not computed in {contract.head_dtype} and "
        f"{contract.engine_dtype} on both sides"
    )


def weights(evidence: Evidence) -> tuple[float, str]:
    """Large everywhere, at short contexts and at fresh prompts too."""
    fresh = _part(evidence.pairs, "fresh")
    everywhere = min(_size(_of_length(fresh, name)) for name in ("short", "middle", "long"))
    return min(0.55, everywhere / NOISE * 0.3), (
        "weights: the engine does not have the trainer's (not published, or shards or tensors swapped on the way)"
    )


Rule = Callable[[Evidence], tuple[float, str]]
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
