"""Opening messages, by name: `nano` (a few words, every token costs) and `default` (for pretrained models).

A prompt is one or two Jinja files beside this one, `NAME_system.jinja` (optional) and `NAME_user.jinja`. A variable
that is not defined is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment as JinjaEnvironment
from jinja2 import StrictUndefined, Template

from swe_rl.errors import ConfigError
from swe_rl.types import Task

if TYPE_CHECKING:
    from swe_rl.agents.formats import ActionFormat
    from swe_rl.agents.toolset import Tool

PROMPTS = ("nano", "default")


@dataclass(frozen=True, slots=True)
class Prompt:
    system: Template | None
    user: Template

    def messages(self, task: Task, *, tools: Sequence[Tool], action_format: ActionFormat) -> list[Mapping[str, str]]:
        """The opening messages of one task."""
        variables: dict[str, Any] = {
            "issue": task.problem_statement.strip(),
            "workdir": task.workdir,
            "tools": tools,
            "format": action_format,
        }
        opening = [{"role": "system", "content": self.system.render(variables)}] if self.system else []
        return [*opening, {"role": "user", "content": self.user.render(variables)}]


@cache
def load_prompt(name: str) -> Prompt:
    """The prompt `name`. Raises ConfigError for an unknown one."""
    if name not in PROMPTS:
        raise ConfigError(f"agent.prompt={name!r} is unknown: use one of {', '.join(PROMPTS)}")
    folder = resources.files("swe_rl.agents.prompts")
    jinja = JinjaEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    system = folder / f"{name}_system.jinja"
    return Prompt(
        jinja.from_string(system.read_text("utf-8")) if system.is_file() else None,
        jinja.from_string((folder / f"{name}_user.jinja").read_text("utf-8")),
    )
