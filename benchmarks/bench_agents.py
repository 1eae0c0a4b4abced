"""What a turn costs this process beside the model and the sandbox: decode, parse, bookkeeping, render, next prompt.

    python benchmarks/bench_agents.py [--tokenizer DIR] [--turns 128] [--tokens 65536] [--episodes 5] [--write]

An engine and an environment that answer at once play episodes that grow evenly to `--tokens` at turn `--turns`; what a
turn costs is the time from the engine's answer to its next request; on a busy machine read the processor time. The
target is at most 5 ms at turn 128 and 64k tokens, whatever the turn. Compares with the rows of this CPU in
baselines/agents.csv; --write appends one.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from swe_rl.agents import FORMATS, TOOLSETS, make_renderer, run_episode
from swe_rl.agents.rendering import Renderer
from swe_rl.config import AgentConfig, ModelConfig
from swe_rl.models import nano_corpus
from swe_rl.models.nano import build_tokenizer
from swe_rl.protocols import EnvStep, SamplingParams
from swe_rl.types import Completion, Task, ToolCall

BASELINES = Path(__file__).with_name("baselines") / "agents.csv"
SAMPLED_SHARE = 0.25  # of a turn's tokens; the rest is observation
WINDOW = 4  # turns on each side that are averaged


@dataclass
class InstantPolicy:
    """Answers with prepared ids and notes when it was asked and when it answered."""

    completion: Completion
    asked: list[tuple[float, float]] = field(default_factory=list)  # wall, processor time of this thread
    answered: list[tuple[float, float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        self.asked.append((time.perf_counter(), time.thread_time()))
        self.lengths.append(len(prompt_ids))
        self.answered.append((time.perf_counter(), time.thread_time()))
        return self.completion

    async def release(self, session: str) -> None: ...


@dataclass
class InstantEnvironment:
    observation: str

    async def reset(self, task: Task) -> list[Mapping[str, str]]:
        return [{"role": "user", "content": "repair it"}]

    async def step(self, call: ToolCall) -> EnvStep:
        return EnvStep(observation=self.observation)


def text_of(renderer: Renderer, num_tokens: int) -> str:
    """Text of about `num_tokens` that looks like a listing of Python code."""
    words = [
        "def",
        "return",
        "self",
        "value",
        "for",
        "item",
        "in",
        "items",
        "if",
        "not",
        "None",
        "(",
        ")",
        ":",
        "=",
        ".",
    ]
    rng, lines = random.Random(0), []
    while len(lines) * 4 < num_tokens:
        lines.append(f"{len(lines) + 1:>6}\t    " + " ".join(rng.choice(words) for _ in range(8)))
    text = "\n".join(lines)
    return text[: len(text) * num_tokens // len(renderer.plain(text))]


def completion_of(renderer: Renderer, action_format: Any, num_tokens: int) -> Completion:
    thought, call = text_of(renderer, num_tokens), action_format.render("bash", {"command": "sed -n 1,40p a.py"})
    ids = renderer.action_ids(f"{thought}\n{call}")
    return Completion(
        token_ids=ids,
        rollout_logprobs=[-0.5] * len(ids),
        finish_reason="stop",
        policy_version=0,
        policy_version_max=0,
    )


def episode(renderer: Renderer, args: argparse.Namespace) -> tuple[list[tuple[float, float]], list[int]]:
    """(milliseconds and processor milliseconds of each turn, prompt tokens of each turn)."""
    per_turn = args.tokens // args.turns
    action_format = FORMATS[args.format].bind(TOOLSETS["minimal"].signatures)
    policy = InstantPolicy(completion_of(renderer, action_format, int(per_turn * SAMPLED_SHARE)))
    limits = AgentConfig(
        max_turns=args.turns + 1,
        max_context_tokens=2 * args.tokens,
        max_turn_tokens=args.tokens,
        max_observation_tokens=per_turn,
        remind_turns=args.turns,
        keep_observations=args.keep_observations,
        drop_from_tokens=args.drop_from_tokens,
        explain_errors=True,
    )
    task = Task(
        task_id="t",
        source="bench",
        split="train",
        repo="r",
        base_commit="",
        problem_statement="",
        fail_to_pass=(),
        pass_to_pass=(),
        gold_patch=b"",
    )
    gc.collect()
    asyncio.run(
        run_episode(
            task,
            InstantEnvironment(text_of(renderer, per_turn - len(policy.completion.token_ids))),
            policy,
            renderer=renderer,
            action_format=action_format,
            limits=limits,
            trajectory_id="t/0",
            group_id="t",
            rollout_index=0,
            seeds=lambda turn: turn,
        )
    )
    pairs = zip(policy.answered, policy.asked[1:], strict=False)
    times = [(1000 * (after[0] - before[0]), 1000 * (after[1] - before[1])) for before, after in pairs]
    return times, policy.lengths


def measure(renderer: Renderer, args: argparse.Namespace) -> dict[str, str]:
    """Medians over episodes and neighbouring turns at a few turns, wall clock and processor time."""
    runs = [episode(renderer, args) for _ in range(args.episodes)]
    row = {}
    for kind, name in ((0, "ms"), (1, "cpu_ms")):
        for turn in (8, args.turns // 4, args.turns // 2, args.turns - WINDOW):
            near = [pair[kind] for times, _ in runs for pair in times[max(turn - WINDOW, 0) : turn + WINDOW]]
            row[f"turn_{turn}_{name}"] = f"{statistics.median(near):.3f}"
        every = sorted(pair[kind] for times, _ in runs for pair in times)
        row[f"p99_{name}"] = f"{every[int(0.99 * (len(every) - 1))]:.3f}"
    row["last_prompt_tokens"] = str(runs[0][1][-1])
    return row


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def load_renderer(directory: str) -> tuple[Renderer, str]:
    """(renderer, name of the tokenizer)."""
    if directory:
        from transformers import AutoTokenizer

        return make_renderer(AutoTokenizer.from_pretrained(directory)), Path(directory).name
    tokenizer = build_tokenizer(
        nano_corpus.texts("minimal"),
        vocab_size=ModelConfig().vocab_size,
        whole_words=nano_corpus.whole_words("minimal"),
    )
    return make_renderer(tokenizer), "nano"


def compare(row: dict[str, str]) -> None:
    if not BASELINES.exists():
        return
    same = ("cpu", "cores", "tokenizer", "format", "keep_observations", "turns", "tokens")
    with BASELINES.open(newline="") as file:
        old = [r for r in csv.DictReader(file) if all(r[k] == row[k] for k in same)]
    if old:
        for name in (key for key in row if key.endswith("_ms")):
            print(f"{name}: {row[name]} now, {old[-1][name]} on {old[-1]['date']} ({old[-1]['commit']})")


def append(row: dict[str, str]) -> None:
    is_new = not BASELINES.exists()
    BASELINES.parent.mkdir(exist_ok=True)
    with BASELINES.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", default="", help="Hugging Face directory; default: the nano policy's")
    parser.add_argument("--format", default="xml", choices=list(FORMATS))
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=65_536, help="in the context after the last turn")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--keep-observations", type=int, default=0, help="older ones leave the context; 0 keeps all")
    parser.add_argument("--drop-from-tokens", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="append a row to the baselines")
    args = parser.parse_args()
    renderer, name = load_renderer(args.tokenizer)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    row = {
        "date": date.today().isoformat(),
        "commit": commit,
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "tokenizer": name,
        "format": args.format,
        "keep_observations": str(args.keep_observations),
        "turns": str(args.turns),
        "tokens": str(args.tokens),
    } | measure(renderer, args)
    for key, value in row.items():
        print(f"{key:<20} {value}")
    compare(row)
    if args.write:
        append(row)


if __name__ == "__main__":
    main()
