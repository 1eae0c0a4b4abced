"""Random groups of rollouts for tests of trees: shared prompts, forks anywhere, twins, turns of one token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from swe_rl.types import TrainSample


@dataclass
class _Draft:
    """A sample that grows."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def add(self, ids: list[int], mask: list[bool], turn: int) -> None:
        self.ids += ids
        self.mask += mask
        self.turns += [turn] * len(ids)

    def kept(self, length: int) -> _Draft:
        """A new sample with the first `length` tokens of this one as context."""
        return _Draft(self.ids[:length], [False] * length, [-1] * length)


def random_group(rng: random.Random, *, size: int = 4, vocab: int = 3) -> list[TrainSample]:
    """The samples of `size` rollouts, of which some are copies of another one under another name.

    With a small `vocab` rollouts agree by chance. Prompts have one of two beginnings; contexts are cut anywhere, also
    inside turns.
    """
    rollouts: list[list[_Draft]] = []
    for _ in range(size):
        twin = bool(rollouts) and rng.random() < 0.25
        rollouts.append(rng.choice(rollouts) if twin else _rollout(rng, vocab))
    made = []
    for index, drafts in enumerate(rollouts):
        temperature = rng.choice((1.0, 0.7, 1.3))
        made += [_sample(f"t{index}", draft, rng, temperature, version=index) for draft in drafts]
    return made


def _rollout(rng: random.Random, vocab: int) -> list[_Draft]:
    drafts = [_Draft()]
    prompt = [0] * 3 if rng.random() < 0.9 else [1] * 3
    drafts[-1].add(prompt, [False] * 3, -1)
    for turn in range(rng.randrange(1, 5)):
        if turn and rng.random() < 0.5:  # an edited context: at least one token of it stays
            drafts.append(drafts[-1].kept(rng.randrange(1, len(drafts[-1].ids) + 1)))
        seen = [rng.randrange(vocab) for _ in range(rng.randrange(0, 4))]
        drafts[-1].add(seen, [False] * len(seen), -1)
        said = [rng.randrange(vocab) for _ in range(rng.choice((1, 1, 2, 3, 4)))]
        drafts[-1].add(said, [rng.random() < 0.9 for _ in said], turn)
    return drafts


def _sample(name: str, draft: _Draft, rng: random.Random, temperature: float, *, version: int) -> TrainSample:
    def column(low: float, high: float) -> list[float]:
        return [rng.uniform(low, high) if m else 0.0 for m in draft.mask]

    return TrainSample(
        trajectory_id=name,
        input_ids=list(draft.ids),
        loss_mask=list(draft.mask),
        rollout_logprobs=column(-4.0, -0.1),
        advantages=column(-1.5, 1.5),
        turn_ids=list(draft.turns),
        policy_version=version,
        temperature=temperature,
        token_weights=column(0.01, 0.1),
    )
