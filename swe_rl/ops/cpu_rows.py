"""The head's kernels on the CPU: matrix products by torch, everything between them by csrc/ops/head_rows.cpp.

One of the two sets of kernels behind ops.chunked_head (the other is ops.triton_rows); same functions, same meaning.
Letters: C rows of a chunk, V vocabulary of this shard, H hidden. fp64 works throughout; bf16 and fp16 inputs are
widened block by block, so that products and sums are fp32.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import row_stats as stats_of_rows

LIBRARIES = Path(__file__).parent / "bin"
LEVELS = {"AVX512": ("v4", "v3"), "AVX2": ("v3",)}  # torch's name of the machine -> builds, the best first
CHUNK_BYTES = 128 << 20  # fp32 logits of one chunk: large enough for fast products, small beside a model
CACHE_BYTES = 4 << 20  # logits that are read again at once should not leave the cache
MIN_ROWS = 64
SCORING_COLUMNS = 4096
WIDE_COLUMNS = 4096  # of the vocabulary in one product of hidden_grad; rows of a bf16 weight that are fp32 at a time


def available() -> tuple[bool, str]:
    """Whether the compiled kernels are there, and what to do if not."""
    path = _library_path()
    if path is None:
        return False, "the C++ kernels are not built: install g++ and reinstall swe-rl"
    return True, path.name


def _library_path() -> Path | None:
    builds = (*LEVELS.get(torch.backends.cpu.get_cpu_capability(), ()), "default")
    found = (LIBRARIES / f"libhead_rows-{build}.so" for build in builds)
    return next((path for path in found if path.exists()), None)


@functools.cache
def _library() -> ctypes.CDLL:
    path = _library_path()
    if path is None:
        raise ConfigError(available()[1])
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    shared: list[Any] = [ctypes.c_int, pointer, number, number, number, pointer, pointer, ctypes.c_double]
    library.swe_rl_row_stats.argtypes = [*shared, pointer, ctypes.c_int]
    library.swe_rl_row_grad.argtypes = [*shared, pointer, pointer, ctypes.c_int]
    library.swe_rl_row_stats.restype = library.swe_rl_row_grad.restype = None
    return library


def chunk_rows(num_rows: int, vocab_size: int) -> int:
    """Rows of one chunk: the fewest equal chunks within CHUNK_BYTES, for a small vocabulary within the cache."""
    fit = max(CHUNK_BYTES // (4 * vocab_size), MIN_ROWS)
    cached = CACHE_BYTES // (4 * vocab_size)
    limit = cached if cached >= 512 else fit
    return max(-(-num_rows // -(-num_rows // limit)), 1) if num_rows else 1


def grad_dtype(hidden_dtype: torch.dtype) -> torch.dtype:
    """Of dlogits: that of the logits, which they overwrite."""
    return torch.promote_types(hidden_dtype, torch.float32)


def matmul_logits(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x [C, H] @ weight.T [H, V] into out [C, V], fp32 (fp64 for fp64 inputs)."""
    if x.dtype == out.dtype:
        return torch.mm(x, weight.T, out=out)
    wide = x.to(out.dtype)
    for start in range(0, len(weight), WIDE_COLUMNS):
        part = slice(start, start + WIDE_COLUMNS)
        torch.mm(wide, weight[part].to(out.dtype).T, out=out[:, part])  # with out=, autocast keeps its hands off
    return out


def row_stats(
    logits: Tensor, labels: Tensor, inv_temperature: Tensor, *, softcap: float = 0.0, num_valid: int
) -> Tensor:
    """[C, 5] statistics (ops.row_stats) of logits [C, V]; labels [C] are columns of this shard or -1; columns from
    num_valid on are padding."""
    out = logits.new_empty(len(logits), stats_of_rows.NUM_STATS)
    _library().swe_rl_row_stats(
        *_shared_arguments(logits, labels, inv_temperature, softcap, num_valid),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


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
    """dlogits [C, V] from row_stats.slopes [C, 5], into `out`, which may be `logits`."""
    slopes = slopes.contiguous()
    _library().swe_rl_row_grad(
        *_shared_arguments(logits, labels, inv_temperature, softcap, num_valid),
        slopes.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _shared_arguments(
    logits: Tensor, labels: Tensor, inv_temperature: Tensor, softcap: float, num_valid: int
) -> tuple[int | float, ...]:
    assert all(t.is_contiguous() for t in (logits, labels, inv_temperature)), "the driver passes contiguous tensors"
    assert inv_temperature.dtype == logits.dtype
    assert labels.dtype == torch.int64
    rows, columns = logits.shape
    double = int(logits.dtype == torch.float64)
    pointers = (labels.data_ptr(), inv_temperature.data_ptr())
    return (double, logits.data_ptr(), rows, columns, num_valid, *pointers, float(softcap))


def hidden_grad(dlogits: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """dlogits [C, V] @ weight [V, H] into out [C, H] of any float dtype; the sum itself is in that of dlogits.

    By blocks of the vocabulary that are summed apart: the library adds up the columns of a single row one by one,
    which over 151936 of them costs two digits (7e-5).
    """
    total, partial = dlogits.new_zeros(out.shape), dlogits.new_empty(out.shape)
    for start in range(0, len(weight), WIDE_COLUMNS):
        part = slice(start, start + WIDE_COLUMNS)
        total += torch.mm(dlogits[:, part], weight[part].to(dlogits.dtype), out=partial)
    return out.copy_(total)


def accumulate_weight_grad(dlogits: Tensor, x: Tensor, grad_weight: Tensor, *, first: bool) -> None:
    """grad_weight [V, H] (fp32, or fp64) = or += dlogits.T @ x; `first` overwrites."""
    grad_weight.addmm_(dlogits.T, x.to(dlogits.dtype), beta=0.0 if first else 1.0)


def streaming_stats(
    hidden: Tensor, weight: Tensor, labels: Tensor, inv_temperature: Tensor, *, softcap: float = 0.0, num_valid: int
) -> Tensor:
    """[S, T, 5] statistics of S column blocks of hidden [T, H] @ weight.T; one block of logits exists at a time."""
    blocks = [
        slice(start, min(start + SCORING_COLUMNS, len(weight))) for start in range(0, len(weight), SCORING_COLUMNS)
    ]
    rows_at_once = max(CACHE_BYTES // (4 * SCORING_COLUMNS), MIN_ROWS)
    out = inv_temperature.new_empty(len(blocks), len(hidden), stats_of_rows.NUM_STATS)
    for first in range(0, len(hidden), rows_at_once):
        rows = slice(first, first + rows_at_once)
        for number, block in enumerate(blocks):
            width = block.stop - block.start
            logits = inv_temperature.new_empty(len(labels[rows]), width)
            matmul_logits(hidden[rows], weight[block], logits)
            inside = (labels[rows] >= block.start) & (labels[rows] < block.stop)
            local = torch.where(inside, labels[rows] - block.start, -1)
            valid = min(max(num_valid - block.start, 0), width)
            out[number, rows] = row_stats(logits, local, inv_temperature[rows], softcap=softcap, num_valid=valid)
    return out
