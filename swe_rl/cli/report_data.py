"""Reads a run directory for the report: configuration, final table, metrics, finished rollouts. No torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from swe_rl.errors import ConfigError
from swe_rl.metrics import METRICS_FILE, Record, read_metrics
from swe_rl.rollout.journal import read_journal
from swe_rl.rollout.records import to_row

ROLLOUT_DIRS = ("rollouts", "journal")
KINDS = (".parquet", ".journal")  # finished steps, and steps (or evaluations) that were not compacted
SAMPLES_PER_PHASE = 2  # one that passed and one that did not, where there are both
SAMPLE_COLUMNS = ["trajectory_id", "task_id", "stop_reason", "detail", "reward", "patch", "token_ids", "turns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTurn:
    context: str  # what was added before it; "" where no tokenizer is at hand
    action: str  # what the policy wrote, or its parsed call
    observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTrajectory:
    phase: str
    trajectory_id: str
    task_id: str
    stop_reason: str
    detail: str
    reward: float | None
    patch: str
    turns: list[SampleTurn]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a report can show. Everything but `path` may be empty: a run may have ended early."""

    path: Path
    config_yaml: str = ""
    results: list[dict[str, Any]] = field(default_factory=list)  # {phase, split, mode, success, stderr, n, ...}
    records: list[Record] = field(default_factory=list)
    stop_reasons: dict[str, Counter[str]] = field(default_factory=dict)  # phase -> reason -> rollouts
    samples: list[SampleTrajectory] = field(default_factory=list)

    @property
    def phases(self) -> list[str]:
        """Phases with metrics, in the order in which they ran."""
        return list(dict.fromkeys(record.phase for record in self.records))


def read_run(path: Path) -> RunData:
    """Reads what is there. ConfigError when `path` is no directory, holds no run or holds a broken file."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory: give the run directory that `swe-rl train` printed")
    rollouts = sorted(file for folder in ROLLOUT_DIRS for kind in KINDS for file in (path / folder).rglob(f"*{kind}"))
    try:
        run = RunData(
            path=path,
            config_yaml=_text(path / "config.yaml"),
            results=json.loads(_text(path / "results.json") or "[]"),
            records=read_metrics(path / METRICS_FILE),
            stop_reasons=_stop_reasons(rollouts),
            samples=_samples(rollouts, decode=_decoder(path)),
        )
    except (ValueError, KeyError, TypeError) as err:  # JSON, Parquet (ArrowInvalid is a ValueError) or their fields
        raise ConfigError(f"{path} holds a file that cannot be read: {type(err).__name__}: {err}") from err
    if not (run.config_yaml or run.results or run.records or rollouts):
        raise ConfigError(f"{path} holds no run: neither config.yaml, results.json, {METRICS_FILE} nor rollouts")
    return run


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _phase_of(file: Path) -> str:
    return unquote(file.stem.rpartition("-")[0]) or file.stem


def _stop_reasons(files: Sequence[Path]) -> dict[str, Counter[str]]:
    reasons: dict[str, dict[str, str]] = {}  # phase -> trajectory -> reason: one may be in both kinds of file
    for file in files:
        found = {row["trajectory_id"]: row["stop_reason"] for row in _rows(file, ["trajectory_id", "stop_reason"])}
        reasons.setdefault(_phase_of(file), {}).update(found)
    return {phase: Counter(found.values()) for phase, found in reasons.items()}


def _samples(files: Sequence[Path], *, decode: Callable[[list[int]], str] | None) -> list[SampleTrajectory]:
    """From the last file of each phase: the first that passed and the first that did not."""
    last = {_phase_of(file): file for file in files}
    found: list[SampleTrajectory] = []
    for phase, file in last.items():
        seen: set[bool] = set()
        for row in _rows(file, SAMPLE_COLUMNS):
            passed = (row["reward"] or 0.0) >= 1.0
            if passed not in seen:
                seen.add(passed)
                found.append(_sample(row, phase, decode))
            if len(seen) == SAMPLES_PER_PHASE:
                break
    return found


def _rows(file: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Row by row, so that a step of long trajectories is never in memory as a whole."""
    if file.suffix == ".journal":
        yield from map(to_row, read_journal(file))
        return
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(batch_size=16, columns=columns):
            yield from batch.to_pylist()


def _sample(row: dict[str, Any], phase: str, decode: Callable[[list[int]], str] | None) -> SampleTrajectory:
    turns, position = [], 0
    for turn in row["turns"]:
        start = position + turn["num_context"]
        end = start + turn["num_sampled"]
        call = json.loads(turn["tool_call_json"])
        parsed = json.dumps(call, indent=1) if call else "(no action could be parsed)"
        turns.append(
            SampleTurn(
                context=decode(row["token_ids"][position:start]) if decode else "",
                action=decode(row["token_ids"][start:end]) if decode else parsed,
                observation=turn["observation"],
            )
        )
        position = end
    patch = (row["patch"] or b"").decode("utf-8", errors="replace")
    reward = None if row["reward"] is None or math.isnan(row["reward"]) else float(row["reward"])
    plain = {key: row[key] for key in ("trajectory_id", "task_id", "stop_reason", "detail")}
    return SampleTrajectory(phase=phase, reward=reward, patch=patch, turns=turns, **plain)


def _decoder(path: Path) -> Callable[[list[int]], str] | None:
    """Token ids to text, by the tokenizer that the run stored with its weights, if it did."""
    files = sorted(path.glob("phases/*/tokenizer.json"))
    if not files:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(files[-1]))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
