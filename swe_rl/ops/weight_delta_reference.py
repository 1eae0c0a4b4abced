"""The formulas of ops.weight_delta in torch, on any device. All tensors here are flat; values are bits (int16)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
KEY = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as int64; arithmetic wraps
SPREAD = 0x0001000100010001
LOW = 0xFFFFFFFF
CHUNK = 1 << 20  # elements hashed at once: the int64 intermediates are four times as large as the values


def compare(old: Tensor, new: Tensor, update: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(counts [blocks] int16, offsets [M] uint8, values [M])."""
    where = (old != new).nonzero(as_tuple=True)[0]
    counts = torch.bincount(where // BLOCK, minlength=-(-len(old) // BLOCK)).to(torch.int16)
    values = new[where]
    if update:
        old[where] = values
    return counts, (where % BLOCK).to(torch.uint8), values


def apply(target: Tensor, counts: Tensor, offsets: Tensor, values: Tensor) -> bool:
    """False, with nothing written, when the parts contradict each other."""
    if len(counts) and (int(counts.min()) < 0 or int(counts.max()) > BLOCK):
        return False
    if int(counts.sum()) != len(values):
        return False
    where = positions(counts, offsets)
    if len(where) and int(where.max()) >= len(target):
        return False
    target[where] = values
    return True


def positions(counts: Tensor, offsets: Tensor) -> Tensor:
    """[M] int64."""
    blocks = torch.arange(len(counts), device=counts.device).repeat_interleave(counts.long())
    return blocks * BLOCK + offsets.long()


def checksum(values: Tensor, first: int) -> int:
    """sum_i lo(m_i) hi(m_i) with m_i = (first + i + 1) KEY xor the value's bits four times; modulo 2^64, signed."""
    total = 0
    for start in range(0, len(values), CHUNK):
        part = values[start : start + CHUNK].long() & 0xFFFF
        numbers = torch.arange(first + start + 1, first + start + 1 + len(part), device=values.device)
        mixed = (numbers * KEY) ^ (part * SPREAD)
        total += int(((mixed & LOW) * ((mixed >> 32) & LOW)).sum())
    return total
