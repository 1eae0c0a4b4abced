"""linear_policy_loss against the formulas in fp64: loss, statistics and both gradients."""

from __future__ import annotations

import math
from typing import Any

import head_formulas as formulas
import pytest
import torch
from head_formulas import Answer, Head, relative
from torch import Tensor

from swe_rl import ops
from swe_rl.ops import cpu_rows

DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5)]
SIZES = [
    (37, 7, 5),
    (130, 1000, 16),
    (35, 4099, 24),
    pytest.param(19, 49152, 8, marks=pytest.mark.slow),
    pytest.param(19, 151936, 8, marks=pytest.mark.slow),
]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one shorter."""
    monkeypatch.setattr(cpu_rows, "MIN_ROWS", 4)
    monkeypatch.setattr(cpu_rows, "CHUNK_BYTES", 0)
    monkeypatch.setattr(cpu_rows, "CACHE_BYTES", 0)


def run(head: Head, columns: dict[str, Tensor], rules: dict[str, Any], **options: Any) -> Answer:
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    loss, stats = ops.linear_policy_loss(hidden, weight, head.labels, **columns, **rules, **options)
    loss.backward()
    assert not any(value.requires_grad for value in stats.values())
    return Answer(loss.detach(), stats["logprobs"], stats["entropy"], stats["ratio"], hidden.grad, weight.grad)


def assert_agree(got: Answer, want: Answer, bound: float) -> None:
    for name in Answer._fields:
        error = relative(getattr(got, name), getattr(want, name))
        assert error <= bound, f"{name}: relative error {error:.1e}"


def chosen(columns: dict[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: columns[name] for name in ("advantages", "token_weights", "loss_mask", *names)}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("case", formulas.RULES)
def test_every_rule_is_its_formula(case: str, dtype: torch.dtype, bound: float) -> None:
    names, rules = formulas.RULES[case]
    head = formulas.make_head(61, 211, 12, dtype)
    scaling: dict[str, Any] = {"temperature": torch.linspace(0.6, 1.4, 61), "softcap": 9.0}
    columns = chosen(formulas.make_columns(head, fraction=0.6, **scaling), names)
    got, want = run(head, columns, rules, **scaling), formulas.answer(head, columns, rules, **scaling)
    assert got.loss.dtype == torch.promote_types(dtype, torch.float32)
    assert want.grad_weight.norm() > 1e-3
    assert_agree(got, want, bound)


@pytest.mark.parametrize(
    ("impl", "dtype", "bound"), [("reference", torch.float64, 1e-11), ("cpu", torch.float32, 1e-5)]
)
@pytest.mark.parametrize(("fraction", "rows_trained"), [(1.0, "all"), (0.0, "none"), (1e-9, "one")])
@pytest.mark.parametrize(("tokens", "vocab", "features"), SIZES)
def test_sizes_and_trained_fractions(
    tokens: int,
    vocab: int,
    features: int,
    fraction: float,
    rows_trained: str,
    impl: str,
    dtype: torch.dtype,
    bound: float,
) -> None:
    names, rules = formulas.RULES["all"]
    head = formulas.make_head(tokens, vocab, features, dtype)
    columns = chosen(formulas.make_columns(head, fraction=fraction, temperature=0.6), names)
    got = run(head, columns, rules, temperature=0.6, impl=impl)
    want = formulas.answer(head, columns, rules, temperature=0.6)
    assert len(got.logprobs) == {"all": tokens, "none": 0, "one": 1}[rows_trained]
    assert_agree(got, want, bound)
    assert not got.grad_hidden[~columns["loss_mask"]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_lose_nothing_but_the_cast_of_the_gradient(dtype: torch.dtype) -> None:
    """Sums are fp32: against fp64 of the same rounded inputs; gradients are then rounded once, to half an ulp."""
    names, rules = formulas.RULES["all"]
    head = formulas.make_head(45, 307, 16, dtype)
    columns = chosen(formulas.make_columns(head, fraction=0.5), names)
    got, want = run(head, columns, rules), formulas.answer(head, columns, rules)
    for name in ("loss", "logprobs", "entropy", "ratio"):
        assert relative(getattr(got, name), getattr(want, name)) <= 1e-5
    for name in ("grad_hidden", "grad_weight"):
        assert getattr(got, name).dtype == dtype
        assert relative(getattr(got, name), getattr(want, name)) <= torch.finfo(dtype).eps
    buffer = torch.zeros(307, 16)
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    loss, _ = ops.linear_policy_loss(hidden, weight, head.labels, **columns, **rules, grad_weight_into=buffer)
    loss.backward()
    assert relative(buffer, want.grad_weight) <= 1e-5


def test_logits_far_below_zero() -> None:
    names, rules = formulas.RULES["all"]
    rules = {**rules, "z_loss_coeff": 1e-5}
    head = formulas.make_head(40, 1000, 8, torch.float32, offset=-120.0)
    assert (formulas.scaled_logits(head.hidden, head.weight) < -100).all()
    columns = chosen(formulas.make_columns(head, fraction=0.7), names)
    assert_agree(run(head, columns, rules), formulas.answer(head, columns, rules), 1e-5)


@pytest.mark.parametrize("vocab_size", [1, 64, 99, 100])
def test_padded_rows_of_the_weight_take_no_part(vocab_size: int) -> None:
    head = formulas.make_head(30, 100, 8, torch.float64)
    head = Head(head.hidden, head.weight, head.labels % vocab_size)
    head.weight[vocab_size:] = 50.0  # would win every row
    names, rules = formulas.RULES["all"]
    columns = chosen(formulas.make_columns(head, fraction=0.7, vocab_size=vocab_size), names)
    got = run(head, columns, rules, vocab_size=vocab_size)
    assert_agree(got, formulas.answer(head, columns, rules, vocab_size=vocab_size), 1e-11)
    assert not got.grad_weight[vocab_size:].any()


@pytest.mark.slow
def test_a_hundred_repeats_are_bitwise_equal() -> None:
    names, rules = formulas.RULES["all"]
    head = formulas.make_head(97, 4099, 24, torch.float32)
    columns = chosen(formulas.make_columns(head, fraction=0.5), names)
    first = run(head, columns, rules)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(head, columns, rules), first, strict=True))


def test_masked_slots_are_never_read() -> None:
    """NaN in every masked column and hidden row, labels outside the vocabulary, a temperature of 0."""
    names, rules = formulas.RULES["all"]
    head = formulas.make_head(40, 30, 5, torch.float32)
    temperature = torch.linspace(0.5, 1.5, 40)
    columns = chosen(formulas.make_columns(head, fraction=0.5, temperature=temperature), names)
    clean = run(head, columns, rules, temperature=temperature)
    masked = ~columns["loss_mask"]
    poisoned = {n: v if n == "loss_mask" else v.masked_fill(masked, math.nan) for n, v in columns.items()}
    bad_head = Head(
        head.hidden.masked_fill(masked[:, None], math.nan), head.weight, head.labels.masked_fill(masked, -100)
    )
    dirty = run(bad_head, poisoned, rules, temperature=temperature.masked_fill(masked, 0.0))
    assert all(torch.equal(a, b) for a, b in zip(dirty, clean, strict=True))


@pytest.mark.parametrize("where", ["hidden", "weight", "old_logprobs", "advantages"])
def test_nan_in_a_trained_row_is_seen(where: str) -> None:
    """A diverged model must not pass for a healthy one: one NaN row of the weight is enough to spoil every row."""
    head = formulas.make_head(12, 100, 5, torch.float32)
    columns = chosen(formulas.make_columns(head, fraction=1.0), ("old_logprobs",))
    {**head._asdict(), **columns}[where][3] = math.nan
    got = run(head, columns, {})
    assert got.loss.isnan()
    if where in ("hidden", "weight"):
        assert got.logprobs.isnan().sum() == (1 if where == "hidden" else 12)
        assert got.entropy.isnan().sum() == (1 if where == "hidden" else 12)


def test_ratio_with_the_own_logprobs_as_old_is_on_policy() -> None:
    """What scoring returns is what training sees: the ratio is 1 and the gradients agree."""
    head = formulas.make_head(50, 600, 9, torch.float32)
    columns = chosen(formulas.make_columns(head, fraction=0.5, temperature=0.7), ())
    old, _ = ops.linear_logprob(*head, temperature=0.7)
    ratio = run(head, {**columns, "old_logprobs": old}, {}, temperature=0.7)
    plain = run(head, columns, {"ratio_rule": "on_policy"}, temperature=0.7)
    torch.testing.assert_close(ratio.ratio, torch.ones(len(ratio.ratio)), rtol=0, atol=5e-6)
    assert (plain.ratio == 1).all()
    assert_agree(ratio, plain, 1e-5)


def test_clipped_flags_are_the_tokens_whose_gradient_is_gone() -> None:
    head = formulas.make_head(60, 50, 6, torch.float64)
    columns = chosen(formulas.make_columns(head, fraction=1.0), ("old_logprobs",))
    hidden = head.hidden.clone().requires_grad_()
    loss, stats = ops.linear_policy_loss(hidden, head.weight, head.labels, **columns, dual_clip=1.4)
    loss.backward()
    gone = (hidden.grad == 0).all(dim=1)
    assert 0 < int(gone.sum()) < 60
    assert torch.equal(stats["clipped"], gone)
