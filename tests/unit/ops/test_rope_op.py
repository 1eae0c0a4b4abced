"""ops.rope in plain torch: against complex rotation in fp64 and transformers' own function; gradients, bad input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from real_parts import require
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb
from triton_versions import INSTALLED, TRITONS, interpret, run_with_triton

from swe_rl.errors import ConfigError
from swe_rl.ops import rope, rope_ops

# (tokens, query heads, key heads, head dim, rotated dimensions)
SHAPES = ((1, 1, 1, 2, 2), (17, 4, 2, 24, 24), (129, 8, 1, 64, 64), (5, 3, 3, 128, 96), (1000, 2, 1, 16, 10))
CASES = "rope_interpreter_cases.py"


def make(tokens: int, q_heads: int, k_heads: int, dim: int, rotated: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    positions = torch.randint(0, 131072, (tokens,))
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    q, k = (torch.randn(tokens, heads, dim, dtype=dtype) for heads in (q_heads, k_heads))
    return q, k, positions, inv_freq


def turned(x: Tensor, positions: Tensor, inv_freq: Tensor, factor: float) -> Tensor:
    """x1 + i x2 times factor e^(i angle) in complex128; the angle is the fp32 product."""
    angles = (positions[:, None].float() * inv_freq).double()
    half, x = len(inv_freq), x.double()
    pairs = (
        torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(angles.new_tensor(factor), angles)[:, None]
    )
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: tuple[int, ...]) -> None:
    q, k, positions, inv_freq = make(*shape, torch.float32)
    for given, found in zip((q, k), rope(q, k, positions, inv_freq, attention_factor=1.1386), strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), turned(given, positions, inv_freq, 1.1386), rtol=0, atol=2e-6)


@pytest.mark.parametrize("position", [0, 1, 32767, 32768, 131071, 1048575])
def test_far_positions_are_the_formula_within_what_an_fp32_angle_can_say(position: int) -> None:
    """A pair (1, 0) becomes (cos, sin)."""
    dimensions = torch.arange(0, 128, 2)
    inv_freq = 1.0 / 1e6 ** (dimensions.float() / 128)
    ones = torch.cat([torch.ones(1, 1, 64), torch.zeros(1, 1, 64)], dim=-1)
    found = rope(ones, ones, torch.tensor([position]), inv_freq)[0][0, 0].double()
    rounded = (position * inv_freq).double()
    torch.testing.assert_close(found, torch.cat([rounded.cos(), rounded.sin()]), rtol=0, atol=2e-7)
    angles = position * 1e6 ** (-dimensions.double() / 128)
    assert ((found - torch.cat([angles.cos(), angles.sin()])).abs() <= angles.repeat(2) * 2.0**-22 + 2e-7).all()


def test_positions_that_cannot_be_checked_become_nan() -> None:
    q, k, _, inv_freq = make(3, 2, 1, 8, 8, torch.float32)
    positions = torch.tensor([7, 1 << 20, (1 << 20) - 1])
    found = rope_ops.turn(q, k, positions, inv_freq, 1.0, False, "reference")[0]
    assert found.isnan().any(dim=2).any(dim=1).tolist() == [False, True, False]
    wide = rope(q.double(), k.double(), positions, inv_freq.double())[0]
    assert wide.isfinite().all()


def test_it_is_the_function_of_transformers() -> None:
    q, k, positions, inv_freq = make(17, 4, 2, 24, 24, torch.float32)
    angles = positions[:, None].float() * inv_freq
    cos, sin = (torch.cat([t, t], dim=-1)[None] for t in (angles.cos() * 1.25, angles.sin() * 1.25))
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for a, b in zip(rope(q, k, positions, inv_freq, attention_factor=1.25), theirs, strict=True):
        assert torch.equal(a, b[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_rounded_once(dtype: torch.dtype) -> None:
    q, k, positions, inv_freq = make(33, 2, 1, 32, 32, dtype)
    for given, found in zip((q, k), rope(q, k, positions, inv_freq), strict=True):
        assert found.dtype == dtype
        exact = rope_ops.reference(given.float(), given.float(), positions, inv_freq)[0]
        assert torch.equal(found, exact.to(dtype))


@pytest.mark.parametrize("rotated", [6, 4])
def test_gradients_of_first_and_second_order(rotated: int) -> None:
    q, k, positions, _ = make(3, 2, 1, 6, rotated, torch.float64)
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)

    def apply(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, positions, inv_freq, attention_factor=1.2)

    inputs = (q.requires_grad_(), k.requires_grad_())
    assert torch.autograd.gradcheck(apply, inputs)
    assert torch.autograd.gradgradcheck(apply, inputs)


def test_views_of_a_fused_projection() -> None:
    q, k, positions, inv_freq = make(9, 4, 2, 8, 8, torch.float32)
    fused = torch.cat([q, k], dim=1)
    found = rope(fused[:, :4], fused[:, 4:], positions, inv_freq)
    for a, b in zip(found, rope(q, k, positions, inv_freq), strict=True):
        assert torch.equal(a, b)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    q, k, positions, inv_freq = make(50, 4, 2, 8, 8, torch.float32)
    order = torch.randperm(50)
    whole = rope(q, k, positions, inv_freq)
    mixed = rope(q[order], k[order], positions[order].int(), inv_freq)
    for a, b in zip(whole, mixed, strict=True):
        assert torch.equal(a[order], b)


def test_no_tokens() -> None:
    q, k, positions, inv_freq = make(1, 2, 1, 4, 4, torch.float32)
    out = rope(q[:0], k[:0], positions[:0], inv_freq)
    assert [tuple(x.shape) for x in out] == [(0, 2, 4), (0, 1, 4)]


def test_the_operator_keeps_its_promises_to_torch() -> None:
    q, k, positions, inv_freq = make(5, 2, 1, 8, 6, torch.float32)
    arguments = (q.requires_grad_(), k.requires_grad_(), positions, inv_freq, 1.1, False, "reference")
    torch.library.opcheck(rope_ops.turn, arguments)


def bad(**changes: Any) -> dict[str, Any]:
    names = ("q", "k", "position_ids", "inv_freq")
    return {**dict(zip(names, make(5, 2, 1, 8, 8, torch.float32), strict=True)), **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_ids": torch.arange(4)}, r"position_ids has shape \[4\], q has 5 tokens"),
        ({"position_ids": torch.arange(5).float()}, "position_ids has dtype torch.float32: use int64 or int32"),
        ({"position_ids": torch.tensor([3, 0, -1, 0, 0])}, "position_ids has -1: positions begin at 0"),
        ({"position_ids": torch.arange(5) + (1 << 20) - 4}, r"position_ids has 1048576: an fp32 angle of 2\^20 rad"),
        ({"q": torch.zeros(1, 5, 2, 8)}, r"q has shape \[1, 5, 2, 8\]: it must be \[tokens, heads, head_dim\]"),
        ({"k": torch.zeros(5, 1, 8).int()}, "k has dtype torch.int32"),
        ({"k": torch.zeros(5, 1, 8).half()}, "q is torch.float32 on cpu, k is torch.float16 on cpu"),
        ({"k": torch.zeros(5, 1, 6)}, r"q is \[5, 2, 8\] and k \[5, 1, 6\]: tokens and head_dim must agree"),
        ({"inv_freq": torch.ones(5)}, r"inv_freq has shape \[5\]: it needs one entry per pair of the 8 dimensions"),
        ({"inv_freq": torch.ones(4).bfloat16()}, "inv_freq has dtype torch.bfloat16: keep it in float32"),
        ({"inv_freq": torch.ones(4, device="meta")}, "inv_freq on meta, q on cpu"),
        ({"attention_factor": 0.0}, "attention_factor=0.0 must be positive"),
    ],
)
def test_bad_input_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        rope(**bad(**changes))
    assert "\n" not in str(caught.value)


def test_bad_impl_is_one_line() -> None:
    with pytest.raises(ConfigError, match="impl='cpu' of rope is unknown: use one of auto, reference, triton"):
        rope(**bad(impl="cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="impl='triton' of rope cannot run here: "):
            rope(**bad(impl="triton"))


@pytest.mark.slow
@pytest.mark.parametrize("triton", TRITONS)
def test_the_kernel_in_the_interpreter(triton: str) -> None:
    interpret(CASES, triton)


def gates(report: dict[str, Any]) -> list[str]:
    """What speaks against a compiled kernel: it only moves bytes, so nothing may be spilled and little staged."""
    found = {
        f"spills {report['spill_bytes']} bytes": report["spill_bytes"] > 0,
        f"needs {report['registers']} registers": report["registers"] > 128,
        f"has {report['fp64']} fp64 instructions": report["fp64"] > 0,
        f"needs {report['shared_bytes']} bytes of shared memory": report["shared_bytes"] > 4096,
    }
    return [f"{report['variant']} {fault}" for fault, is_so in found.items() if is_so]


@pytest.mark.slow
@pytest.mark.parametrize("triton", TRITONS)
def test_the_kernel_compiles_for_hopper(triton: str, tmp_path: Path) -> None:
    require(triton != INSTALLED or importlib.util.find_spec("triton") is not None, "package triton")
    command = ["benchmarks/aot_rope.py", "--arch", "90", "--json"]
    done = run_with_triton(triton, command, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 9
    assert not [fault for report in reports for fault in gates(report)]
