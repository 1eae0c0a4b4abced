"""From what an agent left behind to a number: patch extraction, path policy, grading in a fresh sandbox."""

from swe_rl.rewards.cache import ResultCache
from swe_rl.rewards.grading import grade
from swe_rl.rewards.patch import extract_patch
from swe_rl.rewards.policy import FilteredPatch, filter_patch, is_test_path

__all__ = [
    "FilteredPatch",
    "ResultCache",
    "extract_patch",
    "filter_patch",
    "grade",
    "is_test_path",
]
