"""The head's kernels on the GPU: matrix products by the library with fp32 results, everything between them by Triton.

One of the two sets of kernels behind ops.chunked_head (the other is ops.cpu_rows); same functions, same meaning.
The kernels live in kernels/triton_ops, installed as swe_rl.kernels; a checkout that is only on PYTHONPATH is found
too. Nothing here imports Triton before a kernel is asked for. On CPU tensors the kernels run in Triton's interpreter
(TRITON_INTERPRET=1, for tests). Letters: C rows of a chunk, T rows, V vocabulary of this shard, H hidden.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from swe_rl.errors import ConfigError

OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = (8, 0)
CURE = "pip install --no-deps 'triton>=3.6'"
CHUNK_BYTES = 4 << 30  # fp32 logits and bf16 dlogits of one chunk
MIN_ROWS, MAX_ROWS, ROW_MULTIPLE = 1024, 8192, 128  # fewer rows starve the products, more gain nothing
WIDE_COLUMNS = 16384  # rows of a narrow weight that are fp32 at a time
MAX_TILE_OFFSET = 1 << 31  # offsets inside a tile are 32-bit
TILE_ROWS = 256


def available() -> tuple[bool, str]:
    """Whether the kernels can run here, and the reason."""
    if importlib.util.find_spec("triton") is None:
        return False, f"Triton is not installed: {CURE}"
    version = importlib.import_module("triton").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return False, f"Triton {version} is too old: {CURE}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True, f"Triton {version} in its interpreter (TRITON_INTERPRET=1)"
    if not torch.cuda.is_available():
        return False, "there is no CUDA device: use impl=cpu or auto"
    if torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        return False, f"{torch.cuda.get_device_name()} is older than compute capability 8.0: use impl=reference"
    return True, f"Triton {version} on {torch.cuda.get_device_name()}"


@functools.cache
def kernel_module(name: str) -> ModuleType:
    """Module `name` of the kernel package. Raises ConfigError when Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"impl='triton': Triton is not installed: {CURE}, or impl=cpu")
    if "swe_rl.kernels" not in sys.modules and importlib.util.find_spec("swe_rl.kernels") is None:
        _load_from_checkout()
    return importlib.import_module(f"swe_rl.kernels.{name}")


def _load_from_checkout() -> None:
    """Makes kernels/triton_ops beside the package importable as swe_rl.kernels, as the installation would."""
    folder = Path(__file__).resolve().parents[2] / "kernels" / "triton_ops"
    spec = importlib.util.spec_from_file_location(
        "swe_rl.kernels", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "__init__.py").exists():
        raise ConfigError(f"impl='triton': neither swe_rl.kernels is installed nor {folder} there: reinstall swe-rl")
    module = importlib.util.module_from_spec(spec)
    sys.modules["swe_rl.kernels"] = module
    spec.loader.exec_module(module)


