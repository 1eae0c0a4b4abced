"""Device functions shared by the attention kernels: tiles of rows from memory, and scores under the interval mask.

Letters: T tokens, M queries and N keys of a tile, D head dim (BLOCK_D: the next power of two). Offsets inside a tile
are 32-bit from a 64-bit base; rows beyond the last token repeat it and are masked or dropped by the caller. Padding may
hold NaN, and 0 times NaN is NaN: a product whose probabilities are 0 for it gets its rows as 0 (load_seen_rows), and
score gradients are 0 where the probability is. Scores are kept in units of log2, as exp2 is what the hardware has;
products and additions around it are explicit fma.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_rows(first, num_tokens, CLAMP: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a tile relative to `first`, [BLOCK]; without CLAMP all of them exist."""
    rows = tl.arange(0, BLOCK)
    if CLAMP:
        rows = tl.minimum(rows, num_tokens - 1 - first)
    return rows


@triton.jit
def load_rows(base, first, rows, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """[rows, BLOCK_D] of a [T, D] matrix with row distance `stride`; columns from D on are 0."""
    ds = tl.arange(0, BLOCK_D)
    place = base + first.to(tl.int64) * stride + (rows[:, None] * stride + ds[None, :])
    if D == BLOCK_D:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=ds[None, :] < D, other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def load_seen_rows(base, first, rows, seen, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):
    """As load_rows; rows that are not `seen` [BLOCK] bool are not read and are 0."""
    ds = tl.arange(0, BLOCK_D)
    place = base + first.to(tl.int64) * stride + (rows[:, None] * stride + ds[None, :])
    if D == BLOCK_D:
        tile = tl.load(place, mask=seen[:, None], other=0.0)
    else:
        tile = tl.load(place, mask=seen[:, None] & (ds < D)[None, :], other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_rows(base, first, num_tokens, stride, tile, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes the rows and columns of tile [BLOCK, BLOCK_D] that exist."""
    rows = tl.arange(0, BLOCK)
    ds = tl.arange(0, BLOCK_D)
    place = base + first.to(tl.int64) * stride + (rows[:, None] * stride + ds[None, :])
    own = (rows < num_tokens - first)[:, None]
    if D != BLOCK_D:
        own = own & (ds < D)[None, :]
    tl.store(place, tile, mask=own)


@triton.jit
def masked_scores(scores, query, key, end):
    """scores where key <= query < end, else -inf; query, key and end broadcast to the shape of scores."""
    return tl.where((key <= query) & (query < end), scores, float("-inf"))


@triton.jit
def log2_sums(lse, first, rows):
    """log2 of the sum of exponentials of each row; +inf for a row that sees nothing, so that its probabilities
    exp2(score - inf) are 0."""
    natural = tl.load(lse + first.to(tl.int64) + rows)
    return tl.where(natural == float("-inf"), float("inf"), natural * LOG2_E)


def tile_columns(head_dim: int) -> int:
    """BLOCK_D: a product needs at least 16 columns, and powers of two."""
    return max(16, triton.next_power_of_2(head_dim))
