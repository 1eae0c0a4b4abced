"""What the training loop sees of an engine, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from swe_rl.inference.weight_update import WeightReceiver

if TYPE_CHECKING:
    from torch import Tensor

    from swe_rl.config import ModelConfig
    from swe_rl.protocols import SamplingParams
    from swe_rl.types import Completion


class Counters(Protocol):
    """Numbers since the engine was made."""

    tokens_sampled: int

    def as_dict(self) -> dict[str, int]: ...


class Engine(WeightReceiver, Protocol):
    """A Policy with weights that can be replaced, in one call or in buckets."""

    @property
    def policy_version(self) -> int: ...
    @property
    def counters(self) -> Counters: ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion: ...
    async def release(self, session: str) -> None: ...
    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies all parameters, by Hugging Face name; returns when they are in use."""
        ...

    async def set_rope(self, cfg: ModelConfig) -> None:
        """Takes the rotary embedding of `cfg`, while no request runs; weights are published after it."""
        ...

    async def rest(self) -> None:
        """Leaves the device to the trainer until the next update of the weights, where the two share one."""
        ...

    async def close(self) -> None: ...
