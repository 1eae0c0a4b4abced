"""Synthetic groups of agent rollouts, as the samples that training would get."""

from __future__ import annotations

import random
from dataclasses import dataclass

from swe_rl.types import TrainSample

VOCAB = 151_936
THINKING = 0.6  # share of a turn's sampled tokens


@dataclass(frozen=True)
class AgentGroup:
    """`size` rollouts of one task. `style`:

    - linear: the context only grows, one sample per rollout;
    - per_turn: one sample per turn, with the whole history;
    - stripped: one sample per turn, and the history has lost the thinking of earlier turns;
    - compacted: the context is cut to the prompt and a summary whenever it reaches `limit` tokens.
    """

    size: int
    prompt: int
    turns: int
    per_turn: int  # tokens: sampled ones and the observation
    sampled: int  # of them
    style: str = "linear"
    limit: int = 32_768
    summary: int = 1_000
    spread: float = 0.0  # turns of a rollout are uniform in (1 +- spread) * turns

    def samples(self, seed: int = 0) -> list[TrainSample]:
        rng = random.Random(f"group/{seed}")
        prompt = _ids(rng, self.prompt)
        found: list[TrainSample] = []
        for index in range(self.size):
            turns = max(1, round(self.turns * (1 + self.spread * rng.uniform(-1, 1))))
            found += self._rollout(f"{seed}/{index}", prompt, turns, rng)
        return found

    def _rollout(self, name: str, prompt: list[int], turns: int, rng: random.Random) -> list[TrainSample]:
        """Segments (ids, whether they train, turn) of each sample."""
        context, samples = [(prompt, False, -1)], []
        for turn in range(turns):
            thinking = _ids(rng, round(self.sampled * THINKING))
            action = _ids(rng, self.sampled - len(thinking))
            observation = (_ids(rng, self.per_turn - self.sampled), False, -1)
            said = (thinking + action, True, turn)
            if self.style == "linear":
                context = [*context, said, observation]
                continue
            if self.style == "compacted":
                context = [*context, said, observation]
                if sum(len(ids) for ids, _, _ in context) > self.limit:
                    samples.append(context)
                    context = [(prompt, False, -1), (_ids(rng, self.summary), False, -1)]
                continue
            samples.append([*context, said, observation])
            kept = action if self.style == "stripped" else thinking + action
            context = [*context, (kept, False, -1), observation]
        if self.style in ("linear", "compacted"):
            samples.append(context)
        return [_sample(name, parts) for parts in samples if any(trains for _, trains, _ in parts)]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def _sample(name: str, parts: list[tuple[list[int], bool, int]]) -> TrainSample:
    ids = [i for part, _, _ in parts for i in part]
    mask = [trains for part, trains, _ in parts for _ in part]
    return TrainSample(
        trajectory_id=name,
        input_ids=ids,
        loss_mask=mask,
        rollout_logprobs=[-0.5 if m else 0.0 for m in mask],
        advantages=[1.0 if m else 0.0 for m in mask],
        turn_ids=[turn for part, _, turn in parts for _ in part],
        policy_version=0,
        temperature=1.0,
        token_weights=[1e-6 if m else 0.0 for m in mask],
    )


def bushy_ids(tokens: int, *, seed: int = 0, segment: int = 64) -> list[list[int]]:
    """Samples whose tree has `tokens` rows: each leaves an earlier one somewhere and goes on for a few tokens."""
    rng, left = random.Random(f"bushy/{seed}"), tokens
    samples: list[list[int]] = []
    while left > 0:
        before = rng.choice(samples) if samples else []
        kept = before[: rng.randrange(len(before) + 1) if before else 0]
        new = min(left, rng.randrange(1, 2 * segment))
        samples.append([*kept, VOCAB + len(samples), *_ids(rng, new - 1)])  # an id of its own: it does leave there
        left -= new
    return samples
