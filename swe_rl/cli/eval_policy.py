"""Which policy an evaluation is of: a script, a server, or a model from a run, a directory or a hub."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from swe_rl.agents.environments import GAMES
from swe_rl.agents.formats import FORMATS, ActionFormat
from swe_rl.agents.rendering import Renderer, make_renderer
from swe_rl.agents.toolsets import make_toolset
from swe_rl.cli.paths import cache_dir
from swe_rl.config import AgentConfig, PhaseConfig, TrainConfig, expand_rounds
from swe_rl.config.evaluation import EvaluationConfig
from swe_rl.errors import ConfigError
from swe_rl.evaluation.scripts import ScriptedSessions, empty_demonstrator, oracle_demonstrator
from swe_rl.models import nano_corpus
from swe_rl.models.tokenizers import load_tokenizer, read_tokenizer
from swe_rl.protocols import Policy
from swe_rl.rollout.demonstrations import DemonstratorPolicy
from swe_rl.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPolicy:
    policy: Policy
    renderer: Renderer
    name: str  # of the model, in predictions
    source: str  # where it came from, for people


@asynccontextmanager
async def open_policy(cfg: EvaluationConfig, tasks: Sequence[Task]) -> AsyncIterator[OpenPolicy]:
    """The policy of `cfg`, closed in the end. ConfigError when there is none of that name."""
    if cfg.kind == "scripted":
        yield _scripted(cfg, tasks)
        return
    opened = _open_server(cfg) if cfg.kind == "server" else _open_model(cfg)
    async with opened as found:
        yield found


def weights_of(path: str) -> Path | None:
    """The model directory that a policy means: itself, or the newest weights of a run.

    None for a hub name, a server and a script. ConfigError for a directory that holds neither.
    """
    from swe_rl.training import checkpoint

    if EvaluationConfig(policy=path).kind != "model":
        return None
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise ConfigError(
                f"policy={path}: no such directory; give a run, a model directory, a hub name or a server"
            )
        return None
    if (folder / "config.json").is_file():
        return folder
    found = [item.parent for item in folder.glob("phases/*/config.json")]
    if (latest := checkpoint.latest(folder)) is not None:
        found.append(latest)
    if not found:
        raise ConfigError(f"policy={path} holds no weights: no config.json, no phases/*, no checkpoints/*")
    return max(found, key=lambda item: ((item / "model.safetensors").stat().st_mtime_ns, item.parent.name == "phases"))


def spelt_out(argv: Sequence[str]) -> list[str]:
    """`eval.splits={a: 1, b: 2}` as one word per split: Hydra would take only splits that are there already."""
    words: list[str] = []
    for word in argv:
        value = word.removeprefix("eval.splits=")
        if value == word or not (value.startswith("{") and value.endswith("}")):
            words.append(word)
            continue
        pairs = [pair.partition(":") for pair in value[1:-1].split(",") if pair.strip()]
        words += [f"++eval.splits.{name.strip()}={count.strip()}" for name, _, count in pairs]
    return words


def with_settings_of_run(argv: Sequence[str]) -> list[str]:
    """`argv`, and in front of it the agent settings that the weights of `policy=` were trained with, where nothing else
    chooses them.

    A policy is used to its own tools, prompt and limits: those of the phase that the weights are of, which may override
    the run's. `agent=NAME`, `+eval=NAME` or a single `agent.KEY` wins.
    """
    named = [word.partition("=")[2] for word in argv if word.startswith("policy=")]
    if not named or any(word.lstrip("+").startswith(("agent=", "eval=")) and "{" not in word for word in argv):
        return list(argv)
    path = Path(named[-1]).expanduser()
    found = run_config(path)
    if not found:
        return list(argv)
    agent = agent_of_phase(found, phase_of(weights_of(str(path)), found))
    known = {field.name for field in fields(AgentConfig)}
    settings = [f"agent.{key}={_literal(value)}" for key, value in agent.items() if key in known]
    return [*settings, *argv]


def phase_of(weights: Path | None, config: Mapping[str, Any]) -> str:
    """The phase that trained the weights in a directory of a run with this configuration; "" when it is not known."""
    from swe_rl.training import checkpoint

    if weights is None:
        return ""
    if weights.parent.name != checkpoint.FOLDER:
        return weights.name
    if not (weights / "state.json").is_file():  # copied without it
        return ""
    counters = json.loads((weights / "state.json").read_text(encoding="utf-8"))["counters"]
    names = [name for phase in config.get("phases") or () for name in phase_names(phase)]
    place = counters["phase"] - (counters["step"] == 0)  # at the end of a phase the run stands before the next one
    return names[place] if 0 <= place < len(names) else ""


def agent_of_phase(config: Mapping[str, Any], phase: str) -> dict[str, Any]:
    """Agent settings of a phase of a run: the run's with the overrides of the phase; the run's for another name."""
    from omegaconf import OmegaConf

    own: Mapping[str, Any] = next((item for item in config.get("phases") or () if phase in phase_names(item)), {})
    merged = OmegaConf.merge(config.get("agent") or {}, (own.get("overrides") or {}).get("agent") or {})
    return dict(OmegaConf.to_container(merged))  # type: ignore[arg-type]


def phase_names(phase: Mapping[str, Any]) -> list[str]:
    """Of the phases that one of the configuration becomes: several rounds are several phases."""
    return [item.name for item in expand_rounds([PhaseConfig(name=phase["name"], rounds=phase.get("rounds", 1))])]


def run_config(path: Path) -> dict[str, Any]:
    """The configuration of the run that a path is, or lies in; {} when it is of none."""
    from omegaconf import OmegaConf

    for folder in (path, path.parent.parent) if path.is_dir() else ():
        if (folder / "config.yaml").is_file():
            return dict(OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")))  # type: ignore[arg-type]
    return {}


def _literal(value: Any) -> str:
    """As Hydra reads it."""
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scripted(cfg: EvaluationConfig, tasks: Sequence[Task]) -> OpenPolicy:
    train = cfg.as_train()
    renderer = make_renderer(built_in_tokenizer(train))
    action_format = _action_format(train)
    make = {"oracle": oracle_demonstrator, "empty": empty_demonstrator}[cfg.policy]
    sessions = ScriptedSessions({task.task_id: partial(make, task, toolset=cfg.agent.toolset) for task in tasks})
    policy = DemonstratorPolicy(sessions, renderer=renderer, action_format=action_format)
    return OpenPolicy(policy=policy, renderer=renderer, name=cfg.name or cfg.policy, source=f"script {cfg.policy}")


@asynccontextmanager
async def _open_model(cfg: EvaluationConfig) -> AsyncIterator[OpenPolicy]:
    import torch

    from swe_rl.cli.build import load_policy
    from swe_rl.cli.engines import contract_of, open_engine
    from swe_rl.cli.preflight import check_backends, check_cache
    from swe_rl.training import mesh

    folder = weights_of(cfg.policy) if cfg.policy else None
    train = cfg.as_train()
    if cfg.policy:
        train = replace(train, model=replace(train.model, name=str(folder or cfg.policy)))
    check_backends(train)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    device = mesh.init_distributed()
    try:
        model, tokenizer = load_policy(train)
        renderer = make_renderer(tokenizer, thinking=cfg.agent.thinking, observations=cfg.agent.observations)
        check_cache(train, model.config, device=device)
        model.to(device)
        contract = contract_of(train, model, tokenizer=tokenizer, stop_ids=renderer.stop_ids)
        async with open_engine(train, model, contract) as engine:
            if train.engine.backend != "embedded":  # that one has copied the model; others start without weights
                await engine.update_weights({name: p.detach() for name, p in model.named_parameters()}, version=0)
            source = str(folder or train.model.name)
            name = cfg.name or (short_name(folder) if folder else train.model.name)
            yield OpenPolicy(policy=engine, renderer=renderer, name=name, source=source)
    finally:
        mesh.shutdown()


def short_name(folder: Path) -> str:
    """RUN/PHASE for the weights of a run, else the name of the directory: no paths of this machine in predictions."""
    folder = folder.resolve()
    inside = folder.parent.name in ("phases", "checkpoints")
    return f"{folder.parent.parent.name}/{folder.name}" if inside else folder.name


@asynccontextmanager
async def _open_server(cfg: EvaluationConfig) -> AsyncIterator[OpenPolicy]:
    from swe_rl.inference.server import ServerPolicy

    tokenizer = read_tokenizer(cfg.server.tokenizer) if cfg.server.tokenizer else built_in_tokenizer(cfg.as_train())
    renderer = make_renderer(tokenizer, thinking=cfg.agent.thinking, observations=cfg.agent.observations)
    async with ServerPolicy(cfg.policy, cfg.server, tokenizer=tokenizer, concurrency=cfg.sandbox.concurrency) as policy:
        source = f"{cfg.server.model} on {cfg.policy}"
        yield OpenPolicy(policy=policy, renderer=renderer, name=cfg.name or cfg.server.model, source=source)


def built_in_tokenizer(cfg: TrainConfig) -> Any:
    """The nano tokenizer: knows every byte, so any text comes back as it was."""
    game = GAMES.get(cfg.task.source)
    toolset = cfg.agent.toolset
    return load_tokenizer(
        replace(cfg.model, name="nano"),
        cache_dir=cache_dir() / "models",
        texts=game.texts() if game else nano_corpus.texts(toolset),
        whole_words=() if game else nano_corpus.whole_words(toolset),
    )


def _action_format(cfg: TrainConfig) -> ActionFormat:
    game = GAMES.get(cfg.task.source)
    signatures = game.signatures if game else make_toolset(cfg.agent).signatures
    return FORMATS[cfg.agent.action_format].bind(signatures)
