"""RMSNorm for a layer spec of megatron-core without Transformer Engine, which its own wrapper refuses under sequence
parallelism. Every token is normalised alone, so a share of the tokens needs nothing else: the gradient of the weight is
then a share as well, which `parts` sums over the tensor parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RowNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, as transformers has it for Qwen and Llama.

    In fp32 (fp64 for fp64), rounded to the dtype of x before the weight is applied. Takes what Megatron passes; config
    is not needed. `weight` is marked sequence_parallel where tokens are split over ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.device("cpu") if config.use_cpu_initialization else None
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)
