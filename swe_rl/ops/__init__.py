"""Operations with several implementations behind one name, and the per-token loss maths (token_loss)."""

from swe_rl.ops.attention_dispatch import attention, attention_with_lse
from swe_rl.ops.linear_head import linear_logprob, linear_policy_loss
from swe_rl.ops.rope_ops import rope

__all__ = ["attention", "attention_with_lse", "linear_logprob", "linear_policy_loss", "rope"]
