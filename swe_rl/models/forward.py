"""The trainer's view of a model: hidden states of a packed row, and the weight of the output head."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swe_rl.errors import ConfigError, InvariantError
from swe_rl.models.attention import PACKED, PackedSegments
from swe_rl.models.routing import replay_routing
from swe_rl.ops.context_parallel import ContextGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swe_rl.types import PackedBatch


def packed_forward(
    model: PreTrainedModel, batch: PackedBatch, *, attention: str = "auto", context: ContextGroup | None = None
) -> Tensor:
    """Hidden states after the final norm, [T, H] in the dtype of the forward pass; no head.

    attention (trainer.attention): "sdpa" computes each document alone; a name of ops.attention's implementations
    computes the row under its kv_end; "auto" takes sdpa for plain documents on a CPU, ops.attention otherwise.
    `context` are the ranks that have the other rows of a batch that batching.cp_split has split; collective over them.
    Under FSDP2 call it inside the forward of the sharded root module (a small nn.Module that holds `model`, computes
    hidden states here, reads `head_weight` and applies the loss): the root's hooks gather the embedding, final norm and
    head, the decoder layers gather themselves. Raises InvariantError when the model does not use packed attention or
    the borders and kv_end of plain documents contradict one another, or of `context` and a split batch only one is
    there, ConfigError for trees with "sdpa" and for a split batch with anything but "auto".
    """
    if model.config._attn_implementation != PACKED:
        raise InvariantError(
            f"packed_forward needs attention {PACKED!r}, the model has {model.config._attn_implementation!r}"
        )
    if batch.routed_experts is not None and (context is not None or batch.target_rows is not None):
        raise ConfigError("engine.router_replay needs whole rows of plain documents: no context parallelism, no trees")
    replay_routing(model, batch.routed_experts)
    out = model.base_model(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        packed_segments=_segments(batch, attention, context),
    )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def head_weight(model: PreTrainedModel) -> Tensor:
    """Weight of the output head, [V, H]; the embedding itself when they are tied."""
    weight: Tensor = model.get_output_embeddings().weight
    return weight


def _segments(batch: PackedBatch, attention: str, context: ContextGroup | None) -> PackedSegments:
    """Who sees whom, and who computes it."""
    if (batch.context_rows is None) != (context is None):
        raise InvariantError("a batch that was split over ranks needs their group, and a whole one must not have one")
    if context is not None:
        if attention != "auto":
            raise ConfigError(f"trainer.attention={attention} does nothing for rows split over ranks: set it to auto")
        rows = batch.context_rows
        return PackedSegments(batch.cu_seqlens_host, kv_end=batch.kv_end, context=context, context_rows=rows)
    tree = batch.target_rows is not None
    if attention == "sdpa" and tree:
        raise ConfigError("trainer.attention=sdpa computes plain documents, this batch holds trees: set it to auto")
    if attention == "sdpa" or (attention == "auto" and not tree and not batch.kv_end.is_cuda):
        _check_borders(batch)
        return PackedSegments(batch.cu_seqlens_host)
    return PackedSegments(batch.cu_seqlens_host, kv_end=batch.kv_end, impl=attention)


def _check_borders(batch: PackedBatch) -> None:
    """Plain documents only: every key is visible to the end of its own document."""
    borders = batch.cu_seqlens_host
    if borders[0] != 0 or borders[-1] != batch.input_ids.shape[0]:
        raise InvariantError(f"cu_seqlens ends at {borders[-1]}, the row has {batch.input_ids.shape[0]} tokens")
    if batch.kv_end.is_cuda:  # reading it would make the host wait
        return
    ends = torch.tensor(borders[1:], dtype=batch.kv_end.dtype)
    lengths = torch.tensor([stop - start for start, stop in pairwise(borders)])
    if not torch.equal(batch.kv_end, ends.repeat_interleave(lengths)):
        raise InvariantError(f"{PACKED} attention supports plain documents only, kv_end describes a tree")
