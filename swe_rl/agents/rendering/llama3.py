"""Llama 3: `<|start_header_id|>ROLE<|end_header_id|>\\n\\nCONTENT<|eot_id|>`, contents without white space around them.

Two ways, the same delta in both. Version 3.0 has an opening so small that it is written out here. From 3.1 on the
system message begins with two dates; the library `renderers` has that template and is used for it, over a tokenizer
that cannot make special tokens out of text (the library encodes contents as they are).

Where the ids differ from those of the published template applied to the whole conversation: sampled ids stay as they
were sampled (the template trims the assistant's text and tokenises it again), and special tokens inside text stay text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swe_rl.agents.rendering.base import Renderer, Tokenizer
from swe_rl.errors import ConfigError

_HEADER, _END_HEADER, _END_OF_TURN = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


class Llama3Renderer(Renderer):
    """Llama 3.0; also the turns of 3.1 and later. Observations are user messages."""

    observation_frame = (f"user{_END_HEADER}\n\n", _END_OF_TURN)

    def __init__(self, tokenizer: Tokenizer) -> None:
        begin = str(getattr(tokenizer, "bos_token", None) or "<|begin_of_text|>")
        super().__init__(tokenizer, specials=(begin, _HEADER, _END_HEADER, _END_OF_TURN))
        self._begin = self._special_id(begin)
        self._header, self._end_header = self._special_id(_HEADER), self._special_id(_END_HEADER)
        self.end_id = self._special_id(_END_OF_TURN)
        eos = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids = (self.end_id, *((eos,) if isinstance(eos, int) and eos != self.end_id else ()))

    def initial_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = [self._begin]
        for message in messages:
            ids += self._message(message["role"], self.trusted("\n\n" + message["content"].strip()))
        return ids + self._opening()

    def observation_ids(self, text: str, *, closed: bool = True) -> list[int]:
        message = self._message("user", self.plain("\n\n" + text.strip()))
        return [*([] if closed else [self.end_id]), *message, *self._opening()]

    def _message(self, role: str, body: list[int]) -> list[int]:
        return [self._header, *self._encode(role), self._end_header, *body, self.end_id]

    def _opening(self) -> list[int]:
        return [self._header, *self._encode("assistant"), self._end_header, *self._encode("\n\n")]


class Llama31Renderer(Llama3Renderer):
    """Llama 3.1, 3.2 and 3.3 through the library `renderers`. Raises ConfigError when it is not installed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        try:
            from renderers import Llama3Renderer as LibraryRenderer
        except ImportError as err:
            raise ConfigError("Llama 3.1 needs the package renderers: pip install 'swe-rl[renderers]'") from err
        self._library: Any = LibraryRenderer(_Guarded(self, tokenizer))
        self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, *self._library.get_stop_token_ids())))

    def initial_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return list(self._library.render_ids([dict(message) for message in messages], add_generation_prompt=True))

    def observation_ids(self, text: str, *, closed: bool = True) -> list[int]:
        # The library extends any context that ends with a closed turn; a minimal one makes the cost that of the delta.
        context = [self._begin, self.end_id]
        bridged = self._library.bridge_to_next_turn(context[:1], context[1:], [{"role": "user", "content": text}])
        self.retokenized += bridged.token_ids[: len(context)] != context
        return [*([] if closed else [self.end_id]), *bridged.token_ids[len(context) :]]


class _Guarded:
    """The tokenizer as the library sees it: no text becomes a special token."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self.name_or_path = str(getattr(tokenizer, "name_or_path", ""))
        self.unk_token_id = getattr(tokenizer, "unk_token_id", None)
        self.eos_token_id = getattr(tokenizer, "eos_token_id", None)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._renderer.plain(text)

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        return self._tokenizer.decode(token_ids, **kwargs)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._tokenizer.convert_tokens_to_ids(tokens)
