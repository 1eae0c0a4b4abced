"""From trajectories to packed rows, on the host."""

from swe_rl.batching.packing import empty_batch, pack, pack_row
from swe_rl.batching.samples import to_samples

__all__ = ["empty_batch", "pack", "pack_row", "to_samples"]
