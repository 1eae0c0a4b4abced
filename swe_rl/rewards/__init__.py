"""From what an agent left behind to a number: patch extraction, path policy, grading in a fresh sandbox, shaping."""

from swe_rl.rewards.cache import ResultCache, grader_version, task_digest
from swe_rl.rewards.grading import grade
from swe_rl.rewards.patch import extract_patch
from swe_rl.rewards.policy import FilteredPatch, filter_patch, is_test_path
from swe_rl.rewards.potential import shaping_rewards, turn_rewards, visible_potentials
from swe_rl.rewards.shaping import shape_reward
from swe_rl.rewards.suspect import suspicious

__all__ = [
    "FilteredPatch",
    "ResultCache",
    "extract_patch",
    "filter_patch",
    "grade",
    "grader_version",
    "is_test_path",
    "shape_reward",
    "shaping_rewards",
    "suspicious",
    "task_digest",
    "turn_rewards",
    "visible_potentials",
]