def chunk_rows(num_rows: int, vocab_size: int) -> int:
    """Rows of one chunk: the fewest chunks within CHUNK_BYTES, equal up to ROW_MULTIPLE (no ragged last one)."""
    fit = CHUNK_BYTES // (6 * vocab_size) // ROW_MULTIPLE * ROW_MULTIPLE
    limit = min(max(fit, MIN_ROWS), MAX_ROWS)
    if num_rows <= limit:
        return max(num_rows, 1)
    even = -(-num_rows // -(-num_rows // limit))
    return -(-even // ROW_MULTIPLE) * ROW_MULTIPLE


def grad_dtype(hidden_dtype: torch.dtype) -> torch.dtype:
    """Of dlogits: bf16 for bf16. fp32, in place of the logits, for fp32 and also for fp16: a probability times a
    token weight of 1e-5 falls below the smallest fp16 number (6e-8), and the gradient would vanish without a trace."""
    return torch.bfloat16 if hidden_dtype == torch.bfloat16 else torch.float32


def matmul_logits(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x [C, H] @ weight.T [H, V] into out [C, V] fp32, never rounded to the dtype of the inputs."""
    if x.dtype == out.dtype:
        return torch.mm(x, weight.T, out=out)
    if x.device.type == "cuda":
        return torch.ops.aten.mm.dtype_out(x, weight.T, out.dtype, out=out)
    return torch.mm(x.to(out.dtype), weight.to(out.dtype).T, out=out)


def row_stats(
    logits: Tensor, labels: Tensor, inv_temperature: Tensor, *, softcap: float = 0.0, num_valid: int
) -> Tensor:
    """[C, 5] statistics (ops.row_stats) of logits [C, V] fp32; labels [C] i64 are columns of this shard or -1;
    inv_temperature [C] fp32; columns from num_valid on are padding."""
    rows = kernel_module("head_rows")
    _check_rows(logits, labels, inv_temperature)
    return rows.row_stats(
        logits, labels, inv_temperature, softcap=float(softcap), num_valid=num_valid, config=rows.STATS_CONFIG
    )


def row_grad(
    logits: Tensor,
    labels: Tensor,
    inv_temperature: Tensor,
    slopes: Tensor,
    *,
    softcap: float = 0.0,
    num_valid: int,
    out: Tensor,
) -> Tensor:
    """dlogits [C, V] from row_stats.slopes [C, 5] fp32, into `out`, which may be `logits`."""
    rows = kernel_module("head_rows")
    _check_rows(logits, labels, inv_temperature)
    assert slopes.dtype == torch.float32
    assert out.shape == logits.shape
    assert out.stride(1) == 1
    return rows.row_grad(
        logits,
        labels,
        inv_temperature,
        slopes.contiguous(),
        softcap=float(softcap),
        num_valid=num_valid,
        out=out,
        config=rows.GRAD_CONFIG,
    )


def _check_rows(logits: Tensor, labels: Tensor, inv_temperature: Tensor) -> None:
    assert logits.dtype == inv_temperature.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert logits.stride(1) == labels.stride(0) == inv_temperature.stride(0) == 1, "the driver passes contiguous rows"


def streaming_stats(
    hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, *, softcap: float = 0.0, num_valid: int
) -> Tensor:
    """[S, T, 5] statistics of S splits of the vocabulary of hidden [T, H] @ weight.T; nothing of size V is written.

    hidden and weight bf16, fp16 or fp32; labels [T] i64, inv_temperature [T] fp32. S depends on V alone and a row's
    result on that row alone. Raises ConfigError for rows too far apart for 32-bit offsets inside a tile.
    """
    stream = kernel_module("head_stream")
    hidden, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (hidden, weight))
    if max(hidden.stride(0), weight.stride(0)) * TILE_ROWS >= MAX_TILE_OFFSET:
        raise ConfigError("hidden or weight: rows are more than 2^23 elements apart; pass a contiguous tensor")
    return stream.streaming_stats(
        hidden,
        weight,
        labels.contiguous(),
        inv_temperature.contiguous(),
        softcap=float(softcap),
        num_valid=num_valid,
    )


def hidden_grad(dlogits: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """dlogits [C, V] @ weight [V, H] into out [C, H], summed in fp32.

    A product with a bf16 result may be split along V and its parts added in bf16 (a default of torch): so the result
    is fp32 first. For fp16 weights, whose dlogits are fp32, the weight is widened in slices.
    """
    if dlogits.dtype == weight.dtype == torch.float32:
        return torch.mm(dlogits, weight, out=out)
    if dlogits.dtype == weight.dtype and dlogits.device.type == "cuda":
        return out.copy_(torch.ops.aten.mm.dtype(dlogits, weight, torch.float32))
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for start in range(0, len(weight), WIDE_COLUMNS):
        part = slice(start, start + WIDE_COLUMNS)
        total.addmm_(dlogits[:, part].float(), weight[part].float())
    return out.copy_(total)


def accumulate_weight_grad(dlogits: Tensor, x: Tensor, grad_weight: Tensor, *, first: bool) -> None:
    """grad_weight [V, H] fp32 = or += dlogits.T @ x; `first` overwrites."""
    if dlogits.dtype == torch.float32 or dlogits.device.type != "cuda":
        grad_weight.addmm_(dlogits.T.float(), x.float(), beta=0.0 if first else 1.0)
    elif first:
        torch.ops.aten.mm.dtype_out(dlogits.T, x, torch.float32, out=grad_weight)
    elif _adds_to_fp32(x.device, x.dtype):
        torch.ops.aten.addmm.dtype_out(grad_weight, dlogits.T, x, torch.float32, out=grad_weight)
    else:
        for start in range(0, len(grad_weight), WIDE_COLUMNS):
            part = slice(start, start + WIDE_COLUMNS)
            grad_weight[part].add_(torch.ops.aten.mm.dtype(dlogits[:, part].T, x, torch.float32))


@functools.cache
def _adds_to_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether addmm adds a product of narrow matrices to an fp32 one; early releases with out_dtype refused that."""
    narrow = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, narrow, narrow, torch.float32, out=total)
    except RuntimeError:
        return False
    return True
