"""ChatML: Qwen2.5, Qwen3, SmolLM2, nano.

One message after the other: `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`; then the assistant's opening. A turn's sampled
ids end with `<|im_end|>`; the next delta brings the newline, the observation, and the opening again. So prompt n+1 =
prompt n + sampled ids + delta, to the id.

Where the ids differ from those of a published template applied to the whole conversation, and why:
- No default system message is inserted (Qwen2.5 and SmolLM2 introduce themselves): the prompt says what the context
  holds.
- Sampled ids stay as they were sampled. A template would tokenise their text again: other ids for the same text, a
  newline at their start joined with the one of the opening, the space around a thought set anew.
- Special tokens inside text, and all added tokens inside observations, stay text.
- thinking="off": the empty thought that opens a turn stays in its place. The template of Qwen3 removes it from earlier
  turns, though the policy answered after it.
- thinking="stripped": a thought is what stands between a leading `<think>` and the next `</think>`. The template cuts
  at the last `</think>` of the message, which may be inside the call. Of the white space behind it whole tokens of
  newlines leave; a token that has more in it stays.

The library `renderers` has Qwen3 as well. It is not used for it: text becomes special tokens there, a cut-off thought
cannot be continued, and stripped thoughts are rendered from text again; a test compares the ids where it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swe_rl.agents.rendering.base import Renderer, Tokenizer, token_id
from swe_rl.errors import ConfigError

THINKING = ("accumulated", "kept", "stripped", "off")
_THINK, _END_THINK = "<think>", "</think>"
_NO_THOUGHT = f"{_THINK}\n\n{_END_THINK}\n\n"


class ChatRenderer(Renderer):
    """ChatML for any byte-level tokenizer that has `<|im_start|>` and `<|im_end|>`.

    `thinking`, for models that think between `<think>` and `</think>`:
    - accumulated: every thought stays in the context; nothing is added or removed. Also right for models without.
    - kept: the same tokens, with the condition under which Qwen3's own template keeps thoughts: observations are tool
      messages.
    - stripped: as Qwen3's template does after each user message, the thoughts of earlier turns leave the context.
    - off: each turn opens with an empty thought.
    Raises ConfigError without the tokens that are needed, or when `thinking` and `observations` contradict each other.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: str = "accumulated", observations: str = "user") -> None:
        super().__init__(tokenizer, specials=("<|im_start|>", "<|im_end|>"))
        self.im_start = self._special_id("<|im_start|>")
        self.end_id = self._special_id("<|im_end|>")
        eos = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids = (self.end_id, *((eos,) if isinstance(eos, int) and eos != self.end_id else ()))
        _check(tokenizer, thinking, observations)
        self._thinking, self._newline = thinking, self._encode("\n")
        self._as_tool = observations == "tool"
        before, after = ("user\n<tool_response>\n", "\n</tool_response>") if self._as_tool else ("user\n", "")
        self.observation_frame = (before, f"{after}<|im_end|>")
        self._opening = [self.im_start, *self._encode("assistant\n")]
        if thinking == "off":
            self._opening += self.trusted(_NO_THOUGHT)

    def initial_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += self._message(self.trusted(f"{message['role']}\n{message['content']}"))
        return ids + self._opening

    def observation_ids(self, text: str, *, closed: bool = True) -> list[int]:
        body = self._tool_response(text) if self._as_tool else self.plain(f"user\n{text}")
        return [*([] if closed else [self.end_id]), *self._newline, *self._message(body), *self._opening]

    def _message(self, body: list[int]) -> list[int]:
        return [self.im_start, *body, self.end_id, *self._newline]

    def _tool_response(self, text: str) -> list[int]:
        tags = [token_id(self._tokenizer, tag) for tag in ("<tool_response>", "</tool_response>")]
        if tags[0] is None or tags[1] is None:  # ordinary text (Qwen2.5), which merges with its surroundings
            return self.plain(f"user\n<tool_response>\n{text}\n</tool_response>")
        return [*self._encode("user\n"), tags[0], *self.plain(f"\n{text}\n"), tags[1]]

    def _history(self, sampled: list[int]) -> list[int]:
        if self._thinking != "stripped":
            return sampled
        think, end = self._special_id(_THINK), self._special_id(_END_THINK)
        if think not in sampled or end not in sampled:
            return sampled
        start, stop = sampled.index(think), sampled.index(end)
        if stop < start or self._decode(sampled[:start]).strip():
            return sampled
        rest = sampled[stop + 1 :]
        while rest and not self._decode(rest[:1]).strip("\n"):
            rest.pop(0)
        return rest


def _check(tokenizer: Tokenizer, thinking: str, observations: str) -> None:
    if thinking not in THINKING or observations not in ("user", "tool"):
        raise ConfigError(f"agent.thinking={thinking!r} with agent.observations={observations!r} is unknown")
    if thinking != "accumulated" and not (token_id(tokenizer, _THINK) and token_id(tokenizer, _END_THINK)):
        raise ConfigError(
            f"agent.thinking={thinking} needs a model with {_THINK} and {_END_THINK} tokens, as Qwen3 has: "
            "set agent.thinking=accumulated"
        )
    if (thinking, observations) in (("kept", "user"), ("stripped", "tool")):
        other = "tool" if thinking == "kept" else "user"
        raise ConfigError(
            f"agent.thinking={thinking} with agent.observations={observations}: the template does not do that; "
            f"set agent.observations={other}"
        )
