"""For engines that know whole weights only: adapters come in, merged weights come out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from swe_rl.inference.weight_update import WeightInbox
from swe_rl.models.adapters import SUFFIXES, adapted_layers, trained_names
from swe_rl.ops import weight_delta


class MergingInbox(WeightInbox):
    """Takes updates of the adapters of `model` and writes base + scale B A into `merged`, rounded to its dtype.

    merged: host tensors of all other parameters, by name. The base weights are copied from `model` now, into host
    memory and in the model's dtype, so that it may be sharded or move afterwards.
    """

    def __init__(self, model: nn.Module, merged: Mapping[str, Tensor]) -> None:
        own = dict(model.named_parameters())
        dtype = next(iter(merged.values())).dtype
        super().__init__({name: torch.zeros(own[name].shape, dtype=dtype) for name in trained_names(model)})
        self.merged = merged
        self._scales = {name: layer.scale for name, layer in adapted_layers(model)}
        self._base = {f"{name}.weight": own[f"{name}.weight"].detach().cpu().clone() for name in self._scales}
        for name, target in merged.items():
            target.copy_(own[name].detach())

    def finish(self, checksums: Mapping[str, int]) -> list[str]:
        """As WeightInbox.finish, of the adapters; `merged` follows when all is well."""
        wrong = super().finish(checksums)
        if not wrong:
            for name, scale in self._scales.items():
                a, b = (self.targets[f"{name}.{suffix}"].float() for suffix in SUFFIXES)
                whole = torch.addmm(self._base[f"{name}.weight"].float(), b, a, alpha=scale)
                self.merged[f"{name}.weight"].copy_(whole)
        return wrong

    def checksums(self, sent: Mapping[str, int]) -> Mapping[str, int]:
        """Of the merged weights."""
        return {name: weight_delta.checksum(tensor) for name, tensor in self.merged.items()}
