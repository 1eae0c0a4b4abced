"""Chat templates as plain functions of the whole conversation: text that a tokenizer turns into the expected ids.

They see the whole conversation at once; what a renderer makes piece by piece must give the same ids.
`test_golden_rendering` holds them against the published files where those are at hand.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, str]
BREAK = "\ue000"  # marks where text that looks like a token is taken apart; occurs nowhere else


def chatml(messages: Sequence[Message], *, opening: str = "") -> str:
    """Qwen2.5, SmolLM2, and Qwen3 as trained with all thoughts kept. `opening` follows each assistant's header."""
    text = "".join(_chatml_message(m, opening if m["role"] == "assistant" else "") for m in messages)
    return f"{text}<|im_start|>assistant\n{opening}"


def _chatml_message(message: Message, opening: str) -> str:
    content = message["content"]
    if message["role"] == "tool":
        return f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
    return f"<|im_start|>{message['role']}\n{opening}{content}<|im_end|>\n"


def qwen3(messages: Sequence[Message]) -> str:
    """Qwen3's own template: thoughts only after the last user message, set in fixed white space."""
    last_query = max(number for number, message in enumerate(messages) if message["role"] == "user")
    shown = []
    for number, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "assistant" and "</think>" in content:
            thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
            if number > last_query and thought:
                content = "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + content
        shown.append({"role": message["role"], "content": content})
    return chatml(shown)


def llama3(messages: Sequence[Message]) -> str:
    body = "".join(f"{_llama_header(m['role'])}{m['content'].strip()}<|eot_id|>" for m in messages)
    return f"<|begin_of_text|>{body}{_llama_header('assistant')}"


def llama31(messages: Sequence[Message]) -> str:
    """3.1 and later: a system message always, beginning with two dates."""
    dates = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    system, rest = (messages[0]["content"], messages[1:]) if messages[0]["role"] == "system" else ("", messages)
    head = f"{_llama_header('system')}{dates}{system.strip()}<|eot_id|>"
    return llama3(rest).replace("<|begin_of_text|>", f"<|begin_of_text|>{head}", 1)


def _llama_header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def harmony(messages: Sequence[Message], *, date: str, whole: bool = False) -> str:
    """GPT-OSS; an assistant's content is what it sampled, `<|channel|>...`, of which the final message stays, or with
    `whole` all, the token of its end too."""
    text = (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        f"Knowledge cutoff: 2024-06\nCurrent date: {date}\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
    )
    for message in messages:
        content = message["content"]
        if message["role"] == "system":
            text += f"<|start|>developer<|message|># Instructions\n\n{content}\n\n<|end|>"
        elif message["role"] == "assistant" and whole:
            text += f"<|start|>assistant{content}<|return|>"
        elif message["role"] == "assistant":
            text += f"<|start|>assistant<|channel|>final<|message|>{harmony_final(content)}<|end|>"
        else:
            text += f"<|start|>user<|message|>{content}<|end|>"
    return text + "<|start|>assistant"


def harmony_final(content: str) -> str:
    return content.rpartition("<|channel|>final<|message|>")[2]


def expected_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a whole rendered conversation; text that was marked with BREAK is tokenised on either side of it."""
    return [index for part in text.split(BREAK) for index in tokenizer.encode(part, add_special_tokens=False)]


def broken(tokenizer: Any, content: str, *, control: bool) -> str:
    """`content` with BREAK inside all that looks like a special token, with `control` also like any added token."""
    tokens = tokenizer.added_tokens_decoder.values()
    texts = sorted((str(t) for t in tokens if t.special or control), key=len, reverse=True)
    return re.sub("|".join(map(re.escape, texts)), lambda m: m.group()[0] + BREAK + m.group()[1:], content)


# --- random conversations ----------------------------------------------------------------------------------------

_WORDS = [
    "fix", "the bug", "parse", "\n", "\n\n", " ", "  ", "\t", "é", "ß", "日本語", "𝔘", "🙂", "👩‍👩‍👧",
    "e\u0301", "\u00a0", "\u200b",
    "12345", "3 passed", "def f(x):\n    return x\n", "\r\n", "...", "'s", "<", "<|", "|>", "</", "\x1b[31m", "\0",
]  # fmt: skip


def text(rng: random.Random, look_alikes: Sequence[str], *, length: int = 8) -> str:
    pieces = [rng.choice([*_WORDS, *look_alikes]) if look_alikes else rng.choice(_WORDS) for _ in range(length)]
    return "".join(pieces[: rng.randrange(length + 1)])


def observation(rng: random.Random, look_alikes: Sequence[str]) -> str:
    """Empty, short, or long tool output."""
    kind = rng.random()
    if kind < 0.15:
        return ""
    if kind < 0.25:
        return "\n".join(f"{i}: {text(rng, look_alikes)}" for i in range(rng.randrange(100, 300)))
    return text(rng, look_alikes)


def answer(rng: random.Random, *, thinks: bool) -> str:
    """An assistant's text: sometimes empty, with or without a thought, with odd white space now and then."""
    body = text(rng, ["<tool_call>\n{}\n</tool_call>", "```command\nls\n```"])
    if rng.random() < 0.7:
        body = body.strip()
    if not thinks or rng.random() < 0.2:
        return body
    thought = text(rng, []).strip() if rng.random() < 0.8 else rng.choice(["", "\n a", "a\n"])
    return f"<think>\n{thought}\n</think>\n\n{body}" if rng.random() < 0.9 else f"<think>{thought}</think>{body}"


def conversation(rng: random.Random, look_alikes: Sequence[str], *, role: str, thinks: bool) -> list[Message]:
    """System message, task, and up to six turns with their observations."""
    messages: list[Message] = [
        {"role": "system", "content": text(rng, look_alikes) or "x"},
        {"role": "user", "content": text(rng, look_alikes)},
    ]
    for _ in range(rng.randrange(1, 7)):
        messages.append({"role": "assistant", "content": answer(rng, thinks=thinks)})
        messages.append({"role": role, "content": observation(rng, look_alikes)})
    return messages
