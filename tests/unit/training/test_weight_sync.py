"""WeightPublisher: what arrives is what the trainer has, deltas are lossless and small, lost versions are made good."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import weight_sync_worker as worker
from weight_sync_worker import Receiver, rounded

from swe_rl.config import EngineConfig, ModelConfig
from swe_rl.errors import ConfigError, EngineError
from swe_rl.inference import EmbeddedEngine
from swe_rl.inference.weight_update import UpdatePlan, WeightBucket
from swe_rl.models.nano import build_model
from swe_rl.protocols import SamplingParams
from swe_rl.training.weight_source import Slice, bucket_plan
from swe_rl.training.weight_sync import WeightPublisher

SMALL = 2048  # bytes of a bucket: a model of a few thousand parameters takes several


def delta_publisher(backend: Any, *engines: Any, **changes: Any) -> WeightPublisher:
    return WeightPublisher(backend, engines, **{"mode": "delta", "dtype": "bfloat16", "bucket_bytes": SMALL, **changes})


def assert_holds(engine: Receiver, backend: Any) -> None:
    for name, tensor in rounded(backend.weights(), engine.dtype).items():
        assert torch.equal(engine.inbox.targets[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_every_version_arrives_whole(
    make_backend: Callable[..., Any], make_batches: Callable[..., Any], dtype: str
) -> None:
    backend = make_backend()
    engine = Receiver(backend, dtype)
    publisher = WeightPublisher(backend, [engine], dtype=dtype, bucket_bytes=SMALL)
    assert (await publisher.publish()).version == 0
    assert_holds(engine, backend)
    backend.train_step(make_batches(), learning_rate=1e-2)
    report = await publisher.publish()
    assert_holds(engine, backend)
    num_bytes = sum(w.numel() for w in backend.weights().values()) * (4 if dtype == "float32" else 2)
    assert (report.version, report.delta, report.resync) == (1, False, "")
    assert report.sent_bytes == report.full_bytes == num_bytes
    assert (await publisher.publish(version=41)).version == 41
    assert [plan.version for plan in engine.plans] == [0, 1, 41]
    assert {plan.base_version for plan in engine.plans} == {None}
    assert max(engine.bucket_bytes) <= SMALL


async def test_deltas_are_lossless_over_many_steps_and_smaller(
    make_backend: Callable[..., Any], make_batches: Callable[..., Any]
) -> None:
    backend = make_backend()
    engine = Receiver(backend)
    publisher = delta_publisher(backend, engine)
    before = rounded(backend.weights(), torch.bfloat16)
    for step in range(4):
        report = await publisher.publish()
        assert_holds(engine, backend)
        now = rounded(backend.weights(), torch.bfloat16)
        changed = sum(int((now[name] != before[name]).sum()) for name in now)
        if step:
            assert (report.delta, report.num_changed) == (True, changed)
            assert report.sent_bytes < 0.5 * report.full_bytes
            assert report.metrics()["sync/byte_share"] == report.sent_bytes / report.full_bytes
        before = now
        backend.train_step(make_batches(seed=step), learning_rate=1e-5)
    assert [plan.base_version for plan in engine.plans] == [None, 0, 1, 2]


async def test_a_change_of_everything_is_sent_dense(make_backend: Callable[..., Any]) -> None:
    backend = make_backend()
    engine = Receiver(backend)
    publisher = delta_publisher(backend, engine)
    await publisher.publish()
    backend.load_weights({name: 3.0 * w.clone() + 1.0 for name, w in backend.weights().items()}, policy_version=7)
    report = await publisher.publish()
    assert_holds(engine, backend)
    assert report.delta
    assert report.sent_bytes <= 1.01 * report.full_bytes


async def test_nothing_changed_is_next_to_nothing_sent(make_backend: Callable[..., Any]) -> None:
    backend = make_backend()
    publisher = delta_publisher(backend, Receiver(backend))
    await publisher.publish()
    report = await publisher.publish()
    assert (report.delta, report.num_changed) == (True, 0)
    assert report.sent_bytes < 0.03 * report.full_bytes  # 2 bytes for 256 elements; small tensors round up


async def test_an_engine_that_lost_a_version_gets_everything_and_deltas_go_on(
    make_backend: Callable[..., Any], make_batches: Callable[..., Any]
) -> None:
    backend = make_backend()
    steady, restarted = Receiver(backend), Receiver(backend)
    publisher = delta_publisher(backend, steady, restarted)
    await publisher.publish()
    backend.train_step(make_batches(), learning_rate=1e-5)
    publisher.engines[1] = restarted = Receiver(backend)
    report = await publisher.publish()
    assert (report.delta, report.sent_bytes) == (False, report.full_bytes)
    assert "does not hold version 0" in report.resync
    for engine in (steady, restarted):
        assert_holds(engine, backend)
    backend.train_step(make_batches(seed=1), learning_rate=1e-5)
    assert (await publisher.publish()).resync == ""
    assert_holds(restarted, backend)


async def test_wrong_bits_in_an_engine_are_found_and_replaced(
    make_backend: Callable[..., Any], make_batches: Callable[..., Any]
) -> None:
    backend = make_backend()
    engine = Receiver(backend)
    publisher = delta_publisher(backend, engine)
    await publisher.publish()
    engine.inbox.targets["model.norm.weight"][3] += 1.0
    backend.train_step(make_batches(), learning_rate=1e-5)
    report = await publisher.publish()
    assert report.resync == "1 tensors of an engine differ from the trainer's, model.norm.weight for one"
    assert_holds(engine, backend)


async def test_a_bucket_damaged_on_the_way_is_found_and_replaced(
    make_backend: Callable[..., Any], make_batches: Callable[..., Any]
) -> None:
    backend = make_backend()
    engine = Receiver(backend)
    publisher = delta_publisher(backend, engine)
    await publisher.publish()
    backend.train_step(make_batches(), learning_rate=1e-4)
    engine.damage_next = True
    report = await publisher.publish()
    assert "differ from the trainer's" in report.resync
    assert_holds(engine, backend)


async def test_an_engine_that_fails_raises_after_all_buckets_and_the_next_update_is_whole(
    make_backend: Callable[..., Any], make_batches: Callable[..., Any]
) -> None:
    backend = make_backend()
    engine = Receiver(backend)
    publisher = delta_publisher(backend, engine)
    await publisher.publish()
    engine.failures = 2  # of the delta and of what replaces it
    backend.train_step(make_batches(), learning_rate=1e-4)
    with pytest.raises(EngineError, match="version 1 of the weights did not arrive: out of memory"):
        await publisher.publish()
    report = await publisher.publish()
    assert (report.delta, report.resync) == (False, "")
    assert_holds(engine, backend)


async def test_wrong_bits_after_everything_was_sent_are_an_error(make_backend: Callable[..., Any]) -> None:
    class Forgetful(Receiver):
        async def finish_weight_update(self, checksums: Mapping[str, int]) -> list[str]:
            return await super().finish_weight_update({**checksums, "model.norm.weight": 1})

    backend = make_backend()
    with pytest.raises(EngineError, match=r"model\.norm\.weight for one"):
        await delta_publisher(backend, Forgetful(backend)).publish()


async def test_another_forward_dtype_makes_other_masters_and_they_are_sent_whole(
    make_backend: Callable[..., Any], make_batches: Callable[..., Any]
) -> None:
    backend = make_backend()
    engine = Receiver(backend)
    publisher = delta_publisher(backend, engine)
    await publisher.publish()
    backend.new_phase(backend.cfg, algo=backend.algo, dtype=torch.bfloat16)
    backend.train_step(make_batches(), learning_rate=1e-3)
    assert not (await publisher.publish()).delta
    assert_holds(engine, backend)


async def test_the_policy_for_requests_in_flight_travels_with_the_plan(make_backend: Callable[..., Any]) -> None:
    backend = make_backend()
    engine = Receiver(backend, "float32")
    publisher = WeightPublisher(backend, [engine], in_flight="abort")
    for policy in ("pause", "keep", None):
        await publisher.publish(in_flight=policy)
    assert [plan.in_flight for plan in engine.plans] == ["pause", "keep", "abort"]
    with pytest.raises(ConfigError, match="in_flight='wait' is unknown"):
        await publisher.publish(in_flight="wait")


async def test_the_next_bucket_is_made_while_one_is_sent(make_backend: Callable[..., Any]) -> None:
    backend = make_backend()
    made: list[int] = []

    class Slow(Receiver):
        async def receive_weights(self, bucket: WeightBucket) -> None:
            for _ in range(200):
                if len(made) > len(self.bucket_bytes) + 1:  # one more than this engine was given
                    break
                await worker.nap()
            ahead.append(len(made) - len(self.bucket_bytes) - 1)
            await super().receive_weights(bucket)

    ahead: list[int] = []
    engine = Slow(backend, "float32")
    publisher = WeightPublisher(backend, [engine], bucket_bytes=SMALL)
    source = publisher._current_source()
    original = source.buckets

    def counted(totals: Any, *, delta: bool) -> Any:
        for bucket in original(totals, delta=delta):
            made.append(1)
            yield bucket

    source.buckets = counted  # type: ignore[method-assign]
    await publisher.publish()
    assert len(ahead) > 3
    assert set(ahead[:-1]) == {1}  # never more: two buckets exist at a time
    assert ahead[-1] == 0


def test_what_saves_nothing_is_refused(make_backend: Callable[..., Any]) -> None:
    backend = make_backend()
    with pytest.raises(ConfigError, match="set dtype=bfloat16"):
        WeightPublisher(backend, [], mode="delta", dtype="float32")
    with pytest.raises(ConfigError, match="mode='sparse' is unknown"):
        WeightPublisher(backend, [], mode="sparse")


@pytest.mark.parametrize(
    ("sizes", "per_bucket"),
    [({"a": 1, "b": 255, "c": 3}, 256), ({"a": 5000, "b": 1, "c": 0, "d": 777}, 512), ({"a": 300}, 300), ({}, 256)],
)
def test_buckets_cover_everything_once_within_their_size(sizes: dict[str, int], per_bucket: int) -> None:
    plan = bucket_plan(sizes, per_bucket=per_bucket)
    found: dict[str, list[int]] = {name: [] for name in sizes}
    for bucket in plan:
        assert 0 < sum(part.stop - part.start for part in bucket) <= per_bucket
        for part in bucket:
            assert isinstance(part, Slice)
            assert part.start % 256 == 0
            found[part.name] += range(part.start, part.stop)
    assert found == {name: list(range(size)) for name, size in sizes.items()}


async def test_the_embedded_engine_follows_by_deltas(
    make_backend: Callable[..., Any], make_batches: Callable[..., Any]
) -> None:
    backend = make_backend()
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24}
    model = build_model(ModelConfig(**shape, vocab_size=50))
    cfg = EngineConfig(num_slots=2, prefill_chunk=16, dtype="bfloat16", weight_sync="delta")
    params = SamplingParams(max_new_tokens=8, stop_ids=(), seed=3)
    async with (
        EmbeddedEngine(model, cfg, max_context=64) as engine,
        EmbeddedEngine(model, cfg, max_context=64) as plain,
    ):
        publisher = delta_publisher(backend, engine)
        for step in range(3):
            report = await publisher.publish()
            await plain.update_weights(backend.weights(), version=backend.policy_version)
            got = await engine.generate([1, 2, 3], params, session=f"s{step}")
            assert got == await plain.generate([1, 2, 3], params, session=f"s{step}")
            assert got.policy_version == step
            backend.train_step(make_batches(seed=step), learning_rate=1e-4)
        assert report.delta


@pytest.mark.slow
async def test_two_ranks_with_shards_send_what_one_rank_sends(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 over gloo: each rank's engine gets the whole model, no rank gathers a tensor, and checksums add up."""
    monkeypatch.syspath_prepend(str(worker.REGRESSIONS))
    ranks = worker.run_ranks(tmp_path, 2)
    for mode in worker.MODES:
        alone = await worker.publish_versions(*worker.trainer_and_batches(mode), mode)
        for found in (rank[mode] for rank in ranks):
            assert found["gathered_whole"] == 0
            assert found["largest_bucket"] <= worker.BUCKET_BYTES
            assert found["reports"] == alone["reports"]
            for name, tensor in alone["weights"].items():
                assert torch.equal(found["weights"][name], tensor), name
            for name, tensor in alone["merged"].items():
                torch.testing.assert_close(found["merged"][name], tensor, rtol=1e-9, atol=1e-9)


def test_the_plan_names_every_tensor(make_backend: Callable[..., Any]) -> None:
    backend = make_backend()
    publisher = WeightPublisher(backend, [])
    shapes = publisher._current_source().shapes
    assert shapes == {name: tuple(w.shape) for name, w in backend.weights().items()}
    assert UpdatePlan(version=1, base_version=None, stream="s", dtype="float32", shapes=shapes).in_flight == "keep"
