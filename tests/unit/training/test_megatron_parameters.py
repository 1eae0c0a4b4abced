"""Parameters of transformers' models against the tensors of the files that transformers itself writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from swe_rl.errors import CheckpointError
from swe_rl.training import checkpoint
from swe_rl.training.megatron.convert import HfReader
from swe_rl.training.megatron.parameters import Parameters
from swe_rl.training.planning.shapes import shape_from_config

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 40,
    "tie_word_embeddings": True,
}


def make(*, experts: int) -> tuple[Parameters, Any]:
    """The middle layer of a mixture of experts is dense."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    dims = {"num_experts": experts, "num_experts_per_tok": 1, "moe_intermediate_size": 10, "mlp_only_layers": [1]}
    config = Qwen3MoeConfig(**SIZES, **dims) if experts else Qwen3Config(**SIZES)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return Parameters(shape_from_config(config, name="test")), model


@pytest.mark.parametrize("experts", [0, 1, 5])
def test_files_and_parameters_are_the_same_tensors(experts: int, tmp_path: Path) -> None:
    parameters, model = make(experts=experts)
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert parameters.shapes == {name: tuple(tensor.shape) for name, tensor in own.items()}
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert parameters.sizes == {name: tuple(tensor.shape) for name, tensor in files.items()}
    assert all(torch.equal(parameters.take(own, name), tensor) for name, tensor in files.items())
    found: dict[str, Tensor] = {}
    for name, tensor in files.items():
        parameters.put(found, name, tensor)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    names = [name for group in parameters.groups for name in parameters.names(group)]
    assert sorted(names) == sorted(own)  # no parameter is of two groups


def test_an_exported_model_is_read_as_the_files_of_transformers(tmp_path: Path) -> None:
    """Parameters are exported under their own names; the converter gives back what save_pretrained writes."""
    parameters, model = make(experts=5)
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    model.save_pretrained(tmp_path / "plain")
    files = load_file(tmp_path / "plain" / "model.safetensors")
    exported = checkpoint.export(tmp_path / "exported", own, model_config=model.config)
    assert set(load_file(exported / "model.safetensors")) == set(own)
    with HfReader(exported) as reader:
        for unit in (unit for group in parameters.groups for unit in group):
            assert reader.dtype(unit) == torch.float32
            for name, tensor in zip(unit.hf, reader.read(unit), strict=True):
                assert torch.equal(tensor, files[name])
    own["model.layers.2.mlp.experts.down_proj"] = torch.zeros(5, 24, 11)
    wrong = checkpoint.export(tmp_path / "wrong", own, model_config=model.config)
    down = next(unit for unit in parameters.groups[-2] if unit.rule == "row")
    with HfReader(wrong) as reader, pytest.raises(CheckpointError, match=r"\(5, 24, 11\), by config\.json it is"):
        reader.dtype(down)


def test_parameters_of_another_model() -> None:
    parameters, model = make(experts=5)
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    with pytest.raises(CheckpointError, match=r"lacks weights.*model\.layers\.2\.mlp\.experts\.gate_up_proj"):
        parameters.take({}, name)
    own["model.layers.2.mlp.experts.gate_up_proj"] = torch.zeros(4, 20, 24)
    with pytest.raises(CheckpointError, match=r"\(4, 20, 24\) in the checkpoint, \(5, 20, 24\) in this model"):
        parameters.take(own, name)
