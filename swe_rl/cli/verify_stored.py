"""Finished attempts of a run directory: what was sampled, with which tools, on which tasks, in whose tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from swe_rl.agents.rendering import Renderer, make_renderer
from swe_rl.cli.eval_policy import agent_of_phase, built_in_tokenizer, phase_names, run_config, weights_of
from swe_rl.cli.paths import cache_dir
from swe_rl.cli.rollout import rollout_files
from swe_rl.config import AgentConfig, ModelConfig, SandboxConfig, TaskConfig, TrainConfig
from swe_rl.config.evaluation import EvaluationConfig
from swe_rl.errors import ConfigError
from swe_rl.evaluation.verifier_data import tasks_by_id
from swe_rl.evaluation.verifier_model import MANIFEST
from swe_rl.models.tokenizers import load_tokenizer, read_tokenizer
from swe_rl.rollout.journal import read_journal, read_parquet
from swe_rl.types import Task, Trajectory

C = TypeVar("C")
TEST_AGENT = "test_agent"  # phase of the rollouts and weights of a test agent


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The settings of a run of `swe-rl train`, `eval` or `verify`."""

    path: Path
    agent: AgentConfig  # of the run; a phase may have had its own: `agent_of`
    sandbox: SandboxConfig
    task: TaskConfig
    model: ModelConfig
    policy: str  # of an evaluation: what it was of
    server_tokenizer: str  # of an evaluation of a server: what counted its tokens
    config: Mapping[str, Any]  # all of config.yaml

    def agent_of(self, trajectory: Trajectory) -> AgentConfig:
        """The settings that a rollout was sampled with: those of its phase, also in the evaluation after it."""
        label = trajectory.group_id.split("/", 1)[0]
        names = [name for phase in self.config.get("phases") or () for name in phase_names(phase)]
        own = [name for name in names if label == name or label.startswith(f"eval-{name}-")]
        return _group(AgentConfig, {"agent": agent_of_phase(self.config, max(own, key=len, default=""))}, "agent")

    def renderer(self) -> Renderer:
        """Of the tokenizer that the rollouts were sampled with: of the policy evaluated, else of the run's own
        weights, else of the configured model. ConfigError when it cannot be loaded: no other one reads its ids."""
        stored = sorted(self.path.glob("phases/*/tokenizer.json"))
        own = [file for file in stored if not (file.parent / MANIFEST).exists()]  # a verifier's may have more tokens
        folder = weights_of(self.policy) if self.policy else own[-1].parent if own else None
        if folder is not None and (folder / "tokenizer.json").is_file():
            tokenizer = read_tokenizer(str(folder))
        else:
            tokenizer = self._named_tokenizer(str(folder or ""))
        return make_renderer(tokenizer, thinking=self.agent.thinking, observations=self.agent.observations)

    def _named_tokenizer(self, folder: str) -> Any:
        kind = EvaluationConfig(policy=self.policy).kind
        if kind == "server" and self.server_tokenizer:
            return read_tokenizer(self.server_tokenizer)
        name = folder or self.policy or self.model.name
        if kind != "model" or name == "nano":
            return built_in_tokenizer(TrainConfig(model=self.model, task=self.task, agent=self.agent))
        return load_tokenizer(replace(self.model, name=name), cache_dir=cache_dir() / "models")

    def trajectories(self, *, ids: Iterable[str] | None = None) -> list[Trajectory]:
        """Finished rollouts with these ids, or all graded attempts at tasks (a test agent's are none). ConfigError for
        an id that is not there."""
        wanted = None if ids is None else set(ids)
        found: dict[str, Trajectory] = {}
        for file in rollout_files(self.path):
            for trajectory in read_parquet(file) if file.suffix == ".parquet" else read_journal(file):
                if trajectory.trajectory_id in wanted if wanted is not None else _is_attempt(trajectory):
                    found[trajectory.trajectory_id] = trajectory
        if wanted is not None and (missing := sorted(wanted - set(found))):
            raise ConfigError(f"{self.path} has no rollout {missing[0]}: the file of candidates is of another run")
        return [found[name] for name in sorted(found)]

    def tasks(self, trajectories: Iterable[Trajectory]) -> dict[str, Task]:
        """Their tasks by id."""
        return tasks_by_id(self.task.source, {item.task_id for item in trajectories})


def open_stored(path: Path) -> StoredRun:
    """Raises ConfigError for what is no run directory."""
    values = run_config(path)
    if not values:
        raise ConfigError(f"{path} is no run directory: it has no config.yaml")
    return StoredRun(
        path=path,
        agent=_group(AgentConfig, values, "agent"),
        sandbox=_group(SandboxConfig, values, "sandbox"),
        task=_group(TaskConfig, values, "task"),
        model=_group(ModelConfig, values, "model"),
        policy=str(values.get("policy") or ""),
        server_tokenizer=str((values.get("server") or {}).get("tokenizer") or ""),
        config=values,
    )


def _is_attempt(trajectory: Trajectory) -> bool:
    graded = trajectory.reward is not None and not trajectory.stop_reason.is_infra
    return graded and not trajectory.group_id.startswith(f"{TEST_AGENT}/")


def _group(schema: type[C], values: dict[str, Any], name: str) -> C:
    """The keys that this version knows."""
    known = {field.name for field in fields(schema)}  # type: ignore[arg-type]
    return schema(**{key: value for key, value in (values.get(name) or {}).items() if key in known})
