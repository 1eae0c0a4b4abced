"""Which of n candidates of one task to hand in. Pure functions; the answer is a probability per candidate, so that ties
are averaged exactly instead of broken by the order in which rollouts happened to finish.

    hybrid      the max(keep, ⌊n/2⌋) best by execution-free score; of these the most regression tests passed, then the
                most reproduction tests resolved, then the best score (DeepSWE; R2E-Gym keeps at least 3)
    ef          best execution-free score; a flagged score is none, and none ranks below every score
    eb          most regression tests passed, then most reproduction tests resolved (R2E-Gym)
    majority    an answer that most candidates agree on (equivalence.py); changing nothing is no answer
    shortest    fewest turns, then fewest sampled tokens
    random      any: its mean is pass@1
    oracle      any that passes: pass@n, the bound of every selector
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swe_rl.errors import ConfigError
from swe_rl.evaluation.candidates import Candidate

Key = tuple[float, ...]
Ranking = Callable[[Candidate], Key]  # larger is better; the same for every set that the candidate is in


@dataclass(frozen=True, slots=True)
class Selector:
    """`rank` alone decides, or `choose` where it depends on the other candidates."""

    needs: tuple[str, ...]  # attributes of Candidate that are None until a verifier fills them
    rank: Ranking | None = None
    choose: Callable[[Sequence[Candidate], int], list[float]] | None = None

    def weights(self, candidates: Sequence[Candidate], *, keep: int = 1) -> list[float]:
        """Chance of each candidate to be chosen; they sum to 1. `keep`: see `hybrid`. Raises ValueError for none."""
        if not candidates:
            raise ValueError("there is nothing to select from")
        if self.choose is not None:
            return self.choose(candidates, keep)
        assert self.rank is not None
        return best_of_keys([self.rank(item) for item in candidates])


def best_of_keys(keys: Sequence[Key]) -> list[float]:
    """1/m for each of the m largest keys, 0 for the others."""
    top = max(keys)
    tied = sum(key == top for key in keys)
    return [1.0 / tied if key == top else 0.0 for key in keys]


def best_after_gate(gate: Sequence[float], keys: Sequence[Key], *, keep: int) -> list[float]:
    """Chance of each to have the largest key among the `keep` largest gates, ties at both averaged exactly.

    Where the `keep`-th gate is shared by t of them for r places, every r of the t are equally likely to stay; of these
    the number that beats a key, or equals it, is hypergeometric.
    """
    order = sorted(gate, reverse=True)
    border = order[min(keep, len(order)) - 1]
    sure = [i for i, value in enumerate(gate) if value > border]
    tied = [i for i, value in enumerate(gate) if value == border]
    places = min(keep, len(gate)) - len(sure)
    weights = [0.0] * len(gate)
    for key in set(keys):
        if any(keys[i] > key for i in sure):
            continue
        own = [i for i in sure if keys[i] == key]
        equal = [i for i in tied if keys[i] == key]
        worse = sum(keys[i] < key for i in tied)
        for stay in range(min(len(equal), places) + 1):
            if not own and not stay:
                continue
            chance = math.comb(len(equal), stay) * math.comb(worse, places - stay) / math.comb(len(tied), places)
            for i in own:
                weights[i] += chance / (len(own) + stay)
            for i in equal:
                weights[i] += chance * stay / len(equal) / (len(own) + stay)
    return weights


def select_one(selector: Selector, candidates: Sequence[Candidate], *, keep: int = 1) -> Candidate:
    """The most likely choice; of equals the first by trajectory id, so that it is the same in every run."""
    ordered = sorted(candidates, key=lambda item: item.trajectory_id)
    weights = selector.weights(ordered, keep=keep)
    return ordered[max(range(len(ordered)), key=lambda i: (weights[i], -i))]


def check_scores(name: str, candidates: Sequence[Candidate]) -> int:
    """How many candidates lack a score that the selector needs; they rank below all others.

    ConfigError when none has it.
    """
    needs = SELECTORS[name].needs
    for need in needs:
        if all(getattr(item, need) is None for item in candidates):
            cure = "swe-rl verify score --help"
            flag = next((item.ef_flag for item in candidates if item.ef_flag), "") if need == "trusted_score" else ""
            why = f" (all are flagged: {flag})" if flag else ""
            what = {"trusted_score": "ef_score"}.get(need, need)
            raise ConfigError(f"selector {name} needs {what}, which no candidate has{why}: add it first ({cure})")
    return sum(any(getattr(item, need) is None for need in needs) for item in candidates)


def available(candidates: Sequence[Candidate]) -> list[str]:
    """Selectors whose scores are there for at least some candidate, in the order of SELECTORS."""
    return [
        name
        for name, selector in SELECTORS.items()
        if all(any(getattr(item, need) is not None for item in candidates) for need in selector.needs)
    ]


def _ef(item: Candidate) -> Key:
    return (-math.inf if item.trusted_score is None else item.trusted_score,)


def _eb(item: Candidate) -> Key:
    regression, reproduction = item.regression_passed, item.reproduction_resolved
    return (
        -math.inf if regression is None else regression,
        -math.inf if reproduction is None else reproduction,
    )


def _hybrid(candidates: Sequence[Candidate], keep: int) -> list[float]:
    gate = [_ef(item)[0] for item in candidates]
    keys = [(*_eb(item), *_ef(item)) for item in candidates]
    return best_after_gate(gate, keys, keep=max(keep, len(candidates) // 2))


def _majority(candidates: Sequence[Candidate], keep: int) -> list[float]:
    answers = [item.patch_digest for item in candidates]
    votes = Counter(answer for answer in answers if answer) or Counter(answers)
    most = max(votes.values())
    winners = {answer for answer, count in votes.items() if count == most}
    return [1.0 / (len(winners) * votes[answer]) if answer in winners else 0.0 for answer in answers]


def _shortest(item: Candidate) -> Key:
    return (-item.num_turns, -item.num_tokens)


def _oracle(item: Candidate) -> Key:
    return (float(bool(item.passed)),)


SELECTORS: dict[str, Selector] = {
    "hybrid": Selector(("trusted_score", "regression"), choose=_hybrid),
    "ef": Selector(("trusted_score",), rank=_ef),
    "eb": Selector(("regression",), rank=_eb),
    "majority": Selector((), choose=_majority),
    "shortest": Selector((), rank=_shortest),
    "random": Selector((), rank=lambda item: ()),
    "oracle": Selector(("passed",), rank=_oracle),
}
