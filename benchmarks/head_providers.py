"""Implementations of the head that the benchmarks compare, each behind one function of HeadInputs.

A provider returns the loss, whose backward is the caller's, or in scoring mode the logprobs of the trained tokens.
Other projects are imported when their provider is asked for; whoever cannot be imported or cannot run says so by an
exception, and the benchmarks record its first line. PROVIDERS has all of them; CROSS_ENTROPY names those that have no
policy loss: they compute the mean cross-entropy of the trained tokens, which needs the same products.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from types import ModuleType

import torch
from head_cases import CLIP_HIGH, CLIP_LOW, HeadInputs
from torch import Tensor

IGNORED = -100
SCORING = ("ours", "eager", "rows_selected", "trl_selective", "trl_fused_head", "liger_grpo")
CROSS_ENTROPY = ("liger_flce", "cce", "cce_torch_compile")
NOTES = {
    "ours_main_grad": "the gradient of the weight goes into a buffer that is part of the base",
    **dict.fromkeys(CROSS_ENTROPY, "mean cross-entropy instead of the policy loss"),
}
PACKAGES = ("torch", "triton", "trl", "liger-kernel", "cut-cross-entropy")


class CannotRun(RuntimeError):
    """Why a provider is not measured."""


def ours(inputs: HeadInputs) -> Tensor:
    from swe_rl.ops import linear_logprob

    if inputs.case.mode == "scoring":
        rows = inputs.loss_mask.nonzero()[:, 0]
        return linear_logprob(inputs.hidden[rows], inputs.weight, inputs.labels[rows])[0]
    return _ours_loss(inputs)


def ours_main_grad(inputs: HeadInputs) -> Tensor:
    """The gradient of the weight goes into an fp32 buffer that exists before and after, as in Megatron."""
    if inputs.main_grad is None:
        inputs.main_grad = torch.empty_like(inputs.weight, dtype=torch.float32)
    return _ours_loss(inputs, grad_weight_into=inputs.main_grad.zero_())


def _ours_loss(inputs: HeadInputs, **options: Tensor) -> Tensor:
    from swe_rl.ops import linear_policy_loss

    columns = ("advantages", "loss_mask", "token_weights", "old_logprobs")
    terms = {name: getattr(inputs, name) for name in columns}
    clip = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    return linear_policy_loss(inputs.hidden, inputs.weight, inputs.labels, **terms, **clip, **options)[0]


def eager(inputs: HeadInputs) -> Tensor:
    """Logits of all tokens; the loss is masked."""
    logprobs = _eager_logprobs(inputs.hidden, inputs.weight, inputs.labels)
    if inputs.case.mode == "scoring":
        return logprobs[inputs.loss_mask]
    return _masked_loss(logprobs, inputs)


def rows_selected(inputs: HeadInputs) -> Tensor:
    """Logits of the trained tokens."""
    rows = inputs.loss_mask.nonzero()[:, 0]
    logprobs = _eager_logprobs(inputs.hidden[rows], inputs.weight, inputs.labels[rows])
    if inputs.case.mode == "scoring":
        return logprobs
    losses = _surrogate(logprobs, inputs.old_logprobs[rows], inputs.advantages[rows])
    return (losses * inputs.token_weights[rows]).sum()


def trl_selective(inputs: HeadInputs) -> Tensor:
    """Logits of all tokens through TRL's selective_log_softmax."""
    utils = _import("trl.trainer.utils")
    logits = inputs.per_sequence(inputs.hidden) @ inputs.weight.T
    logprobs = utils.selective_log_softmax(logits, inputs.per_sequence(inputs.labels)).flatten()
    if inputs.case.mode == "scoring":
        return logprobs[inputs.loss_mask]
    return _masked_loss(logprobs, inputs)


def trl_fused_head(inputs: HeadInputs) -> Tensor:
    """The tiled head of TRL's trainers. As there, rows are selected on a GPU only."""
    utils = _import("trl.trainer.utils")
    mask = inputs.loss_mask if inputs.hidden.is_cuda else torch.ones_like(inputs.loss_mask)
    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    scored = utils._ChunkedLogProbFunction.apply(
        inputs.hidden[mask], inputs.weight, None, inputs.labels[mask], 1.0, chunk, None, 1.0, ("log_probs",)
    )[0]
    logprobs = scored.new_zeros(mask.shape).masked_scatter(mask, scored)
    if inputs.case.mode == "scoring":
        return logprobs[inputs.loss_mask]
    return _masked_loss(logprobs, inputs)


