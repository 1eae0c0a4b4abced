"""Opening messages, by name. A prompt is one or two Jinja files beside this one; a variable that is not defined is an
error. Which toolsets a prompt describes is in config.PROMPTS.

- nano: the issue and nothing else, every token costs;  default: a few words for pretrained models
- deepswe, deepswe_eval: as DeepSWE was trained and evaluated (R2E-Gym's instructions)
- nebius: arXiv:2508.03501; nebius_demo shows one solved task first, as for the first collection with the base model
- bash: one shell and nothing else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment as JinjaEnvironment
from jinja2 import StrictUndefined, Template

from swe_rl.agents.toolsets.bash import SENTINEL
from swe_rl.errors import ConfigError
from swe_rl.types import Task

if TYPE_CHECKING:
    from swe_rl.agents.formats import ActionFormat
    from swe_rl.agents.toolset import Tool

TEMPLATES: dict[str, tuple[str, ...]] = {  # prompt -> user, system, demonstration
    "nano": ("nano_user",),
    "default": ("default_user", "default_system"),
    "deepswe": ("deepswe_user", "tools_system"),
    "deepswe_eval": ("deepswe_eval_user", "tools_system"),
    "nebius": ("nebius_user", "nebius_system"),
    "nebius_demo": ("nebius_user", "nebius_system", "nebius_demonstration"),
    "bash": ("bash_user", "bash_system"),
}
_SHELL_TOOLS = ("bash", "execute_bash")


@dataclass(frozen=True, slots=True)
class Prompt:
    user: Template
    system: Template | None = None
    demonstration: Template | None = None

    def messages(self, task: Task, *, tools: Sequence[Tool], action_format: ActionFormat) -> list[Mapping[str, str]]:
        """The opening messages of one task."""
        variables: dict[str, Any] = {
            "issue": task.problem_statement.strip(),
            "workdir": task.workdir,
            "tools": tools,
            "format": action_format,
            "shell": partial(_shell_call, tools, action_format),
            "sentinel": SENTINEL,
        }
        variables["demonstration"] = self.demonstration.render(variables) if self.demonstration else ""
        opening = [{"role": "system", "content": self.system.render(variables)}] if self.system else []
        return [*opening, {"role": "user", "content": self.user.render(variables)}]


def _shell_call(tools: Sequence[Tool], action_format: ActionFormat, command: str) -> str:
    """A call of the toolset's shell, as an example."""
    shell = next(tool for tool in tools if tool.name in _SHELL_TOOLS)
    return action_format.render(shell.name, {next(iter([*shell.parameters, *shell.optional])): command})


@cache
def load_prompt(name: str) -> Prompt:
    """The prompt `name`. Raises ConfigError for an unknown one."""
    if name not in TEMPLATES:
        raise ConfigError(f"agent.prompt={name!r} is unknown: use one of {', '.join(TEMPLATES)}")
    folder = resources.files("swe_rl.agents.prompts")
    jinja = JinjaEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    return Prompt(*(jinja.from_string((folder / f"{file}.jinja").read_text("utf-8")) for file in TEMPLATES[name]))
