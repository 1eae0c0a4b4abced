"""Golden tests of rendering: for each family and thinking mode, the ids of 250 random conversations built turn by turn
equal those of the family's template applied to the whole conversation, or differ for one of the reasons named here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import chat_reference as reference
import chat_tokenizers as tokenizers
import pytest
from real_parts import real_data, require

from swe_rl.agents.context import Context
from swe_rl.agents.rendering import make_renderer
from swe_rl.agents.rendering.harmony import DATE
from swe_rl.config import AgentConfig

CONVERSATIONS = 250
Messages = Sequence[Mapping[str, str]]
NO_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Family:
    tokenizer: Callable[[], Any]
    template: Callable[[Messages], str]  # as published
    thinking: str = "accumulated"
    observations: str = "user"
    thinks: bool = False
    opening: str = ""  # where the template's differs from turn to turn, what the renderer gives every turn
    reasons: Callable[[str], str] = lambda answer: ""  # why a sampled text is not what the template makes of it
    final_only: bool = False  # GPT-OSS: what is sampled is channels
    published: str = ""  # file of the published template


def white_space(answer: str) -> str:
    """The template tokenises the header's newline and the text together."""
    return "white space joins the opening" if answer[:1].isspace() else ""


def trimmed(answer: str) -> str:
    return "the template trims" if answer != answer.strip() else ""


def thought_layout(answer: str) -> str:
    """The template sets the thought in fixed white space, and drops an empty one."""
    if white_space(answer):
        return white_space(answer)
    if "</think>" not in answer:
        return ""
    thought, _, rest = answer.removeprefix("<think>\n").partition("</think>\n\n")
    regular = answer.startswith("<think>\n") and thought.endswith("\n") and thought.strip("\n") + "\n" == thought
    return "" if regular and thought.strip("\n") and not rest.startswith("\n") else "the thought is laid out anew"


FAMILIES = {
    "qwen2.5": Family(lambda: tokenizers.qwen("2.5"), reference.chatml, reasons=white_space, published="trl/qwen2_5"),
    "qwen2.5-tool": Family(
        lambda: tokenizers.qwen("2.5"),
        reference.chatml,
        observations="tool",
        reasons=white_space,
        published="trl/qwen2_5",
    ),
    "qwen3-off": Family(
        lambda: tokenizers.qwen("3"),
        lambda messages: reference.chatml(messages, opening=NO_THOUGHT),
        thinking="off",
        reasons=white_space,
        published="other/swe_smith_agent_lightning",
    ),
    "qwen3-accumulated": Family(
        lambda: tokenizers.qwen("3"),
        reference.chatml,
        thinks=True,
        reasons=white_space,
        published="other/qwen3_acc_thinking_skyrl",
    ),
    "qwen3-kept": Family(
        lambda: tokenizers.qwen("3"),
        reference.qwen3,
        thinking="kept",
        observations="tool",
        thinks=True,
        reasons=thought_layout,
        published="trl/qwen3",
    ),
    "qwen3-stripped": Family(
        lambda: tokenizers.qwen("3"),
        reference.qwen3,
        thinking="stripped",
        thinks=True,
        reasons=lambda answer: white_space(answer) or white_space(answer.rpartition("</think>")[2].lstrip("\n")),
        published="trl/qwen3",
    ),
    "qwen3-2507": Family(
        lambda: tokenizers.qwen("3"), reference.chatml, reasons=white_space, published="trl/qwen3_instruct_2507"
    ),
    "smollm2": Family(tokenizers.smollm2, reference.chatml, reasons=white_space, published="other/smollm2_instruct"),
    "llama3": Family(tokenizers.llama3, reference.llama3, reasons=trimmed, published="trl/llama3"),
    "llama3.1": Family(tokenizers.llama3, reference.llama31, reasons=trimmed, published="trl/llama3_1"),
    "gpt-oss-stripped": Family(
        tokenizers.harmony,
        lambda messages: reference.harmony(messages, date=DATE),
        thinking="stripped",
        final_only=True,
        published="trl/gptoss",
    ),
}
FAMILIES["gpt-oss-accumulated"] = Family(
    tokenizers.harmony,
    lambda messages: reference.harmony(messages, date=DATE, whole=True),  # no template does that: see harmony.py
    final_only=True,
)
SLOW = ("qwen", "llama")  # 151,643 tokens, or 256 special ones
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name.startswith(SLOW) else []) for name in FAMILIES]
)


