"""Which renderer a tokenizer gets, what its settings need, and what the parser sees."""

from __future__ import annotations

import sys
from typing import Any

import chat_tokenizers as tokenizers
import pytest

from swe_rl.agents.formats import FORMATS, ParsedAction
from swe_rl.agents.rendering import ChatRenderer, HarmonyRenderer, Llama3Renderer, make_renderer
from swe_rl.errors import ConfigError
from swe_rl.testing import ByteTokenizer

CALL = FORMATS["xml"].render("bash", {"command": "ls"})


def test_the_family_is_told_by_the_special_tokens() -> None:
    llama = tokenizers.llama3()
    llama.chat_template = "no dates"
    for tokenizer, kind in (
        (ByteTokenizer(), ChatRenderer),
        (tokenizers.thinking(), ChatRenderer),
        (llama, Llama3Renderer),
        (tokenizers.harmony(), HarmonyRenderer),
    ):
        renderer = make_renderer(tokenizer)
        assert type(renderer) is kind
        assert renderer.is_closed([5, renderer.end_id])
        assert not renderer.is_closed([renderer.end_id, 5])
        assert not renderer.is_closed([])
        ids = renderer.action_ids(f"So.\n{CALL}")
        assert ids[-1] in renderer.stop_ids
        assert renderer.text(ids) == f"So.\n{CALL}"
        closed, unclosed = renderer.observation_ids("x"), renderer.observation_ids("x", closed=False)
        assert unclosed == [renderer.end_id, *closed]


def test_llama_3_1_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    tokenizer = tokenizers.llama3()
    tokenizer.chat_template = "Today Date: "
    with pytest.raises(ConfigError, match=r"pip install 'swe-rl\[renderers\]'"):
        make_renderer(tokenizer)


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (ByteTokenizer, {"thinking": "stripped"}, "needs a model with <think> and </think> tokens"),
        (ByteTokenizer, {"thinking": "off"}, "set agent.thinking=accumulated"),
        (tokenizers.thinking, {"thinking": "kept"}, "set agent.observations=tool"),
        (tokenizers.thinking, {"thinking": "stripped", "observations": "tool"}, "set agent.observations=user"),
        (tokenizers.thinking, {"thinking": "loud"}, "is unknown"),
        (tokenizers.llama3, {"thinking": "off"}, "Llama 3 does not think"),
        (tokenizers.llama3, {"observations": "tool"}, "set agent.observations=user"),
        (tokenizers.harmony, {"thinking": "off"}, "use accumulated or stripped"),
    ],
)
def test_settings_that_the_family_does_not_have(make: Any, settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_renderer(make(), **settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sampled", "stays"),
    [
        ("<think>\nSo.\n</think>\n\nls", "ls"),
        ("<think></think>ls", "ls"),
        (" \n<think>a</think>\n \nls", "\n \nls"),  # one token, and no id is taken apart
        ("<think>a</think>b</think>c", "b</think>c"),
        ("<think>a</think>", ""),
        ("ls <think>a</think>b", "ls <think>a</think>b"),
        ("<think>never closed", "<think>never closed"),
        ("</think>a<think>", "</think>a<think>"),
        ("", ""),
    ],
)
def test_a_stripped_thought(sampled: str, stays: str) -> None:
    tokenizer = tokenizers.thinking()
    renderer = make_renderer(tokenizer, thinking="stripped")
    ids = [*tokenizer.encode(sampled, add_special_tokens=False), renderer.end_id]
    kept = renderer.history(ids)
    assert kept[-1] == renderer.end_id
    assert tokenizer.decode(kept[:-1]) == stays
    assert renderer.retokenized == 0
    assert make_renderer(tokenizer).history(ids) == ids


@pytest.mark.parametrize(
    ("sampled", "text"),
    [
        (f"<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>{CALL}", None),
        (f"<|channel|>final<|message|>{CALL}", CALL),
        (f"<|channel|>analysis<|message|>{CALL}", f"<think>{CALL}"),
        (CALL, CALL),
    ],
)
def test_the_channels_of_gpt_oss_are_thought_and_answer(sampled: str, text: str | None) -> None:
    tokenizer = tokenizers.harmony()
    renderer = make_renderer(tokenizer)
    ids = [*tokenizer.encode(sampled, add_special_tokens=False), renderer.stop_ids[0]]
    shown = renderer.text(ids)
    assert text is None or shown == text
    action = FORMATS["xml"].parse(shown)
    assert isinstance(action, ParsedAction) == (not shown.startswith("<think>") or "</think>" in shown)
