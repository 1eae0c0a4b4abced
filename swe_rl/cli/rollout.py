"""`swe-rl rollout --show RUN`: replays recorded episodes in the terminal, trained tokens coloured; exports them."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from swe_rl.algorithms.filters import is_masked
from swe_rl.cli.arguments import ArgumentParser
from swe_rl.cli.paths import cache_dir
from swe_rl.cli.rollout_view import CONTEXT, MASKED, TRAINED, Decode, to_document, view
from swe_rl.config import AgentConfig, AlgoConfig, ModelConfig
from swe_rl.config.stop_presets import stop_map
from swe_rl.errors import ConfigError
from swe_rl.rollout.journal import read_journal, read_parquet
from swe_rl.types import Trajectory

if TYPE_CHECKING:
    from rich.text import Text

EXAMPLE = "swe-rl rollout --show runs/RUN --outcome failed --count 2"
BRACKETS = {TRAINED: ("⟦", "⟧"), MASKED: ("⟨", "⟩")}  # instead of colours, where there are none
OUTCOMES: dict[str, Callable[[Trajectory], bool]] = {
    "any": lambda trajectory: True,
    "passed": lambda trajectory: trajectory.reward is not None and trajectory.reward.solved,
    "failed": lambda trajectory: trajectory.reward is not None and not trajectory.reward.solved,
    "unscored": lambda trajectory: trajectory.reward is None,
}


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code. Raises ConfigError for bad input."""
    arguments = _parser().parse_args(argv)
    if arguments.count <= 0:
        raise ConfigError(f"--count must be positive, got {arguments.count}")
    if not arguments.delay >= 0:
        raise ConfigError(f"--delay must be 0 or more, got {arguments.delay}")
    chosen = choose(arguments.show, arguments)
    if arguments.list:
        for trajectory in chosen:
            print(summary(trajectory))
        return 0
    config = _config(arguments.show)
    decode = decoder(arguments.show, config, arguments.tokenizer)
    algo = config.get("algo") or {}
    known = {key: algo[key] for key in ("stop_preset", "stop_reasons") if key in algo}
    reasons = stop_map(AlgoConfig(**known))
    if arguments.json:
        documents = [to_document(t, decode=decode, trains=_trains(t, reasons)) for t in chosen]
        _write(arguments.json, json.dumps(documents, ensure_ascii=False, allow_nan=False, indent=1) + "\n")
        return 0
    for trajectory in chosen:
        show(trajectory, decode=decode, trains=_trains(trajectory, reasons), delay_s=arguments.delay)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="swe-rl rollout",
        description="Shows recorded episodes, the latest first: context dim, sampled tokens that train on green, "
        "sampled tokens that do not on yellow; without colours, in ⟦ ⟧ and ⟨ ⟩.",
        example=EXAMPLE,
    )
    parser.add_argument(
        "--show", type=Path, required=True, metavar="RUN", help="a run directory, or a .journal or .parquet file in it"
    )
    parser.add_argument("--id", default="", metavar="TEXT", help="only episodes whose id contains this")
    parser.add_argument("--phase", default="", help="only episodes of this phase, or eval-PHASE-... evaluation")
    parser.add_argument("--outcome", choices=OUTCOMES, default="any", help="by the hidden tests (default any)")
    parser.add_argument("--count", type=int, default=1, help="episodes (default 1)")
    parser.add_argument("--list", action="store_true", help="one line per episode, no text")
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="pause between turns (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write the episodes as JSON instead; - is standard output")
    parser.add_argument("--tokenizer", metavar="DIR", help="where the tokenizer is, if not that of the run")
    return parser


def choose(path: Path, arguments: Namespace) -> list[Trajectory]:
    """The latest `count` episodes that fit, the latest first. ConfigError when there are none."""
    found: dict[str, Trajectory] = {}
    for file in reversed(rollout_files(path)):
        if arguments.phase and not _phase_of(file).startswith(arguments.phase):
            continue
        for trajectory in reversed(list(_read(file))):
            if arguments.id in trajectory.trajectory_id and OUTCOMES[arguments.outcome](trajectory):
                found.setdefault(trajectory.trajectory_id, trajectory)
            if len(found) == arguments.count:
                return list(found.values())
    if not found:
        raise ConfigError(f"{path} has no such episode: see what there is with --list --count 1000")
    return list(found.values())


