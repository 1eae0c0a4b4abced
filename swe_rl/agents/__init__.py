"""The agent: episode loop, tools, action formats, prompts, and the rendering of tokens."""

from swe_rl.agents.environment import SweEnvironment
from swe_rl.agents.episode import run_episode
from swe_rl.agents.formats import FORMATS
from swe_rl.agents.prompts import load_prompt
from swe_rl.agents.rendering import ChatRenderer, Renderer, make_renderer
from swe_rl.agents.toolset import Toolset
from swe_rl.agents.toolsets import TOOLSETS, make_toolset

__all__ = [
    "FORMATS",
    "TOOLSETS",
    "ChatRenderer",
    "Renderer",
    "SweEnvironment",
    "Toolset",
    "load_prompt",
    "make_renderer",
    "make_toolset",
    "run_episode",
]
