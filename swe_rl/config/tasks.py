"""The keys of the groups `task` and `reward`: what is trained on, and what counts as solved."""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.config.bounds import Bounds


@dataclass(kw_only=True)
class TaskConfig:
    source: str = "minirepo"  # "minirepo", or a directory written by `swe-rl tasks build`
    num_train: int = 400  # distinct training tasks; 0 takes all that the source has
    seed: int = 0  # of the training tasks
    heldout_seed: int = 4_000_037  # of the held-out tasks; nothing is ever tuned on them


@dataclass(kw_only=True)
class RewardConfig:
    grade_s: float = 60.0  # limit of one hidden-test run
    max_patch_bytes: int = 1 << 20
    grade_retries: int = 2  # after infrastructure trouble, each in a fresh sandbox


TASK_BOUNDS = Bounds(not_negative=("num_train",))
REWARD_BOUNDS = Bounds(positive=("grade_s", "max_patch_bytes"), not_negative=("grade_retries",))
