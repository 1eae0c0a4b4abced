"""Core attention inside megatron-core's GPTModel on gloo: packed rows against transformers and against Megatron's own
layers, document by document, with 1 and 2 ranks of tensor parallelism."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_parts import require
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.models.rope import Rope
from swe_rl.training.megatron.core_attention import PackedCoreAttention, row_mask, use_core_attention

SIZES = (1, 2)
OURS = ("ours packed", "ours alone", "recompute core", "recompute all")
ROPES = ("plain", "yarn")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """By number of ranks: what each of them measured."""
    require(importlib.util.find_spec("megatron") is not None, "package megatron-core (pip install 'swe-rl[megatron]')")
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).with_name("megatron_worker.py")
    root = str(worker.parents[3])
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(worker), str(folder), *map(str, SIZES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]
    return {size: [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)] for size in SIZES}


def compare(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=0, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        bound = 1e-5 * max(float(gradient.abs().max()), 1.0)
        torch.testing.assert_close(found[1][name].double(), gradient.double(), rtol=0, atol=bound, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OURS)
def test_logits_and_gradients_are_those_of_transformers(ranks: Any, rope: str, size: int, name: str) -> None:
    for rank in ranks[size]:
        compare(rank[rope, name], rank[rope, "transformers"])


@pytest.mark.slow
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("size", SIZES)
def test_logits_and_gradients_are_those_of_megatrons_own_layers(ranks: Any, rope: str, size: int) -> None:
    for rank in ranks[size]:
        compare(rank[rope, "ours packed"], rank[rope, "megatron"])


def settings(**changes: Any) -> SimpleNamespace:
    """What core attention reads of a TransformerConfig."""
    plain = {"kv_channels": 8, "attention_dropout": 0.0, "context_parallel_size": 1}
    return SimpleNamespace(**{**plain, **changes})


def core(**changes: Any) -> PackedCoreAttention:
    causal = SimpleNamespace(name="causal")
    return PackedCoreAttention(settings(**changes), 1, causal, "self", softmax_scale=None)


def packed_params(**changes: Any) -> SimpleNamespace:
    plain = {
        "qkv_format": "thd",
        "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cu_seqlens_q_padded": None,
    }
    return SimpleNamespace(**{**plain, **changes})


def test_masks_of_packed_rows() -> None:
    kv_end, positions = row_mask(packed_params(), 7, torch.device("cpu"))
    assert kv_end.tolist() == [3, 3, 3, 5, 5, 5, 6]  # two tokens of padding, seen by nobody
    assert kv_end.dtype == torch.int32
    assert positions[:5].tolist() == [0, 1, 2, 0, 1]
    padded = torch.tensor([0, 4, 8], dtype=torch.int32)
    kv_end, positions = row_mask(packed_params(cu_seqlens_q_padded=padded), 8, torch.device("cpu"))
    assert kv_end.tolist() == [3, 3, 3, 3, 6, 6, 6, 7]
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    borders = torch.tensor([0, 0, 2, 2, 3], dtype=torch.int32)  # documents without tokens
    kv_end, positions = row_mask(packed_params(cu_seqlens_q=borders), 3, torch.device("cpu"))
    assert (kv_end.tolist(), positions.tolist()) == ([2, 2, 3], [0, 1, 0])


def test_shapes_of_both_layouts() -> None:
    attention = core()
    q, k = torch.randn(6, 2, 4, 8), torch.randn(6, 2, 2, 8)
    out = attention(q, k, k, None)
    assert out.shape == (6, 2, 32)
    alone = attention(q[:, :1], k[:, :1], k[:, :1], None)
    torch.testing.assert_close(out[:, :1], alone)
    borders = packed_params(cu_seqlens_q=torch.tensor([0, 6, 12], dtype=torch.int32))
    row = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, k))
    torch.testing.assert_close(attention(*row, None, packed_seq_params=borders), out.transpose(0, 1).flatten(0, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: only causal self-attention"),
        ({"window_size": (64, 0)}, r"window_size=\(64, 0\) is not supported by core attention: set it to None"),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling=True"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        core(**changes)


def test_calls_that_would_be_misread_are_refused() -> None:
    attention, x = core(), torch.zeros(6, 1, 2, 8)
    for kind in ("no_mask", "padding", "arbitrary"):
        with pytest.raises(ConfigError, match=f"got attn_mask_type={kind} or a bias"):
            attention(x, x, x, None, attn_mask_type=SimpleNamespace(name=kind))
    with pytest.raises(ConfigError, match="or a bias"):
        attention(x, x, x, None, attention_bias=torch.zeros(1))
    with pytest.raises(ConfigError, match="qkv_format='sbhd': use 'thd'"):
        attention(x, x, x, None, packed_seq_params=packed_params(qkv_format="sbhd"))
    row = x[:, 0]
    with pytest.raises(ValueError, match="neither kv_end nor cu_seqlens_q"):
        attention(row, row, row, None, packed_seq_params=packed_params(cu_seqlens_q=None))
    mask = torch.full((6,), 6, dtype=torch.int32)
    with pytest.raises(ValueError, match="kv_end and no position_ids"):
        attention(row, row, row, None, packed_seq_params=packed_params(kv_end=mask))
    with pytest.raises(ValueError, match=r"kv_end is \[6\], position_ids \[5\], the row has 6 tokens"):
        attention(row, row, row, None, packed_seq_params=packed_params(kv_end=mask, position_ids=torch.arange(5)))
    with pytest.raises(ConfigError, match="turns 16 dimensions, a head has 8"):
        PackedCoreAttention(settings(), 1, None, "self", rope=Rope(theta=1e4, dim=16))
    split = PackedCoreAttention(
        settings(context_parallel_size=2), 1, None, "self", pg_collection=SimpleNamespace(cp=object())
    )
    with pytest.raises(ConfigError, match="needs packed rows"):
        split(x, x, x, None)
    with pytest.raises(ConfigError, match=r"needs packed_seq_params\.context_rows"):
        split(row, row, row, None, packed_seq_params=packed_params())
    with pytest.raises(ConfigError, match="attention_type='cross'"):
        PackedCoreAttention(settings(), 1, None, "cross")
    with pytest.raises(ConfigError, match=r"has no self_attention\.core_attention"):
        use_core_attention(SimpleNamespace(module="MambaLayer", submodules=SimpleNamespace()), rope=None)


def test_frequencies_are_not_rounded_with_the_model() -> None:
    rope = Rope(theta=1e4, dim=8)
    attention = PackedCoreAttention(settings(), 1, None, "self", rope=rope).bfloat16()
    q = torch.randn(5, 2, 8).bfloat16()
    params = packed_params(cu_seqlens_q=torch.tensor([0, 5], dtype=torch.int32))
    attention(q, q, q, None, packed_seq_params=params)
    assert torch.equal(attention._frequencies, rope.inv_freq())
    assert not list(attention.state_dict())
