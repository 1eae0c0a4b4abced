"""Device functions shared by the head kernels: scaled logits and the running statistics of one row.

Letters: L rows or lanes, P columns handled together. All arithmetic is fp32. Kernels are launched with
enable_fp_fusion=False, so that inv_temperature * logit is the same number in every kernel (a contraction into
z - max would round differently and make the log-probability of a certain token positive), whatever Triton's default.
"""

import triton
import triton.language as tl


@triton.jit
def tanh_and_slope(x):
    """(tanh x, 1 - tanh(x)^2) without libdevice, which the interpreter lacks.

    With e = exp(-2|x|): tanh|x| = (1 - e) / (1 + e), slope 4 e / (1 + e)^2, neither of which cancels for large |x|;
    below 1/4, where 1 - e cancels, the odd Taylor polynomial of degree 9 (next term 9e-3 x^11, 9e-9 relative).
    """
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    square = x * x
    poly = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    far = (1.0 - e) / (1.0 + e)
    value = tl.where(size < 0.25, size * poly, far)
    return tl.where(x < 0, -value, value), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def scaled_logits(logits, inv_temperature, SOFTCAP: tl.constexpr):
    """z = inv_temperature * (SOFTCAP tanh(logits / SOFTCAP), or logits where SOFTCAP is 0)."""
    if SOFTCAP > 0:
        bounded, _ = tanh_and_slope(logits / SOFTCAP)
        logits = SOFTCAP * bounded
    return logits * inv_temperature


@triton.jit
def absorb(z, top, total, weighted, squares):
    """Adds the columns of z [L, P] to statistics [L] relative to the running maximum `top`.

    total = sum e, weighted = sum e (z - top), squares = sum e^2 with e = exp(z - top). Moving the maximum by
    shift <= 0 adds shift * total to `weighted` and then scales them by s, s and s^2 with s = exp(shift). The maximum
    starts at -inf (never at 0: rows whose logits are all below -100 would vanish); until the first finite column the
    reference point is 0 and every term exp(-inf) = 0. NaN columns make every sum NaN. The bound of z - top in the
    product keeps exp(-inf) * -inf at 0; a comparison there cost registers until some compilers spilled.
    """
    higher = tl.maximum(top, tl.max(z, axis=1))
    origin = tl.where(higher == float("-inf"), 0.0, higher)
    shift = tl.where(top == float("-inf"), 0.0, top - origin)
    scale = tl.where(top == float("-inf"), 0.0, tl.exp(shift))
    below = z - origin[:, None]
    e = tl.exp(below)
    weighted = scale * (weighted + shift * total) + tl.sum(e * tl.maximum(below, -1e30), axis=1)
    total = scale * total + tl.sum(e, axis=1)
    squares = scale * scale * squares + tl.sum(e * e, axis=1)
    return higher, total, weighted, squares


@triton.jit
def merge_lanes(top, total, weighted, squares):
    """Statistics [L] of disjoint columns of one row, as four scalars relative to the common maximum."""
    highest = tl.max(top, axis=0)
    origin = tl.where(highest == float("-inf"), 0.0, highest)
    shift = tl.where(top == float("-inf"), 0.0, top - origin)
    scale = tl.where(top == float("-inf"), 0.0, tl.exp(shift))
    all_weighted = tl.sum(scale * (weighted + shift * total), axis=0)
    return highest, tl.sum(scale * total, axis=0), all_weighted, tl.sum(scale * scale * squares, axis=0)