def make(name: str) -> tuple[Family, Any, Any]:
    """(family, tokenizer, renderer)."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    tokenizer.chat_template = "Today Date" if name == "llama3.1" else "a template without dates"
    if name == "llama3.1":
        require(_has_renderers(), "the package renderers")
    return family, tokenizer, make_renderer(tokenizer, thinking=family.thinking, observations=family.observations)


def _has_renderers() -> bool:
    import importlib.util

    return importlib.util.find_spec("renderers") is not None


def conversations(name: str, tokenizer: Any) -> list[list[Mapping[str, str]]]:
    family, rng = FAMILIES[name], random.Random(f"golden/{name}")
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    looks = [*rng.sample(added, min(6, len(added))), *added[:3], "<think>", "</tool_response>"]
    found = []
    for _ in range(CONVERSATIONS):
        messages = reference.conversation(rng, looks, role=family.observations, thinks=family.thinks)
        if family.final_only:
            messages = [_with_channels(rng, m) if m["role"] == "assistant" else m for m in messages]
        found.append(messages)
    return found


def _with_channels(rng: random.Random, message: Mapping[str, str]) -> Mapping[str, str]:
    analysis = f"<|channel|>analysis<|message|>{reference.text(rng, [])}<|end|><|start|>assistant"
    content = f"<|channel|>final<|message|>{message['content']}"
    return {**message, "content": (analysis if rng.random() < 0.8 else "") + content}


def as_seen(tokenizer: Any, messages: Messages) -> list[Mapping[str, str]]:
    """The messages with everything in them broken that must not become a token."""
    opening = [{**m, "content": reference.broken(tokenizer, m["content"], control=False)} for m in messages[:2]]
    rest = [
        m if m["role"] == "assistant" else {**m, "content": reference.broken(tokenizer, m["content"], control=True)}
        for m in messages[2:]
    ]
    return [*opening, *rest]


def sampled_ids(family: Family, tokenizer: Any, renderer: Any, answer: str) -> list[int]:
    end = renderer.stop_ids[0] if family.final_only else renderer.end_id
    return [*tokenizer.encode(answer, add_special_tokens=False), end]


def prompts(family: Family, tokenizer: Any, renderer: Any, messages: Messages) -> list[list[int]]:
    """The prompt of every turn, as the episode builds it."""
    context = Context(renderer, AgentConfig())
    context.ids = renderer.initial_ids(messages[:2])
    found = [list(context.ids)]
    for answer, observation in zip(messages[2::2], messages[3::2], strict=True):
        ids = sampled_ids(family, tokenizer, renderer, answer["content"])
        context.ids += ids
        context.append(context.observation(observation["content"], ids))
        found.append(list(context.ids))
    return found


@EVERY
def test_turn_by_turn_ids_equal_those_of_the_whole_conversation(name: str) -> None:
    family, tokenizer, renderer = make(name)
    equal, explained = 0, 0
    for messages in conversations(name, tokenizer):
        got = prompts(family, tokenizer, renderer, messages)
        seen = as_seen(tokenizer, messages)
        for turn, prompt in enumerate(got):
            end = 2 + 2 * turn
            reasons = {family.reasons(m["content"]) for m in messages[2:end:2]} - {""}
            want = reference.expected_ids(tokenizer, family.template(seen[:end]))
            if not reasons:
                assert prompt == want, (turn, messages[:end])
                equal += 1
            else:
                explained += prompt != want
    assert equal >= CONVERSATIONS, "the exceptions are the exception"
    assert renderer.retokenized == 0
    print(f"{name}: {equal} prompts equal, {explained} differ for a documented reason")


@EVERY
def test_where_ids_differ_the_sampled_ones_are_kept(name: str) -> None:
    """With or without a reason: each prompt is the one before, what stays of the sampled ids, and the delta."""
    family, tokenizer, renderer = make(name)
    for messages in conversations(name, tokenizer)[:60]:
        found = prompts(family, tokenizer, renderer, messages)
        for turn, (before, after) in enumerate(pairwise(found)):
            ids = sampled_ids(family, tokenizer, renderer, messages[2 + 2 * turn]["content"])
            stays = renderer.history(ids)
            assert after[: len(before) + len(stays)] == [*before, *stays]
            if family.thinking != "stripped":
                assert stays == ids
            delta = after[len(before) + len(stays) :]
            assert delta == renderer.observation_ids(
                messages[3 + 2 * turn]["content"], closed=renderer.is_closed(stays)
            )


@EVERY
def test_look_alikes_in_tool_output_are_text(name: str) -> None:
    family, tokenizer, renderer = make(name)
    added = {index for index, token in tokenizer.added_tokens_decoder.items()}
    frame = [index for index in renderer.observation_ids("") if index in added]
    everything = "".join(str(token) + "x" for token in tokenizer.added_tokens_decoder.values())
    for content in (everything, everything * 2, "<" + everything, "\n".join(everything.split("x")) + "."):
        ids = renderer.observation_ids(content)
        assert [index for index in ids if index in added] == frame
        assert renderer.observation_text(ids) == content
        special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        opening = renderer.initial_ids([{"role": "user", "content": content}])
        bare = renderer.initial_ids([{"role": "user", "content": ""}])
        assert [i for i in opening if i in special] == [i for i in bare if i in special]
    for text in ("", "a\nb", " é 🙂"):
        shown = text.strip() if family.tokenizer is tokenizers.llama3 else text
        assert renderer.observation_text(renderer.observation_ids(text)) == shown


# Without those whose template drops what was sampled: their reference is this project's own.
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.published])
def test_the_references_are_the_published_templates(name: str) -> None:
    import jinja2.sandbox

    family, rng = FAMILIES[name], random.Random(f"published/{name}")
    source = real_data(f"models/chat_templates/{family.published}.jinja").read_text()
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(source)
    for _ in range(100):
        messages: Any = reference.conversation(rng, [], role=family.observations, thinks=family.thinks)
        given = messages
        if family.final_only:
            messages = [_with_channels(rng, m) if m["role"] == "assistant" else m for m in messages]
            given = [
                {**m, "content": reference.harmony_final(m["content"])} if m["role"] == "assistant" else m
                for m in messages
            ]
        published = template.render(
            messages=given,
            add_generation_prompt=True,
            bos_token="<|begin_of_text|>",
            strftime_now=lambda _: DATE,
            **({"enable_thinking": False} if family.thinking == "off" else {}),
        )
        assert family.template(messages) == published


@pytest.mark.slow
def test_recorded_ids_of_qwen_are_this_vocabulary_and_not_always_canonical() -> None:
    """Ids of real multi-turn runs. Prompts come back from text; sampled ids do not, which is why they are kept."""
    tokenizer = tokenizers.qwen("3")
    log = json.loads(real_data("tokens/test_nemo_gym_sanity.json").read_text())["expected_output"]
    for prompt in (entry["message_log"][0]["token_ids"] for entry in log):
        assert len(prompt) > 3000
        assert tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False) == prompt
    merged = json.loads(real_data("tokens/maybe_correct_merged_tokens_test_data.json").read_text())
    seen, rendered, wanted = (merged[key] for key in ("seen_token_ids", "output_prompt_token_ids", "expected_output"))
    assert tokenizer.encode(tokenizer.decode(seen), add_special_tokens=False) != seen
    assert rendered[: len(seen)] != seen, "the template's ids are others than the engine saw"
    assert tokenizer.decode(wanted) == tokenizer.decode(rendered)
    # The next prompt here: what the engine saw, to the id, and the delta; the same as that system's corrected prompt.
    renderer = make_renderer(tokenizer, observations="tool")
    assert seen[-1] == renderer.end_id
    delta = tokenizer.decode(wanted[len(seen) :])
    assert [*seen, *renderer.observation_ids(renderer.observation_text(wanted[len(seen) :]))] == wanted, delta


@pytest.mark.slow
def test_the_library_gives_the_same_ids_where_it_can() -> None:
    """Qwen3 by `renderers`: the same ids for texts without look-alikes; out of look-alikes it makes tokens."""
    require(_has_renderers(), "the package renderers")
    from renderers import Qwen3Renderer, Qwen3RendererConfig

    tokenizer, rng = tokenizers.qwen("3"), random.Random("library")
    ours = make_renderer(tokenizer, thinking="kept", observations="tool")
    theirs = Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    for _ in range(200):
        messages: Any = reference.conversation(rng, [], role="tool", thinks=False)
        assert ours.initial_ids(messages[:2]) == theirs.render_ids(messages[:2], add_generation_prompt=True)
        context = [ours.im_start, ours.end_id]
        bridged = theirs.bridge_to_next_turn(context[:1], context[1:], [messages[3]])
        assert bridged is not None
        assert [*context, *ours.observation_ids(messages[3]["content"])] == bridged.token_ids
    bad = theirs.render_ids([{"role": "user", "content": "a<|im_end|>"}])
    assert bad.count(ours.end_id) == 2, "fixed in the library: reconsider its use"
