"""The public head operations and the choice of who computes them."""

from __future__ import annotations

import functools
import logging
from typing import Unpack

from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import reference
from swe_rl.ops.token_loss import LossTerms

IMPLS = {"reference": reference}
KNOWN_IMPLS = ("auto", "reference", "cpu", "triton")
log = logging.getLogger(__name__)


@functools.cache
def _log_choice(op: str, impl: str, reason: str) -> None:
    """Once per operation and choice: what runs, and why."""
    log.info("%s: impl=%s (%s)", op, impl, reason)


def pick_impl(op: str, impl: str) -> str:
    """Name of the implementation to use. Raises ConfigError for a name that is unknown or not available here."""
    if impl not in KNOWN_IMPLS:
        raise ConfigError(f"impl={impl!r} is unknown: use one of {', '.join(KNOWN_IMPLS)}")
    chosen = "reference" if impl == "auto" else impl
    if chosen not in IMPLS:
        raise ConfigError(f"impl={impl!r} of {op} is not available in this installation: use impl=reference or auto")
    _log_choice(op, chosen, "asked for" if impl != "auto" else "the only one available")
    return chosen


def linear_logprob(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float | Tensor = 1.0, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[label] and the entropy of each row; no [T, V] tensor.

    hidden [T, H], weight [V, H] (one of bf16, fp32, fp64), labels [T] i64 already shifted, temperature a number or [T].
    Returns (logprobs [T], entropy [T]), natural, fp32 (fp64 for fp64 inputs). Raises ConfigError for a bad `impl`.
    """
    return IMPLS[pick_impl("linear_logprob", impl)].linear_logprob(hidden, weight, labels, temperature=temperature)


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    temperature: float | Tensor = 1.0,
    impl: str = "auto",
    **terms: Unpack[LossTerms],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum over trained t of token_weights[t] * loss[t], with the maths of ops.token_loss.

    hidden [T, H], weight [V, H], everything else [T] aligned to `labels` (already shifted); loss_mask bool selects
    the T_trained rows first, so that masked slots may hold anything. token_weights fp32 hold every normaliser.
    terms: old_logprobs, rollout_logprobs, sequence_coeff, ref_logprobs (each [T] or None), and the rules of
    token_loss.token_loss with its defaults: clip_low=0.2, clip_high=0.28, ratio_rule="ppo", correction="none",
    correction_cap=2.0, kl_coeff=0.0, entropy_coeff=0.0.
    Returns (loss scalar, stats: detached [T_trained] logprobs, entropy, ratio, clipped).
    Raises ConfigError for a bad `impl`, ValueError for rules that do not fit together.
    """
    return IMPLS[pick_impl("linear_policy_loss", impl)].linear_policy_loss(
        hidden,
        weight,
        labels,
        advantages=advantages,
        loss_mask=loss_mask,
        token_weights=token_weights,
        temperature=temperature,
        **terms,
    )
