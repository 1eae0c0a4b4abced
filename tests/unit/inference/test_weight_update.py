"""The records of a weight update on a wire, the inbox that takes them, and the embedded engine in the middle of one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from swe_rl.config import EngineConfig
from swe_rl.errors import EngineError
from swe_rl.inference import EmbeddedEngine
from swe_rl.inference.weight_update import UpdatePlan, WeightBucket, WeightInbox, WeightPiece, moved, packed, unpacked
from swe_rl.ops import weight_delta
from swe_rl.protocols import SamplingParams

PROMPT = [3, 1, 4, 1, 5]


def plan_of(weights: Mapping[str, Tensor], *, version: int, base: int | None = None, **changes: Any) -> UpdatePlan:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    dtype = str(next(iter(weights.values())).dtype)[6:]
    fields = {"version": version, "base_version": base, "stream": "s", "dtype": dtype, "shapes": shapes, **changes}
    return UpdatePlan(**fields)


def sums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: weight_delta.checksum(tensor) for name, tensor in weights.items()}


def dense(weights: Mapping[str, Tensor]) -> WeightBucket:
    return WeightBucket(tuple(WeightPiece(name=n, first=0, values=w.reshape(-1)) for n, w in weights.items()))


def delta(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> WeightBucket:
    pieces = (WeightPiece(name=n, first=0, values=weight_delta.compare(old[n], new[n])) for n in old)
    return WeightBucket(tuple(pieces))


def two_versions(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    old = {"a": torch.randn(7, 83, generator=generator).bfloat16(), "b": torch.randn(3, generator=generator).bfloat16()}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][3, ::9] += 1
    return old, new


def fresh_inbox(old: Mapping[str, Tensor]) -> WeightInbox:
    """Holds version 7 of stream s."""
    inbox = WeightInbox({name: torch.zeros_like(tensor) for name, tensor in old.items()})
    assert inbox.start(plan_of(old, version=7))
    inbox.receive(dense(old))
    assert inbox.finish(sums(old)) == []
    return inbox


def test_a_delta_comes_to_the_host_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a GPU a copy that does not wait may be read too early; one to a GPU may go on beside the host."""
    asked: list[bool] = []
    old, new = two_versions()
    name = next(iter(old))
    (piece,) = (p for p in delta(old, new).pieces if p.name == name)
    assert isinstance(piece.values, weight_delta.Delta)

    def to(part: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        asked.append(non_blocking)
        return part

    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "device", torch.device("cuda"))
    moved(piece.values, torch.device("cpu"))
    assert asked == [False] * 3


def test_a_bucket_survives_the_wire() -> None:
    old, new = two_versions()
    changed = weight_delta.compare(old["a"], new["a"])
    own = WeightBucket(
        (
            WeightPiece(name="odd", first=3, values=torch.arange(5).bfloat16()),
            WeightPiece(name="a", first=256, values=changed),
            WeightPiece(name="none", first=0, values=weight_delta.compare(old["b"], old["b"])),
            WeightPiece(name="a", first=0, values=changed),
        )
    )
    meta, payload = packed(own)
    assert payload.dtype == torch.uint8
    assert len(payload) == own.num_bytes
    back = unpacked(meta, torch.cat([payload, torch.zeros(9, dtype=torch.uint8)]))  # padding behind is ignored
    assert [(p.name, p.first, p.size, p.num_changed) for p in back.pieces] == [
        (p.name, p.first, p.size, p.num_changed) for p in own.pieces
    ]
    target = old["a"].clone()
    weight_delta.apply(target, back.pieces[3].values)  # type: ignore[arg-type]
    assert torch.equal(target, new["a"])
    assert torch.equal(back.pieces[0].values, torch.arange(5).bfloat16())  # type: ignore[arg-type]


