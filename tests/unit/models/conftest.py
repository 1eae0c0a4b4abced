"""Small models and packed rows for the model tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swe_rl.types import PackedBatch


def _pack(documents: list[list[int]]) -> PackedBatch:
    """A packed row of the documents; labels inside a document, nothing trained on its last token."""
    ids = torch.tensor([token for doc in documents for token in doc])
    borders = [0]
    for doc in documents:
        borders.append(borders[-1] + len(doc))
    lengths = torch.tensor([len(doc) for doc in documents])
    positions = torch.cat([torch.arange(len(doc)) for doc in documents])
    zeros = torch.zeros(len(ids))
    return PackedBatch(
        input_ids=ids,
        labels=torch.roll(ids, -1),
        position_ids=positions,
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        cu_seqlens_host=tuple(borders),
        kv_end=torch.tensor(borders[1:], dtype=torch.int32).repeat_interleave(lengths),
        loss_mask=torch.ones(len(ids), dtype=torch.bool),
        rollout_logprobs=zeros,
        old_logprobs=None,
        ref_logprobs=None,
        advantages=zeros,
        token_weights=zeros,
        temperature=None,
        policy_version=torch.zeros(len(ids), dtype=torch.int32),
        trajectory_ids=tuple(str(i) for i in range(len(documents))),
    )


@pytest.fixture
def pack() -> Callable[[list[list[int]]], PackedBatch]:
    return _pack


@pytest.fixture
def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in (1, 37, 5, 64, 23)]
