"""From what an agent left behind to a number: patch extraction, path policy, grading in a fresh sandbox."""

from swe_rl.rewards.patch import extract_patch

__all__ = ["extract_patch"]
