"""The vLLM engine without vLLM: nothing is lost when replicas are, and no old weights answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import torch
from vllm_fakes import MAX_CONTEXT, STOP, VOCAB, WEIGHTS, FakeReplica, eventually, fake_engine

from swe_rl.errors import EngineDead, EngineError
from swe_rl.inference.vllm import engine as engine_module
from swe_rl.inference.vllm import fleet as fleet_module
from swe_rl.inference.weight_update import UpdatePlan, WeightBucket, WeightPiece
from swe_rl.ops.weight_delta import checksum
from swe_rl.protocols import SamplingParams


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WATCH_S", 0.01)
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.0)


def params(limit: int = 12, *, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_new_tokens=limit, stop_ids=(STOP,), seed=seed)


def expected(prompt: list[int], limit: int) -> list[int]:
    """What the fakes sample, whoever does it and in however many parts."""
    ids: list[int] = []
    while len(ids) < limit and STOP not in ids:
        ids.append((len(prompt) + len(ids)) % VOCAB)
    return ids


@pytest.fixture
async def two() -> AsyncIterator[Any]:
    replicas = FakeReplica("r0"), FakeReplica("r1")
    async with fake_engine(*replicas, max_skew=2) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        yield engine


async def test_no_token_before_weights_are_published() -> None:
    async with fake_engine(FakeReplica("r0")) as engine:
        with pytest.raises(EngineError, match="no weights have been published"):
            await engine.generate([1], params(), session="s")


async def test_every_sampling_parameter_is_sent(two: Any) -> None:
    await two.generate(
        [1, 2, 3], SamplingParams(temperature=0.7, max_new_tokens=3, stop_ids=(7, 9), seed=5), session="s"
    )
    sent = two.replicas[0].requests[0]
    wanted = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 5}
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "max_tokens": 3, "logprobs": 0}
    wanted |= {"stop_token_ids": [7, 9], "ignore_eos": True, "n": 1, "detokenize": False}
    assert wanted.items() <= sent.sampling.items()
    assert sent.prompt_ids == [1, 2, 3]


async def test_a_lost_replica_loses_no_token_and_is_back_with_the_current_weights(two: Any) -> None:
    prompt = list(range(10, 22))
    first, second = two.replicas
    first.fail_after = [5]  # in the middle of a chunk: what came before it is kept
    got = await two.generate(prompt, params(20), session="s")
    assert got.token_ids == expected(prompt, 20)
    assert got.rollout_logprobs == [-0.01 * token for token in got.token_ids]
    assert got.finish_reason == "length"
    assert (got.policy_version, got.policy_version_max) == (0, 0)
    parts = [first.requests[0], second.requests[0]]
    assert parts[1].prompt_ids == [*prompt, *got.token_ids[:4]]
    assert parts[1].sampling["max_tokens"] == 16
    assert parts[0].sampling["seed"] != parts[1].sampling["seed"]
    await eventually(lambda: first.held == 0)
    assert first.events[-3:] == ["close", "start", "load 0"]
    assert two.counters.resubmitted == two.counters.restarts == 1


async def test_many_turns_survive_many_losses(two: Any) -> None:
    """Every replica is lost again and again while 20 turns run; each gets exactly the tokens of an undisturbed run."""
    for replica in two.replicas:
        replica.fail_after = [3, 11, 0, 7, 2, 9]
    prompts = [list(range(10, 12 + index)) for index in range(20)]
    got = await asyncio.gather(*(two.generate(p, params(25), session=f"s{i}") for i, p in enumerate(prompts)))
    assert [c.token_ids for c in got] == [expected(p, 25) for p in prompts]
    assert two.counters.tokens_sampled == sum(len(c.token_ids) for c in got)
    assert two.counters.restarts >= 4


async def test_a_hanging_replica_is_replaced_and_a_slow_one_is_not() -> None:
    slow, hanging = FakeReplica("slow", delay_s=0.03), FakeReplica("hanging")
    async with fake_engine(slow, hanging, stall_s=0.2) as engine:
        await engine.update_weights(WEIGHTS, version=3)
        hanging.hang_after = [4]
        prompt = list(range(10, 20))
        turns = [engine.generate(prompt, params(30), session=name) for name in ("a", "b")]
        got = await asyncio.wait_for(asyncio.gather(*turns), timeout=20)
        assert [c.token_ids for c in got] == [expected(prompt, 30)] * 2
        assert engine.counters.stalls == engine.counters.restarts == 1
        assert "close" not in slow.events


class Recomputing(FakeReplica):
    """Takes a moment after an update, for what it has to compute again."""

    async def load(self, info: Mapping[str, Any], *, version: int) -> None:
        held, self.paused = self.paused, asyncio.Event()
        await super().load(info, version=version)
        asyncio.get_running_loop().call_later(0.1, held.set)


async def test_a_long_update_is_no_stall() -> None:
    replica = Recomputing("r0", delay_s=0.01)
    async with fake_engine(replica, stall_s=0.2) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        prompt = list(range(10, 20))
        turn = asyncio.create_task(engine.generate(prompt, params(30), session="s"))
        await asyncio.sleep(0.12)
        shapes = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
        plan = UpdatePlan(version=1, base_version=None, stream="x", dtype="float32", shapes=shapes, in_flight="pause")
        assert await engine.start_weight_update(plan)
        await asyncio.sleep(0.5)  # longer than stall_s: the replica stands still because it was told to
        assert await engine.finish_weight_update({name: checksum(tensor) for name, tensor in WEIGHTS.items()}) == []
        assert (await turn).token_ids == expected(prompt, 30)
        assert engine.counters.stalls == 0


async def test_a_restart_that_fails_by_an_error_of_the_system_leaves_no_turn_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica) as engine:
        await engine.update_weights(WEIGHTS, version=0)

        async def start() -> None:
            raise OSError("no process left")

        monkeypatch.setattr(replica, "start", start)
        replica.fail_after = [2]
        with pytest.raises(EngineDead, match="no process left"):
            await asyncio.wait_for(engine.generate([11, 12], params(), session="s"), timeout=5)


async def test_a_server_that_came_back_with_other_weights_is_not_believed(two: Any) -> None:
    prompt = [11, 12, 13]
    first = two.replicas[0]
    first.held = -1  # restarted behind the same URL: it answers, with whatever it was started with
    got = await two.generate(prompt, params(9), session="s")
    assert got.token_ids == expected(prompt, 9)
    assert (got.policy_version, two.counters.stale_replicas) == (0, 1)
    assert two.replicas[1].requests[0].prompt_ids == prompt  # none of its tokens was kept
    await eventually(lambda: first.held == 0)


async def test_an_engine_without_a_replica_left_says_so() -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        replica.fail_after, replica.refuse_start = [2], ["no memory"] * 3
        with pytest.raises(EngineDead, match="no memory"):
            await engine.generate([11, 12], params(), session="s")
        with pytest.raises(EngineDead):
            await engine.generate([11, 12], params(), session="t")


async def test_a_start_that_fails_closes_what_was_started() -> None:
    good, bad = FakeReplica("good"), FakeReplica("bad")
    bad.refuse_start = ["no such model"]
    engine = fake_engine(good, bad)
    with pytest.raises(EngineError, match="no such model"):
        await engine.start()
    assert good.events[-1] == bad.events[-1] == "close"


async def test_updates_reach_every_replica_also_one_that_is_starting(two: Any) -> None:
    first = two.replicas[0]
    first.fail_after, first.refuse_start = [0], ["still busy"]
    await two.generate([11, 12], params(4), session="s")
    new = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    await two.update_weights(new, version=5)
    await eventually(lambda: first.held == 5)
    for replica in two.replicas:
        assert all(torch.equal(replica.weights[name], new[name]) for name in new)
    got = await two.generate([11, 12], params(4), session="t")
    assert (got.policy_version, got.policy_version_max) == (5, 5)
    assert "v5" in [r.requests[-1].cache_salt for r in two.replicas if r.requests]


@pytest.mark.parametrize("in_flight", ["pause", "keep", "abort"])
async def test_an_update_in_buckets_under_a_running_turn(in_flight: str) -> None:
    replica = FakeReplica("r0", delay_s=0.05)
    async with fake_engine(replica, dtype="bfloat16") as engine:
        await engine.update_weights(WEIGHTS, version=0)
        prompt = list(range(10, 20))
        turn = asyncio.create_task(engine.generate(prompt, params(30), session="s"))
        await eventually(lambda: replica.num_sampled)
        new = {name: (tensor * 3).bfloat16() for name, tensor in WEIGHTS.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in new.items()}
        plan = UpdatePlan(
            version=1, base_version=None, stream="x", dtype="bfloat16", shapes=shapes, in_flight=in_flight
        )
        assert await engine.start_weight_update(plan)
        for name, tensor in new.items():
            flat = tensor.reshape(-1)
            for first, part in ((0, flat[:2]), (2, flat[2:])):
                await engine.receive_weights(WeightBucket((WeightPiece(name=name, first=first, values=part),)))
        assert await engine.finish_weight_update({name: checksum(tensor) for name, tensor in new.items()}) == []
        got = await turn
        assert got.token_ids == expected(prompt, 30)
        assert (got.policy_version, got.policy_version_max) == (0, 1)
        assert all(torch.equal(replica.weights[name], tensor) for name, tensor in new.items())
        assert engine.counters.resubmitted == (in_flight == "abort")
        assert (
            await engine.start_weight_update(
                UpdatePlan(version=2, base_version=7, stream="x", dtype="bfloat16", shapes=shapes)
            )
            is False
        )  # a delta to weights that are not here
        await engine.update_weights(WEIGHTS, version=2)


async def test_damaged_weights_are_named_and_nothing_is_sampled_with_them() -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica) as engine:
        await engine.update_weights(WEIGHTS, version=0)
        shapes = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
        plan = UpdatePlan(version=1, base_version=None, stream="x", dtype="float32", shapes=shapes)
        assert await engine.start_weight_update(plan)
        sums = {name: checksum(tensor) for name, tensor in WEIGHTS.items()}
        sums["b.weight"] += 1
        assert await engine.finish_weight_update(sums) == ["b.weight"]
        assert "load 1" not in replica.events
        turn = asyncio.create_task(engine.generate([11, 12], params(4), session="s"))
        await asyncio.sleep(0.05)
        assert not turn.done()  # it stands still until a whole update has come
        await engine.update_weights(WEIGHTS, version=2)
        assert (await turn).policy_version_max == 2


async def test_bits_that_changed_in_shared_memory_are_not_loaded(two: Any) -> None:
    two._store.targets["a.weight"][1, 2] = 99.0
    two.replicas[0].fail_after, two.replicas[0].refuse_start = [0], []
    location = dict(two._location)
    from swe_rl.errors import InvariantError
    from swe_rl.inference.vllm.store import read_tensors

    with pytest.raises(InvariantError, match=r"a\.weight of version 0"):
        dict(read_tensors(location["path"], location["tensors"], version=0))


async def test_sleep_and_wake_around_training() -> None:
    replica = FakeReplica("r0")
    async with fake_engine(replica, layout="colocated") as engine:
        await engine.update_weights(WEIGHTS, version=0)
        await engine.rest()
        await engine.update_weights(WEIGHTS, version=1)
        assert replica.events[-3:] == ["sleep 2", "wake None", "load 1"]


async def test_reusable_tokens_are_those_of_the_session_and_version(two: Any) -> None:
    prompt = list(range(10, 30))
    first = await two.generate(prompt, params(5), session="s")
    assert two.counters.tokens_reusable == 0
    longer = [*prompt, *first.token_ids, 1, 2]
    await two.generate(longer, params(5), session="s")
    assert two.counters.tokens_reusable == len(prompt) + len(first.token_ids) - 1
    await two.update_weights(WEIGHTS, version=1)
    await two.generate([*longer, 3], params(5), session="s")
    assert two.counters.tokens_reusable == len(prompt) + len(first.token_ids) - 1
    assert two.counters.tokens_prompt == len(prompt) + 2 * len(longer) + 1


async def test_closing_ends_waiting_turns_and_removes_the_weights() -> None:
    replica = FakeReplica("r0")
    engine = fake_engine(replica)
    await engine.start()
    await engine.update_weights(WEIGHTS, version=0)
    path = engine._store.path
    replica.fail_after, replica.refuse_start = [0], ["down"] * 2
    turn = asyncio.create_task(engine.generate([11], params(), session="s"))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError):
        await turn
    assert not path.exists()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([11], params(), session="t")


async def test_a_prompt_that_fills_the_context_is_refused(two: Any) -> None:
    with pytest.raises(EngineError, match="leaves no room"):
        await two.generate([1] * MAX_CONTEXT, params(), session="s")