def test_wide_values_and_no_piece_at_all_survive_the_wire() -> None:
    weights = {"w": torch.randn(3, 5)}
    assert torch.equal(unpacked(*packed(dense(weights))).pieces[0].values, weights["w"].reshape(-1))  # type: ignore[arg-type]
    assert unpacked(*packed(WeightBucket(()))).pieces == ()


def test_an_inbox_takes_deltas_one_after_the_other() -> None:
    old, new = two_versions()
    inbox = fresh_inbox(old)
    assert inbox.start(plan_of(old, version=8, base=7))
    inbox.receive(delta(old, new))
    assert inbox.finish(sums(new)) == []
    assert inbox.start(plan_of(old, version=9, base=8))
    inbox.receive(delta(new, old))
    assert inbox.finish(sums(old)) == []
    for name, tensor in old.items():
        assert torch.equal(inbox.targets[name], tensor)


def test_a_delta_to_another_version_or_of_another_stream_is_refused_and_changes_nothing() -> None:
    old, new = two_versions()
    inbox = fresh_inbox(old)
    assert not inbox.start(plan_of(old, version=9, base=8))
    assert not inbox.start(plan_of(old, version=8, base=7, stream="other"))
    assert torch.equal(inbox.targets["a"], old["a"])
    assert inbox.start(plan_of(old, version=8, base=7))
    inbox.receive(delta(old, new))  # never finished: what is here is no version
    assert not inbox.start(plan_of(old, version=8, base=7))
    inbox = fresh_inbox(old)
    inbox.forget()
    assert not inbox.start(plan_of(old, version=8, base=7))


def test_wrong_bits_are_named_and_end_the_chain_of_deltas() -> None:
    old, new = two_versions()
    inbox = fresh_inbox(old)
    inbox.targets["b"][1] = 5.0  # what the sender does not know of
    assert inbox.start(plan_of(old, version=8, base=7))
    inbox.receive(delta(old, new))
    assert inbox.finish(sums(new)) == ["b"]
    assert not inbox.start(plan_of(old, version=9, base=8))


def test_a_piece_that_contradicts_itself_or_reaches_too_far_names_its_tensor() -> None:
    old, new = two_versions()
    for piece in (
        WeightPiece(name="a", first=512, values=weight_delta.compare(old["a"], new["a"])),
        WeightPiece(name="a", first=7 * 83 - 1, values=torch.zeros(2).bfloat16()),
    ):
        inbox = fresh_inbox(old)
        assert inbox.start(plan_of(old, version=8, base=7))
        inbox.receive(delta(old, new))
        inbox.receive(WeightBucket((piece,)))
        assert inbox.finish(sums(new)) == ["a"]


def test_weights_of_another_model_are_refused() -> None:
    old, _ = two_versions()
    inbox = fresh_inbox(old)
    wrong = {"a": old["a"], "b": old["b"], "c": old["b"]}
    with pytest.raises(EngineError, match="c is \\(3,\\) in the trainer, None in the engine"):
        inbox.start(plan_of(wrong, version=8))
    with pytest.raises(EngineError, match="a is \\(581,\\) in the trainer"):
        inbox.start(plan_of({"a": old["a"].reshape(-1), "b": old["b"]}, version=8))
    with pytest.raises(EngineError, match="values come as float32"):
        inbox.start(plan_of(old, version=8, dtype="float32"))
    with pytest.raises(EngineError, match="not started"):
        inbox.finish({})
    with pytest.raises(EngineError, match="without an update"):
        inbox.receive(dense(old))


def parameters(model: Any, scale: float) -> dict[str, Tensor]:
    return {name: (p.detach() * scale).bfloat16() for name, p in model.named_parameters()}


def sampling(n: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, stop_ids=(), seed=seed)


CFG = EngineConfig(num_slots=2, prefill_chunk=16, dtype="bfloat16")


