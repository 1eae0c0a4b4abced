"""ops.weight_delta: every build of the C++ code and the torch formulas, against plain indexing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_parts import require
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import cpu_rows, weight_delta, weight_delta_native
from swe_rl.ops.weight_delta import Delta

BUILDS = ("default", "v3", "v4")
SIZES = (1, 31, 32, 33, 255, 256, 257, 1000, 4099)  # around a step of 32, a block of 256
SHARES = (0.0, 0.02, 0.5, 1.0)
KEY, SPREAD, MASK = 0x9E3779B97F4A7C15, 0x0001000100010001, (1 << 64) - 1


@pytest.fixture(params=("reference", *BUILDS))
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An `impl` to ask for, with one build behind "cpu"."""
    if request.param == "reference":
        yield "reference"
        return
    if request.param not in (*cpu_rows.LEVELS.get(torch.backends.cpu.get_cpu_capability(), ()), "default"):
        pytest.skip(f"this machine cannot run {request.param}")
    path = weight_delta_native.LIBRARIES / f"libweight_delta-{request.param}.so"
    require(path.exists(), path.name)
    monkeypatch.setattr(weight_delta_native, "library_path", lambda device: path)
    weight_delta_native.library.cache_clear()
    yield "cpu"
    weight_delta_native.library.cache_clear()