def liger_grpo(inputs: HeadInputs) -> Tensor:
    """Liger's fused linear GRPO with its own defaults (loss compiled, one sequence at a time), no KL."""
    grpo = _import("liger_kernel.chunked_loss.grpo_loss")
    hidden, labels = inputs.per_sequence(inputs.hidden), inputs.per_sequence(inputs.labels)
    if inputs.case.mode == "scoring":
        logprobs = grpo.LigerFusedLinearGRPOFunction.chunk_forward(hidden, inputs.weight, labels)
        return logprobs.flatten()[inputs.loss_mask]
    head = grpo.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH)
    mask, old = inputs.per_sequence(inputs.loss_mask).float(), inputs.per_sequence(inputs.old_logprobs)
    return head(hidden, inputs.weight, labels, mask, inputs.sequence_advantages, old_per_token_logps=old)[0]


def liger_flce(inputs: HeadInputs) -> Tensor:
    flce = _import("liger_kernel.transformers.fused_linear_cross_entropy")
    if not inputs.hidden.is_cuda:
        raise CannotRun("its kernel is Triton: needs a GPU")
    head = flce.LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    return head(inputs.weight, inputs.hidden, _visible_labels(inputs))


def cce(inputs: HeadInputs) -> Tensor:
    package = _import("cut_cross_entropy")
    if not inputs.hidden.is_cuda:
        raise CannotRun("its kernels are Triton: needs a GPU")
    return package.linear_cross_entropy(inputs.hidden, inputs.weight, _visible_labels(inputs), ignore_index=IGNORED)


def cce_torch_compile(inputs: HeadInputs) -> Tensor:
    """cut-cross-entropy without its kernel: rows selected, then a compiled head."""
    package = _import("cut_cross_entropy")
    options = {"ignore_index": IGNORED, "impl": "torch_compile"}
    return package.linear_cross_entropy(inputs.hidden, inputs.weight, _visible_labels(inputs), **options)


def _cross_entropy(inputs: HeadInputs) -> Tensor:
    rows = inputs.loss_mask.nonzero()[:, 0]
    return -_eager_logprobs(inputs.hidden[rows], inputs.weight, inputs.labels[rows]).mean()


PROVIDERS: dict[str, Callable[[HeadInputs], Tensor]] = {
    provider.__name__: provider
    for provider in (
        ours,
        ours_main_grad,
        eager,
        rows_selected,
        trl_selective,
        trl_fused_head,
        liger_grpo,
        liger_flce,
        cce,
        cce_torch_compile,
    )
}


def run_provider(name: str, inputs: HeadInputs) -> tuple[Tensor, ...]:
    """One step: (loss, grad_hidden, grad_weight), or (logprobs,) in scoring mode. Raises CannotRun with the reason."""
    if inputs.case.mode == "scoring" and name not in SCORING:
        raise CannotRun("has no scoring")
    inputs.clear_gradients()
    if inputs.case.mode == "scoring":
        with torch.no_grad():
            return (PROVIDERS[name](inputs),)
    return _differentiated(PROVIDERS[name](inputs), inputs)


def run_reference(name: str, inputs: HeadInputs) -> tuple[Tensor, ...]:
    """What run_provider(name, inputs) should return, in plain torch."""
    if name in CROSS_ENTROPY:
        inputs.clear_gradients()
        return _differentiated(_cross_entropy(inputs), inputs)
    return run_provider("rows_selected", inputs)


def versions() -> str:
    """Such as "torch 2.13.0, trl 1.16.0, ...": what is installed of PACKAGES."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def first_line(error: BaseException) -> str:
    """Of its message, with the class where the message alone would not tell."""
    text = (str(error).strip().splitlines() or [""])[0][:160]
    return text if isinstance(error, CannotRun) else f"{type(error).__name__}: {text}"


def _import(name: str) -> ModuleType:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        missing = "is not installed" if missing == package else f"needs {missing}, which is not installed"
        raise CannotRun(f"{package} {missing}") from error


def _differentiated(loss: Tensor, inputs: HeadInputs) -> tuple[Tensor, ...]:
    loss.backward()
    assert inputs.hidden.grad is not None
    weight_grad = inputs.main_grad if inputs.weight.grad is None else inputs.weight.grad
    assert weight_grad is not None
    return loss.detach(), inputs.hidden.grad, weight_grad


def _eager_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return torch.log_softmax(logits, dim=-1).gather(1, labels[:, None])[:, 0]


def _surrogate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH))


def _masked_loss(logprobs: Tensor, inputs: HeadInputs) -> Tensor:
    losses = _surrogate(logprobs, inputs.old_logprobs, inputs.advantages)
    return (losses * inputs.token_weights * inputs.loss_mask).sum()


def _visible_labels(inputs: HeadInputs) -> Tensor:
    return inputs.labels.masked_fill(~inputs.loss_mask, IGNORED)
