"""Documents and forests as calls of a kernel for packed sequences; which kernel the cost model takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import (
    PADDED,
    check,
    check_padding,
    crossing,
    exact,
    make,
    packed,
    padded,
    poisoned,
    random_forest,
)
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import attention_cost, attention_flash, attention_levels, attention_routes
from swe_rl.ops.attention_cost import ASSUMED_TFLOPS, Shape, cheapest, visible_pairs
from swe_rl.ops.attention_facts import MaskFacts
from swe_rl.ops.attention_levels import Segments, levels
from swe_rl.ops.attention_mask import dense_mask, runs

CPU = torch.device("cpu")
H100 = Shape(tokens=131072, heads=32, head_dim=128)


class PlainSegments:
    """A kernel for packed sequences in plain torch; counts its calls."""

    name = "plain"

    def __init__(self) -> None:
        self.calls: list[bool] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        self.calls.append(segments.causal)
        scores = self._scores(q, k, segments, scale)
        lse = scores.logsumexp(dim=2)
        shared = q.shape[1] // v.shape[1]
        out = torch.einsum("hrk,khd->rhd", (scores - lse[..., None]).exp(), v.repeat_interleave(shared, dim=1))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        shared = q.shape[1] // k.shape[1]
        p = (self._scores(q, k, segments, scale) - lse[..., None]).exp()
        dp = torch.einsum("rhd,khd->hrk", grad, v.repeat_interleave(shared, dim=1))
        ds = scale * p * (dp - (grad * out).sum(dim=2).T[..., None])
        dq = torch.einsum("hrk,khd->rhd", ds, k.repeat_interleave(shared, dim=1))
        dk, dv = torch.einsum("hrk,rhd->khd", ds, q), torch.einsum("hrk,rhd->khd", p, grad)
        return dq, *(t.unflatten(1, (-1, shared)).sum(dim=2) for t in (dk, dv))  # type: ignore[return-value]

    def _scores(self, q: Tensor, k: Tensor, segments: Segments, scale: float) -> Tensor:
        rows, keys = (
            torch.bucketize(torch.arange(int(starts[-1])), starts, right=True) for starts in (
                segments.row_starts, segments.key_starts,
            )
        )  # fmt: skip
        visible = rows[:, None] == keys[None, :]
        if segments.causal:
            visible = visible.tril()
        scores = scale * torch.einsum("rhd,khd->hrk", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
        return scores.masked_fill(~visible, -torch.inf)


def by_levels(tensors: tuple[Tensor, ...], kv_end: Tensor, kernel: PlainSegments) -> list[Tensor]:
    q, k, v, grad = tensors
    calls = levels(runs(kv_end), CPU)
    assert calls is not None
    scale = q.shape[2] ** -0.5
    out, lse = attention_levels.forward(q, k, v, calls, scale, kernel)
    return [out, lse, *attention_levels.backward(grad, q, k, v, out, lse, calls, scale, kernel)]


@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("seed", range(0, 200, 13))
def test_forests(seed: int, shared: int) -> None:
    kv_end, _ = random_forest(40 + seed, seed, padding=seed % 4)
    tensors = make(len(kv_end), 2 * shared, 2, 16)
    check(by_levels(tensors, kv_end, PlainSegments()), exact(tensors, kv_end))


@pytest.mark.parametrize("kind", [kind for kind in PADDED if kind != "crossing"])  # its runs do not nest
def test_padding_is_zero_whatever_it_holds(kind: str) -> None:
    kv_end, tensors = padded(kind), make(150, 4, 2, 16)
    dirty, blind, unseen = poisoned(tensors, kv_end)
    check_padding(by_levels(dirty, kv_end, PlainSegments()), exact(tensors, kv_end), blind, unseen)


def test_documents_are_one_call() -> None:
    for padding in (0, 4):
        kv_end = packed(30, 1, 50, padding=padding)
        tensors, kernel = make(len(kv_end), 4, 2, 16), PlainSegments()
        check(by_levels(tensors, kv_end, kernel), exact(tensors, kv_end))
        assert kernel.calls == [True]


def test_a_prompt_with_answers_is_two_calls() -> None:
    kv_end = torch.tensor([100] * 40 + [60] * 20 + [61] + [100] * 39, dtype=torch.int32)
    tensors, kernel = make(100, 4, 2, 16), PlainSegments()
    check(by_levels(tensors, kv_end, kernel), exact(tensors, kv_end))
    assert kernel.calls == [True, False]


def test_nothing_but_padding_is_no_call() -> None:
    tensors, kernel = make(3, 2, 1, 8), PlainSegments()
    out, lse, *grads = by_levels(tensors, packed(padding=3), kernel)
    assert not kernel.calls
    assert not any(t.any() for t in (out, *grads))
    assert (lse == -torch.inf).all()


def test_the_check_of_a_kernel_sees_what_is_wrong_with_it() -> None:
    fine = attention_flash.probe(PlainSegments(), CPU, torch.float32, 16)
    assert fine < 1e-5

    class LocalNormaliser(PlainSegments):
        def backward(self, grad, q, k, v, out, lse, segments, scale):  # type: ignore[no-untyped-def]
            out, lse = self.forward(q, k, v, segments, scale)
            return super().backward(grad, q, k, v, out, lse, segments, scale)

    class BottomRight(PlainSegments):
        def forward(self, q, k, v, segments, scale):  # type: ignore[no-untyped-def]
            out, lse = super().forward(q, k, v, segments, scale)
            return out, lse / 0.6931

    for wrong in (LocalNormaliser(), BottomRight()):
        assert attention_flash.probe(wrong, CPU, torch.float32, 16) > attention_flash.PROBE_LIMIT


def test_kernels_that_are_not_there_say_so() -> None:
    for name in attention_flash.KERNELS:
        assert attention_flash.usable(name, CPU, torch.bfloat16, 128) == (False, f"{name} needs a GPU")
        fine, reason = attention_flash.usable(name, CPU, torch.float32, 128)
        assert not fine
        assert "takes bf16 and fp16" in reason


@pytest.mark.parametrize(
    ("error", "words"),
    [(AssertionError(), "AssertionError: "), (LookupError("no tile\nfor it"), "LookupError: no tile")],
)
def test_a_kernel_that_fails_in_its_own_way_is_left_out(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise error

    monkeypatch.setattr(attention_flash, "probe", fail)
    attention_flash.usable.cache_clear()
    found = attention_flash.usable("torch_flash", torch.device("cuda", 0), torch.bfloat16, 128)
    attention_flash.usable.cache_clear()
    assert found == (False, f"torch_flash failed its check: {words}")


@pytest.mark.parametrize("seed", range(0, 200, 17))
def test_visible_pairs_are_counted_exactly(seed: int) -> None:
    kv_end, visible = random_forest(30 + seed, seed, padding=seed % 4)
    assert visible_pairs(runs(kv_end)) == visible.sum()
    crossed = crossing(50, seed)
    assert visible_pairs(runs(crossed)) == dense_mask(crossed).sum()


def chosen(kv_end: Tensor, *names: str, major: int = 9, shape: Shape = H100) -> str:
    found = runs(kv_end)
    calls = levels(found, CPU)
    return cheapest(found, None if calls is None else len(calls), names, shape, major)[0]


def test_documents_go_to_the_fastest_that_is_there() -> None:
    document, short = packed(131072), packed(*[512] * 256)
    for kv_end in (document, short):
        assert chosen(kv_end, "flash3", "flash4", "flash2", "torch_flash", "triton") == "flash3"
        assert chosen(kv_end, "torch_flash") == "torch_flash"
    assert chosen(document, "flash2", "triton") == "triton"
    assert chosen(document, "flash4", "flash2", "triton", major=10) == "flash4"
    assert chosen(document, "flash2", "torch_flash", "triton", major=8) == "flash2"
    assert chosen(document) == ""


def test_shallow_forests_are_decomposed_and_bushy_ones_are_not() -> None:
    prompt, answer = 8192, 4096
    ends = [prompt + 16 * answer] * prompt
    for _ in range(16):
        ends += [len(ends) + answer] * answer
    shallow = torch.tensor(ends, dtype=torch.int32)
    everyone = ("flash3", "triton")
    assert chosen(shallow, *everyone, shape=Shape(len(shallow), 32, 128)) == "flash3"
    bush = torch.tensor([16384 - key // 4 for key in range(8192)] + list(range(8193, 16385)), dtype=torch.int32)
    assert levels(runs(bush), CPU) is not None
    assert chosen(bush, *everyone, shape=Shape(len(bush), 32, 128)) == "triton"
    crossed = crossing(300, 1)
    assert chosen(crossed, *everyone) == "triton"
    assert chosen(crossed, "flash3") == ""


def test_every_kernel_has_a_rate_where_it_can_run() -> None:
    assert set(ASSUMED_TFLOPS[9]) == {*attention_flash.KERNELS, "triton"}
    assert set(attention_cost.BYTES_PER_S) == set(ASSUMED_TFLOPS)
    for table in ASSUMED_TFLOPS.values():
        assert set(table) <= set(ASSUMED_TFLOPS[9])


def test_the_choice_says_why_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(300, 2, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(
        attention_routes, "usable_names", lambda *_, **__: (["flash3"], {"triton": "it is not installed"})
    )
    with pytest.raises(
        ConfigError,
        match=r"kv_end does not describe a forest, which only impl='triton' takes; triton: it is not installed",
    ):
        attention_routes.choose("auto", q, MaskFacts(crossing(300, 1)), deterministic=True)
    assert attention_routes.choose("flash", q, MaskFacts(packed(300)), deterministic=True) == "flash3"


@pytest.mark.parametrize("name", ["flash3", "torch_flash"])
def test_each_route_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public function's own operators, with a plain kernel in the place of the one that needs a GPU."""
    monkeypatch.setitem(attention_flash.KERNELS, name, PlainSegments)
    monkeypatch.setattr(attention_routes, "usable_names", lambda *_, **__: ([name], {}))
    for seed in (1, 5, 9):
        kv_end, _ = random_forest(120, seed, padding=3)
        q, k, v, grad = make(120, 4, 2, 16)
        found = {}
        for impl in ("cpu", "auto", name):
            out, lse = attention_routes.forward(q, k, v, kv_end, 0.25, impl)
            found[impl] = [out, lse, *attention_routes.backward(grad, q, k, v, out, lse, kv_end, 0.25, impl)]
        check(found["auto"], found["cpu"])
        assert all(map(torch.equal, found["auto"], found[name]))


