"""load_model: the one way to a model and its tokenizer, whatever the source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swe_rl.config import ModelConfig
from swe_rl.errors import ConfigError
from swe_rl.models import nano
from swe_rl.models.attention import PACKED, register
from swe_rl.models.smollm2 import SMOLLM2_NAME, smollm2_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def load_model(
    cfg: ModelConfig,
    *,
    cache_dir: str | Path,
    texts: Iterable[str] = (),
    whole_words: Sequence[str] = (),
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Model (fp32, packed attention, eval mode) and tokenizer named by `cfg.name`.

    `texts` and `whole_words` feed the tokenizer of "nano" and are ignored otherwise; without texts it knows bytes, tags
    and whole words only. Raises ConfigError, one line: missing directory or package, unknown hub name, or a model that
    the packed and slot attention do not cover.
    """
    if cfg.name == "nano":
        tokenizer = nano.build_tokenizer(texts, vocab_size=cfg.vocab_size, whole_words=whole_words)
        # As many rows as the tokenizer has ids: an id without text could be sampled, but not decoded.
        return nano.build_model(replace(cfg, vocab_size=len(tokenizer))).eval(), tokenizer
    if cfg.name == SMOLLM2_NAME:
        return _load_pretrained(str(smollm2_directory(Path(cache_dir))))
    if _looks_like_path(cfg.name) and not Path(cfg.name).expanduser().is_dir():
        raise ConfigError(f"model.name={cfg.name!r}: no such directory; give one with config.json, or a model name")
    return _load_pretrained(str(Path(cfg.name).expanduser()) if _looks_like_path(cfg.name) else cfg.name)


def model_without_weights(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """As load_model of a directory or a hub name, but parameters are on the meta device: a trainer whose ranks hold
    parts of a model reads those from the files itself. model.config.name_or_path is the directory of the files.

    Raises ConfigError as load_model.
    """
    from huggingface_hub import snapshot_download
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    register()
    try:
        directory = str(Path(name).expanduser()) if _looks_like_path(name) else snapshot_download(name)
        config = AutoConfig.from_pretrained(directory)
        check_supported(config, name)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=PACKED)
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as err:
        if isinstance(err, ConfigError):
            raise
        reason = " ".join(str(err).split())
        raise ConfigError(f"model.name={name!r} cannot be loaded: {reason[:300]}") from err
    body = model.base_model
    body.rotary_emb = type(body.rotary_emb)(config=model.config)  # its table is computed, not loaded
    model.config.use_cache, model.config.name_or_path = False, directory
    return model.eval(), tokenizer


def has_files(name: str) -> bool:
    """Whether model.name stands for files of weights, rather than a model that is made here."""
    return name not in ("nano", SMOLLM2_NAME)


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).is_dir()


def _load_pretrained(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    register()
    try:
        config = AutoConfig.from_pretrained(name)
        check_supported(config, name)
        model = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch.float32, attn_implementation=PACKED
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as err:
        if isinstance(err, ConfigError):
            raise
        reason = " ".join(str(err).split())
        raise ConfigError(f"model.name={name!r} cannot be loaded: {reason[:300]}") from err
    model.config.use_cache = False
    return model.eval(), tokenizer


def check_supported(config: Any, name: str) -> None:
    """Raises ConfigError for what the attention functions or a plain linear head would silently get wrong."""
    declared = getattr(config, "layer_types", None)  # it says which layers use the window; without it all of them do
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    layer_types = set(declared or ["sliding_attention" if windowed else "full_attention"])
    if layer_types != {"full_attention"}:
        raise ConfigError(
            f"model.name={name!r} has layers {sorted(layer_types)}: only full causal attention is supported"
        )
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, key, None) not in (None, 1.0):
            raise ConfigError(f"model.name={name!r} sets {key}: only models with a plain linear head are supported")
