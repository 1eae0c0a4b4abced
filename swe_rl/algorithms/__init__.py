"""Credit, filters, normalisers and losses: the algorithm as pure functions."""

from swe_rl.algorithms.advantages import compute_advantages, group_advantages, group_normalized, leave_one_out, whitened
from swe_rl.algorithms.aggregation import count_rows, count_tokens, token_weights
from swe_rl.algorithms.credit import Credit, Scores, assign_credit
from swe_rl.algorithms.filters import filter_group, is_masked, stop_action
from swe_rl.algorithms.penalties import soft_overlong
from swe_rl.algorithms.turns import generalized_advantages, turn_level, turn_states

__all__ = [
    "Credit",
    "Scores",
    "assign_credit",
    "compute_advantages",
    "count_rows",
    "count_tokens",
    "filter_group",
    "generalized_advantages",
    "group_advantages",
    "group_normalized",
    "is_masked",
    "leave_one_out",
    "soft_overlong",
    "stop_action",
    "token_weights",
    "turn_level",
    "turn_states",
    "whitened",
]
