"""Bugs of other systems between trainer and engine: rendering, rotary embedding, prefix cache, each beside ours."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from immunity import immune
from torch import Tensor

from swe_rl.agents import ChatRenderer
from swe_rl.config import EngineConfig, ModelConfig
from swe_rl.inference import EmbeddedEngine
from swe_rl.models.nano import build_model
from swe_rl.models.rope import set_rope
from swe_rl.protocols import SamplingParams
from swe_rl.testing import ByteTokenizer

VOCAB, ORIGINAL = 61, 64
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64},
    "vocab_size": VOCAB,
}
PLAIN = ModelConfig(**SIZES)
YARN = ModelConfig(**SIZES, yarn_factor=4.0, yarn_original_context=ORIGINAL)
SLOTS = EngineConfig(num_slots=2, prefill_chunk=16)
Messages = Sequence[Mapping[str, str]]


def uneven_model() -> Any:
    """Random weights with spread, so that attention is far from uniform and a wrong key shows."""
    model, generator = build_model(PLAIN), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=generator))
    return model


def trainer_logprobs(model: Any, ids: list[int], num_last: int) -> Tensor:
    """Logprobs of the last `num_last` ids, by one pass over the whole."""
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
    return table[:-1].gather(1, torch.tensor(ids[1:])[:, None])[-num_last:, 0]


def test_a_token_lost_between_assistant_and_tool() -> None:
    """verl 6501, TRL 5330, slime 2264: the delta was what the template adds to the rendered conversation so far. That
    one ends with the newline behind the end token; the engine stopped at the end token, so no context has the newline.
    """
    tokenizer = ByteTokenizer()
    renderer = ChatRenderer(tokenizer)
    opening: Messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "fix it"}]

    def template(messages: Messages, *, prompt: bool) -> list[int]:
        """The whole conversation at once, as the published ChatML template makes it."""
        ids: list[int] = []
        for message in messages:
            body = tokenizer.encode(f"{message['role']}\n{message['content']}")
            ids += [renderer.im_start, *body, renderer.end_id, *tokenizer.encode("\n")]
        return [*ids, renderer.im_start, *tokenizer.encode("assistant\n")] if prompt else ids

    def whole(answers: Sequence[str], observations: Sequence[str]) -> list[Mapping[str, str]]:
        pairs = zip(answers, observations, strict=True)
        turns = [({"role": "assistant", "content": a}, {"role": "user", "content": o}) for a, o in pairs]
        return [*opening, *(message for turn in turns for message in turn)]

    def added_by_the_template(answers: Sequence[str], observations: Sequence[str]) -> list[int]:
        after = whole(answers, observations)
        return template(after, prompt=True)[len(template(after[:-1], prompt=False)) :]

    def rendered(answers: Sequence[str], observations: Sequence[str]) -> list[int]:
        return renderer.observation_ids(observations[-1])

    def check(delta: Callable[[Sequence[str], Sequence[str]], list[int]]) -> None:
        answers, observations = ["ls", "cat a", "submit"], ["a\nb", "", " x"]
        ids = template(opening, prompt=True)
        for turn, answer in enumerate(answers, 1):
            ids += [*tokenizer.encode(answer), renderer.end_id]  # as sampled: the end token is the last
            ids += delta(answers[:turn], observations[:turn])
            assert ids == template(whole(answers[:turn], observations[:turn]), prompt=True)

    immune(check, ours=rendered, buggy=added_by_the_template)


@pytest.mark.parametrize("length", [8, ORIGINAL - 5, 3 * ORIGINAL])
def test_the_engine_drops_the_attention_factor_of_yarn(length: int) -> None:
    """prime-rl 2802: the trainer scaled cos and sin by 0.1 ln s + 1, the engine did not: a mismatch from the first step
    on, at every length. Short, just below and beyond the original context."""
    model = uneven_model()
    prompt = [(7 * place) % VOCAB for place in range(length)]
    params = SamplingParams(max_new_tokens=6, stop_ids=(), seed=0)

    def played(change: Callable[[EmbeddedEngine], None]) -> tuple[list[int], Tensor]:
        async def play() -> tuple[list[int], Tensor]:
            async with EmbeddedEngine(model, SLOTS, max_context=4 * ORIGINAL) as engine:
                await engine.set_rope(YARN)
                change(engine)
                found = await engine.generate(prompt, params, session="a")
            return found.token_ids, torch.tensor(found.rollout_logprobs, dtype=torch.float64)

        return asyncio.run(play())

    def without_factor(engine: EmbeddedEngine) -> None:
        engine._scheduler.runner.model.base_model.rotary_emb.attention_scaling = 1.0

    def check(change: Callable[[EmbeddedEngine], None]) -> None:
        ids, logprobs = played(change)
        trainer = copy.deepcopy(model)
        set_rope(trainer, YARN)
        assert float((trainer_logprobs(trainer, [*prompt, *ids], len(ids)) - logprobs).abs().max()) < 1e-4

    immune(check, ours=lambda engine: None, buggy=without_factor)


def test_keys_of_old_weights_survive_an_update() -> None:
    """prime-rl 1650, SkyRL 1824: the prefix cache was kept over a weight update (or its reset did nothing while
    requests ran), so new weights attended to keys of old ones. A session that goes on, and another one with the same
    prompt."""
    model = uneven_model()
    after = {name: 1.3 * param.detach() for name, param in model.named_parameters()}
    prompt = [(5 * place) % VOCAB for place in range(40)]
    params = SamplingParams(max_new_tokens=6, stop_ids=(), seed=0)

    def cleared(engine: EmbeddedEngine) -> None: ...

    def kept(engine: EmbeddedEngine) -> None:
        scheduler = engine._scheduler

        def load_weights(weights: Mapping[str, Tensor], version: int) -> None:
            scheduler.runner.load_weights(weights)
            scheduler.policy_version = version

        scheduler.load_weights = load_weights  # type: ignore[method-assign]

    def check(change: Callable[[EmbeddedEngine], None]) -> None:
        async def play() -> list[tuple[list[int], list[float]]]:
            async with EmbeddedEngine(model, SLOTS, max_context=128) as engine:
                change(engine)
                first = await engine.generate(prompt, params, session="a")
                await engine.update_weights(after, version=1)
                found = []
                for session, ids in (("b", prompt), ("a", [*prompt, *first.token_ids, 3])):
                    completion = await engine.generate(ids, params, session=session)
                    assert completion.policy_version == 1
                    found.append(([*ids, *completion.token_ids], completion.rollout_logprobs))
            return found

        trainer = copy.deepcopy(model)
        trainer.load_state_dict(after, strict=False)
        for ids, logprobs in asyncio.run(play()):
            want = trainer_logprobs(trainer, ids, len(logprobs))
            torch.testing.assert_close(torch.tensor(logprobs, dtype=torch.float64), want, rtol=0, atol=1e-4)

    immune(check, ours=cleared, buggy=kept)
