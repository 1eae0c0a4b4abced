"""The manager of a node: admission, warm leases, retries, clean ends, counts. Over fakes, and over real sandboxes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from real_parts import require

from swe_rl.errors import ConfigError, SandboxError, SandboxLost, SandboxUnavailable
from swe_rl.sandbox import SandboxPool, node_manager, open_sandbox
from swe_rl.sandbox.admission import AGENTS, GRADING
from swe_rl.sandbox.owner import leases_dir, owner_label
from swe_rl.sandbox.stats import quantile_ms, sandbox_metrics
from swe_rl.sandbox.warm_pool import MAX_AGE_S
from swe_rl.testing import FakeSandbox, exec_result
from swe_rl.types import Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory_bytes=100 << 20, disk_bytes=0, lease_s=60))
ROOM = 100 << 20


class Machine:
    """Starts fakes; fails as often as `failures` says."""

    def __init__(self, *failures: Exception, delay_s: float = 0.0) -> None:
        self.failures = list(failures)
        self.delay_s = delay_s
        self.specs: list[SandboxSpec] = []
        self.alive: list[FakeSandbox] = []
        self.in_flight = self.peak = 0

    async def start(self, spec: SandboxSpec) -> FakeSandbox:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.in_flight -= 1
        if self.failures:
            raise self.failures.pop(0)
        self.specs.append(spec)
        machine = self

        class Counted(FakeSandbox):
            async def close(self) -> None:
                await super().close()
                if self in machine.alive:
                    machine.alive.remove(self)

        made = Counted(commands={"true": exec_result("ok"), "die": SandboxLost("gone")})
        self.alive.append(made)
        return made


def pool_of(machine: Machine, places: int = 4, **options: int) -> SandboxPool:
    return SandboxPool(places, start=machine.start, **options)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_places_are_bounded_per_lane() -> None:
    machine = Machine()
    pool = pool_of(machine, 3, grading=2)
    peak = {AGENTS: 0, GRADING: 0}
    now = {AGENTS: 0, GRADING: 0}

    async def use(lane: str) -> None:
        async with pool.lease(SPEC, lane=lane):
            now[lane] += 1
            peak[lane] = max(peak[lane], now[lane])
            await asyncio.sleep(0.002)
            now[lane] -= 1

    await asyncio.gather(*(use(lane) for lane in (AGENTS, GRADING) for _ in range(9)))
    assert peak == {AGENTS: 3, GRADING: 2}
    assert machine.alive == []
    assert pool.num_open == 0
    assert pool.counts["leases"] == 18


async def test_grading_runs_while_agents_wait_for_the_model() -> None:
    pool = pool_of(Machine(), 2, grading=1)
    async with pool.lease(SPEC), pool.lease(SPEC):
        waiting = asyncio.create_task(pool.lease(SPEC).__aenter__())
        async with asyncio.timeout(5), pool.lease(SPEC, lane=GRADING) as sandbox:
            assert (await sandbox.exec("true")).stdout == b"ok"
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert pool.lanes[AGENTS].holders == 0


async def test_memory_is_never_lent_twice() -> None:
    machine = Machine()
    pool = pool_of(machine, 10, grading=10, memory_bytes=6 * ROOM)  # half of it for agents
    peak = 0

    async def use() -> None:
        nonlocal peak
        async with pool.lease(SPEC):
            peak = max(peak, len(machine.alive))
            await asyncio.sleep(0.002)

    await asyncio.gather(*(use() for _ in range(12)))
    assert peak == 3
    assert pool.snapshot()["wait_agents_memory_bytes_s"] > 0


async def test_starts_are_retried_and_what_no_retry_cures_is_not() -> None:
    machine = Machine(SandboxError("busy"), SandboxError("busy"))
    pool = pool_of(machine)
    async with pool.lease(SPEC):
        pass
    assert pool.counts["start_failures"] == 2
    machine.failures = [SandboxError("busy")] * 3
    with pytest.raises(SandboxError, match="busy"):
        async with pool.lease(SPEC):
            pass
    for failure in (SandboxUnavailable("no namespaces"), ConfigError("bad spec")):
        machine.failures = [failure]
        with pytest.raises(type(failure)):
            async with pool.lease(SPEC):
                pass
        assert machine.failures == []
    assert pool.lanes[AGENTS].holders == 0


async def test_calls_to_a_daemon_are_few_at_a_time() -> None:
    machine = Machine(delay_s=0.005)
    pool = pool_of(machine, 20, daemon_calls=3)
    docker = replace(SPEC, backend="docker")

    async def use() -> None:
        async with pool.lease(docker):
            pass

    await asyncio.gather(*(use() for _ in range(12)))
    assert machine.peak == 3


async def test_a_warm_lease_is_handed_out_once_with_a_whole_lease_left() -> None:
    machine = Machine()
    pool = pool_of(machine, 4, warm=2)
    pool.expect([SPEC, SPEC, SPEC])
    await settle()
    assert pool.num_warm == 2
    assert [spec.limits.lease_s for spec in machine.specs] == [60 + MAX_AGE_S] * 2
    async with pool.lease(SPEC) as one, pool.lease(SPEC) as two:
        assert one is not two
        assert (await one.exec("true")).outcome == "ok"
        await settle()
        assert len(machine.specs) == 3  # the third was started when there was room for it
    assert pool.counts["warm_leases"] == 2
    assert sandbox_metrics(pool.snapshot())["sandbox/warm_share"] == 1.0
    await pool.close()
    assert machine.alive == []
    assert pool.lanes[AGENTS].holders == 0


async def test_warm_sandboxes_give_way_to_who_needs_the_room() -> None:
    machine = Machine()
    pool = pool_of(machine, 2, grading=1, memory_bytes=3 * ROOM, warm=2)  # two fit
    pool.expect([SPEC, SPEC])
    await settle()
    assert pool.num_warm == 2
    other = replace(SPEC, env={"OTHER": "1"})
    async with asyncio.timeout(5), pool.lease(other):
        assert pool.num_warm == 1
    assert pool.counts["warm_evicted"] == 1
    await pool.close()
    assert machine.alive == []


async def test_what_is_open_at_the_end_is_closed_and_cancelled_users_leave_nothing() -> None:
    machine = Machine()
    pool = pool_of(machine, 2)
    started = asyncio.Event()

    async def hold() -> None:
        async with pool.lease(SPEC):
            started.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(hold())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle()
    assert machine.alive == []
    lease = pool.lease(SPEC)
    await lease.__aenter__()
    await pool.close()
    assert machine.alive == []
    assert pool.num_open == 0


async def test_forks_are_charged_and_paid_back() -> None:
    machine = Machine()
    pool = pool_of(machine, 3, grading=1, memory_bytes=4 * ROOM)
    async with pool.lease(SPEC) as sandbox:
        forks = [await sandbox.fork() for _ in range(3)]
        assert pool.num_open == 4
        waiting = asyncio.create_task(pool.lease(SPEC).__aenter__())
        await settle()
        assert not waiting.done()  # 4 of 3
        for fork in forks:
            await fork.close()
            await fork.close()
        await settle()
        assert waiting.done()
    assert pool.counts["forks"] == 3


async def test_counts_say_what_happened() -> None:
    pool = pool_of(Machine())
    async with pool.lease(SPEC) as sandbox:
        await sandbox.exec("true")
        await sandbox.exec("nonsense")
        with pytest.raises(SandboxLost):
            await sandbox.exec("die")
    found = sandbox_metrics(pool.snapshot())
    assert found["sandbox/outcome_ok"] == found["sandbox/outcome_nonzero"] == found["sandbox/lost"] == 1
    assert found["sandbox/output_bytes"] == len("ok") + len("nonsense: not found")
    assert 0 < found["sandbox/local_exec_ms_p50"] <= found["sandbox/local_exec_ms_p95"]
    assert found["sandbox/started"] == found["sandbox/ended"] == 1


def test_percentiles_of_buckets() -> None:
    counts = {"x_ms/4": 50.0, "x_ms/10": 50.0}  # 2 to 3 ms, 16 to 24 ms
    assert quantile_ms(counts, "x", 0.25) == pytest.approx(2.5)
    assert quantile_ms(counts, "x", 0.5) == pytest.approx(3.0)
    assert quantile_ms(counts, "x", 0.75) == pytest.approx(20.0)
    assert quantile_ms({"x_ms/25": 1.0}, "x", 0.5) == 60_000
    assert quantile_ms({}, "x", 0.5) != quantile_ms({}, "x", 0.5)  # nan


def test_bad_sizes_name_the_key() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.concurrency=0"):
        SandboxPool(0)


async def _need_sandboxes() -> None:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")


async def test_upkeep_goes_on_after_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    async def look(_pool: SandboxPool) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise OSError("no descriptors left")

    monkeypatch.setattr(node_manager, "UPKEEP_S", 0.01)
    monkeypatch.setattr(SandboxPool, "_reap", look)
    async with SandboxPool(1), asyncio.timeout(10):
        while looks < 4:
            await asyncio.sleep(0.01)


async def test_real_sandboxes_warm_and_cold_with_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    await _need_sandboxes()
    monkeypatch.setattr(node_manager, "UPKEEP_S", 0.05)
    async with SandboxPool(3, warm=2, run_id="run-1") as pool:
        assert (leases_dir() / f"{owner_label()}.json").exists()
        pool.expect([SandboxSpec()] * 4)
        async with asyncio.timeout(20):
            while pool.num_warm < 2:
                await asyncio.sleep(0.01)
        async with (
            pool.lease(SandboxSpec()) as one,
            pool.lease(SandboxSpec()) as two,
            pool.lease(SandboxSpec()) as three,
        ):
            for number, sandbox in enumerate((one, two, three)):
                await sandbox.write_file("mine", str(number).encode())
            answers = [(await sandbox.exec("cat mine")).stdout for sandbox in (one, two, three)]
        assert answers == [b"0", b"1", b"2"]
        await asyncio.sleep(0.15)
        assert pool.counts["lost"] == 0
    assert not (leases_dir() / f"{owner_label()}.json").exists()
    assert pool.num_open == pool.num_warm == 0
