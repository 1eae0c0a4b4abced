"""The nano tokenizer: lossless, whole words and tags are one token, deterministic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_rl.errors import ConfigError
from swe_rl.models import build_tokenizer

CORPUS = [
    "<|im_start|>user\nfix clamp_value in src/pkg/core.py<|im_end|>\n",
    "def clamp_value(items, low):\n    total = 0\n    for item in items:\n        if item > low:\n"
    "            total += 15\n",
    "<function=edit_function><parameter=name>clamp_value</parameter></function>",
] * 4
WORDS = ["clamp_value", "def", "return", "for", "x"]


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return build_tokenizer(CORPUS, vocab_size=420, whole_words=WORDS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "   ",
        "\n\n    \t x",
        "def f(x):\n\treturn  x_1  \r\n",
        "</function></parameter><function=bash><parameter=path>",
        "a</function",
        "é😀\u0301 \x00\x7f \u2028z",
        "<|im_start|>user\nhi<|im_end|>",
        " trailing space \n",
        "don't .strip , these ! ( spaces )",
        "__init__ _x9 9x ²",
    ],
)
def test_round_trip(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_round_trip_any_text(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    "token",
    [
        *WORDS,
        *(" " + word for word in WORDS),
        "<function=bash>",
        "<function=submit>",
        "<parameter=body>",
        "</parameter>",
        "</function>",
        "<|im_start|>",
        "<|im_end|>",
        "user",
    ],
)
def test_whole_words_and_tags_are_one_token(tokenizer, token: str) -> None:  # type: ignore[no-untyped-def]
    assert len(tokenizer.encode(token, add_special_tokens=False)) == 1


def test_words_are_not_split_out_of_longer_ones(tokenizer) -> None:  # type: ignore[no-untyped-def]
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("xdef defx", add_special_tokens=False)]
    assert "def" not in pieces


def test_tags_stand_alone_in_any_context(tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = "x = (1)\n</parameter></function>"
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]
    assert pieces[-2:] == ["</parameter>", "</function>"]


def test_size_and_determinism(tokenizer) -> None:  # type: ignore[no-untyped-def]
    again = build_tokenizer(iter(reversed(CORPUS)), vocab_size=420, whole_words=WORDS)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) <= 420
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_too_small_vocabulary_and_bad_words_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        build_tokenizer(CORPUS, vocab_size=270, whole_words=WORDS)
    with pytest.raises(ConfigError, match="pre-token"):
        build_tokenizer(CORPUS, vocab_size=420, whole_words=["a.b"])
