"""Adapters on their way out of the trainer: merged into whole weights, or alone in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from swe_rl.errors import CheckpointError, ConfigError
from swe_rl.models.adapters import SUFFIXES, adapted_layers
from swe_rl.training.masters import full_tensor


def merged(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full weights by Hugging Face name: W + scale B A where a layer has an adapter, in fp32 (fp64 for fp64 adapters).

    trained: full tensors of what is trained, by name. Without adapters they are the answer. Collective when sharded.
    """
    layers = dict(adapted_layers(model))
    if not layers:
        return dict(trained)
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if name.endswith(SUFFIXES):
            continue
        whole, owner = full_tensor(param), name.rpartition(".")[0]
        if owner in layers and name.endswith(".weight"):
            a, b = (trained[f"{owner}.{suffix}"] for suffix in SUFFIXES)
            whole = whole.to(a.dtype).addmm(b, a, alpha=layers[owner].scale)
        found[name] = whole
    return found


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
