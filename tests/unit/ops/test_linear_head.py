"""linear_logprob against full log_softmax in fp64; what is never materialised; who computes."""

from __future__ import annotations

import logging
import math
from typing import Any

import head_formulas as formulas
import pytest
import torch
from head_formulas import Head, relative
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swe_rl import ops
from swe_rl.errors import ConfigError
from swe_rl.ops import chunked_head, cpu_rows, linear_head

SIZES = [
    (1, 7, 5),
    (129, 1000, 16),
    (33, 4099, 24),
    pytest.param(21, 49152, 8, marks=pytest.mark.slow),
    pytest.param(21, 151936, 8, marks=pytest.mark.slow),
]
DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of logits in training, four rows of 256 columns in scoring."""
    monkeypatch.setattr(cpu_rows, "MIN_ROWS", 4)
    monkeypatch.setattr(cpu_rows, "CHUNK_BYTES", 0)
    monkeypatch.setattr(cpu_rows, "CACHE_BYTES", 0)
    monkeypatch.setattr(cpu_rows, "SCORING_COLUMNS", 256)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("tokens", "vocab", "features"), SIZES)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_values_equal_full_log_softmax(
    tokens: int, vocab: int, features: int, dtype: torch.dtype, bound: float
) -> None:
    """Half precision inputs lose nothing either: products and sums are fp32."""
    head = formulas.make_head(tokens, vocab, features, dtype, spread=0.5)
    for temperature in (1.0, 0.6, torch.linspace(0.4, 1.7, tokens)):
        logprobs, entropy = ops.linear_logprob(*head, temperature=temperature)
        want = formulas.softmax_summary(formulas.scaled_logits(*head[:2], temperature=temperature), head.labels)
        assert logprobs.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert relative(logprobs, want[0]) <= bound
        assert relative(entropy, want[1]) <= bound


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("terms", ["logprob", "entropy", "both"])
@pytest.mark.parametrize(("dtype", "bound"), DTYPES[:2])
def test_gradients_equal_autograd_of_full_log_softmax(terms: str, dtype: torch.dtype, bound: float) -> None:
    head = formulas.make_head(37, 611, 6, dtype)
    scaling: dict[str, Any] = {"temperature": torch.linspace(0.5, 1.5, 37), "softcap": 12.0}
    weights = torch.randn(2, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def total(logprobs: Tensor, entropy: Tensor) -> Tensor:
        parts = {"logprob": (weights[0] * logprobs).sum(), "entropy": (weights[1] * entropy).sum()}
        return sum(parts.values()) if terms == "both" else parts[terms]

    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    total(*ops.linear_logprob(hidden, weight, head.labels, **scaling)).backward()
    wide_hidden, wide_weight = formulas.wide_leaves(head)
    total(
        *formulas.softmax_summary(formulas.scaled_logits(wide_hidden, wide_weight, **scaling), head.labels)[:2]
    ).backward()
    assert relative(hidden.grad, wide_hidden.grad) <= bound
    assert relative(weight.grad, wide_weight.grad) <= bound


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_gradcheck_by_finite_differences(impl: str) -> None:
    head = formulas.make_head(5, 9, 3, torch.float64)
    torch.autograd.gradcheck(
        lambda a, b: ops.linear_logprob(a, b, head.labels, temperature=0.8, softcap=3.0, impl=impl),
        (head.hidden.requires_grad_(), head.weight.requires_grad_()),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_a_common_offset_costs_four_ulp_of_the_largest_logit(offset: float, temperature: float) -> None:
    """The product rounds once per feature at the size of the offset, the softmax nothing more."""
    head = formulas.make_head(40, 1000, 3, torch.float32, offset=offset)
    logits = formulas.scaled_logits(*head[:2], temperature=temperature)
    want = formulas.softmax_summary(logits, head.labels)
    ulp = 2.0 ** (math.floor(math.log2(float(logits.abs().max()))) - 23)
    logprobs, entropy = ops.linear_logprob(*head, temperature=temperature)
    assert (logprobs <= 0).all()
    assert (entropy >= 0).all()
    assert (logprobs.double() - want[0]).abs().max() <= 4 * ulp
    assert (entropy.double() - want[1]).abs().max() <= 4 * ulp


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


@pytest.mark.usefixtures("small_chunks")
def test_logits_of_all_tokens_never_exist_at_once() -> None:
    """Neither in scoring (blocks of 4 x 256 logits), nor in its gradient or in training (4 rows)."""
    tokens, vocab = 300, 1000
    head = formulas.make_head(tokens, vocab, 4, torch.float32)
    with LargestTensor() as scoring:
        ops.linear_logprob(*head)
    assert scoring.numel <= max(tokens * 4 * 5, vocab * 4)  # statistics of four blocks; the weight itself
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    with LargestTensor() as gradient:
        logprobs, entropy = ops.linear_logprob(hidden, weight, head.labels)
        (logprobs.sum() + entropy.sum()).backward()
    columns = formulas.make_columns(head, fraction=1.0)
    with LargestTensor() as training:
        loss, _ = ops.linear_policy_loss(hidden, weight, head.labels, **columns, kl_coeff=0.1)
        loss.backward()
    assert gradient.numel <= max(tokens * 4 * 5, vocab * 4)
    assert training.numel == vocab * 4


def test_nothing_of_a_masked_row_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost is that of trained rows: those alone reach the first product."""
    seen: list[int] = []
    product = cpu_rows.matmul_logits
    monkeypatch.setattr(cpu_rows, "matmul_logits", lambda x, *rest: (seen.append(len(x)), product(x, *rest))[1])
    head = formulas.make_head(100, 50, 4, torch.float32)
    columns = formulas.make_columns(head, fraction=0.2)
    ops.linear_policy_loss(*head, **columns)
    assert sum(seen) == int(columns["loss_mask"].sum()) < 40


