"""The head against plain log_softmax over the whole [T, V] matrix, in fp64."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swe_rl import ops
from swe_rl.errors import ConfigError
from swe_rl.ops import cpu_rows, linear_head

SIZES = [(1, 7, 5), (129, 1000, 16), (33, 4099, 24)]


def make(tokens: int, vocab: int, hidden: int, dtype: torch.dtype, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype)
    w = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype)
    return x, w, torch.randint(vocab, (tokens,), generator=generator)


def naive(x: Tensor, w: Tensor, y: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    scale = temperature[:, None].double() if isinstance(temperature, Tensor) else temperature
    distribution = torch.distributions.Categorical(logits=x.double() @ w.double().T / scale, validate_args=False)
    return distribution.log_prob(y), distribution.entropy()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "MIN_ROWS", 4)
    monkeypatch.setattr(cpu_rows, "CHUNK_BYTES", 4 * 4 * 1000)
    monkeypatch.setattr(cpu_rows, "CACHE_BYTES", 0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("tokens", "vocab", "hidden"), SIZES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-5)])
def test_values_equal_full_log_softmax(tokens: int, vocab: int, hidden: int, dtype: torch.dtype, bound: float) -> None:
    """bf16 inputs lose nothing either: products and sums are fp32."""
    x, w, y = make(tokens, vocab, hidden, dtype)
    temperature = torch.linspace(0.4, 1.7, tokens)
    for value in (1.0, 0.6, temperature):
        logprobs, entropy = ops.linear_logprob(x, w, y, temperature=value)
        want_logprobs, want_entropy = naive(x, w, y, value)
        assert logprobs.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(logprobs.double(), want_logprobs, rtol=bound, atol=bound * 10)
        torch.testing.assert_close(entropy.double(), want_entropy, rtol=bound, atol=bound * 10)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_equal_autograd_of_full_log_softmax(with_entropy: bool) -> None:
    x, w, y = make(37, 211, 6, torch.float64)
    coeff, temperature = torch.randn(37, 2, dtype=torch.float64), torch.linspace(0.5, 1.5, 37, dtype=torch.float64)
    results = []
    for head in (naive, lambda a, b, c, t: ops.linear_logprob(a, b, c, temperature=t)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        logprobs, entropy = head(a, b, y, temperature)
        ((coeff[:, 0] * logprobs).sum() + ((coeff[:, 1] * entropy).sum() if with_entropy else 0.0)).backward()
        results.append((a.grad, b.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-11, atol=1e-12)


def test_gradcheck_by_finite_differences() -> None:
    x, w, y = make(5, 9, 3, torch.float64)
    torch.autograd.gradcheck(
        lambda a, b: ops.linear_logprob(a, b, y, temperature=0.8), (x.requires_grad_(), w.requires_grad_())
    )


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_a_large_common_offset_of_the_logits_changes_little(offset: float) -> None:
    """log_softmax subtracts the maximum first; no logprob becomes positive."""
    x, w, y = make(20, 50, 4, torch.float32)
    shifted_x = torch.cat([x, torch.full((20, 1), offset)], dim=1)
    shifted_w = torch.cat([w, torch.ones(50, 1)], dim=1)
    logprobs, entropy = ops.linear_logprob(shifted_x, shifted_w, y)
    want, _ = naive(x, w, y)
    assert (logprobs <= 0).all()
    assert (entropy >= 0).all()
    torch.testing.assert_close(logprobs.double(), want, rtol=0, atol=5e-3)  # fp32 logits near 1e4 have steps of 1e-3


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
    tokens, vocab, hidden = 300, 1000, 4
    x, w, y = make(tokens, vocab, hidden, torch.float32)
    x.requires_grad_(), w.requires_grad_()
    with LargestTensor() as seen:
        logprobs, entropy = ops.linear_logprob(x, w, y)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.numel == 4 * vocab


def loss_inputs(tokens: int, *, seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(tokens, dtype=torch.float64).uniform_(low, high, generator=generator)

    return {
        "advantages": uniform(-1, 1),
        "loss_mask": torch.rand(tokens, generator=generator) < 0.5,
        "token_weights": uniform(0, 1),
        "old_logprobs": uniform(-5, -1),
        "rollout_logprobs": uniform(-5, -1),
        "ref_logprobs": uniform(-5, -1),
        "sequence_coeff": uniform(0, 2),
    }


def test_policy_loss_is_the_written_formula() -> None:
    x, w, y = make(40, 30, 5, torch.float64)
    given = loss_inputs(40)
    loss, stats = ops.linear_policy_loss(
        x, w, y, **given, correction="tis", correction_cap=1.5, kl_coeff=0.2, entropy_coeff=0.05, temperature=0.9
    )
    logprobs, entropy = naive(x, w, y, 0.9)
    want, clipped = 0.0, []
    for t in given["loss_mask"].nonzero().flatten().tolist():
        value = {name: float(column[t]) for name, column in given.items()}
        ratio = math.exp(float(logprobs[t]) - value["old_logprobs"])
        gain = min(ratio * value["advantages"], min(max(ratio, 0.8), 1.28) * value["advantages"])
        clipped.append(gain != ratio * value["advantages"])
        weight = min(math.exp(value["old_logprobs"] - value["rollout_logprobs"]), 1.5) * value["sequence_coeff"]
        delta = value["ref_logprobs"] - float(logprobs[t])
        term = -gain * weight + 0.2 * (math.exp(delta) - delta - 1) - 0.05 * float(entropy[t])
        want += value["token_weights"] * term
    assert loss.item() == pytest.approx(want, rel=1e-12)
    assert stats["clipped"].tolist() == clipped
    assert any(clipped)
    torch.testing.assert_close(stats["logprobs"], logprobs[given["loss_mask"]])
    torch.testing.assert_close(stats["entropy"], entropy[given["loss_mask"]])
    assert not any(value.requires_grad for value in stats.values())


def test_masked_slots_are_never_read() -> None:
    x, w, y = make(40, 30, 5, torch.float64)
    given = loss_inputs(40)
    options: dict[str, Any] = {"correction": "tis", "kl_coeff": 0.1, "entropy_coeff": 0.1}
    results = []
    for poison in (False, True):
        bad = ~given["loss_mask"]
        columns = {n: v.masked_fill(bad, math.nan) if poison and n != "loss_mask" else v for n, v in given.items()}
        labels = y.masked_fill(bad, -100) if poison else y
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss, _ = ops.linear_policy_loss(a, b, labels, **columns, **options)
        loss.backward()
        results.append((loss.detach(), a.grad, b.grad))
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*results, strict=True))


def test_nothing_trained_gives_zero_loss_and_zero_gradient() -> None:
    x, w, y = make(6, 10, 3, torch.float32)
    x.requires_grad_(), w.requires_grad_()
    nothing = torch.zeros(6)
    loss, stats = ops.linear_policy_loss(x, w, y, advantages=nothing, loss_mask=nothing.bool(), token_weights=nothing)
    loss.backward()
    assert loss.item() == 0.0
    assert len(stats["logprobs"]) == 0
    assert not x.grad.any()
    assert not w.grad.any()


def test_ppo_without_old_logprobs_is_on_policy() -> None:
    x, w, y = make(12, 10, 3, torch.float64)
    given = {k: v for k, v in loss_inputs(12).items() if k in ("advantages", "loss_mask", "token_weights")}
    grads = []
    for rule in ("ppo", "on_policy"):
        a = x.clone().requires_grad_()
        loss, stats = ops.linear_policy_loss(a, w, y, **given, ratio_rule=rule)
        loss.backward()
        grads.append(a.grad)
        assert (stats["ratio"] == 1).all()
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-14, atol=0)
    a = x.clone().requires_grad_()
    logprobs, _ = naive(a, w, y)
    mask = given["loss_mask"]
    (-(given["advantages"] * given["token_weights"])[mask] * logprobs[mask]).sum().backward()
    torch.testing.assert_close(grads[0], a.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio_rule": "gspo"}, "ratio_rule='gspo'"),
        ({"correction": "mis"}, "correction='mis'"),
        ({"correction": "tis"}, "needs rollout_logprobs"),
        ({"kl_coeff": 0.1}, "needs ref_logprobs"),
        ({"ratio_rule": "on_policy", "old_logprobs": torch.zeros(3)}, "takes no old_logprobs"),
        ({"ratio_rule": "cross_entropy", "correction": "tis", "rollout_logprobs": torch.zeros(3)}, "no correction"),
    ],
)
def test_rules_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    x, w, y = make(3, 5, 2, torch.float32)
    ones = torch.ones(3)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        ops.linear_policy_loss(x, w, y, advantages=ones, loss_mask=ones.bool(), token_weights=ones, **options)


@pytest.mark.parametrize(("impl", "words"), [("magic", "is unknown"), ("triton", "no fp64")])
def test_bad_impl_is_a_configuration_error(impl: str, words: str) -> None:
    x, w, y = make(3, 5, 2, torch.float64)
    with pytest.raises(ConfigError, match=words):
        ops.linear_logprob(x, w, y, impl=impl)


def test_the_chosen_implementation_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    linear_head._log_choice.cache_clear()
    x, w, y = make(3, 5, 2, torch.float32)
    with caplog.at_level(logging.INFO, logger="swe_rl.ops.linear_head"):
        for _ in range(3):
            ops.linear_logprob(x, w, y)
    assert [r.getMessage() for r in caplog.records] == ["linear_logprob: impl=cpu (made for cpu)"]
