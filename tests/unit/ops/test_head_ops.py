"""The operators of torch.library: what autograd, torch.compile and a second backward pass see of the head."""

from __future__ import annotations

from typing import Any

import head_formulas as formulas
import pytest
import torch
from head_formulas import relative
from torch import Tensor

from swe_rl import ops
from swe_rl.ops import head_ops
from swe_rl.ops.head_spec import decode_spec, encode_spec

ROWS, VOCAB, FEATURES = 9, 23, 5


@pytest.fixture
def head() -> formulas.Head:
    made = formulas.make_head(ROWS, VOCAB, FEATURES, torch.float32)
    return formulas.Head(made.hidden.requires_grad_(), made.weight.requires_grad_(), made.labels)


@pytest.fixture
def columns(head: formulas.Head) -> dict[str, Tensor]:
    made = formulas.make_columns(formulas.Head(*(t.detach() for t in head)), fraction=0.6)
    return {name: made[name] for name in ("advantages", "token_weights", "loss_mask", "old_logprobs")}


def operator_arguments(head: formulas.Head) -> tuple[Tensor, Tensor, list[Tensor], str]:
    """(rows, labels, columns, spec) of a call with four trained rows."""
    rows = torch.tensor([0, 2, 3, 8])
    names = ("advantages", "token_weights", "inv_temperature")
    spec = encode_spec(impl="cpu", vocab_size=VOCAB, columns=names, rules={})
    return rows, head.labels[rows], [torch.rand(4) + 0.5 for _ in names], spec


@pytest.mark.parametrize(("need_hidden", "need_weight"), [(True, True), (True, False), (False, True)])
def test_opcheck_of_the_loss(head: formulas.Head, need_hidden: bool, need_weight: bool) -> None:
    hidden, weight = head.hidden.detach().requires_grad_(need_hidden), head.weight.detach().requires_grad_(need_weight)
    rows, labels, given, spec = operator_arguments(head)
    torch.library.opcheck(
        head_ops.head_policy_loss, (hidden, weight, rows, labels, given, spec, need_hidden, need_weight)
    )


def test_opcheck_of_the_loss_into_a_buffer(head: formulas.Head) -> None:
    rows, labels, given, spec = operator_arguments(head)
    hidden, weight = head.hidden.detach(), head.weight.detach()
    buffer = torch.zeros(VOCAB, FEATURES)
    torch.library.opcheck(head_ops.head_policy_loss_into, (hidden, weight, buffer, rows, labels, given, spec, True))


