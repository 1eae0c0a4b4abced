"""The agent: episode loop, tools, action formats, prompts, and the rendering of tokens."""

from swe_rl.agents.environment import SweEnvironment
from swe_rl.agents.episode import run_episode
from swe_rl.agents.formats import FORMATS
from swe_rl.agents.prompts import load_prompt
from swe_rl.agents.rendering import ChatRenderer
from swe_rl.agents.toolset import DEFAULT_TOOLS, Toolset

__all__ = ["DEFAULT_TOOLS", "FORMATS", "ChatRenderer", "SweEnvironment", "Toolset", "load_prompt", "run_episode"]
