"""Checks between the keys of the group `agent`."""

from __future__ import annotations

from typing import Any

import pytest

from swe_rl.agents import toolsets
from swe_rl.config.agent import MEMORY_TOOLS, AgentConfig, validate_agent
from swe_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "nebius"}, "agent.prompt=nebius describes other tools than those of agent.toolset=minimal"),
        ({"memory_tools": ["diary"]}, "agent.memory_tools=['diary'] must be some of plan, note"),
        ({"memory_tools": ["plan", "plan"]}, "each once"),
        ({"question_cost": 0.1}, "agent.question_cost=0.1 does nothing with agent.ask_human=off"),
        ({"drop_from_tokens": 9}, "agent.drop_from_tokens=9 does nothing with agent.keep_observations=0"),
        ({"keep_observations": 1, "drop_from_tokens": 513}, "agent.max_context_tokens is 512"),
        ({"soft_turns": 9, "remind_turns": 3}, "agent.soft_turns=9 can never be reached: agent.max_turns is 8"),
        ({"soft_turns": 3}, "agent.soft_turns=3 does nothing with agent.remind_turns=0"),
        ({"remind_tokens": 600}, "agent.remind_tokens=600 can never be reached"),
        ({"tool_s": 301.0}, "agent.tool_s=301.0 can never be reached: agent.episode_s is 300.0"),
    ],
)
def test_what_cannot_take_effect_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_agent(AgentConfig(**changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_works_together_passes() -> None:
    validate_agent(AgentConfig())
    validate_agent(
        AgentConfig(max_turns=100, soft_turns=40, remind_turns=40, keep_observations=5, drop_from_tokens=200)
    )
    validate_agent(AgentConfig(memory_tools=["note", "plan"], ask_human="scripted", question_cost=0.1, tool_s=300.0))


def test_the_lists_of_names_agree() -> None:
    assert tuple(toolsets.MEMORY_TOOLS) == MEMORY_TOOLS
