"""Credit, filters, normalisers and losses: the algorithm as pure functions."""

from swe_rl.algorithms.advantages import compute_advantages, group_normalized, leave_one_out
from swe_rl.algorithms.aggregation import count_rows, count_tokens, token_weights
from swe_rl.algorithms.filters import filter_group, is_masked, stop_action

__all__ = [
    "compute_advantages",
    "count_rows",
    "count_tokens",
    "filter_group",
    "group_normalized",
    "is_masked",
    "leave_one_out",
    "stop_action",
    "token_weights",
]
