"""models.adapters: what is adapted, and that an adapter that has not learnt anything changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from swe_rl.config import ModelConfig
from swe_rl.errors import ConfigError
from swe_rl.models.adapters import AdaptedLinear, adapt, adapted_layers, is_adapted, trained_names
from swe_rl.models.nano import build_model

SHAPE = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24}


def make() -> nn.Module:
    return build_model(ModelConfig(**SHAPE, vocab_size=50))


def test_every_linear_layer_of_the_blocks_is_adapted_and_nothing_else_trains() -> None:
    model = make()
    names = [name for name, _ in model.named_parameters()]
    linear = {name for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in name}
    assert trained_names(model) == names
    assert not is_adapted(model)
    adapt(model, rank=3, alpha=6.0)
    layers = dict(adapted_layers(model))
    assert set(layers) == linear
    assert len(linear) == 2 * 7  # q, k, v, o, gate, up, down of both blocks
    trained = {f"{name}.{suffix}" for name in linear for suffix in ("lora_a", "lora_b")}
    assert set(trained_names(model)) == trained
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    assert [name for name, _ in model.named_parameters() if name not in trained] == names
    for layer in layers.values():
        assert layer.lora_a.shape == (3, layer.in_features)
        assert layer.lora_b.shape == (layer.out_features, 3)
        assert layer.scale == 2.0
        assert 0 < layer.lora_a.abs().max() <= 1 / math.sqrt(layer.in_features)


def test_a_new_adapter_changes_nothing_and_begins_alike_everywhere() -> None:
    plain, one, two = make(), make(), make()
    for model in (one, two):
        adapt(model, rank=2, alpha=8.0)
    layer = "model.layers.1.mlp.up_proj"
    original, own, other = (dict(m.named_modules())[layer] for m in (plain, one, two))
    x = torch.randn(5, 16)
    assert isinstance(own, AdaptedLinear)
    assert torch.equal(original(x), own(x))
    assert torch.equal(own.lora_a, other.lora_a)
    assert not torch.equal(own.lora_a, dict(one.named_modules())["model.layers.0.mlp.up_proj"].lora_a)
    with torch.no_grad():
        own.lora_b.normal_()
    whole = own.weight.double() + own.scale * own.lora_b.double() @ own.lora_a.double()
    torch.testing.assert_close(own(x).double(), x.double() @ whole.T, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_adapted_is_refused() -> None:
    model = make()
    with pytest.raises(ConfigError, match="both must be positive"):
        adapt(model, rank=2, alpha=0.0)
    adapt(model, rank=2, alpha=1.0)
    with pytest.raises(ConfigError, match="no plain linear layer"):
        adapt(model, rank=2, alpha=1.0)
    with pytest.raises(ConfigError, match="no plain linear layer"):
        adapt(nn.Sequential(nn.Linear(2, 2)), rank=2, alpha=1.0)
