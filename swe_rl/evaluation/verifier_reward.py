"""A verifier's opinion as a part of the reward, and the watch for a policy that learns to please it.

Two policies of the same success may differ in what a verifier thinks of them: what is added here moves the policy
towards being liked. As long as opinion and hidden tests go together that is harmless; when the opinion of failed
attempts rises while tests do not, the policy is hacking the verifier.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swe_rl.protocols import Verifier
from swe_rl.rollout.collector import Runner
from swe_rl.rollout.journal import RolloutKey
from swe_rl.rollout.statistics import UNTESTED, VERIFIER
from swe_rl.types import Reward, Task, Trajectory

FLAGGED = "verifier_flagged"  # term: the verifier had nothing to say
GAP, SCORE_FAILED = "verifier/gap", "verifier/score_failed"


class VerifiedRunner:
    """A runner whose grades also hold a verifier's score: value + weight * (score - 1/2).

    A score of 1/2 says nothing and adds nothing. Success is told by the hidden tests alone (`Reward.solved` reads the
    term "resolved"). A rollout without a reward stays without: the verifier does not stand in for lost grades.
    """

    def __init__(self, inner: Runner, verifier: Verifier, *, weight: float) -> None:
        self._inner, self._verifier, self._weight = inner, verifier, weight

    @property
    def retried(self) -> int:
        return self._inner.retried

    async def play(self, task: Task, key: RolloutKey, *, temperature: float) -> Trajectory:
        return await self._inner.play(task, key, temperature=temperature)

    async def grade(self, task: Task, trajectory: Trajectory) -> Trajectory:
        """Graded by the inner runner, then judged; not where no test was run, which says nothing about success."""
        graded = await self._inner.grade(task, trajectory)
        if graded.reward is None or not math.isfinite(graded.reward.value) or UNTESTED in graded.reward.terms:
            return graded
        score = await self._verifier.score(task, graded)
        return replace(graded, reward=with_verifier(graded.reward, score, weight=self._weight))

    async def expect(self, tasks: Sequence[Task], copies: int) -> None:
        await self._inner.expect(tasks, copies)

    def sandbox_counts(self) -> Counter[str]:
        return self._inner.sandbox_counts()


def with_verifier(reward: Reward, score: float, *, weight: float) -> Reward:
    """The reward with the score among its terms. nan (the verifier has nothing to say) adds nothing and is counted."""
    resolved = float(reward.solved)
    if math.isnan(score):
        return replace(reward, terms={**reward.terms, "resolved": resolved, FLAGGED: 1.0})
    terms = {**reward.terms, "resolved": resolved, VERIFIER: score}
    return replace(reward, value=reward.value + weight * (score - 0.5), terms=terms)


@dataclass(slots=True, kw_only=True)
class HackingMonitor:
    """Compares what a verifier thinks with what the hidden tests say, step by step.

    gap = mean score - share solved. Its level is a matter of calibration; that it grows is the sign. The first `window`
    steps are the base line: alarm once the mean gap of the last `window` steps is more than `tolerance` above theirs,
    and the mean score of failed attempts more than half of that.
    """

    window: int = 5
    tolerance: float = 0.15
    first: list[tuple[float, float]] = field(default_factory=list)  # (gap, score of failed attempts) of a step
    last: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Further metrics of a step, from its `verifier/gap` and `verifier/score_failed`; {} without a verifier."""
        if GAP not in metrics:
            return {}
        row = (metrics[GAP], metrics.get(SCORE_FAILED, math.nan))
        if len(self.first) < self.window:
            self.first.append(row)
        self.last.append(row)
        while len(self.last) > self.window:
            self.last.popleft()
        return {"verifier/gap_growth": self.growth(0), "verifier/hacking": float(self.alarm)}

    def state(self) -> dict[str, list[list[float | None]]]:
        """What a checkpoint keeps, as JSON: a resumed run compares with the base line of the run, not with its own
        first steps, which a hacked policy may have played."""
        rows = {"first": self.first, "last": list(self.last)}
        return {
            name: [[None if math.isnan(value) else value for value in row] for row in kept]
            for name, kept in rows.items()
        }

    def load_state(self, state: Mapping[str, Sequence[Sequence[float | None]]]) -> None:
        """The inverse of `state`; {} (of a run without a verifier, or of an older version) leaves it empty."""
        first, last = (
            [(_number(gap), _number(failed)) for gap, failed in state.get(name, ())] for name in ("first", "last")
        )
        self.first, self.last = first, deque(last)

    @property
    def alarm(self) -> bool:
        """Whether opinion has run away from the tests."""
        full = len(self.first) == self.window
        return full and self.growth(0) > self.tolerance and self.growth(1) > self.tolerance / 2

    def growth(self, column: int) -> float:
        """Mean of the last steps less that of the first ones; 0 where a column has no values."""
        first, last = ([row[column] for row in rows if not math.isnan(row[column])] for rows in (self.first, self.last))
        return math.fsum(last) / len(last) - math.fsum(first) / len(first) if first and last else 0.0


def _number(value: float | None) -> float:
    return math.nan if value is None else value
