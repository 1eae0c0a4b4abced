"""Which kernel computes one call of attention, and the call itself. The choice is a function of mask, shape, device and
torch's flag for deterministic algorithms, so that the backward pass takes the same way as the forward pass; each could
also take the output and LSE of another."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import attention_flash, attention_levels, attention_tiles, attention_triton
from swe_rl.ops.attention_cost import Shape, cheapest
from swe_rl.ops.attention_facts import LatestMask, MaskFacts

FAST = ":fast"  # after the name of an implementation: the order of additions may differ from run to run
log = logging.getLogger(__name__)
latest_mask = LatestMask()


@functools.cache
def log_choice(impl: str, reason: str) -> None:
    """Once per choice: what runs, and why."""
    log.info("attention: impl=%s (%s)", impl, reason)


def usable_names(
    device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool
) -> tuple[list[str], dict[str, str]]:
    """(kernels that can run there, why the others cannot); `deterministic`: those that add up in a fixed order."""
    names, reasons = [], {}
    for name in (*attention_flash.KERNELS, "triton"):
        if name == "triton":
            fine, reason = attention_triton.usable(device.type, dtype, head_dim)
        else:
            fine, reason = attention_flash.usable(name, device, dtype, head_dim)
            if fine and deterministic and (unordered := attention_flash.any_order(name)):
                fine, reason = False, unordered
        if fine:
            names.append(name)
        else:
            reasons[name] = reason
    return names, reasons


def choose(impl: str, q: Tensor, mask: MaskFacts, *, deterministic: bool) -> str:
    """Name of the kernel for tensors on a GPU; impl is auto or flash. Raises ConfigError where none can do it."""
    names, reasons = usable_names(q.device, q.dtype, q.shape[2], deterministic=deterministic)
    if impl == "flash":
        names = [name for name in names if name != "triton"]
    calls = mask.levels
    shape = Shape(len(q), q.shape[1], q.shape[2], q.element_size())
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 9
    name, costs = cheapest(mask.runs, None if calls is None else len(calls), names, shape, major)
    if not name:
        why = "; ".join(f"{kernel}: {reason}" for kernel, reason in reasons.items())
        nested = "" if calls is not None else "kv_end does not describe a forest, which only impl='triton' takes; "
        raise ConfigError(f"impl={impl!r} of attention cannot run here: {nested}{why}")
    kind = "documents" if calls is not None and len(calls) <= 1 else "a tree"
    others = ", ".join(f"{other} {cost / costs[name]:.2f}x" for other, cost in costs.items() if other != name)
    log.debug("attention: %s for %d tokens; the others: %s", name, len(q), others)
    log_choice(name, f"least time by the cost model for {kind} on {q.device.type}")
    return name


def forward(q: Tensor, k: Tensor, v: Tensor, kv_end: Tensor, scale: float, impl: str) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], lse [Hq, T]) by the implementation that `impl` names or leaves to the cost model."""
    mask = latest_mask.facts(kv_end)
    name, deterministic = impl.removesuffix(FAST), not impl.endswith(FAST)
    if name == "cpu":
        return attention_tiles.forward(q, k, v, mask, scale)
    if name in ("auto", "flash"):
        name = choose(name, q, mask, deterministic=deterministic)
    if name == "triton":
        return attention_triton.forward(q, k, v, mask, scale)
    kernel = attention_flash.KERNELS[name]()
    q, k, v = (t.contiguous() for t in (q, k, v))
    return attention_levels.forward(q, k, v, mask.levels or [], scale, kernel)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kv_end: Tensor, scale: float, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, by the same way as forward."""
    mask = latest_mask.facts(kv_end)
    name, deterministic = impl.removesuffix(FAST), not impl.endswith(FAST)
    if name == "cpu":
        return attention_tiles.backward(grad, q, k, v, out, lse, mask, scale)
    if name in ("auto", "flash"):
        name = choose(name, q, mask, deterministic=deterministic)
    if name == "triton":
        return attention_triton.backward(grad, q, k, v, out, lse, mask, scale, deterministic=deterministic)
    kernel = attention_flash.KERNELS[name]()
    grad, q, k, v, out = (t.contiguous() for t in (grad, q, k, v, out))
    return attention_levels.backward(grad, q, k, v, out, lse, mask.levels or [], scale, kernel)
