"""GPT-OSS: messages of the harmony format, `<|start|>ROLE<|channel|>CHANNEL<|message|>CONTENT<|end|>`.

The policy thinks in the channel `analysis` and answers in `final`, with its action, and stops with `<|return|>`. For
the parser the analysis is a leading `<think>...</think>`. Observations are user messages; calls of harmony's own tool
channel are none of ours: the action formats are text.

Where the ids differ from those of the published template applied to the whole conversation, and why:
- The date in the system message is fixed: a run that goes on past midnight, or is resumed, keeps its prompt.
- thinking="accumulated": the template drops each analysis when the next message comes, and writes `<|end|>` where
  `<|return|>` was sampled. Here both stay, so that the context only grows. "stripped" does as the template does.
- Sampled ids stay as they were sampled, and special tokens inside text stay text.

The library `renderers` covers GPT-OSS with OpenAI's encoder. It is not used: the encoder downloads its own vocabulary
instead of taking the model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swe_rl.agents.rendering.base import Renderer, Tokenizer
from swe_rl.errors import ConfigError

DATE = "2025-08-05"
_SYSTEM = (
    "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    f"Current date: {DATE}\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
_MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
_FINAL, _ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"


class HarmonyRenderer(Renderer):
    """`thinking`: accumulated or stripped, see above. Raises ConfigError for another."""

    observation_frame = ("<|start|>user<|message|>", "<|end|>")

    def __init__(self, tokenizer: Tokenizer, *, thinking: str = "accumulated") -> None:
        super().__init__(tokenizer, specials=_MARKERS)
        if thinking not in ("accumulated", "stripped"):
            raise ConfigError(f"agent.thinking={thinking} is nothing that GPT-OSS can do: use accumulated or stripped")
        self._thinking = thinking
        self._ids = {marker: self._special_id(marker) for marker in _MARKERS}
        self.end_id = self._ids["<|end|>"]
        self.stop_ids = (self._ids["<|return|>"], self._ids["<|call|>"])

    def initial_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = self._message("system", self._encode(_SYSTEM))
        for number, message in enumerate(messages):
            if message["role"] == "system" and number == 0:
                ids += self._message("developer", self.trusted(f"# Instructions\n\n{message['content']}\n\n"))
            else:
                ids += self._message(message["role"], self.trusted(message["content"]))
        return ids + self._opening()

    def observation_ids(self, text: str, *, closed: bool = True) -> list[int]:
        return [*([] if closed else [self.end_id]), *self._message("user", self.plain(text)), *self._opening()]

    def is_closed(self, kept: Sequence[int]) -> bool:
        return bool(kept) and kept[-1] in (self.end_id, *self.stop_ids)

    def action_ids(self, text: str) -> list[int]:
        return [*self._final(), *self.trusted(text), self.stop_ids[0]]

    def text(self, token_ids: Sequence[int]) -> str:
        """Sampled ids for the parser: the analysis as a leading thought, then the content of the final message."""
        text = super().text(token_ids)
        thought, found, answer = text.rpartition(_FINAL)
        if not found:
            return text.replace(_ANALYSIS, "<think>", 1)
        return f"<think>{thought.removeprefix(_ANALYSIS)}</think>{answer}" if thought else answer

    def _history(self, sampled: list[int]) -> list[int]:
        """stripped: the final message, without its `<|return|>`; the delta closes it with `<|end|>`."""
        if self._thinking != "stripped":
            return sampled
        final = self._final()
        starts = [i for i, index in enumerate(sampled) if index == final[0] and sampled[i : i + len(final)] == final]
        kept = sampled[starts[-1] :] if starts else sampled
        return kept[:-1] if kept and kept[-1] in self.stop_ids else kept

    def _final(self) -> list[int]:
        return [self._ids["<|channel|>"], *self._encode("final"), self._ids["<|message|>"]]

    def _message(self, role: str, body: list[int]) -> list[int]:
        return [self._ids["<|start|>"], *self._encode(role), self._ids["<|message|>"], *body, self.end_id]

    def _opening(self) -> list[int]:
        return [self._ids["<|start|>"], *self._encode("assistant")]
