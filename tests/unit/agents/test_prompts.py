"""Prompts: every one renders for the toolsets and formats that it is for, and says what the published one says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from jinja2 import Environment, StrictUndefined, UndefinedError

from swe_rl.agents import FORMATS, TOOLSETS, load_prompt, make_toolset
from swe_rl.agents.formats import ParsedAction
from swe_rl.agents.prompts import TEMPLATES, Prompt
from swe_rl.agents.toolset import Toolset
from swe_rl.agents.toolsets.bash import SENTINEL
from swe_rl.agents.toolsets.command_line import USAGE
from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import TrainConfig, validate
from swe_rl.config.agent import PROMPTS, AgentConfig, validate_agent
from swe_rl.errors import ConfigError
from swe_rl.testing import make_task

TASK = make_task()
AGENTS = sorted(path.stem for path in (Path(__file__).parents[3] / "conf" / "agent").glob("*.yaml"))
PAIRS = [(prompt, toolset) for prompt, described in PROMPTS.items() for toolset in described or TOOLSETS]


def render(prompt: str, toolset: str | Toolset, action_format: str = "xml") -> str:
    chosen = TOOLSETS[toolset] if isinstance(toolset, str) else toolset
    bound = FORMATS[action_format].bind(chosen.signatures)
    messages = load_prompt(prompt).messages(TASK, tools=chosen.tools, action_format=bound)
    assert messages[-1]["role"] == "user"
    return "\n".join(message["content"] for message in messages)


def test_the_tables_agree() -> None:
    assert list(TEMPLATES) == list(PROMPTS)
    with pytest.raises(ConfigError, match=r"agent\.prompt='other' is unknown"):
        load_prompt("other")


@pytest.mark.parametrize("action_format", list(FORMATS))
@pytest.mark.parametrize(("prompt", "toolset"), PAIRS)
def test_every_prompt_renders_and_shows_an_example_that_parses(prompt: str, toolset: str, action_format: str) -> None:
    text = render(prompt, toolset, action_format)
    assert TASK.problem_statement in text
    if prompt == "nano":
        assert text == TASK.problem_statement
        return
    assert "/testbed" in text
    assert "{{" not in text
    assert "{%" not in text
    bound = FORMATS[action_format].bind(TOOLSETS[toolset].signatures)
    assert bound.help in text
    shell = "execute_bash" if toolset == "r2e" else "bash"
    key = "cmd" if toolset == "r2e" else "command"
    commands = ["ls -a", "grep -rn 'def parse' .", "grep -rn 'def parse' . | head"]
    examples = [bound.render(shell, {key: command}) for command in commands]
    found = [example for example in examples if example in text]
    assert len(found) == 1
    assert isinstance(bound.parse(found[0]), ParsedAction)


@pytest.mark.parametrize(("prompt", "toolset"), [pair for pair in PAIRS if pair[0].startswith("deepswe")])
def test_tools_and_all_their_parameters_are_described(prompt: str, toolset: str) -> None:
    text = render(prompt, toolset)
    for tool in TOOLSETS[toolset].tools:
        assert f"\n{tool.name}: {tool.description}\n" in text
        for key, meaning in tool.parameters.items():
            assert f"\n    {key}: {meaning}\n" in text
        for key, meaning in tool.optional.items():
            assert f"\n    [{key}]: {meaning}\n" in text


@pytest.mark.parametrize("prompt", [name for name in PROMPTS if name not in ("nano", "default")])
def test_optional_tools_are_described_too(prompt: str) -> None:
    cfg = AgentConfig(toolset=PROMPTS[prompt][0], memory_tools=["plan", "note"], ask_human="scripted")
    text = render(prompt, make_toolset(cfg))
    for name in ("plan", "note", "ask_human"):
        assert name not in render(prompt, cfg.toolset)
        tool = next(tool for tool in make_toolset(cfg).tools if tool.name == name)
        assert f"{name}" in text
        assert tool.description in text


def test_deepswe_says_what_the_published_prompts_say() -> None:
    train, evaluation = render("deepswe", "r2e"), render("deepswe_eval", "r2e")
    for text in (train, evaluation):
        assert f"<github_issue>\n{TASK.problem_statement}\n</github_issue>" in text
        assert "Make one call in each message" in text
    assert "reproduce_issue.py" in train
    assert "50 to 100 lines" in train
    assert [line[:2] for line in train.split("\n") if line[:1].isdigit()] == [f"{n}." for n in range(1, 8)]
    assert [line[:2] for line in evaluation.split("\n") if line[:1].isdigit()] == [f"{n}." for n in range(1, 10)]
    assert "number of steps is limited" in evaluation
    assert "number of steps is limited" not in train


def test_nebius_describes_its_commands_and_ends_in_the_prompt_line() -> None:
    text = render("nebius", "nebius", "fence")
    for usage in USAGE.values():
        assert usage.partition(",")[0].partition(" [TEXT]")[0] in text
    assert text.endswith("(Current directory: /testbed, current file: n/a) bash-$")
    assert "```command\nls -a\n```" in text
    assert "primes.py" not in text
    assert [line[:2] for line in text.split("\n") if line[:1].isdigit()] == ["1.", "2.", "3.", "4."]


@pytest.mark.parametrize("action_format", list(FORMATS))
def test_the_demonstration_is_written_in_the_format_of_the_run(action_format: str) -> None:
    text = render("nebius_demo", "nebius", action_format)
    bound = FORMATS[action_format].bind(TOOLSETS["nebius"].signatures)
    for command in ("python primes.py 10", "open primes.py", "submit"):
        assert bound.render("bash", {"command": command}) in text
    assert text.endswith(render("nebius", "nebius", action_format).rpartition("We work on")[2])


def test_bash_tells_how_to_hand_in() -> None:
    text = render("bash", "bash", "fence")
    assert f"```command\necho {SENTINEL}\n```" in text


def test_an_undefined_variable_is_an_error() -> None:
    jinja = Environment(undefined=StrictUndefined)
    prompt = Prompt(user=jinja.from_string("{{ issue }} {{ hint }}"))
    with pytest.raises(UndefinedError, match="hint"):
        prompt.messages(TASK, tools=(), action_format=FORMATS["xml"])


@pytest.mark.parametrize("agent", AGENTS)
def test_every_agent_configuration_is_valid(agent: str) -> None:
    config = compose_config(
        TrainConfig,
        "train",
        ["experiment=smoke", f"agent={agent}", "sandbox.lease_s=100000", "agent.max_turns=120"],
    )
    validate(config)
    make_toolset(config.agent)
    load_prompt(config.agent.prompt)


def test_a_prompt_of_other_tools_is_refused() -> None:
    for prompt, toolset in itertools.product(PROMPTS, TOOLSETS):
        cfg = AgentConfig(prompt=prompt, toolset=toolset)
        if (prompt, toolset) in PAIRS:
            validate_agent(cfg)
        else:
            with pytest.raises(ConfigError, match=r"agent\.prompt=.* describes other tools"):
                validate_agent(cfg)
