"""Optimisers over named parameters: AdamW for all, or Muon for the matrices of the blocks and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swe_rl.config import TrainerConfig
from swe_rl.errors import CheckpointError, ConfigError
from swe_rl.training.masters import gathered, like

OPTIMIZERS = ("adamw", "muon")


def is_block_matrix(name: str, param: Tensor) -> bool:
    """True for weight matrices inside the decoder blocks: neither embeddings, head, norms nor biases."""
    return param.ndim == 2 and ".layers." in name


class NamedOptimizer:
    """One or two torch optimisers whose state is kept by parameter name, so that it survives any sharding.

    AdamW decays matrices only. Muon (momentum 0.95, Nesterov, five Newton-Schulz steps) is torch.optim.Muon; its rate
    is muon_learning_rate times the same schedule factor as AdamW's.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], cfg: TrainerConfig) -> None:
        if cfg.optimizer not in OPTIMIZERS:
            raise ConfigError(f"trainer.optimizer={cfg.optimizer!r} is unknown: use one of {', '.join(OPTIMIZERS)}")
        self._params, self._cfg = dict(params), cfg
        muon = {n: p for n, p in params.items() if cfg.optimizer == "muon" and is_block_matrix(n, p)}
        rest = {n: p for n, p in params.items() if n not in muon}
        self._muon_names = frozenset(muon)
        groups = [
            {"params": [p for p in rest.values() if p.ndim >= 2], "weight_decay": cfg.weight_decay},
            {"params": [p for p in rest.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=cfg.learning_rate,
            betas=(cfg.betas[0], cfg.betas[1]),
            eps=cfg.eps,
            fused=True,
        )
        self._muon = (
            torch.optim.Muon(list(muon.values()), lr=cfg.muon_learning_rate, weight_decay=cfg.weight_decay)
            if muon
            else None
        )

    @property
    def _all(self) -> list[torch.optim.Optimizer]:
        return [self._adamw] if self._muon is None else [self._adamw, self._muon]

    def step(self, *, learning_rate: float) -> None:
        """One update at AdamW's rate `learning_rate`."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        if self._muon is not None:
            for group in self._muon.param_groups:
                group["lr"] = self._cfg.muon_learning_rate * learning_rate / self._cfg.learning_rate
        for optimizer in self._all:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._all:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self, *, keep: bool = True) -> dict[str, dict[str, Tensor]]:
        """Full tensors by parameter name and state key, empty without `keep`. Collective when sharded, and on the host
        then; views where it is not."""
        return {
            name: gathered(self._owner(name).state.get(param, {}), keep=keep) for name, param in self._params.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises CheckpointError when the state belongs to other parameters or another kind of optimiser."""
        if set(state) != set(self._params):
            raise CheckpointError("the optimiser state in the checkpoint belongs to a different model")
        for name, param in self._params.items():
            owner = self._owner(name)
            expected = {"momentum_buffer"} if owner is self._muon else {"step", "exp_avg", "exp_avg_sq"}
            if state[name] and set(state[name]) != expected:
                raise CheckpointError(
                    f"the optimiser state of {name} holds {', '.join(sorted(state[name]))}: "
                    f"trainer.optimizer={self._cfg.optimizer} did not write it"
                )
            owner.state.pop(param, None)
            if state[name]:
                owner.state[param] = {key: _place(param, value) for key, value in state[name].items()}

    def _owner(self, name: str) -> torch.optim.Optimizer:
        if self._muon is not None and name in self._muon_names:
            return self._muon
        return self._adamw


def _place(param: Tensor, value: Tensor) -> Tensor:
    """A copy of a state tensor where the optimiser keeps it; counters are scalars of their own dtype."""
    if value.ndim == 0:
        return value.clone().to(param.device)
    return like(param, value.clone())
