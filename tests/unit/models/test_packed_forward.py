"""packed_forward against each document alone, against transformers' own attention, and inside an FSDP2 root."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from swe_rl.config import ModelConfig
from swe_rl.errors import InvariantError
from swe_rl.models import head_weight, packed_forward
from swe_rl.models.nano import build_model

SIZES = ModelConfig(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=80, vocab_size=97)


@pytest.fixture
def model() -> Any:
    return build_model(SIZES)


def test_packed_documents_equal_single_documents(model: Any, pack: Any, documents: list[list[int]]) -> None:
    hidden = packed_forward(model, pack(documents))
    alone = torch.cat([packed_forward(model, pack([doc])) for doc in documents])
    torch.testing.assert_close(hidden, alone, rtol=1e-5, atol=1e-6)


def test_equals_transformers_eager_attention(model: Any, pack: Any, documents: list[list[int]]) -> None:
    """Independent reference: fp64, one document per call, transformers' own eager attention with its own mask."""
    hidden = packed_forward(model, pack(documents))
    reference = build_model(SIZES).double()
    reference.config._attn_implementation = "eager"
    want = [reference.model(torch.tensor([doc]), use_cache=False).last_hidden_state[0] for doc in documents]
    torch.testing.assert_close(hidden.double(), torch.cat(want), rtol=1e-4, atol=1e-5)


def test_gradients_equal_single_documents(model: Any, pack: Any, documents: list[list[int]]) -> None:
    model.double()
    packed_forward(model, pack(documents)).square().sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for doc in documents:
        packed_forward(model, pack([doc])).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, rtol=1e-10, atol=1e-10)


def test_gradient_checkpointing_changes_nothing(model: Any, pack: Any, documents: list[list[int]]) -> None:
    model.train()
    packed_forward(model, pack(documents)).square().sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed_forward(model, pack(documents)).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(plain[name], p.grad)


def test_no_token_sees_another_document(model: Any, pack: Any, documents: list[list[int]]) -> None:
    before = packed_forward(model, pack(documents))
    changed = [*documents[:3], [(t + 1) % 97 for t in documents[3]], documents[4]]
    after = packed_forward(model, pack(changed))
    start = sum(len(doc) for doc in documents[:3])
    stop = start + len(documents[3])
    assert torch.equal(before[:start], after[:start])
    assert torch.equal(before[stop:], after[stop:])
    assert not torch.equal(before[start:stop], after[start:stop])


def test_trees_and_foreign_attention_are_refused(model: Any, pack: Any, documents: list[list[int]]) -> None:
    batch = pack(documents)
    with pytest.raises(InvariantError, match="tree"):
        packed_forward(model, replace(batch, kv_end=batch.kv_end - 1))
    with pytest.raises(InvariantError, match="cu_seqlens"):
        packed_forward(model, replace(batch, cu_seqlens_host=batch.cu_seqlens_host[:-1]))
    model.config._attn_implementation = "sdpa"
    with pytest.raises(InvariantError, match="swe_rl_packed"):
        packed_forward(model, batch)


class _Root(nn.Module):
    """What a trainer shards: the loss, and so the head, inside the root's forward."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any) -> torch.Tensor:
        logits = packed_forward(self.inner, batch) @ head_weight(self.inner).T
        return torch.nn.functional.cross_entropy(logits, batch.labels)


def test_works_inside_an_fsdp2_root(model: Any, pack: Any, documents: list[list[int]], tmp_path: Any) -> None:
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard

    batch = pack(documents)
    want = _Root(model)(batch)
    want.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = _Root(build_model(SIZES))
        mesh = dist.init_device_mesh("cpu", (1,))
        for layer in sharded.inner.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        loss = sharded(batch)
        loss.backward()
        torch.testing.assert_close(loss, want)
        for name, p in sharded.inner.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), grads[name])
    finally:
        dist.destroy_process_group()
