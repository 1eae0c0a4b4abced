"""Evaluation: success rates with standard errors, pass@k, paired differences."""

from swe_rl.evaluation.attempt import Attempt
from swe_rl.evaluation.benchmark import EvalResult, evaluate
from swe_rl.evaluation.statistics import Difference, clustered_mean, paired_difference, pass_at_k

__all__ = ["Attempt", "Difference", "EvalResult", "clustered_mean", "evaluate", "paired_difference", "pass_at_k"]
