"""trainer.context_scheme=heads against the model's heads, before anything is loaded or written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swe_rl.cli.dispatch import main
from swe_rl.cli.preflight import check_backends
from swe_rl.config import ModelConfig, PhaseConfig, TrainConfig, TrainerConfig
from swe_rl.errors import ConfigError


def make(model: ModelConfig, size: int, scheme: str = "heads") -> TrainConfig:
    trainer = TrainerConfig(context_parallel=size, context_scheme=scheme)
    return TrainConfig(model=model, trainer=trainer, phases=[PhaseConfig(name="rl", steps=2)])


def directory(path: Path, heads: int, key_heads: int, family: str = "qwen3") -> str:
    """A model's directory as far as it says how many heads there are."""
    config = {"model_type": family, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(("size", "fits"), [(2, True), (4, True), (8, True), (3, False), (16, False)])
def test_of_nano(size: int, fits: bool) -> None:
    cfg = make(ModelConfig(num_heads=8, num_kv_heads=4), size)
    if fits:
        check_backends(cfg)
        return
    message = rf"cannot split 8 query and 4 key-value heads over trainer\.context_parallel={size} ranks: set it to"
    with pytest.raises(ConfigError, match=message):
        check_backends(cfg)
    check_backends(make(cfg.model, size, "ring"))


def test_of_a_directory_and_of_a_published_model(tmp_path: Path) -> None:
    local = ModelConfig(name=directory(tmp_path, 12, 3))
    check_backends(make(local, 3))
    with pytest.raises(ConfigError, match="cannot split 12 query and 3 key-value heads"):
        check_backends(make(local, 2))
    with pytest.raises(ConfigError, match="cannot split 28 query and 4 key-value heads"):
        check_backends(make(ModelConfig(name="Qwen/Qwen2.5-7B-Instruct"), 8))


def test_an_unknown_model_is_left_to_the_trainer(tmp_path: Path) -> None:
    check_backends(make(ModelConfig(name="someone/something"), 3))
    check_backends(make(ModelConfig(name=directory(tmp_path, 12, 3, "gpt2")), 2))


def test_the_command_ends_with_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = ["trainer.context_parallel=3", "trainer.context_scheme=heads", f"run_dir={run}"]
    assert main(["train", "experiment=quickstart_smoke", *keys]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "trainer.context_scheme=heads cannot split" in line
    assert "set it to gather or ring" in line
    assert not run.exists()
