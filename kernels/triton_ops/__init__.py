"""Triton kernels. Imported as swe_rl.kernels, by swe_rl.ops only."""