@pytest.fixture
def flags() -> Iterator[None]:
    """Restores torch's two flags of the process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, True), (True, False)])
@pytest.mark.usefixtures("flags")
def test_torchs_kernel_is_taken_where_its_order_is_fixed_or_does_not_matter(
    enabled: bool, warn_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads both flags of the process: with warn_only it adds up in any order. Nobody but the process sets them."""
    monkeypatch.setattr(attention_flash, "usable", lambda name, *_: (name == "torch_flash", f"{name} is not here"))
    monkeypatch.setitem(attention_flash.KERNELS, "torch_flash", PlainSegments)
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    kv_end, (q, k, v, grad) = packed(60, 40), make(100, 4, 2, 16)
    for deterministic in (True, False):
        impl = "flash" if deterministic else "flash:fast"
        names, reasons = attention_routes.usable_names(CPU, q.dtype, 16, deterministic=deterministic)
        if deterministic and (warn_only or not enabled):
            assert "torch_flash" not in names
            assert "unless the process calls torch.use_deterministic_algorithms(True)" in reasons["torch_flash"]
            with pytest.raises(ConfigError, match=r"impl='flash' .* torch_flash adds up in any order unless"):
                attention_routes.forward(q, k, v, kv_end, 0.25, impl)
            continue
        assert names == ["torch_flash"]
        out, lse = attention_routes.forward(q, k, v, kv_end, 0.25, impl)
        found = [out, lse, *attention_routes.backward(grad, q, k, v, out, lse, kv_end, 0.25, impl)]
        check(found, exact((q, k, v, grad), kv_end))
    assert torch.are_deterministic_algorithms_enabled() == enabled
    assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only


def test_only_torchs_kernel_needs_a_flag() -> None:
    assert [name for name in attention_flash.KERNELS if attention_flash.any_order(name)] == ["torch_flash"]