def versions(size: int, share: float, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(old, new) of bf16 numbers with a few special values among them."""
    generator = torch.Generator().manual_seed(1000 * size + seed)
    old, other = (torch.randn(size, generator=generator).bfloat16() for _ in range(2))
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf")]).bfloat16()
    other[::7] = special[torch.arange(len(other[::7])) % 4]
    return old, torch.where(torch.rand(size, generator=generator) < share, other, old)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.int16)


def plain_checksum(values: Tensor, first: int = 0) -> int:
    """The formula in Python's own integers."""
    total = 0
    for index, value in enumerate(bits(values).tolist()):
        mixed = ((first + index + 1) * KEY & MASK) ^ ((value & 0xFFFF) * SPREAD & MASK)
        total += (mixed & 0xFFFFFFFF) * (mixed >> 32)
    return total & MASK


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("size", SIZES)
def test_a_delta_is_what_differs_and_makes_the_old_the_new(impl: str, size: int, share: float) -> None:
    old, new = versions(size, share)
    where = (bits(old) != bits(new)).nonzero()[:, 0]
    delta = weight_delta.compare(old, new, impl=impl)
    assert torch.equal(weight_delta.positions(delta), where)
    assert torch.equal(bits(delta.values), bits(new)[where])
    assert delta.counts.tolist() == torch.bincount(where // 256, minlength=-(-size // 256)).tolist()
    assert (delta.num_changed, delta.num_bytes) == (len(where), 2 * -(-size // 256) + 3 * len(where))
    target = old.clone()
    weight_delta.apply(target, delta, impl=impl)
    assert torch.equal(bits(target), bits(new))
    again = weight_delta.compare(old, new, update=True, impl=impl)
    assert torch.equal(bits(old), bits(new))
    assert torch.equal(bits(again.values), bits(delta.values))
    assert weight_delta.compare(old, new, impl=impl).num_changed == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("first", [0, 5, 1 << 40])
def test_checksums_are_the_formula_and_add_up(impl: str, size: int, first: int) -> None:
    _, values = versions(size, 1.0)
    whole = weight_delta.checksum(values, first=first, impl=impl)
    assert whole == plain_checksum(values, first)
    cut = size // 3
    parts = [weight_delta.checksum(values[:cut], first=first, impl=impl)]
    parts.append(weight_delta.checksum(values[cut:], first=first + cut, impl=impl))
    assert sum(parts) % weight_delta.MODULUS == whole


def test_a_wide_dtype_counts_as_two_elements_of_two_bytes(impl: str) -> None:
    values = torch.randn(3, 11)
    assert weight_delta.checksum(values, first=2, impl=impl) == plain_checksum(values, 2)


def test_checksums_see_one_bit_a_swap_and_a_shift() -> None:
    _, values = versions(999, 1.0)
    right = weight_delta.checksum(values)
    for index in (0, 500, 998):
        for bit in range(16):
            wrong = values.clone()
            bits(wrong)[index] ^= 1 << bit if bit < 15 else -(1 << 15)
            assert weight_delta.checksum(wrong) != right
    for wrong in (values.roll(1), torch.cat([values[1:2], values[:1], values[2:]]), values.flip(0)):
        assert weight_delta.checksum(wrong.contiguous()) != right
    flipped = values.clone()
    bits(flipped)[[3, 700]] ^= -(1 << 15)  # two signs: what a plain sum of weighted words would miss
    assert weight_delta.checksum(flipped) != right


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.floats(0, 1), st.integers(0, 99))
def test_the_builds_agree_bit_by_bit(size: int, share: float, seed: int) -> None:
    require(weight_delta_native.available("cpu")[0], "libweight_delta")
    old, new = versions(size, share, seed=seed)
    mine, theirs = (weight_delta.compare(old, new, impl=impl) for impl in ("cpu", "reference"))
    for name in ("counts", "offsets"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert torch.equal(bits(mine.values), bits(theirs.values))
    assert weight_delta.checksum(new, impl="cpu") == weight_delta.checksum(new, impl="reference")


def damaged(delta: Delta, **changes: Any) -> Delta:
    parts = {"size": delta.size, "counts": delta.counts, "offsets": delta.offsets, "values": delta.values}
    return Delta(**{**parts, **changes})


def test_a_delta_that_contradicts_itself_changes_nothing(impl: str) -> None:
    old, new = versions(300, 1.0)
    delta = weight_delta.compare(old, new, impl=impl)
    counts = delta.counts.clone()
    offsets = delta.offsets.clone()
    counts[0], counts[1] = counts[0] - 1, counts[1] + 1  # then an offset of the second block lies behind the end
    offsets[-1] = 255
    for wrong in (
        damaged(delta, counts=torch.tensor([-1, 1], dtype=torch.int16)),
        damaged(delta, counts=counts + 300),
        damaged(delta, counts=counts),
        damaged(delta, offsets=offsets),
    ):
        target = old.clone()
        with pytest.raises(ConfigError, match="damaged"):
            weight_delta.apply(target, wrong, impl=impl)
        assert torch.equal(bits(target), bits(old))


@pytest.mark.parametrize("size", [256, 512, 300])
def test_the_check_before_a_gpu_applies_lets_whole_last_blocks_pass(size: int) -> None:
    old, new = versions(size, 1.0)
    delta = weight_delta.compare(old, new)
    ends = delta.counts.long().cumsum(0)
    assert weight_delta_native.fits(size, delta.counts, ends, delta.offsets)
    assert not weight_delta_native.fits(size - 45, delta.counts, ends, delta.offsets)
    assert not weight_delta_native.fits(size, delta.counts, ends, delta.offsets[1:])
    counts = delta.counts + torch.tensor([-1] + [0] * (len(delta.counts) - 1), dtype=torch.int16)
    assert not weight_delta_native.fits(size, counts, counts.long().cumsum(0), delta.offsets)


def test_wrong_arguments_are_named() -> None:
    old, new = versions(300, 0.1)
    delta = weight_delta.compare(old, new)
    for call, words in (
        (lambda: weight_delta.compare(old.float(), new.float()), "old must be contiguous and of a 16-bit dtype"),
        (lambda: weight_delta.compare(old, new[:299]), "compare two versions of one tensor"),
        (lambda: weight_delta.compare(old, new.half()), "compare two versions of one tensor"),
        (lambda: weight_delta.compare(old[::2], new[::2]), "old must be contiguous"),
        (lambda: weight_delta.apply(old[:299], delta), "target is"),
        (lambda: weight_delta.apply(old, damaged(delta, offsets=delta.offsets[1:])), "one offset for each value"),
        (lambda: weight_delta.apply(old, damaged(delta, offsets=delta.offsets.to("meta"))), "the delta on meta: move"),
        (lambda: weight_delta.apply(old, damaged(delta, counts=delta.counts.long())), "one offset for each value"),
        (lambda: weight_delta.checksum(old.double()), "of 2 or 4 bytes"),
        (lambda: weight_delta.compare(old, new, impl="fast"), "impl='fast' is unknown"),
        (lambda: weight_delta.compare(old, new, impl="cuda"), "cannot work on a tensor on cpu"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_nothing_at_all_has_an_empty_delta(impl: str) -> None:
    empty = torch.empty(0, dtype=torch.bfloat16)
    delta = weight_delta.compare(empty, empty, update=True, impl=impl)
    weight_delta.apply(empty, delta, impl=impl)
    assert (delta.num_changed, delta.num_bytes, weight_delta.checksum(empty, impl=impl)) == (0, 0, 0)


def test_without_the_compiled_code_auto_is_torch_and_cpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_delta_native, "library_path", lambda device: None)
    weight_delta._compiled.cache_clear()
    old, new = versions(300, 0.1)
    assert weight_delta.compare(old, new).num_changed == int((bits(old) != bits(new)).sum())
    with pytest.raises(ConfigError, match="reinstall swe-rl"):
        weight_delta.compare(old, new, impl="cpu")
    weight_delta._compiled.cache_clear()
