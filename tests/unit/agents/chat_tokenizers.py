"""Tokenizers of the model families: Qwen's from its published vocabulary, small trained ones for the others."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from real_parts import require

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]  # 151643 on
QWEN25_CONTROL = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
]  # 151657 on; added, but not special
QWEN3_CONTROL = [*QWEN25_CONTROL, "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA_SPECIAL = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(248))),
]
HARMONY_SPECIAL = [
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|call|>", "<|endofprompt|>"),
]
SMOLLM2_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>", "<filename>"]
CORPUS = [
    "def parse(text):\n    return [line.strip() for line in text.split('\\n')]\n\n\nclass A(object):\n    pass\n",
    "user\nassistant\nsystem\ndeveloper\n\nYou repair bugs in a repository. 2024-06 12345 3 passed, 1 failed\n\n",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>\n<think>\nSo:\n</think>\n\n',
    "<function=bash>\n<parameter=command>grep -rn 'def f' .</parameter>\n</function>\n```command\nls\n```\n",
    "<| |> im_start im_end start_header_id eot_id channel message analysis final   \t\t  \r\n  \n \n",
]  # fmt: skip


@cache
def qwen(version: str) -> Any:
    """The tokenizer of Qwen2.5 ("2.5") or Qwen3 ("3") over the 151,643 published tokens."""
    from tokenizers import normalizers

    vocab, merges = _qwen_model()
    control = QWEN3_CONTROL if version == "3" else QWEN25_CONTROL
    tokenizer = _wrap(vocab, merges, QWEN_SPLIT, QWEN_SPECIAL, control)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


@cache
def smollm2() -> Any:
    """GPT-2's splitting, as in SmolLM2: white space joins across a message's opening."""
    return _trained(None, SMOLLM2_SPECIAL, eos="<|im_end|>")


@cache
def thinking() -> Any:
    """A small ChatML tokenizer with Qwen3's control words."""
    return _trained(QWEN_SPLIT, SMOLLM2_SPECIAL, eos="<|im_end|>", control=QWEN3_CONTROL)


@cache
def llama3() -> Any:
    return _trained(LLAMA_SPLIT, LLAMA_SPECIAL, eos="<|eot_id|>", bos="<|begin_of_text|>")


@cache
def harmony() -> Any:
    return _trained(LLAMA_SPLIT, HARMONY_SPECIAL, eos="<|return|>", bos="<|startoftext|>")


@cache
def _qwen_model() -> tuple[dict[str, int], list[tuple[str, str]]]:
    ranks = _qwen_ranks()
    names = {token: _printable(token) for token in ranks}
    pairs = [_pair(ranks, token, rank) for token, rank in ranks.items() if len(token) > 1]
    return {names[t]: rank for t, rank in ranks.items()}, [(names[left], names[right]) for left, right in pairs]


def _qwen_ranks() -> dict[bytes, int]:
    spec = importlib.util.find_spec("dashscope")
    require(spec is not None, "the package dashscope, which carries the vocabulary of Qwen")
    assert spec is not None
    assert spec.origin is not None
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    assert len(ranks) == 151_643
    return ranks


def _pair(ranks: dict[bytes, int], token: bytes, limit: int) -> tuple[bytes, bytes]:
    """The two parts whose merge gives `token`: what merging its bytes by rank below its own leaves."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, at = min(found)
        assert rank < limit, token
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


@cache
def _alphabet() -> list[str]:
    """The printable character of each byte in byte-level BPE."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(other)) for byte in range(256)]


def _printable(token: bytes) -> str:
    letters = _alphabet()
    return "".join(letters[byte] for byte in token)


def _wrap(vocab: Any, merges: Any, split: str | None, special: list[str], control: list[str]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = _splitter(Regex, pre_tokenizers, split)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in control])
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False)


def _splitter(regex: Any, pre_tokenizers: Any, split: str | None) -> Any:
    if split is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts = [pre_tokenizers.Split(regex(split), behavior="isolated")]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _trained(
    split: str | None, special: list[str], *, eos: str, bos: str | None = None, control: Sequence[str] = ()
) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = _splitter(Regex, pre_tokenizers, split)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(
        CORPUS * 20, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(raw.to_str())["model"]
    tokenizer = _wrap(model["vocab"], [tuple(pair) for pair in model["merges"]], split, special, [*control])
    tokenizer.eos_token, tokenizer.bos_token = eos, bos
    return tokenizer
