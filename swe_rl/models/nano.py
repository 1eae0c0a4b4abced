"""The nano policy: a Qwen3-architecture model of a few million parameters and a byte-level BPE tokenizer for it.

Both are built deterministically from their arguments. Nano stands in for a pretrained model: it knows nothing until it
is warm-started.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from swe_rl.errors import ConfigError
from swe_rl.models.attention import PACKED, register

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from swe_rl.config import ModelConfig

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
ROLES = ("system", "user", "assistant")
ACTION_TAGS = (
    *(f"<function={name}>" for name in ("bash", "replace", "edit_function", "test", "submit")),
    *(f"<parameter={name}>" for name in ("command", "path", "old", "new", "name", "body")),
    "</parameter>",
    "</function>",
)
_TAG = r"</?(?:function|parameter)(?:=[\w.-]+)?>"
# One alternative per kind of pre-token; together they cover every character, so nothing is lost.
PRE_TOKEN = "|".join(
    (
        _TAG,
        r"\n+[ \t]*",  # line end and the indentation after it
        r" ?[^\W\d]\w*",  # identifier or word
        r" ?\d",
        rf" ?(?:(?!{_TAG})[^\s\w])+",  # punctuation, up to the next tag
        r" +(?= )| +",  # a run of spaces leaves its last one to the word behind it
        r"\s",
        r"\w",
    )
)


def build_model(cfg: ModelConfig) -> PreTrainedModel:
    """Qwen3 model of the configured sizes, fp32, tied head, weights drawn from `cfg.init_seed` alone."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if cfg.hidden_size % cfg.num_heads or cfg.num_heads % cfg.num_kv_heads or (cfg.hidden_size // cfg.num_heads) % 2:
        raise ConfigError(
            f"model.num_heads={cfg.num_heads}: hidden_size {cfg.hidden_size} must be an even multiple of it, and it a "
            f"multiple of num_kv_heads {cfg.num_kv_heads}"
        )
    register()
    config = Qwen3Config(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_kv_heads,
        head_dim=cfg.hidden_size // cfg.num_heads,
        intermediate_size=cfg.intermediate_size,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.init_seed)
        return Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED, dtype=torch.float32)


def build_tokenizer(
    texts: Iterable[str], *, vocab_size: int, whole_words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab_size` ids; decode(encode(x)) == x for every text.

    The three ChatML markers are special tokens. Every action tag and role, and every entry of `whole_words` with and
    without a leading space, is one token (variants that `texts` do not have are left out first when the vocabulary is
    small); the rest of the budget goes to merges learned from `texts`. Raises ConfigError when the words do not fit or
    are not one pre-token.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    counts = Counter(piece for text in texts for piece in _pre_tokens(text))
    whole = _choose_whole(counts, whole_words, room=vocab_size - 256 - len(SPECIAL_TOKENS))
    tokenizer = _train(counts, whole, vocab_size=vocab_size - len(SPECIAL_TOKENS))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 30,
    )


def _pre_tokens(text: str) -> Iterator[str]:
    """Pre-tokens of the text between special markers."""
    for part in re.split("|".join(map(re.escape, SPECIAL_TOKENS)), text):
        for match in re.finditer(PRE_TOKEN, part):
            yield match.group()


def _choose_whole(counts: Counter[str], whole_words: Sequence[str], *, room: int) -> list[str]:
    """Pre-tokens that become one token each, most needed first: the plain or seen variants, then the others."""
    needed, optional = [*ACTION_TAGS, *ROLES], []
    for word in dict.fromkeys(whole_words):
        if re.fullmatch(PRE_TOKEN, word) is None or len(list(_pre_tokens(word))) != 1:
            raise ConfigError(f"whole word {word!r} is more than one pre-token: give its parts instead")
        variants = [word] if word.startswith((" ", "<")) else [word, " " + word]
        seen = [v for v in variants if counts[v]] or variants[:1]
        needed += seen
        optional += [v for v in variants if v not in seen]
    needed = list(dict.fromkeys(needed))
    if len(needed) > room:
        raise ConfigError(
            f"model.vocab_size is too small for {len(needed)} whole words: add at least {len(needed) - room}"
        )
    return list(dict.fromkeys(needed + optional))[:room]


def _train(counts: Counter[str], whole: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """Bytes, then the whole words, then merges learned from the pre-tokens that are not whole words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size - len(whole), 256),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = byte_level
    skip = set(whole)
    # Sorted and repeated by count: the result depends on the counts only, not on the order of the texts.
    learner.train_from_iterator((p for p in sorted(counts) if p not in skip for _ in range(counts[p])), trainer)
    learned: dict[str, Any] = json.loads(learner.to_str())["model"]
    vocab: dict[str, int] = dict(sorted(learned["vocab"].items(), key=lambda item: item[1]))
    for word in whole:
        vocab.setdefault(_byte_text(byte_level, word), len(vocab))
    merges = [(left, right) for left, right in learned["merges"]]
    # ignore_merges: a pre-token found in the vocabulary is that token, whatever the merges would make of it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_text(byte_level: Any, word: str) -> str:
    """The word in the printable byte alphabet of byte-level BPE."""
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(word))
