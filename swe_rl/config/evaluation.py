"""The whole tree of `swe-rl eval`: which policy, on which tasks, how often. Groups are those of `swe-rl train`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from swe_rl.config.agent import AgentConfig
from swe_rl.config.bounds import Bounds
from swe_rl.config.model import ModelConfig
from swe_rl.config.rollout import EngineConfig, RolloutConfig
from swe_rl.config.run import EvalConfig, TrainConfig, validate_groups
from swe_rl.config.sandbox import SandboxConfig
from swe_rl.config.tasks import GAMES, RewardConfig, TaskConfig
from swe_rl.errors import ConfigError

SCRIPTED = ("oracle", "empty")  # policies without a model: plays the gold patch; submits at once


@dataclass(kw_only=True)
class ServerConfig:
    """An OpenAI-compatible server, for policy=http://..."""

    model: str = ""  # the name it serves the model under
    api: str = "chat"  # chat (any server) | completions (token ids in and out: vLLM)
    tokenizer: str = ""  # directory or hub name; "": tokens are counted, roughly, by the small built-in tokenizer
    key_env: str = "OPENAI_API_KEY"  # environment variable with the key; not set: no key is sent
    request_s: float = 7200.0  # limit of one request (R2E-Gym's)
    retries: int = 4  # of a request that the server refused or lost, with growing pauses


@dataclass(kw_only=True)
class SequentialConfig:
    """Sampling a task until a verifier is confident, in place of eval.samples_per_task rollouts of every task."""

    verifier: str = ""  # a directory that `swe-rl verify train` wrote; "": no stopping rule
    threshold: float = 0.9  # the first rollout with such a score is handed in; without one, the best after all
    batch_tokens: int = 16_384  # of the verifier


@dataclass(kw_only=True)
class EvaluationConfig:
    # "oracle", "empty", a run directory of `swe-rl train` (its newest weights), a Hugging Face directory, a hub name,
    # or http://HOST:PORT/v1; "" is model.name as it is
    policy: str = ""
    server: ServerConfig = field(default_factory=ServerConfig)
    sequential: SequentialConfig = field(default_factory=SequentialConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(base_tasks=0, greedy_tasks=0))
    seed: int = 0
    run_dir: str = ""  # empty: runs/<date>-eval
    resume: bool = False
    threads: int = 0  # torch threads; 0 leaves torch's choice
    name: str = ""  # of the model in predictions; "": the policy

    @property
    def splits(self) -> dict[str, int]:
        """eval.splits, or all that a directory of tasks has, or 64 held-out tasks of a source without end."""
        endless = self.task.source == "minirepo" or self.task.source in GAMES
        return dict(self.eval.splits) or ({"heldout": 64} if endless else {"all": 0})

    @property
    def kind(self) -> str:
        """scripted | server | model"""
        if self.policy in SCRIPTED:
            return "scripted"
        return "server" if self.policy.startswith(("http://", "https://")) else "model"

    def as_train(self) -> TrainConfig:
        """The same settings where a component takes the tree of a training run."""
        shared = {f.name for f in fields(TrainConfig)} & {f.name for f in fields(self)}
        cfg = TrainConfig(**{name: getattr(self, name) for name in shared})
        if self.kind != "scripted":
            return cfg
        # A script has no context window: what it shows and says counts for nothing.
        agent = replace(cfg.agent, max_context_tokens=1 << 24, max_turn_tokens=1 << 20, max_generated_tokens=0)
        return replace(cfg, agent=agent)


SEQUENTIAL_BOUNDS = Bounds(positive=("threshold", "batch_tokens"), at_most_one=("threshold",))
SERVER_BOUNDS = Bounds(choices={"api": ("chat", "completions")}, positive=("request_s",), not_negative=("retries",))


def validate_evaluation(cfg: EvaluationConfig) -> None:
    """Cross-checks of the whole tree. ConfigError names the key and the cure."""
    SERVER_BOUNDS.check(cfg.server, "server")
    SEQUENTIAL_BOUNDS.check(cfg.sequential, "sequential")
    validate_groups(cfg.as_train())
    _validate_policy(cfg)
    _validate_samples(cfg)
    _validate_sequential(cfg)


def _validate_policy(cfg: EvaluationConfig) -> None:
    default = ServerConfig()
    for key in (f.name for f in fields(ServerConfig)):
        if cfg.kind != "server" and getattr(cfg.server, key) != getattr(default, key):
            raise ConfigError(f"server.{key} does nothing for policy={cfg.policy!r}: give policy=http://HOST:PORT/v1")
    if cfg.kind == "server" and not cfg.server.model:
        raise ConfigError(f"policy={cfg.policy} is a server: name the model that it serves with server.model=NAME")
    if cfg.kind == "server" and cfg.server.api == "completions" and not cfg.server.tokenizer:
        raise ConfigError("server.api=completions sends token ids: name the model's tokenizer, server.tokenizer=NAME")
    if cfg.policy and cfg.kind == "model" and cfg.model.name != ModelConfig().name:
        raise ConfigError(
            f"policy={cfg.policy} and model.name={cfg.model.name} both name the policy: remove one of them"
        )
    if cfg.model.lora_rank:
        raise ConfigError(f"model.lora_rank={cfg.model.lora_rank} is for training: remove it, and merge the adapter")


def _validate_samples(cfg: EvaluationConfig) -> None:
    for split, count in cfg.eval.splits.items():
        if count < 0 or (count == 0 and (cfg.task.source == "minirepo" or cfg.task.source in GAMES)):
            raise ConfigError(
                f"eval.splits.{split}={count}: give a number of tasks; 0, for all, goes with a directory of tasks only"
            )
    if cfg.eval.base_tasks:
        raise ConfigError(f"eval.base_tasks={cfg.eval.base_tasks} is a row of training runs: set it to 0")
    for key in ("every", "every_tasks"):
        if getattr(cfg.eval, key) != getattr(EvalConfig(), key):
            raise ConfigError(f"eval.{key} is for training runs, which evaluate on the way: remove it")
    if cfg.eval.greedy_tasks and cfg.kind == "scripted":
        raise ConfigError(
            f"eval.greedy_tasks={cfg.eval.greedy_tasks} does nothing for policy={cfg.policy}, which samples nothing: "
            "set it to 0"
        )
    if not cfg.rollout.temperature and cfg.eval.samples_per_task > 1 and cfg.kind == "model":
        raise ConfigError(
            f"rollout.temperature=0 gives eval.samples_per_task={cfg.eval.samples_per_task} times the same: raise it, "
            "or set eval.samples_per_task=1"
        )


def _validate_sequential(cfg: EvaluationConfig) -> None:
    default = SequentialConfig()
    for key in ("threshold", "batch_tokens"):
        if not cfg.sequential.verifier and getattr(cfg.sequential, key) != getattr(default, key):
            raise ConfigError(f"sequential.{key} does nothing without sequential.verifier=DIR: set that, or remove it")
    if cfg.sequential.verifier and cfg.eval.samples_per_task < 2:
        raise ConfigError("sequential.verifier with eval.samples_per_task=1 has nothing to stop: allow more rollouts")
    if cfg.sequential.verifier and cfg.eval.greedy_tasks:
        raise ConfigError(f"eval.greedy_tasks={cfg.eval.greedy_tasks} goes without sequential.verifier: set it to 0")
