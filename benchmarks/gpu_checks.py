"""The head against plain torch in fp64 on the same device. Each check returns one number that has a limit."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from head_cases import CLIP_HIGH, CLIP_LOW, HeadCase, HeadInputs, make_inputs
from torch import Tensor

TOKENS, HIDDEN = 780, 192  # no multiple of a tile; trained rows are not one either
VOCABULARIES = (7, 1000, 4099, 49152, 151936)
FLOAT32_LIMIT = 1e-5
BFLOAT16_LIMIT = 2.0**-8  # one rounding of a gradient; sums and logits are fp32
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def head_error(case: HeadCase) -> float:
    """The largest of the relative errors of loss, logprobs, entropy and both gradients (Euclidean norm)."""
    inputs = make_inputs(case)
    exact = _outputs(inputs, dtype=torch.float64, impl="reference")
    found = _outputs(inputs, dtype=inputs.hidden.dtype, impl="auto")
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def scoring_error(case: HeadCase) -> float:
    """As head_error, of linear_logprob's two outputs."""
    from swe_rl.ops import linear_logprob

    inputs = make_inputs(case)
    pairs = []
    for dtype, impl in ((inputs.hidden.dtype, "auto"), (torch.float64, "reference")):
        pairs.append(linear_logprob(inputs.hidden.to(dtype), inputs.weight.to(dtype), inputs.labels, impl=impl))
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(*pairs, strict=True))


def differing_repeats(case: HeadCase, repeats: int) -> float:
    """How many of `repeats` training steps are not bitwise equal to the first."""
    inputs = make_inputs(case)
    first = _outputs(inputs, dtype=inputs.hidden.dtype, impl="auto")
    differing = 0
    for _ in range(repeats):
        again = _outputs(inputs, dtype=inputs.hidden.dtype, impl="auto")
        differing += not all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    return float(differing)


def _outputs(inputs: HeadInputs, *, dtype: torch.dtype, impl: str) -> Outputs:
    """(loss, logprobs, entropy, grad_hidden, grad_weight) of one policy loss with every differentiable term."""
    from swe_rl.ops import linear_policy_loss

    hidden, weight = (leaf.detach().to(dtype).requires_grad_() for leaf in (inputs.hidden, inputs.weight))
    columns = ("advantages", "loss_mask", "token_weights", "old_logprobs")
    loss, stats = linear_policy_loss(
        hidden,
        weight,
        inputs.labels,
        **{name: getattr(inputs, name) for name in columns},
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        entropy_coeff=0.01,
        impl=impl,
    )
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), stats["logprobs"], stats["entropy"], hidden.grad, weight.grad


def _case(vocab_size: int, dtype: str, mode: str = "forward_backward") -> HeadCase:
    return HeadCase(TOKENS, HIDDEN, vocab_size, 0.3, mode, dtype, "cuda")


def _checks() -> list[tuple[str, float, Callable[[], float]]]:
    checks: list[tuple[str, float, Callable[[], float]]] = []
    for dtype, limit in (("float32", FLOAT32_LIMIT), ("bfloat16", BFLOAT16_LIMIT)):
        for vocab in VOCABULARIES:
            case, scored = _case(vocab, dtype), _case(vocab, dtype, "scoring")
            checks.append((f"head V={vocab} {dtype} against fp64", limit, functools.partial(head_error, case)))
            checks.append((f"scoring V={vocab} {dtype} against fp64", limit, functools.partial(scoring_error, scored)))
    case = _case(49152, "bfloat16")
    checks.append(("repeats that differ, of 20, bfloat16", 0.0, functools.partial(differing_repeats, case, 20)))
    return checks


CHECKS = _checks()  # (name, limit, what to run)
