"""Operations with several implementations behind one name, and the per-token loss maths (token_loss)."""

from swe_rl.ops.linear_head import linear_logprob, linear_policy_loss

__all__ = ["linear_logprob", "linear_policy_loss"]
