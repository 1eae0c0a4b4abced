"""YaRN: our description against the formula and transformers' tables, published models, switching between phases."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swe_rl.config import ModelConfig
from swe_rl.errors import ConfigError, InvariantError
from swe_rl.models.nano import build_model
from swe_rl.models.rope import Rope, rope_from_config, set_rope, wanted_rope

SMALL = {
    "hidden_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 40,
}
POSITIONS = torch.tensor([0, 1, 32767, 32768, 131071, 1048575])
QWEN = Rope(theta=1e6, dim=128, factor=4.0, original_context=32768)


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**SMALL, **changes)  # type: ignore[arg-type]


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    """The shape of a shipped Qwen3's rotary embedding, with hardly any weights."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    given = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 40960}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=8, intermediate_size=16, head_dim=128, **{**sizes, **given, **changes})
    )


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
    assert QWEN.inv_freq().tolist() == pytest.approx(frequencies, rel=1e-6)


@pytest.mark.parametrize(("original", "ramp"), [(32768, (23, 40)), (40960, (24, 41)), (131072, (30, 47))])
def test_check_values_of_the_ramp(original: int, ramp: tuple[int, int]) -> None:
    assert Rope(theta=1e6, dim=128, factor=4.0, original_context=original).ramp == ramp


@pytest.mark.parametrize(("factor", "expected"), [(4.0, 1.138629), (2.0, 1.069315), (1.0, 1.0)])
def test_check_values_of_the_attention_factor(factor: float, expected: float) -> None:
    assert Rope(theta=1e6, dim=128, factor=factor, original_context=32768).scaling == pytest.approx(expected, abs=1e-6)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "truncate": (True, False),
    "attention_factor": (0.0, 1.0, 1.416),
    "mscale": (0.0, 0.707, 1.0),
    "mscale_all_dim": (0.0, 1.0),
    "beta_fast": (32.0, 16.0, 1000.0),
    "beta_slow": (1.0, 2.0),
}
SHAPES = ((128, 1e6, 4.0, 32768), (128, 1e6, 2.0, 40960), (24, 1e4, 4.0, 2048), (64, 5e5, 40.0, 4096), (8, 1e4, 3.0, 7))


@pytest.mark.parametrize(("dim", "theta", "factor", "original"), SHAPES)
def test_every_option_is_that_of_transformers(dim: int, theta: float, factor: float, original: int) -> None:
    """Inverse frequencies equal to the last bit, the factor and the tables too, for all combinations of options."""
    for values in itertools.product(*OPTIONS.values()):
        given = dict(zip(OPTIONS, values, strict=True))
        rope = Rope(theta=theta, dim=dim, factor=factor, original_context=original, **given)
        described = Qwen3Config(head_dim=dim, rope_parameters=rope.parameters(), max_position_embeddings=8 * original)
        frequencies, scaling = ROPE_INIT_FUNCTIONS["yarn"](described)
        assert torch.equal(rope.inv_freq(), frequencies), given
        assert rope.scaling == pytest.approx(scaling, rel=1e-12), given
        assert rope_from_config(described) == rope, given


@pytest.mark.parametrize("rope", [QWEN, Rope(theta=1e6, dim=128)], ids=["yarn", "plain"])
def test_tables_are_those_of_a_transformers_model(rope: Rope) -> None:
    model = qwen3(rope_parameters=rope.parameters())
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1), POSITIONS[None])
    ours = rope.tables(POSITIONS)
    for theirs, table in zip((cos[0], sin[0]), ours, strict=True):
        assert theirs.dtype == table.dtype == torch.float32
        torch.testing.assert_close(torch.cat([table, table], dim=-1), theirs, rtol=0, atol=1e-6)


def test_tables_are_the_formula_within_the_error_of_an_fp32_angle() -> None:
    frequencies, factor = yarn(128, 1e6, 4.0, 32768)
    angles = POSITIONS[:, None].double() * torch.tensor(frequencies, dtype=torch.float64)
    bound = angles * 2.0**-22 + 1e-6  # of an angle: its frequency, and the product, are rounded once each
    for table, exact in zip(QWEN.tables(POSITIONS), (angles.cos(), angles.sin()), strict=True):
        assert ((table - exact * factor).abs() <= bound * factor).all()


