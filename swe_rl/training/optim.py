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
VALUE = "value"  # key of an extra parameter itself beside its state


def is_block_matrix(name: str, param: Tensor) -> bool:
    """True for weight matrices inside the decoder blocks: neither embeddings, head, norms nor biases."""
    return param.ndim == 2 and ".layers." in name


class NamedOptimizer:
    """One or two torch optimisers whose state is kept by parameter name, so that it survives any sharding.

    AdamW decays matrices only. Muon (momentum 0.95, Nesterov, five Newton-Schulz steps) is torch.optim.Muon; its rate
    is muon_learning_rate times the same schedule factor as AdamW's.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        cfg: TrainerConfig,
        *,
        extra: Mapping[str, nn.Parameter] | None = None,
        extra_rate: float = 0.0,
    ) -> None:
        """`extra` are parameters beside the model's (the value head): AdamW at the constant rate `extra_rate`. Their
        values are kept with their state, since the exported model has no place for them."""
        if cfg.optimizer not in OPTIMIZERS:
            raise ConfigError(f"trainer.optimizer={cfg.optimizer!r} is unknown: use one of {', '.join(OPTIMIZERS)}")
        self._extra = dict(extra or {})
        self._params, self._cfg = {**params, **self._extra}, cfg
        muon = {n: p for n, p in params.items() if cfg.optimizer == "muon" and is_block_matrix(n, p)}
        rest = {n: p for n, p in params.items() if n not in muon}
        self._muon_names = frozenset(muon)
        groups = [
            {"params": [p for p in rest.values() if p.ndim >= 2], "weight_decay": cfg.weight_decay},
            {"params": [p for p in rest.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = (
            torch.optim.AdamW(
                [g for g in groups if g["params"]],
                lr=cfg.learning_rate,
                betas=(cfg.betas[0], cfg.betas[1]),
                eps=cfg.eps,
                fused=True,
            )
            if rest  # adapters alone are all block matrices
            else None
        )
        self._side = _side_optimizer(self._extra, rate=extra_rate)
        self._muon = (
            torch.optim.Muon(list(muon.values()), lr=cfg.muon_learning_rate, weight_decay=cfg.weight_decay)
            if muon
            else None
        )

    @property
    def _all(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in (self._adamw, self._muon, self._side) if optimizer is not None]

    def step(self, *, learning_rate: float) -> None:
        """One update at AdamW's rate `learning_rate`."""
        if self._adamw is not None:
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

    def state_dict(self, *, keep: bool = True, own: bool = False) -> dict[str, dict[str, Tensor]]:
        """Full tensors by parameter name and state key, empty without `keep`. Collective when sharded, and on the host
        then; views where it is not, and with `own` copies on the host."""
        return {
            name: gathered({**self._owner(name).state.get(param, {}), **self._value(name)}, keep=keep, own=own)
            for name, param in self._params.items()
        }

    def _value(self, name: str) -> dict[str, Tensor]:
        return {VALUE: self._extra[name].detach()} if name in self._extra else {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises CheckpointError when the state belongs to other parameters or another kind of optimiser."""
        if set(state) != set(self._params):
            raise CheckpointError("the optimiser state in the checkpoint belongs to a different model")
        for name, param in self._params.items():
            owner = self._owner(name)
            expected = {"momentum_buffer"} if owner is self._muon else {"step", "exp_avg", "exp_avg_sq"}
            found = {key: value for key, value in state[name].items() if key != VALUE}
            if found and set(found) != expected:
                raise CheckpointError(
                    f"the optimiser state of {name} holds {', '.join(sorted(state[name]))}: "
                    f"trainer.optimizer={self._cfg.optimizer} did not write it"
                )
            owner.state.pop(param, None)
            if found:
                owner.state[param] = {key: _place(param, value) for key, value in found.items()}
            if name in self._extra:
                with torch.no_grad():
                    param.copy_(state[name][VALUE])

    def _owner(self, name: str) -> torch.optim.Optimizer:
        if name in self._extra:
            assert self._side is not None  # made of them
            return self._side
        if self._muon is not None and name in self._muon_names:
            return self._muon
        assert self._adamw is not None  # made of the rest
        return self._adamw


def _side_optimizer(params: Mapping[str, nn.Parameter], *, rate: float) -> torch.optim.Optimizer | None:
    """AdamW without decay; None without parameters."""
    return torch.optim.AdamW(list(params.values()), lr=rate, weight_decay=0.0) if params else None


def _place(param: Tensor, value: Tensor) -> Tensor:
    """A copy of a state tensor where the optimiser keeps it; counters are scalars of their own dtype."""
    if value.ndim == 0:
        return value.clone().to(param.device)
    return like(param, value.clone())
