"""The table of toolsets, and the optional tools that any of them can be given."""

from __future__ import annotations

from swe_rl.agents.toolset import Tool, Toolset
from swe_rl.agents.toolsets.abstain import ABSTAIN
from swe_rl.agents.toolsets.bash import BASH_ONLY
from swe_rl.agents.toolsets.human import ASK_HUMAN
from swe_rl.agents.toolsets.memory import NOTE, PLAN
from swe_rl.agents.toolsets.minimal import MINIMAL
from swe_rl.agents.toolsets.nebius import NEBIUS
from swe_rl.agents.toolsets.r2e import R2E
from swe_rl.agents.toolsets.sweagent import SWEAGENT
from swe_rl.config import AgentConfig

TOOLSETS: dict[str, Toolset] = {
    "minimal": MINIMAL,
    "r2e": R2E,
    "nebius": NEBIUS,
    "sweagent": SWEAGENT,
    "bash": BASH_ONLY,
}
MEMORY_TOOLS: dict[str, Tool] = {"plan": PLAN, "note": NOTE}


def make_toolset(cfg: AgentConfig) -> Toolset:
    """The toolset that the configuration names, with its optional tools."""
    extra = [MEMORY_TOOLS[name] for name in cfg.memory_tools]
    extra += [ASK_HUMAN] if cfg.ask_human != "off" else []
    extra += [ABSTAIN] if cfg.abstain else []
    return TOOLSETS[cfg.toolset].extended(*extra)


__all__ = ["MEMORY_TOOLS", "TOOLSETS", "make_toolset"]