def rollout_files(path: Path) -> list[Path]:
    """Files with episodes, in the order in which they were written last. ConfigError when there are none."""
    if path.is_file():
        return [path]
    found = [file for kind in ("*.parquet", "*.journal") for file in (path / "rollouts").rglob(kind)]
    if not found:
        raise ConfigError(f"{path} holds no episodes: give the run directory that `swe-rl train` printed")
    return sorted(found, key=lambda file: (file.stat().st_mtime_ns, file.name))


def decoder(path: Path, config: dict[str, Any], tokenizer: str | None) -> Decode:
    """Ids to text: by the tokenizer given, else the one that the run stored, else that of the configured model."""
    from swe_rl.models.tokenizers import load_tokenizer, read_tokenizer

    stored = sorted(path.glob("phases/*/tokenizer.json"))
    if tokenizer:
        loaded = read_tokenizer(tokenizer)
    elif stored:
        loaded = read_tokenizer(str(stored[-1].parent))
    elif config.get("policy") and (folder := _policy_folder(config["policy"])) is not None:  # of an evaluation
        loaded = read_tokenizer(str(folder))
    elif config.get("model"):
        from swe_rl.models import nano_corpus

        toolset = config.get("agent", {}).get("toolset", AgentConfig().toolset)
        known = {key: value for key, value in config["model"].items() if key in ModelConfig.__dataclass_fields__}
        loaded = load_tokenizer(
            ModelConfig(**known),
            cache_dir=cache_dir() / "models",
            texts=nano_corpus.texts(toolset),
            whole_words=nano_corpus.whole_words(toolset),
        )
    else:
        raise ConfigError(f"{path} says nothing about its tokenizer: give --tokenizer DIR")
    return lambda ids: str(loaded.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _policy_folder(policy: str) -> Path | None:
    """The model directory that an evaluation was of, if it was of one."""
    from swe_rl.cli.eval_policy import weights_of

    return weights_of(policy)


def summary(trajectory: Trajectory) -> str:
    """One line about an episode."""
    reward = "not scored" if trajectory.reward is None else f"reward {trajectory.reward.value:g}"
    return (
        f"{trajectory.trajectory_id}: {reward}, {trajectory.stop_reason}, {len(trajectory.turns)} turns, "
        f"{trajectory.num_sampled_tokens} tokens sampled"
    )


def show(trajectory: Trajectory, *, decode: Decode, trains: bool, delay_s: float = 0.0) -> None:
    """Prints an episode turn by turn."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    marks = BRACKETS if console.color_system is None else {}
    console.print(Text(f"━━ {summary(trajectory)}", style="bold"))
    legend = [("context", CONTEXT), ("trains", TRAINED), ("sampled, does not train", MASKED)]
    console.print(Text("  ").join(_span(f" {label} ", style, marks) for label, style in legend))
    for turn in view(trajectory, decode=decode, trains=trains):
        console.print(Text(f"\n── {turn.title}", style="bold"))
        console.print(Text("").join(_span(span.text, span.style, marks) for span in turn.spans))
        time.sleep(delay_s)
    last = trajectory.turns[-1].observation if trajectory.turns else ""
    ending = [f"ended: {trajectory.stop_reason}", trajectory.detail, last]
    console.print(Text("\n".join(["", *(line for line in ending if line)]), style="bold"))


def _span(text: str, style: str, marks: Mapping[str, tuple[str, str]]) -> Text:
    from rich.text import Text

    before, after = marks.get(style, ("", ""))
    return Text(f"{before}{text}{after}", style=style)


def _trains(trajectory: Trajectory, stop_reasons: dict[str, str]) -> bool:
    evaluation = trajectory.group_id.startswith("eval-")
    return not evaluation and not trajectory.stop_reason.is_infra and not is_masked(trajectory, stop_reasons)


def _read(file: Path) -> Iterator[Trajectory]:
    try:
        yield from read_parquet(file) if file.suffix == ".parquet" else read_journal(file)
    except (ValueError, KeyError, TypeError) as err:  # JSON, Parquet (ArrowInvalid is a ValueError) or their fields
        raise ConfigError(f"{file} cannot be read: {type(err).__name__}: {err}") from err


def _phase_of(file: Path) -> str:
    return unquote(file.stem.rpartition("-")[0])


def _config(path: Path) -> dict[str, Any]:
    """The run's configuration, {} when there is none beside the episodes."""
    from omegaconf import OmegaConf

    file = path / "config.yaml"
    return dict(OmegaConf.to_container(OmegaConf.load(file))) if file.exists() else {}  # type: ignore[arg-type]


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staged.write_text(text, encoding="utf-8")
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