def test_trained_rows_may_be_given() -> None:
    head = formulas.make_head(20, 30, 4, torch.float32)
    columns = formulas.make_columns(head, fraction=0.5)
    loss, _ = ops.linear_policy_loss(*head, **columns)
    given, _ = ops.linear_policy_loss(*head, **columns, trained_rows=columns["loss_mask"].nonzero()[:, 0])
    assert torch.equal(given, loss)


@pytest.mark.parametrize(("impl", "words"), [("magic", "is unknown"), ("triton", "of linear_logprob cannot run here")])
def test_bad_impl_is_a_configuration_error(impl: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ops.linear_logprob(*formulas.make_head(3, 5, 2, torch.float64), impl=impl)


def test_the_reference_has_no_buffer_for_the_gradient() -> None:
    head = formulas.make_head(3, 5, 2, torch.float32)
    columns = formulas.make_columns(head, fraction=1.0)
    with pytest.raises(ConfigError, match="no grad_weight_into"):
        ops.linear_policy_loss(*head, **columns, grad_weight_into=torch.zeros(5, 2), impl="reference")


def test_without_kernels_auto_takes_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chunked_head, "usable", lambda *_, **__: (False, "no compiler"))
    linear_head._log_choice.cache_clear()
    head = formulas.make_head(3, 5, 2, torch.float32)
    with caplog.at_level(logging.INFO, logger="swe_rl.ops.linear_head"):
        logprobs, _ = ops.linear_logprob(*head)
    assert relative(logprobs, formulas.softmax_summary(formulas.scaled_logits(*head[:2]), head.labels)[0]) <= 1e-5
    assert [r.getMessage() for r in caplog.records] == [
        "linear_logprob: impl=reference (cpu cannot run here: no compiler)"
    ]
    with pytest.raises(ConfigError, match="cannot run here: no compiler"):
        ops.linear_logprob(*head, impl="cpu")
    linear_head._log_choice.cache_clear()


def test_the_chosen_implementation_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    linear_head._log_choice.cache_clear()
    head = Head(*formulas.make_head(3, 5, 2, torch.float32))
    with caplog.at_level(logging.INFO, logger="swe_rl.ops.linear_head"):
        for _ in range(3):
            ops.linear_logprob(*head)
    assert [r.getMessage() for r in caplog.records] == ["linear_logprob: impl=cpu (made for cpu)"]
