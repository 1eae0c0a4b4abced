"""Messages to token ids, once. What was sampled is kept as ids and is never turned into text and back.

ChatML, one message after the other: `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`; then the assistant's opening. A turn's
sampled ids end with `<|im_end|>`; the next delta brings the newline, the observation as a user message, and the opening
again. So prompt n+1 = prompt n + sampled ids + delta, to the id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from swe_rl.errors import ConfigError

_CUT = "\n[{count} tokens cut]\n"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...
    def convert_tokens_to_ids(self, tokens: Any) -> Any: ...


class ChatRenderer:
    """ChatML for any byte-level tokenizer that has `<|im_start|>` and `<|im_end|>`.

    No default system message is inserted: the prompt says what the context holds. Raises ConfigError without the two
    tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.im_start = _special_id(tokenizer, "<|im_start|>")
        self.im_end = _special_id(tokenizer, "<|im_end|>")
        eos = getattr(tokenizer, "eos_token_id", None)
        extra = (eos,) if isinstance(eos, int) and eos != self.im_end else ()
        self.stop_ids: tuple[int, ...] = (self.im_end, *extra)
        self._special_texts = _special_texts(tokenizer)

    def initial_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of the opening messages and the assistant's opening."""
        ids: list[int] = []
        for message in messages:
            ids += self._message(message["role"], message["content"])
        return ids + self._opening()

    def observation_ids(self, text: str, *, closed: bool = True) -> list[int]:
        """The delta after a completion. `closed`: the completion ended with `<|im_end|>`; otherwise it is added here,
        as context, so that it is never trained."""
        end = [] if closed else [self.im_end]
        return [*end, *self.plain("\n"), *self._message("user", text), *self._opening()]

    def text(self, token_ids: Sequence[int]) -> str:
        """Sampled ids as text for the parser, without the stop token."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def plain(self, text: str) -> list[int]:
        """Ids of `text` in which no special token can occur: a marker inside text is broken after its first
        character."""
        position = min((at for marker in self._special_texts if (at := text.find(marker)) >= 0), default=-1)
        if position < 0:
            return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []
        ids: list[int] = []
        while position >= 0:
            ids += self._tokenizer.encode(text[: position + 1], add_special_tokens=False)
            text = text[position + 1 :]
            position = min((at for marker in self._special_texts if (at := text.find(marker)) >= 0), default=-1)
        return ids + (self._tokenizer.encode(text, add_special_tokens=False) if text else [])

    def cut(self, text: str, *, max_tokens: int) -> str:
        """`text` with its middle replaced by a note so that it costs at most `max_tokens` (>= 1); head and tail
        stay."""
        ids = self.plain(text)
        if len(ids) <= max_tokens:
            return text
        keep = max_tokens
        while keep > 0:
            head, tail = (keep + 1) // 2, keep // 2
            note = _CUT.format(count=len(ids) - keep)
            shown = self._decode(ids[:head]) + note + (self._decode(ids[len(ids) - tail :]) if tail else "")
            excess = len(self.plain(shown)) - max_tokens
            if excess <= 0:
                return shown
            keep -= max(excess, 1)
        return self._decode(ids[:max_tokens])

    def _decode(self, ids: Sequence[int]) -> str:
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        return text.strip("�")  # a cut may fall inside a character

    def _message(self, role: str, content: str) -> list[int]:
        return [self.im_start, *self.plain(f"{role}\n{content}"), self.im_end, *self.plain("\n")]

    def _opening(self) -> list[int]:
        return [self.im_start, *self.plain("assistant\n")]


def _special_id(tokenizer: Tokenizer, token: str) -> int:
    index = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(index, int) or index == getattr(tokenizer, "unk_token_id", None):
        raise ConfigError(
            f"the tokenizer has no {token}: set model.name to a ChatML model (Qwen, SmolLM2-Instruct) or nano"
        )
    return index


def _special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Texts that the tokenizer would turn into special tokens."""
    texts = {"<|im_start|>", "<|im_end|>", *getattr(tokenizer, "all_special_tokens", ())}
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if getattr(token, "special", False):
            texts.add(str(token))
    return tuple(sorted(text for text in texts if text))