def test_a_phase_without_it_gets_back_what_the_model_came_with() -> None:
    model = build_model(config())
    before, parameters = model.base_model.rotary_emb.inv_freq.clone(), dict(model.config.rope_parameters)
    assert set_rope(model, config()) == ""
    said = set_rope(model, config(yarn_factor=2.0, yarn_original_context=4096))
    assert said.startswith("rotary embedding from plain (base 10000) to YaRN factor 2 of 4096 tokens (dimensions ")
    assert set_rope(model, config(yarn_factor=2.0, yarn_original_context=4096)) == ""
    assert not torch.equal(model.base_model.rotary_emb.inv_freq, before)
    said = set_rope(model, config(yarn_factor=4.0, yarn_original_context=2048, yarn_truncate=False))
    assert "from YaRN factor 2 of 4096" in said
    assert "to YaRN factor 4 of 2048" in said
    assert model.config.rope_parameters["truncate"] is False
    set_rope(model, config())
    assert torch.equal(model.base_model.rotary_emb.inv_freq, before)
    assert dict(model.config.rope_parameters) == parameters


def test_options_reach_the_model() -> None:
    model = build_model(config())
    options = {"yarn_mscale": 0.7, "yarn_mscale_all_dim": 1.0, "yarn_beta_fast": 20.0, "yarn_beta_slow": 2.0}
    wanted = config(yarn_factor=4.0, yarn_original_context=2048, **options)
    set_rope(model, wanted)
    rope = wanted_rope(model, wanted)
    assert rope is not None
    assert rope.scaling == pytest.approx((0.07 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    assert model.base_model.rotary_emb.attention_scaling == pytest.approx(rope.scaling)
    assert torch.equal(model.base_model.rotary_emb.inv_freq, rope.inv_freq())


def test_another_scaling_is_refused() -> None:
    model = build_model(config())
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="came with rope_type=linear"):
        set_rope(model, config(yarn_factor=2.0, yarn_original_context=4096))
    assert set_rope(model, config()) == ""  # left as it is


def test_another_yarn_than_the_one_it_came_with_is_refused() -> None:
    model = qwen3(rope_parameters=QWEN.parameters())
    assert set_rope(model, config(yarn_factor=4.0, yarn_original_context=32768)) == ""
    with pytest.raises(ConfigError, match="came with rope_type=yarn, YaRN factor 4 of 32768 tokens"):
        set_rope(model, config(yarn_factor=2.0, yarn_original_context=32768))


@pytest.mark.parametrize("wrong", [40960, 8192, 131072])
def test_a_wrong_original_context_of_qwen3_is_refused(wrong: int) -> None:
    with pytest.raises(ConfigError, match=f"yarn_original_context={wrong}: a qwen3 of 40960 positions .* to 32768"):
        set_rope(qwen3(), config(yarn_factor=4.0, yarn_original_context=wrong))
    assert set_rope(qwen3(), config(yarn_factor=4.0, yarn_original_context=32768))


def test_a_qwen3_directory_that_leaves_the_original_context_out_is_refused() -> None:
    """transformers falls back to max_position_embeddings there, 40,960, and the ramp goes from 24 to 41."""
    model = qwen3(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0})
    with pytest.raises(ConfigError, match=r"rope_parameters in its config\.json.*40960 would shift"):
        set_rope(model, config())


def test_a_context_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="pretrained for at most 8192 tokens"):
        set_rope(build_model(config()), config(yarn_factor=4.0, yarn_original_context=8193))


def test_a_context_beyond_what_fp32_angles_can_say_is_refused() -> None:
    assert set_rope(qwen3(), config(yarn_factor=32.0, yarn_original_context=32768))
    with pytest.raises(ConfigError, match="and factor 33 make a context of more than 2\\^20 tokens"):
        set_rope(qwen3(), config(yarn_factor=33.0, yarn_original_context=32768))


def test_tables_that_are_not_the_description_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "yarn", lambda cfg, **_: (torch.ones(16), 1.0))
    with pytest.raises(InvariantError, match="transformers computes another rotary embedding than YaRN factor 4"):
        set_rope(build_model(config()), config(yarn_factor=4.0, yarn_original_context=2048))