def test_opcheck_of_scoring(head: formulas.Head) -> None:
    spec = encode_spec(impl="cpu", vocab_size=VOCAB)
    inverse = torch.linspace(0.5, 2, ROWS)
    torch.library.opcheck(head_ops.head_logprob, (head.hidden, head.weight, head.labels, inverse, spec))
    slopes = torch.randn(ROWS, 5)
    arguments = (head.hidden.detach(), head.weight.detach(), head.labels, inverse, slopes, spec, True, True)
    torch.library.opcheck(head_ops.head_logprob_backward, arguments)


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_compiled_loss_is_the_eager_one(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        return ops.linear_policy_loss(hidden, weight, head.labels, **columns, temperature=0.8, entropy_coeff=0.1)[0]

    results = []
    for function in (loss_of, compiled(loss_of)):
        loss = function(head.hidden, head.weight)
        results.append((loss, *torch.autograd.grad(2 * loss, (head.hidden, head.weight))))
    assert all(torch.equal(eager, traced) for eager, traced in zip(*results, strict=True))


def test_compiled_loss_into_a_buffer(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    def loss_of(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        return ops.linear_policy_loss(hidden, weight, head.labels, **columns, grad_weight_into=buffer)[0]

    results = []
    for function in (loss_of, compiled(loss_of)):
        buffer = torch.ones(VOCAB, FEATURES)
        loss = function(head.hidden, head.weight, buffer)
        results.append((loss, buffer, *torch.autograd.grad(loss, head.hidden)))
    assert all(torch.equal(eager, traced) for eager, traced in zip(*results, strict=True))


def test_compiled_scoring_is_the_eager_one(head: formulas.Head) -> None:
    temperature = torch.linspace(0.5, 2, ROWS)

    def score(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.linear_logprob(hidden, weight, head.labels, temperature=temperature, softcap=5.0)

    results = []
    for function in (score, compiled(score)):
        logprobs, entropy = function(head.hidden, head.weight)
        total = (logprobs * temperature + entropy).sum()
        results.append((logprobs, entropy, *torch.autograd.grad(total, (head.hidden, head.weight))))
    assert all(torch.equal(eager, traced) for eager, traced in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_upstream_gradient_scales_both(dtype: torch.dtype, columns: dict[str, Tensor]) -> None:
    head = formulas.make_head(ROWS, VOCAB, FEATURES, dtype)
    grads = []
    for scale in (1.0, -4.0):
        hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
        loss, _ = ops.linear_policy_loss(hidden, weight, head.labels, **columns)
        (scale * loss).backward()
        grads.append((hidden.grad, weight.grad))
    assert all(torch.equal(-4 * one, scaled) for one, scaled in zip(*grads, strict=True))


def test_a_loss_scale_beyond_fp16_does_not_overflow(columns: dict[str, Tensor]) -> None:
    """65536, where gradient scalers start, is no fp16 number; the scaled gradient is."""
    head = formulas.make_head(ROWS, VOCAB, FEATURES, torch.float16)
    small = {**columns, "token_weights": columns["token_weights"] / 1024}
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    loss, _ = ops.linear_policy_loss(hidden, weight, head.labels, **small)
    (65536 * loss).backward()
    want = formulas.answer(head, small, {})
    assert relative(hidden.grad, 65536 * want.grad_hidden) < 2e-3
    assert relative(weight.grad, 65536 * want.grad_weight) < 2e-3


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_only_what_needs_a_gradient_gets_one(trained: str, head: formulas.Head, columns: dict[str, Tensor]) -> None:
    both = ops.linear_policy_loss(*head, **columns)[0]
    want = torch.autograd.grad(both, getattr(head, trained))[0]
    alone = head._replace(**{name: getattr(head, name).detach() for name in ("hidden", "weight") if name != trained})
    ops.linear_policy_loss(*alone, **columns)[0].backward()
    assert torch.equal(getattr(head, trained).grad, want)


def test_a_second_backward_pass_is_refused(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    """The buffer with the gradient was scaled in place: a second use of it would be wrong."""
    loss, _ = ops.linear_policy_loss(*head, **columns)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives_are_refused(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    frozen = head._replace(weight=head.weight.detach())
    loss, _ = ops.linear_policy_loss(*frozen, **columns)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, head.hidden, create_graph=True)
    logprobs, _ = ops.linear_logprob(*head)
    grad = torch.autograd.grad(logprobs.sum(), head.hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def test_the_gradient_is_added_to_the_buffer(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    plain = ops.linear_policy_loss(*head, **columns)[0]
    want_hidden, want_weight = torch.autograd.grad(plain, (head.hidden, head.weight))
    buffer = torch.full((VOCAB, FEATURES), 3.0)
    loss, _ = ops.linear_policy_loss(*head, **columns, grad_weight_into=buffer)
    assert torch.equal(loss, plain)
    loss.backward()
    assert head.weight.grad is None
    assert torch.equal(head.hidden.grad, want_hidden)
    torch.testing.assert_close(buffer - 3, want_weight, rtol=0, atol=1e-6)


def test_the_buffer_is_left_alone_without_a_gradient(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    buffer = torch.zeros(VOCAB, FEATURES)
    with torch.no_grad():
        ops.linear_policy_loss(*head, **columns, grad_weight_into=buffer)
    ops.linear_policy_loss(head.hidden, head.weight.detach(), head.labels, **columns, grad_weight_into=buffer)
    assert not buffer.any()


def test_a_buffer_takes_no_other_upstream_gradient(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    loss, _ = ops.linear_policy_loss(*head, **columns, grad_weight_into=torch.zeros(VOCAB, FEATURES))
    with pytest.raises(RuntimeError, match="fold every scale into token_weights"):
        (loss * 0.5).backward()


def test_a_buffer_takes_no_second_backward_pass(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    loss, _ = ops.linear_policy_loss(*head, **columns, grad_weight_into=torch.zeros(VOCAB, FEATURES))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiate the loss once"):
        loss.backward()


def test_inputs_and_columns_are_not_written(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    watched = {**head._asdict(), **columns}
    before = {name: value.detach().clone() for name, value in watched.items()}
    loss, _ = ops.linear_policy_loss(*head, **columns, entropy_coeff=0.1)
    (3 * loss).backward()
    ops.linear_logprob(*head)[0].sum().backward()
    assert all(torch.equal(watched[name], value) for name, value in before.items())


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(dtype: torch.dtype, impl: str, columns: dict[str, Tensor]) -> None:
    """Logits stay fp32: in bf16 they are wrong by 0.07."""
    head = formulas.make_head(ROWS, 300, 32, dtype)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
            loss, stats = ops.linear_policy_loss(hidden, weight, head.labels, **columns, impl=impl)
            logprobs, entropy = ops.linear_logprob(*head, impl=impl)
        loss.backward()
        results.append((loss, stats["logprobs"], logprobs, entropy, hidden.grad, weight.grad))
    assert all(torch.equal(plain, cast) for plain, cast in zip(*results, strict=True))


def test_inference_mode(head: formulas.Head, columns: dict[str, Tensor]) -> None:
    want = ops.linear_policy_loss(*head, **columns)[0]
    with torch.inference_mode():
        inference = formulas.Head(*(t.detach().clone() for t in head))
        assert torch.equal(ops.linear_policy_loss(*inference, **columns)[0], want)


def test_a_spec_survives_its_text() -> None:
    spec = decode_spec(encode_spec(impl="cpu", vocab_size=7, columns=("a", "b"), rules={"clip_low": 0.1}, softcap=3))
    assert (spec.impl, spec.vocab_size, spec.columns, spec.rules) == ("cpu", 7, ("a", "b"), {"clip_low": 0.1})
