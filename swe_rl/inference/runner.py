"""Runs rows (one token of some slot each) through the model, always in one of two fixed shapes.

Bit-exactness. A row's result must not depend on its neighbours, its place or how many rows there are. What was found
on CPU (MKL and oneDNN products, fp32 and bf16, 1 and 2 threads): a row of a matrix product never depends on its place or
on the other rows; it does depend on the row COUNT below 16 rows, and above for some shapes (K is split over threads).
Hence at least 16 rows, two fixed counts, and `_probe`, which compares their bits on this machine with this model and
gives up the larger count where they differ. Attention handles each (row, key-value head) alone, see models.attention.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from swe_rl.errors import ConfigError, EngineError
from swe_rl.models.attention import SLOTS, SlotBlock, SlotCache, SlotRows, register
from swe_rl.models.forward import head_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

MIN_ROWS = 16  # below, matrix kernels change with the number of rows
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one slot, first at position `start`."""

    slot: int
    start: int
    ids: Sequence[int]


class SlotRunner:
    """Holds the engine's own copy of the weights, the slot cache and the two shapes."""

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, prefill_chunk: int, max_context: int, dtype: str
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"engine.dtype={dtype!r} is unknown: use one of {', '.join(DTYPES)}")
        if num_slots < 1 or prefill_chunk < 1 or max_context < 2:
            raise ConfigError("engine.num_slots and engine.prefill_chunk must be >= 1, the context length >= 2")
        register()
        self.model: PreTrainedModel = copy.deepcopy(model).to(DTYPES[dtype]).eval().requires_grad_(False)
        self.model.config._attn_implementation = SLOTS
        config, self.device = self.model.config, self.model.device
        self.vocab_size: int = head_weight(self.model).shape[0]
        self.num_slots, self.max_context = num_slots, max_context
        self.cache = SlotCache(
            num_layers=config.num_hidden_layers,
            num_slots=num_slots,
            num_kv_heads=config.num_key_value_heads,
            max_context=max_context,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=DTYPES[dtype],
            device=self.device,
        )
        self.small_rows = max(num_slots, MIN_ROWS)
        self.large_rows = self._probe(prefill_chunk)

    def forward(self, decode: Sequence[Chunk], prefill: Sequence[Chunk]) -> tuple[Tensor, int]:
        """Computes all tokens and stores their keys and values. `decode` chunks hold one token each, slots ascending.

        Returns fp32 logits [small_rows, V] (row i belongs to decode[i]; the rest is padding) and the padding rows.
        """
        chunks = [*decode, *prefill]
        real = sum(len(chunk.ids) for chunk in chunks)
        rows = self.small_rows if real <= self.small_rows else self.large_rows
        ids = [token for chunk in chunks for token in chunk.ids]
        slots = [chunk.slot for chunk in chunks for _ in chunk.ids]
        positions = [chunk.start + offset for chunk in chunks for offset in range(len(chunk.ids))]
        padding = rows - real
        hidden = self._hidden(
            torch.tensor(ids + [0] * padding),
            torch.tensor(slots + [0] * padding),
            torch.tensor(positions + [self.max_context] * padding),
            decode,
            prefill,
        )
        return F.linear(hidden[: self.small_rows], head_weight(self.model)).float(), padding

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies every parameter by Hugging Face name and clears the cache. Raises EngineError on a name or shape."""
        params = dict(self.model.named_parameters(remove_duplicate=False))
        unique = dict(self.model.named_parameters())
        unknown, missing = set(weights) - set(params), set(unique) - set(weights)
        if unknown or missing:
            raise EngineError(f"weight update: unknown names {sorted(unknown)[:3]}, missing names {sorted(missing)[:3]}")
        for name, value in weights.items():
            if params[name].shape != value.shape:
                raise EngineError(f"weight update: {name} has shape {tuple(value.shape)}, not {tuple(params[name].shape)}")
            params[name].data.copy_(value)
        self.cache.clear()

    def _hidden(
        self, ids: Tensor, slots: Tensor, positions: Tensor, decode: Sequence[Chunk], prefill: Sequence[Chunk]
    ) -> Tensor:
        """Hidden states [R, H]; blocks of the attention are runs of neighbouring decode slots, then prefill chunks."""
        device = self.device
        rows = SlotRows(cache=self.cache, slot_ids=slots.to(device), positions=positions.to(device))
        span = self.cache.span(max((chunk.start + len(chunk.ids) for chunk in (*decode, *prefill)), default=1))
        visible = torch.arange(span, device=device)[None, :] <= rows.positions[:, None]
        dtype = self.cache.keys.dtype
        mask = torch.where(visible, 0.0, float("-inf")).to(dtype)[:, None, None, :]
        for start, stop in _runs([chunk.slot for chunk in decode]):
            first = decode[start].slot
            rows.blocks.append(SlotBlock(start, stop, first, first + stop - start, mask[start:stop]))
        start = len(decode)
        for chunk in prefill:
            stop = start + len(chunk.ids)
            rows.blocks.append(SlotBlock(start, stop, chunk.slot, chunk.slot + 1, mask[start:stop]))
            start = stop
        out = self.model.base_model(
            input_ids=ids.to(device)[None], position_ids=rows.positions[None], use_cache=False, slot_rows=rows
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _probe(self, prefill_chunk: int) -> int:
        """The larger row count: small_rows + prefill_chunk, or less where the bits of a row would change with it."""
        tokens = [(7 * i + 3) % self.vocab_size for i in range(min(8, self.max_context - 1))]
        want = self._probe_rows(self.small_rows, tokens, slot=0)
        chunk = prefill_chunk
        while chunk > 0:
            got = self._probe_rows(self.small_rows + chunk, tokens, slot=self.num_slots - 1)
            if torch.equal(want, got):
                break
            chunk //= 2
        self.cache.clear()
        if chunk < prefill_chunk:
            log.info("engine.prefill_chunk: using %d, not %d: rows would not be bit-equal here", chunk, prefill_chunk)
        return self.small_rows + chunk

    def _probe_rows(self, rows: int, tokens: Sequence[int], *, slot: int) -> Tensor:
        padding = rows - len(tokens)
        return self._hidden(
            torch.tensor([*tokens, *([1] * padding)]),
            torch.tensor([slot] * rows),
            torch.tensor([*range(len(tokens)), *([self.max_context] * padding)]),
            [],
            [Chunk(slot, 0, tokens)],
        )[: len(tokens)]


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Index ranges of `slots` (ascending) whose values are consecutive."""
    starts = [i for i, slot in enumerate(slots) if i == 0 or slots[i - 1] != slot - 1]
    return list(zip(starts, [*starts[1:], len(slots)], strict=False))
