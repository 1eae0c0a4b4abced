"""Adapters on their way out of the trainer: merged into whole weights, or alone in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from swe_rl.errors import CheckpointError, ConfigError
from swe_rl.models.adapters import SUFFIXES, AdaptedLinear, adapted_layers
from swe_rl.training.masters import full_tensor


def merged(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full weights by Hugging Face name: W + scale B A where a layer has an adapter, in fp32 (fp64 for fp64 adapters).

    trained: full tensors of what is trained, by name. Without adapters they are the answer. Collective when sharded.
    """
    layers = dict(adapted_layers(model))
    if not layers:
        return dict(trained)
    return {name: _with_adapter(name, full_tensor(param), layers, trained) for name, param in _own(model)}


def merged_on_host(model: nn.Module, trained: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """As `merged` of a model with adapters, one tensor after the other into host memory: no device ever holds more than
    one that it did not hold before. Without `keep` this rank only takes part, needs no `trained` and returns {}."""
    layers, found = dict(adapted_layers(model)), {}
    for name, param in _own(model):
        whole = full_tensor(param)
        if keep:
            found[name] = _with_adapter(name, whole, layers, trained).cpu()
    return found


def _own(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that the model had without adapters."""
    return ((name, param) for name, param in model.named_parameters() if not name.endswith(SUFFIXES))


def _with_adapter(
    name: str, whole: Tensor, layers: Mapping[str, AdaptedLinear], trained: Mapping[str, Tensor]
) -> Tensor:
    """A whole parameter, with its layer's adapter in it if it is the weight of one; where `whole` lies."""
    owner = name.rpartition(".")[0]
    if owner not in layers or not name.endswith(".weight"):
        return whole
    a, b = (trained[f"{owner}.{suffix}"].to(whole.device) for suffix in SUFFIXES)
    return whole.to(a.dtype).addmm(b, a, alpha=layers[owner].scale)


def export_adapters(directory: Path, model: nn.Module, trained: Mapping[str, Tensor], *, base: str) -> None:
    """Writes adapter_model.safetensors and adapter_config.json, which PEFT and vLLM load beside the model `base`.

    Raises ConfigError for a model without adapters, CheckpointError when the disk refuses.
    """
    layers = dict(adapted_layers(model))
    if not layers:
        raise ConfigError("the model has no adapters to export: set model.lora_rank")
    kinds = {"lora_a": "lora_A", "lora_b": "lora_B"}
    plain = {
        f"base_model.model.{name.rpartition('.')[0]}.{kinds[name.rpartition('.')[2]]}.weight": tensor.detach()
        .cpu()
        .contiguous()
        for name, tensor in trained.items()
    }
    rank = next(iter(layers.values())).lora_a.shape[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": next(iter(layers.values())).scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(plain, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    except OSError as err:
        raise CheckpointError(f"cannot write adapters {directory}: {err}") from err
