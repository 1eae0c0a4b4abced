"""The keys of the group `agent`, and the checks between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from swe_rl.config.bounds import Bounds
from swe_rl.errors import ConfigError

PROMPTS: dict[str, tuple[str, ...]] = {  # of swe_rl/agents/prompts -> the toolsets that it describes; none: any
    "nano": (),
    "default": ("minimal",),
    "deepswe": ("r2e", "sweagent"),
    "deepswe_eval": ("r2e", "sweagent"),
    "nebius": ("nebius",),
    "nebius_demo": ("nebius",),
    "bash": ("bash",),
}
MEMORY_TOOLS = ("plan", "note")


@dataclass(kw_only=True)
class AgentConfig:
    toolset: str = "minimal"  # minimal | r2e | nebius | sweagent | bash
    memory_tools: list[str] = field(default_factory=list)  # of plan, note: added to the toolset
    ask_human: str = "off"  # off | scripted (task.meta["answers"]) | terminal: adds a tool of that name
    question_cost: float = 0.0  # taken off the reward for each question
    abstain: bool = False  # adds a tool that ends the episode without an answer
    abstain_reward: float = 0.0  # of an episode that ended so; between a failure's and a success's to be of use
    prompt: str = "nano"  # a prompt of swe_rl/agents/prompts
    action_format: str = "xml"  # xml | hermes | fence
    # Of models that think (Qwen3, GPT-OSS): accumulated keeps every thought in the context, as for models that do
    # not think; kept is that with observations=tool; stripped drops earlier ones; off opens turns with an empty one.
    thinking: str = "accumulated"
    observations: str = "user"  # what observations are to the model: user | tool (ChatML only)
    max_turns: int = 8
    soft_turns: int = 0  # turns that the policy is told it has, when it shall have more; 0: max_turns
    remind_turns: int = 0  # with so many turns left, observations begin to end in how many; 0: never
    max_context_tokens: int = 512  # prompt + everything after it
    max_turn_tokens: int = 160  # sampled tokens per turn
    max_generated_tokens: int = 0  # sampled tokens of the episode; 0: what the context has room for
    remind_tokens: int = 0  # from so many context tokens on, observations end in how many are left; 0: never
    max_observation_tokens: int = 128  # head and tail kept
    keep_observations: int = 0  # older observations leave the context, a note stays; 0: all are kept
    drop_from_tokens: int = 0  # they leave it only when the context is longer than this
    max_format_errors: int = 3  # in a row
    explain_errors: bool = False  # a format error is explained in full: what was seen, expected, an example, tries left
    tool_s: float = 0.0  # seconds that the tool calls of the episode may take together; 0: episode_s
    episode_s: float = 300.0


BOUNDS = Bounds(
    choices={
        "toolset": ("minimal", "r2e", "nebius", "sweagent", "bash"),
        "ask_human": ("off", "scripted", "terminal"),
        "prompt": tuple(PROMPTS),
        "action_format": ("xml", "hermes", "fence"),
        "thinking": ("accumulated", "kept", "stripped", "off"),
        "observations": ("user", "tool"),
    },
    positive=(
        *(f"max_{key}" for key in ("turns", "context_tokens", "turn_tokens", "observation_tokens", "format_errors")),
        "episode_s",
    ),
    not_negative=(
        *("question_cost", "soft_turns", "remind_turns", "max_generated_tokens"),
        *("remind_tokens", "keep_observations", "drop_from_tokens", "tool_s"),
    ),
)


def validate_agent(cfg: AgentConfig) -> None:
    """Cross-checks of the group. ConfigError names the key and the cure."""
    if PROMPTS[cfg.prompt] and cfg.toolset not in PROMPTS[cfg.prompt]:
        raise ConfigError(
            f"agent.prompt={cfg.prompt} describes other tools than those of agent.toolset={cfg.toolset}: "
            f"set agent.toolset to one of {', '.join(PROMPTS[cfg.prompt])}"
        )
    for name in cfg.memory_tools:
        if name not in MEMORY_TOOLS or cfg.memory_tools.count(name) > 1:
            raise ConfigError(
                f"agent.memory_tools={list(cfg.memory_tools)} must be some of {', '.join(MEMORY_TOOLS)}, each once"
            )
    if cfg.question_cost and cfg.ask_human == "off":
        raise ConfigError(
            f"agent.question_cost={cfg.question_cost} does nothing with agent.ask_human=off: set that, or no cost"
        )
    if cfg.abstain_reward and not cfg.abstain:
        raise ConfigError(f"agent.abstain_reward={cfg.abstain_reward} does nothing with agent.abstain=false: set that")
    if cfg.drop_from_tokens and not cfg.keep_observations:
        raise ConfigError(
            f"agent.drop_from_tokens={cfg.drop_from_tokens} does nothing with agent.keep_observations=0: set that"
        )
    for key, limit in (
        ("soft_turns", "max_turns"),
        ("remind_tokens", "max_context_tokens"),
        ("drop_from_tokens", "max_context_tokens"),
        ("tool_s", "episode_s"),
    ):
        if getattr(cfg, key) > getattr(cfg, limit):
            raise ConfigError(
                f"agent.{key}={getattr(cfg, key)} can never be reached: agent.{limit} is {getattr(cfg, limit)}"
            )
    if cfg.soft_turns and not cfg.remind_turns:
        raise ConfigError(
            f"agent.soft_turns={cfg.soft_turns} does nothing with agent.remind_turns=0: nobody is told; set that"
        )
