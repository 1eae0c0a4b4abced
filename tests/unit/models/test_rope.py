"""YaRN: transformers' tables against the formula, the numbers of the published models, and switching between phases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swe_rl.config import ModelConfig
from swe_rl.errors import ConfigError
from swe_rl.models.nano import build_model
from swe_rl.models.rope import set_rope

SMALL = {
    "hidden_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 40,
}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**SMALL, **changes)  # type: ignore[arg-type]


def yarn(dim: int, base: float, factor: float, original: int) -> tuple[list[float], float]:
    """Inverse frequencies and the factor on cos and sin, written from arXiv:2309.00071 with a ramp over dimensions."""

    def place(rotations: float) -> float:
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), dim - 1)
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(dim // 2)]
    return [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)], 0.1 * math.log(factor) + 1


def test_the_tables_are_those_of_the_formula() -> None:
    model = build_model(config())
    set_rope(model, config(yarn_factor=4.0, yarn_original_context=2048))
    expected, attention_factor = yarn(32, 10_000.0, 4.0, 2048)
    rotary = model.base_model.rotary_emb
    assert rotary.inv_freq.tolist() == pytest.approx(expected, rel=1e-6)
    assert rotary.attention_scaling == pytest.approx(attention_factor)
    assert attention_factor == pytest.approx(1.138629, abs=1e-6)
    assert model.config.rope_parameters["original_max_position_embeddings"] == 2048


def test_the_published_models_have_the_published_ramp() -> None:
    """Qwen3-32B and Qwen2.5-72B: head 128, base 1e6, pretrained for 32,768: the ramp goes from dimension 23 to 40."""
    frequencies, _ = yarn(128, 1e6, 4.0, 32768)
    plain = [1e6 ** (-2 * i / 128) for i in range(64)]
    unchanged = [i for i in range(64) if frequencies[i] == plain[i]]
    divided = [i for i in range(64) if frequencies[i] == pytest.approx(plain[i] / 4, rel=1e-12)]
    assert (unchanged[-1], divided[0]) == (23, 40)


def test_a_phase_without_it_gets_back_what_the_model_came_with() -> None:
    model = build_model(config())
    before, parameters = model.base_model.rotary_emb.inv_freq.clone(), dict(model.config.rope_parameters)
    set_rope(model, config())
    assert model.base_model.rotary_emb.inv_freq is not before
    set_rope(model, config(yarn_factor=2.0, yarn_original_context=4096))
    assert not torch.equal(model.base_model.rotary_emb.inv_freq, before)
    set_rope(model, config(yarn_factor=4.0, yarn_original_context=2048))
    set_rope(model, config())
    assert torch.equal(model.base_model.rotary_emb.inv_freq, before)
    assert dict(model.config.rope_parameters) == parameters


def test_another_scaling_is_refused() -> None:
    model = build_model(config())
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="came with rope_type=linear"):
        set_rope(model, config(yarn_factor=2.0, yarn_original_context=4096))
