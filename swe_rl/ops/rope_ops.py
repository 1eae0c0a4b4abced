"""ops.rope: rotary embedding of packed queries and keys from position ids, YaRN's attention factor included.

    (x1, x2) -> (x1 c - x2 s, x2 c + x1 s),  c = a cos(p f), s = a sin(p f)

for dimensions i and i + R / 2 of every head, R = 2 len(inv_freq); dimensions from R on pass through. Angles are formed
in the dtype of inv_freq (fp32: as in the inference engines, so that both sides turn by the same rounded angle),
products in fp32 (fp64 for fp64 inputs) with one rounding at the end. No table of positions exists.

An fp32 angle of x radians is off by up to x 2^-22 (its frequency and the product are rounded), 0.03 at position
131,071; exact angles would not be those of the engines. From MAX_ANGLE on, where it is off by up to 0.25, fp32 angles
are refused: at once on a CPU, and where checking would mean waiting for a GPU such pairs become NaN.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import triton_rows

IMPLS = ("auto", "reference", "triton")
MAX_ANGLE = 1 << 20  # radians, in fp32; also how far the kernel's sine and cosine are exact
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
log = logging.getLogger(__name__)


def rope(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    *,
    attention_factor: float = 1.0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Turned copies of q [T, Hq, D] and k [T, Hkv, D], differentiable in both, contiguous, of the dtype of the inputs.

    position_ids [T] int64 or int32, at least 0 and of any order; inv_freq [R / 2] radians per position, fp32 (angles
    below MAX_ANGLE) or, for the reference, fp64; R at most D. attention_factor multiplies cos and sin. impl: auto takes
    the Triton kernel for CUDA tensors where it can run, else plain torch. q and k may be views of a fused projection
    (unit stride along D). Raises ConfigError for a bad `impl`, ValueError for tensors that do not fit.
    """
    check(q, k, position_ids, inv_freq, attention_factor=attention_factor)
    chosen = pick_impl(impl, q, inv_freq)
    found: tuple[Tensor, Tensor] = turn(q, k, position_ids, inv_freq, float(attention_factor), False, chosen)
    return found


def check(q: Tensor, k: Tensor, position_ids: Tensor, inv_freq: Tensor, *, attention_factor: float) -> None:
    """ValueError, one line that names the argument and the cure. Nothing here waits for a GPU."""
    for name, heads in (("q", q), ("k", k)):
        if heads.ndim != 3:
            raise ValueError(f"{name} has shape {list(heads.shape)}: it must be [tokens, heads, head_dim]")
        if heads.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {heads.dtype}: use bfloat16, float16, float32 or float64")
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError(f"q is {q.dtype} on {q.device}, k is {k.dtype} on {k.device}: they must agree")
    if len(q) != len(k) or q.shape[2] != k.shape[2]:
        raise ValueError(f"q is {list(q.shape)} and k {list(k.shape)}: tokens and head_dim must agree")
    if position_ids.shape != (len(q),):
        raise ValueError(f"position_ids has shape {list(position_ids.shape)}, q has {len(q)} tokens: they must agree")
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"position_ids has dtype {position_ids.dtype}: use int64 or int32")
    if inv_freq.ndim != 1 or not 0 < 2 * len(inv_freq) <= q.shape[2]:
        raise ValueError(
            f"inv_freq has shape {list(inv_freq.shape)}: it needs one entry per pair of the {q.shape[2]} dimensions of "
            "a head, or fewer"
        )
    if inv_freq.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"inv_freq has dtype {inv_freq.dtype}: keep it in float32, model.to(bfloat16) rounds it")
    if position_ids.device != q.device or inv_freq.device != q.device:
        raise ValueError(
            f"position_ids is on {position_ids.device}, inv_freq on {inv_freq.device}, q on {q.device}: move them"
        )
    if not attention_factor > 0:
        raise ValueError(f"attention_factor={attention_factor} must be positive: 1 without YaRN")
    if position_ids.device.type == "cpu" and len(position_ids) and not torch.compiler.is_compiling():
        _check_positions(position_ids, inv_freq)


def _check_positions(position_ids: Tensor, inv_freq: Tensor) -> None:
    lowest, highest = (int(end) for end in position_ids.aminmax())
    if lowest < 0:
        raise ValueError(f"position_ids has {lowest}: positions begin at 0")
    if inv_freq.dtype == torch.float32 and highest * float(inv_freq.max()) >= MAX_ANGLE:
        raise ValueError(
            f"position_ids has {highest}: an fp32 angle of 2^20 radians is off by up to 0.25, use shorter sequences"
        )


def pick_impl(impl: str, q: Tensor, inv_freq: Tensor) -> str:
    """ "reference" or "triton". Raises ConfigError for a name that is unknown or cannot run here."""
    if impl not in IMPLS:
        raise ConfigError(f"impl={impl!r} of rope is unknown: use one of {', '.join(IMPLS)}")
    if impl == "reference" or (impl == "auto" and q.device.type != "cuda"):
        _log_choice("reference", "asked for" if impl == "reference" else f"made for {q.device.type}")
        return "reference"
    usable, reason = triton_rows.available()
    if usable and (q.dtype == torch.float64 or inv_freq.dtype == torch.float64):
        usable, reason = False, "the kernel computes in fp32"
    if not usable and impl == "triton":
        raise ConfigError(f"impl='triton' of rope cannot run here: {reason}")
    chosen = "triton" if usable else "reference"
    _log_choice(chosen, "asked for" if impl == "triton" else reason)
    return chosen


@functools.cache
def _log_choice(impl: str, reason: str) -> None:
    """Once per choice: what runs, and why."""
    log.info("rope: impl=%s (%s)", impl, reason)


@torch.library.custom_op("swe_rl::rope", mutates_args=())
def turn(
    q: Tensor, k: Tensor, position_ids: Tensor, inv_freq: Tensor, attention_factor: float, inverse: bool, impl: str
) -> tuple[Tensor, Tensor]:
    """rope without checks. `inverse` turns back, still times attention_factor: the transpose, which is the gradient."""
    if impl == "triton":
        kernel = triton_rows.kernel_module("rope")
        found: tuple[Tensor, Tensor] = kernel.rope(
            q, k, position_ids, inv_freq, attention_factor=attention_factor, inverse=inverse
        )
        return found
    return reference(q, k, position_ids, inv_freq, attention_factor=attention_factor, inverse=inverse)


def reference(
    q: Tensor,
    k: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    *,
    attention_factor: float = 1.0,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Plain torch, with the meaning of the module's first lines."""
    wide = torch.promote_types(q.dtype, torch.float32)
    angles = position_ids[:, None].to(inv_freq.dtype) * inv_freq
    if inv_freq.dtype == torch.float32:
        angles = angles.masked_fill(angles.abs() >= MAX_ANGLE, torch.nan)
    cos = (angles.cos() * attention_factor).to(wide)[:, None]
    sin = (angles.sin() * attention_factor).to(wide)[:, None]
    sin = -sin if inverse else sin
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


@turn.register_fake
def _(q, k, position_ids, inv_freq, attention_factor, inverse, impl):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(
        k, memory_format=torch.contiguous_format
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, position_ids, inv_freq, ctx.attention_factor, ctx.inverse, ctx.impl = inputs
    ctx.save_for_backward(position_ids, inv_freq)


def _backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
    position_ids, inv_freq = ctx.saved_tensors
    back = turn(grad_q, grad_k, position_ids, inv_freq, ctx.attention_factor, not ctx.inverse, ctx.impl)
    return *back, None, None, None, None, None


turn.register_autograd(_backward, setup_context=_save)
