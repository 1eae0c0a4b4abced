"""What every family of chat models shares: text to ids without special tokens, ids to text, and the life of a turn.

Token in, token out. A renderer makes ids of the opening messages and of observations, once each. Sampled ids are
decoded to find the action and are never encoded again; where a family's template leaves part of an earlier completion
out, `history` says which of the sampled ids stay.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from swe_rl.errors import ConfigError

_CUT = "\n[{count} tokens cut]\n"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...
    def convert_tokens_to_ids(self, tokens: Any) -> Any: ...


class Renderer(ABC):
    """Ids of one family of chat models. Append-only unless `history` drops something.

    Two kinds of text. Opening messages and own actions may hold the family's control words (`<tool_call>`, `<think>`),
    as its published template makes them tokens there; special tokens (`<|im_end|>`) come from no text at all.
    Observations make neither.
    """

    end_id: int  # closes a turn
    stop_ids: tuple[int, ...]  # what the engine stops at; a completion may end with any of them
    observation_frame: tuple[str, str]  # what the decoded delta has before and after the observation

    def __init__(self, tokenizer: Tokenizer, *, specials: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        special, control = _added_texts(tokenizer)
        self._special = _any_of({*specials, *special})
        self._added = _any_of({*specials, *special, *control})
        self._forbidden = {token_id(tokenizer, text) for text in (*specials, *special)} - {None}
        self.retokenized = 0  # sampled ids that came back from `history` as ids that were not sampled

    @abstractmethod
    def initial_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of the opening messages and the assistant's opening."""

    @abstractmethod
    def observation_ids(self, text: str, *, closed: bool = True) -> list[int]:
        """The delta after a completion. `closed`: what the context keeps of the completion ends with a stop token;
        otherwise the end of the turn is added here, as context, so that it is never trained."""

    def history(self, sampled: Sequence[int]) -> list[int]:
        """The ids of a completion that later turns see, in order: all of them for an append-only family."""
        kept = self._history(list(sampled))
        if kept == sampled:
            return kept
        remaining = iter(sampled)
        self.retokenized += sum(index not in remaining for index in kept)
        return kept

    def is_closed(self, kept: Sequence[int]) -> bool:
        """Whether the turn's end is among the ids of `history` already."""
        return bool(kept) and kept[-1] == self.end_id

    def text(self, token_ids: Sequence[int]) -> str:
        """Sampled ids as text for the parser, without the stop token."""
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._decode(ids)

    def action_ids(self, text: str) -> list[int]:
        """Ids of a scripted assistant turn, as a policy would sample them, with the turn's end."""
        return [*self.trusted(text), self.end_id]

    def observation_text(self, delta: Sequence[int]) -> str:
        """The observation inside a delta of `observation_ids`."""
        before, after = self.observation_frame
        return self._decode(delta).partition(before)[2].rpartition(after)[0]

    def plain(self, text: str) -> list[int]:
        """Ids of `text` in which no added token can occur: a marker inside text is broken after its first character."""
        return self._without(self._added, text)

    def trusted(self, text: str) -> list[int]:
        """The same for special tokens only: control words of the family become their tokens."""
        return self._without(self._special, text)

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
            shown = self._piece(ids[:head]) + note + (self._piece(ids[len(ids) - tail :]) if tail else "")
            excess = len(self.plain(shown)) - max_tokens
            if excess <= 0:
                return shown
            keep -= max(excess, 1)
        return self._piece(ids[:max_tokens])

    def _history(self, sampled: list[int]) -> list[int]:
        return sampled

    def _without(self, markers: re.Pattern[str], text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        found = markers.search(text)
        while found is not None:
            ids += self._encode(text[start : found.start() + 1])
            start = found.start() + 1
            found = markers.search(text, start)
        ids += self._encode(text[start:]) if start < len(text) else []
        if self._forbidden.isdisjoint(ids):
            return ids
        # A normaliser of the tokenizer made a marker that was not in the text: no single character can be one.
        return [index for character in text for index in self._encode(character)]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _piece(self, ids: Sequence[int]) -> str:
        return self._decode(ids).strip("�")  # a cut may fall inside a character

    def _special_id(self, token: str) -> int:
        index = token_id(self._tokenizer, token)
        if index is None:
            raise ConfigError(
                f"the tokenizer has no {token}: set model.name to a ChatML model (Qwen, SmolLM2-Instruct), Llama 3, "
                "GPT-OSS or nano"
            )
        return index


def token_id(tokenizer: Tokenizer, token: str) -> int | None:
    """The id of `token`, None if the tokenizer does not have it."""
    index = tokenizer.convert_tokens_to_ids(token)
    return index if isinstance(index, int) and index != getattr(tokenizer, "unk_token_id", None) else None


def _added_texts(tokenizer: Tokenizer) -> tuple[set[str], set[str]]:
    """Texts that the tokenizer turns into (special tokens, other added tokens)."""
    special: set[str] = set(getattr(tokenizer, "all_special_tokens", ()))
    control: set[str] = set()
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        (special if getattr(token, "special", False) else control).add(str(token))
    return special - {""}, control - {""}


def _any_of(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=lambda text: (-len(text), text))))
