"""load_model: deterministic nano, local directories, and one-line errors for what is missing."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from swe_rl.config import ModelConfig
from swe_rl.errors import ConfigError
from swe_rl.models import load_model
from swe_rl.models.loading import check_supported
from swe_rl.models.smollm2 import SMOLLM2_NAME, smollm2_directory

SMALL = {"hidden_size": 48, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64}


def test_nano_is_deterministic_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first, tokenizer = load_model(ModelConfig(**SMALL), cache_dir=tmp_path, texts=["def f(): pass"] * 3)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    second, _ = load_model(ModelConfig(**SMALL), cache_dir=tmp_path, texts=["def f(): pass"] * 3)
    other, _ = load_model(ModelConfig(**SMALL, init_seed=1), cache_dir=tmp_path, texts=["def f(): pass"] * 3)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert first.config.vocab_size == len(tokenizer)
    assert first.lm_head.weight is first.model.embed_tokens.weight


def test_default_nano_has_the_configured_sizes(tmp_path: Path) -> None:
    model, _ = load_model(ModelConfig(), cache_dir=tmp_path)
    attention = model.model.layers[0].self_attn
    assert (len(model.model.layers), attention.head_dim, attention.k_proj.out_features) == (3, 24, 96)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_local_directory_round_trip(tmp_path: Path) -> None:
    model, tokenizer = load_model(ModelConfig(**SMALL), cache_dir=tmp_path)
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    again, tokenizer2 = load_model(ModelConfig(name=str(tmp_path / "m")), cache_dir=tmp_path)
    text = "<|im_start|>user\ndef f(x):\n    return x\n</parameter></function><|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer2.encode(text, add_special_tokens=False) == ids
    assert tokenizer2.decode(ids) == text
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([ids])).logits, again(torch.tensor([ids])).logits)


@pytest.mark.parametrize("name", ["/no/such/dir", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_missing_directory_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.name=.*no such directory") as info:
        load_model(ModelConfig(name=name), cache_dir=tmp_path)
    assert "\n" not in str(info.value)


def test_directory_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.name") as info:
        load_model(ModelConfig(name=str(tmp_path)), cache_dir=tmp_path)
    assert "\n" not in str(info.value)


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.num_heads"):
        load_model(ModelConfig(hidden_size=50, num_heads=4), cache_dir=tmp_path)


def test_smollm2_without_its_package_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"swe-rl\[smollm2\]"):
        load_model(ModelConfig(name="smollm2-135m"), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("architecture", "settings", "refused"),
    [
        ("mistral", {"sliding_window": 4096}, True),
        ("mistral", {"sliding_window": None}, False),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, False),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}, True),
        ("qwen3_moe", {"sliding_window": 4096, "use_sliding_window": True}, True),
        ("qwen3", {}, False),
        ("llama", {}, False),
        ("gemma3_text", {}, True),
    ],
)
def test_attention_that_does_not_see_everything_is_refused(
    architecture: str, settings: dict[str, Any], refused: bool
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(architecture, **settings)
    with pytest.raises(ConfigError, match="sliding_attention") if refused else nullcontext():
        check_supported(config, architecture)


@pytest.mark.slow
def test_smollm2_is_converted_once_and_speaks_python(smollm2_cache: Path) -> None:
    model, tokenizer = load_model(ModelConfig(name=SMOLLM2_NAME), cache_dir=smollm2_cache)
    assert sum(p.numel() for p in model.parameters()) > 130e6
    ids = tokenizer.encode("def add(a, b):\n    return a +", add_special_tokens=False)
    with torch.no_grad():
        best = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    assert tokenizer.decode([best]).strip() == "b"
    before = {path: path.stat().st_mtime_ns for path in smollm2_cache.rglob("*")}
    assert smollm2_directory(smollm2_cache) == smollm2_cache / SMOLLM2_NAME
    assert {path: path.stat().st_mtime_ns for path in smollm2_cache.rglob("*")} == before
