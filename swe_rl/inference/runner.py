"""Runs rows (one token of some slot each) through the model, always in one of a few fixed shapes.

A row's result must not depend on its neighbours, its place or how many rows there are: inference.probe tells which
shapes keep that promise on this machine. Attention handles each (row, key-value head) alone, see models.attention.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swe_rl.errors import ConfigError, EngineError
from swe_rl.inference import probe
from swe_rl.models.adapters import trained_names
from swe_rl.models.attention import (
    SLOTS,
    SlotBlock,
    SlotCache,
    SlotRows,
    additive_mask,
    register,
)
from swe_rl.models.forward import head_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

MIN_ROWS = 16  # below, matrix kernels change with the number of rows
ROW_STEP = 8  # row counts are multiples: elementwise kernels treat the odd elements at the very end differently
RUN_SLOTS = 8  # decoded together by one attention call; small groups, as each looks as far as its longest context
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one slot, first at position `start`."""

    slot: int
    start: int
    ids: Sequence[int]


class SlotRunner:
    """Holds the engine's own copy of the weights, the slot cache and the row counts that may be used."""

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, prefill_chunk: int, max_context: int, dtype: str
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"engine.dtype={dtype!r} is unknown: use one of {', '.join(DTYPES)}")
        if num_slots < 1 or prefill_chunk < 1 or max_context < 2:
            raise ConfigError("engine.num_slots and engine.prefill_chunk must be >= 1, the context length >= 2")
        register()
        self.model: PreTrainedModel = _engine_copy(model, DTYPES[dtype])
        config, self.device = self.model.config, self.model.device
        self._widen_head()
        self.vocab_size: int = self.head.shape[0]
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
        self.small_rows = _round_up(max(num_slots, MIN_ROWS))
        self._probe(prefill_chunk, num_heads=config.num_attention_heads)

    def forward(self, decode: Sequence[Chunk], prefill: Sequence[Chunk]) -> tuple[Tensor, int]:
        """Computes all tokens and stores their keys and values. `decode` chunks hold one token each, slots ascending.

        Returns fp32 logits [small_rows, V] (row i belongs to decode[i]; the rest is padding) and the padding rows.
        """
        chunks = [*decode, *prefill]
        real = sum(len(chunk.ids) for chunk in chunks)
        rows = next(count for count in self.row_counts if count >= real)
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
        return F.linear(hidden[: self.small_rows].float(), self.head), padding

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies every parameter by Hugging Face name and clears the cache. Raises EngineError on a name or shape."""
        params = dict(self.model.named_parameters(remove_duplicate=False))
        unique = dict(self.model.named_parameters())
        unknown, missing = set(weights) - set(params), set(unique) - set(weights)
        if unknown or missing:
            raise EngineError(
                f"weight update: unknown names {sorted(unknown)[:3]}, missing names {sorted(missing)[:3]}"
            )
        for name, value in weights.items():
            if params[name].shape != value.shape:
                raise EngineError(
                    f"weight update: {name} has shape {tuple(value.shape)}, not {tuple(params[name].shape)}"
                )
            params[name].data.copy_(value)
        self.weights_changed()

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Of what training moves: all by Hugging Face name, a tied one once, or the adapters if there are any. Whoever
        writes into them calls `weights_changed` before a forward."""
        own = dict(self.model.named_parameters())
        return {name: own[name].data for name in trained_names(self.model)}

    def weights_changed(self) -> None:
        """What was made from the old weights goes: the fp32 head, and every key and value."""
        self._widen_head()
        self.cache.clear()

    def _widen_head(self) -> None:
        """Logits are fp32 products of (rounded) hidden states and weights, as in ops.linear_policy_loss: a head that
        rounds its logits on one side only shows as a mismatch of logprobs. An fp32 head is the parameter itself."""
        self.head: Tensor = head_weight(self.model).detach().float()

    def _hidden(
        self, ids: Tensor, slots: Tensor, positions: Tensor, decode: Sequence[Chunk], prefill: Sequence[Chunk]
    ) -> Tensor:
        """Hidden states [R, H]; blocks of the attention are runs of neighbouring decode slots, then prefill chunks."""
        device = self.device
        rows = SlotRows(cache=self.cache, slot_ids=slots.to(device), positions=positions.to(device))
        chunks = [(chunk.slot, 1, len(chunk.ids), chunk.start + len(chunk.ids)) for chunk in prefill]
        runs = [(decode[a].slot, b - a, b - a, max(c.start for c in decode[a:b]) + 1) for a, b in _runs(decode)]
        blocks = [(a, b, c, self.cache.span(length)) for a, b, c, length in (*runs, *chunks)]
        mask = additive_mask(rows.positions, max(block[3] for block in blocks), self.cache.keys.dtype)
        start = 0
        for slot, num_slots, num_rows, span in blocks:
            stop = start + num_rows
            rows.blocks.append(SlotBlock(start, stop, slot, slot + num_slots, mask[start:stop, :, :, :span]))
            start = stop
        out = self.model.base_model(
            input_ids=ids.to(device)[None], position_ids=rows.positions[None], use_cache=False, slot_rows=rows
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _probe(self, prefill_chunk: int, *, num_heads: int) -> None:
        """Chooses row counts and the span block; see inference.probe."""
        self.cache.fine_spans = fine = probe.spans_keep_bits(self.cache, num_heads=num_heads)
        self.cache.clear()
        tokens = [(7 * i + 3) % self.vocab_size for i in range(min(8, self.max_context - 1))]
        wanted = sorted({self.small_rows + _round_up(prefill_chunk // part) for part in (1, 2, 4)} - {self.small_rows})
        first = self._probe_rows(self.small_rows, tokens, slot=0)
        last = self.num_slots - 1
        equal = [rows for rows in wanted if torch.equal(first, self._probe_rows(rows, tokens, slot=last))]
        self.row_counts = [self.small_rows, *equal]
        self.cache.clear()
        log.debug("engine rows per call: %s of %s; fine spans: %s", self.row_counts, wanted, fine)

    def _probe_rows(self, rows: int, tokens: Sequence[int], *, slot: int) -> Tensor:
        """Hidden states of `tokens` in `slot`, computed among `rows` rows."""
        padding = rows - len(tokens)
        return self._hidden(
            torch.tensor([*tokens, *([1] * padding)]),
            torch.tensor([slot] * rows),
            torch.tensor([*range(len(tokens)), *([self.max_context] * padding)]),
            [],
            [Chunk(slot, 0, tokens)],
        )[: len(tokens)]


def _round_up(rows: int) -> int:
    return -(-rows // ROW_STEP) * ROW_STEP


def _engine_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    engine_model: Any = copy.deepcopy(model)
    engine_model.to(dtype).eval().requires_grad_(False)
    engine_model.config._attn_implementation = SLOTS
    own: PreTrainedModel = engine_model
    return own


def _runs(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Index ranges of chunks (slots ascending) whose slots are neighbours of one group of RUN_SLOTS."""
    slots = [chunk.slot for chunk in chunks]
    starts = [i for i, slot in enumerate(slots) if i == 0 or slots[i - 1] != slot - 1 or slot % RUN_SLOTS == 0]
    return list(zip(starts, [*starts[1:], len(slots)], strict=False))
