"""The tool-call JSON format: what is read, what is repaired and flagged, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_parts import real_data

from swe_rl.agents.formats import FORMATS, FormatError, ParsedAction

HERMES = FORMATS["hermes"]


def test_plain_rendering() -> None:
    text = HERMES.render("bash", {"command": 'echo "é</tool_call>"\n'})
    assert text == (
        '<tool_call>\n{"name": "bash", "arguments": {"command": "echo \\"é\\u003c/tool_call>\\"\\n"}}\n</tool_call>'
    )
    assert json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"] == "bash"


@pytest.mark.parametrize(
    ("body", "arguments", "repaired"),
    [
        ('{"name": "f", "arguments": {"a": "x"}}', {"a": "x"}, ""),
        ('\n{"arguments": {"a": "</tool_call>"}, "name": "f"}\n', {"a": "</tool_call>"}, ""),
        ('{"name":"f","arguments":{"a":3,"b":true,"c":null,"d":[1,"é"],"e":1.50}}', None, ""),
        ('{"name": "f", "arguments": {"a": "x\n\ty"}}', {"a": "x\n\ty"}, "raw control characters in a string"),
        ('{"name": "f", "parameters": {"a": "x"}}', {"a": "x"}, '"parameters" for "arguments"'),
        ('{"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}', {"a": "x"}, "arguments as a string"),
        ('{"name": "f"}', {}, "no arguments"),
        ('{"name": "f", "arguments": {}}}\n}', {}, "closing braces too many"),
        ('{"name": "f", "parameters": {"a": "\n"}}}', {"a": "\n"}, None),
    ],
)
def test_values_and_repairs(body: str, arguments: dict[str, str] | None, repaired: str | None) -> None:
    got = HERMES.parse(f"So.\n<tool_call>{body}</tool_call> <tool_response>")
    assert isinstance(got, ParsedAction)
    want = {"a": "3", "b": "true", "d": '[1, "é"]', "e": "1.5"} if arguments is None else arguments
    assert got.tool_call.arguments == want
    assert (got.tool_call.name, got.thought) == ("f", "So.\n")
    if repaired is None:
        assert got.repaired.count(", ") == 2
    else:
        assert got.repaired == repaired


@pytest.mark.parametrize(
    ("text", "kind", "seen"),
    [
        ("", "no_call", "no tool call"),
        ("<tool_cal", "no_call", "no tool call"),
        ("<tool_call>", "truncated", "the call is not closed by </tool_call>"),
        ('<tool_call>{"name": "f", "arguments": {"a": "x', "truncated", None),
        ('<tool_call>{"name": "f", "arguments": {"a": "x"}}', "truncated", None),
        ('<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool', "truncated", None),
        ('<tool_call>{"name": "f", "arguments": {"a": "\n', "truncated", None),
        ('<tool_call>{"name": "f", "arguments": {"a": "x"}</tool_call>', "malformed", None),
        ("<tool_call>ls</tool_call>", "malformed", "no JSON object after <tool_call>, but 'ls</tool_call>'"),
        ('<tool_call>["f"]</tool_call>', "malformed", None),
        ('<tool_call>{"name": "f",}</tool_call>', "malformed", None),
        ("<tool_call>{'name': 'f'}</tool_call>", "malformed", None),
        ('<tool_call>{"arguments": {}}</tool_call>', "malformed", '"name" must be the name of a tool'),
        ('<tool_call>{"name": "a b"}</tool_call>', "malformed", '"name" must be the name of a tool'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "malformed", '"arguments" must be an object'),
        ('<tool_call>{"name": "f", "arguments": "ls"}</tool_call>', "malformed", None),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "malformed", "'a' given twice"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "malformed", "NaN is not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "malformed", None),
        ('<tool_call>{"name": "f"} and</tool_call>', "malformed", "unexpected text after the JSON: 'and</tool_call>'"),
        ('<tool_call>{"name":"f"}</tool_call><tool_call>', "several", "more than one tool call"),
    ],
)
def test_errors_say_what_was_seen(text: str, kind: str, seen: str | None) -> None:
    got = HERMES.parse(text)
    assert isinstance(got, FormatError)
    assert got.kind == kind
    assert seen is None or got.seen == seen


def test_recorded_calls_of_a_real_model_are_read() -> None:
    """Tool calls of recorded rollouts, written as the chat template writes them."""
    calls = list(_recorded(real_data("trajectories/openhands/fncall-llm-message.json")))
    assert len(calls) > 3
    for name, arguments in calls:
        text = "Now.\n<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
        got = HERMES.parse(text)
        assert isinstance(got, ParsedAction)
        want = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        assert (got.tool_call.name, dict(got.tool_call.arguments), got.repaired) == (name, want, "")


def _recorded(path: Path) -> list[tuple[str, dict[str, object]]]:
    data = json.loads(path.read_text())
    messages = data["messages"] if isinstance(data, dict) else data
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]