async def update(engine: EmbeddedEngine, weights: Mapping[str, Tensor], version: int, **changes: Any) -> list[str]:
    assert await engine.start_weight_update(plan_of(weights, version=version, **changes))
    await engine.receive_weights(dense(weights))
    return await engine.finish_weight_update(sums(weights))


async def tokens_sampled(engine: EmbeddedEngine, count: int) -> None:
    while engine.counters.tokens_sampled < count:
        await asyncio.sleep(0.001)


async def test_buckets_and_one_call_give_the_same_engine(model: Any) -> None:
    new = parameters(model, 1.3)
    async with EmbeddedEngine(model, CFG, max_context=64) as one, EmbeddedEngine(model, CFG, max_context=64) as other:
        await one.update_weights({name: tensor.float() for name, tensor in new.items()}, version=4)
        assert await update(other, new, 4) == []
        got = [await engine.generate(PROMPT, sampling(12), session="a") for engine in (one, other)]
    assert got[0] == got[1]
    assert got[0].policy_version == 4


@pytest.mark.parametrize("in_flight", ["pause", "keep"])
async def test_requests_in_flight_go_on_and_tell_both_versions(model: Any, in_flight: str) -> None:
    new = parameters(model, 1.5)
    async with EmbeddedEngine(model, CFG, max_context=4096) as engine:
        assert await update(engine, parameters(model, 1.0), 1) == []
        running = asyncio.create_task(engine.generate(PROMPT, sampling(150), session="a"))
        await tokens_sampled(engine, 20)
        assert await engine.start_weight_update(plan_of(new, version=2, in_flight=in_flight))
        sampled = engine.counters.tokens_sampled
        await asyncio.sleep(0.1)
        assert (engine.counters.tokens_sampled > sampled) == (in_flight == "keep")
        await engine.receive_weights(dense(new))
        assert await engine.finish_weight_update(sums(new)) == []
        completion = await asyncio.wait_for(running, 60)
        assert (completion.policy_version, completion.policy_version_max) == (1, 2)
        again = await engine.generate(PROMPT, sampling(5), session="b")
        async with EmbeddedEngine(model, CFG, max_context=4096) as fresh:
            await update(fresh, new, 2)
            assert again == await fresh.generate(PROMPT, sampling(5), session="b")


async def test_abort_ends_requests_in_flight_and_the_engine_lives_on(model: Any) -> None:
    new = parameters(model, 1.5)
    async with EmbeddedEngine(model, CFG, max_context=4096) as engine:
        running = asyncio.create_task(engine.generate(PROMPT, sampling(2000), session="a"))
        await tokens_sampled(engine, 5)
        assert await update(engine, new, 2, in_flight="abort") == []
        with pytest.raises(EngineError, match="version 2"):
            await running
        assert (await engine.generate(PROMPT, sampling(3), session="a")).policy_version == 2


async def test_an_engine_with_wrong_bits_stands_still_until_everything_has_come(model: Any) -> None:
    new = parameters(model, 1.5)
    wrong = {**sums(new), "model.norm.weight": 0}
    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        assert await engine.start_weight_update(plan_of(new, version=2))
        await engine.receive_weights(dense(new))
        assert await engine.finish_weight_update(wrong) == ["model.norm.weight"]
        assert engine.policy_version == 0
        waiting = asyncio.create_task(engine.generate(PROMPT, sampling(3), session="a"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert await update(engine, new, 2) == []
        assert (await asyncio.wait_for(waiting, 30)).policy_version == 2


async def test_weights_that_came_in_one_call_take_no_delta(model: Any) -> None:
    old, new = parameters(model, 1.0), parameters(model, 1.5)
    async with EmbeddedEngine(model, CFG, max_context=64) as engine:
        assert await update(engine, old, 1) == []
        assert await engine.start_weight_update(plan_of(new, version=2, base=1))
        await engine.update_weights({name: tensor.float() for name, tensor in old.items()}, version=1)
        assert not await engine.start_weight_update(plan_of(new, version=2, base=1))
