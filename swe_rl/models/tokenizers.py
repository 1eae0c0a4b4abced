"""The tokenizer of a configured model, without its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from swe_rl.config import ModelConfig
from swe_rl.errors import ConfigError
from swe_rl.models import nano
from swe_rl.models.smollm2 import SMOLLM2_NAME, smollm2_directory


def load_tokenizer(
    cfg: ModelConfig, *, cache_dir: str | Path, texts: Iterable[str] = (), whole_words: Sequence[str] = ()
) -> Any:
    """The same transformers tokenizer that `load_model` gives. Raises ConfigError when it cannot be loaded."""
    if cfg.name == "nano":
        return nano.build_tokenizer(texts, vocab_size=cfg.vocab_size, whole_words=whole_words)
    name = str(smollm2_directory(Path(cache_dir))) if cfg.name == SMOLLM2_NAME else str(Path(cfg.name).expanduser())
    return read_tokenizer(name if Path(name).is_dir() else cfg.name)


def read_tokenizer(name: str) -> Any:
    """The tokenizer of a Hugging Face directory or hub name. Raises ConfigError, one line."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as err:
        raise ConfigError(f"no tokenizer can be loaded from {name}: {' '.join(str(err).split())[:200]}") from err
