"""Replay after a loss: the same state, compared by hash; whose doing a loss is; never a made-up result."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from swe_rl.errors import SandboxError, SandboxLost
from swe_rl.sandbox.replay import replayed
from swe_rl.testing import CommandResult, FakeSandbox, exec_result
from swe_rl.types import ExecResult, SandboxSpec

SPEC = SandboxSpec()


def append(sandbox: FakeSandbox, command: str) -> ExecResult:
    """`add X`: appends X to a file, prints the file."""
    word = command.split(" ", 1)[1].encode()
    sandbox.files["log"] = sandbox.files.get("log", b"") + word
    return exec_result(sandbox.files["log"])


class FakePool:
    """Leases of fakes that know `add`; `failures[n]` says, for the n-th sandbox, which command loses it and how."""

    def __init__(self, failures: dict[int, dict[str, Exception]] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.failures = failures or {}
        self.made: list[FakeSandbox] = []
        self.open = 0
        self.on_open: Callable[[int], None] = lambda number: None

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, **options: str) -> AsyncIterator[FakeSandbox]:
        number = len(self.made)
        self.on_open(number)

        def run(sandbox: FakeSandbox, command: str) -> CommandResult:
            failure = self.failures.get(number, {}).get(command)
            if isinstance(failure, SandboxLost):
                self.counts["lost"] += 1
            return failure or append(sandbox, command)

        sandbox = FakeSandbox(commands={"add": run})
        self.made.append(sandbox)
        self.open += 1
        try:
            yield sandbox
        finally:
            await sandbox.close()
            self.open -= 1


def inside() -> SandboxLost:
    return SandboxLost("the stream ended", from_inside=True)


async def test_a_lost_sandbox_is_replaced_and_nobody_notices() -> None:
    pool = FakePool({0: {"add c": SandboxLost("the node is gone")}})
    async with replayed(pool, SPEC, retries=2) as sandbox:
        await sandbox.exec("add a")
        await sandbox.write_file("other", b"1")
        assert (await sandbox.exec("add b")).stdout == b"ab"
        assert (await sandbox.exec("add c")).stdout == b"abc"  # in the second sandbox
        assert await sandbox.read_file("other") == b"1"
        assert sandbox.recovery_s > 0
    assert [item.executed for item in pool.made] == [["add a", "add b", "add c"], ["add a", "add b", "add c"]]
    assert pool.counts["replays"] == 1
    assert pool.counts["replayed_actions"] == 3
    assert pool.counts["replay_mismatches"] == 0
    assert pool.open == 0
    assert all(item.closed for item in pool.made)


async def test_a_different_output_is_counted_and_a_different_exit_code_ends_the_attempt() -> None:
    pool = FakePool({0: {"add b": SandboxLost("gone")}})
    async with replayed(pool, SPEC, retries=2) as sandbox:
        pool.made[0].commands["date"] = exec_result("10:00")
        await sandbox.exec("date")

        def prepare(number: int) -> None:
            pass

        pool.on_open = prepare
        pool.failures[1] = {}
        original = pool.lease

        @asynccontextmanager
        async def later(spec: SandboxSpec, **options: str) -> AsyncIterator[FakeSandbox]:
            async with original(spec) as fresh:
                fresh.commands["date"] = exec_result("10:07")
                yield fresh

        pool.lease = later  # type: ignore[method-assign]
        assert (await sandbox.exec("add b")).stdout == b"b"
        assert pool.counts["replay_mismatches"] == 1

    pool = FakePool({0: {"add b": SandboxLost("gone")}})
    async with replayed(pool, SPEC, retries=2) as sandbox:
        pool.made[0].commands["make"] = exec_result("", exit_code=2)
        await sandbox.exec("make")
        with pytest.raises(SandboxError, match=r"replay of action 0 ended differently, nonzero 127 .* 'make'"):
            await sandbox.exec("add b")
    assert pool.open == 0


async def test_a_write_that_failed_must_fail_again() -> None:
    pool = FakePool()
    async with replayed(pool, SPEC, retries=1) as sandbox:

        async def refuse(path: str, data: bytes) -> None:
            raise PermissionError(13, "Permission denied", path)

        pool.made[0].write_file = refuse  # type: ignore[method-assign]
        with pytest.raises(PermissionError):
            await sandbox.write_file("x", b"1")
        pool.failures[0] = {"add a": SandboxLost("gone")}
        with pytest.raises(SandboxError, match=r"errno 0 instead of errno 13: 'write x'"):
            await sandbox.exec("add a")


async def test_the_same_command_twice_from_inside_is_the_agents_doing() -> None:
    pool = FakePool({0: {"add b": inside()}, 1: {"add b": inside()}})
    async with replayed(pool, SPEC, retries=2) as sandbox:
        await sandbox.exec("add a")
        result = await sandbox.exec("add b")
    assert (result.outcome, result.exit_code) == ("lost", 137)
    assert pool.counts["ended_by_agent"] == 1
    assert pool.made[1].executed == ["add a", "add b"]  # it was in the same state
    assert len(pool.made) == 2


@pytest.mark.parametrize(
    "losses",
    [
        [SandboxLost("lease ended"), SandboxLost("lease ended"), SandboxLost("lease ended")],
        [inside(), SandboxLost("transport"), inside()],
        [SandboxLost("transport"), inside(), SandboxLost("transport")],
    ],
)
async def test_without_proof_it_is_the_machines(losses: list[SandboxLost]) -> None:
    pool = FakePool({number: {"add b": loss} for number, loss in enumerate(losses)})
    async with replayed(pool, SPEC, retries=2) as sandbox:
        with pytest.raises(SandboxLost):
            await sandbox.exec("add b")
    assert pool.counts["ended_by_agent"] == 0
    assert pool.open == 0


async def test_not_while_other_sandboxes_of_the_node_are_lost_too() -> None:
    pool = FakePool({0: {"add b": inside()}, 1: {"add b": inside()}})

    def neighbour_dies(number: int) -> None:
        pool.counts["lost"] += number == 1

    pool.on_open = neighbour_dies
    async with replayed(pool, SPEC, retries=2) as sandbox:
        assert (await sandbox.exec("add b")).stdout == b"b"  # the third one lives
    assert pool.counts["ended_by_agent"] == 0


async def test_losses_at_two_commands_do_not_add_up() -> None:
    pool = FakePool({0: {"add a": inside()}, 1: {"add b": inside()}})
    async with replayed(pool, SPEC, retries=2) as sandbox:
        assert (await sandbox.exec("add a")).stdout == b"a"
        assert (await sandbox.exec("add b")).stdout == b"ab"


async def test_a_loss_in_the_replay_is_retried() -> None:
    pool = FakePool({0: {"add b": SandboxLost("gone")}, 1: {"add a": SandboxLost("gone, too")}})
    async with replayed(pool, SPEC, retries=1) as sandbox:
        await sandbox.exec("add a")
        assert (await sandbox.exec("add b")).stdout == b"ab"
    assert len(pool.made) == 3
    assert pool.open == 0


async def test_reading_is_never_the_agents_doing() -> None:
    pool = FakePool()
    async with replayed(pool, SPEC, retries=2) as sandbox:

        async def lost(path: str) -> bytes:
            raise inside()

        original = pool.lease

        @asynccontextmanager
        async def broken(spec: SandboxSpec, **options: str) -> AsyncIterator[FakeSandbox]:
            async with original(spec) as fresh:
                fresh.read_file = lost  # type: ignore[method-assign]
                yield fresh

        pool.lease = broken  # type: ignore[method-assign]
        pool.made[0].read_file = lost  # type: ignore[method-assign]
        with pytest.raises(SandboxLost):
            await sandbox.read_file("log")


async def test_a_fork_has_its_own_log() -> None:
    pool = FakePool()
    async with replayed(pool, SPEC, retries=1) as sandbox:
        await sandbox.exec("add a")
        async with await sandbox.fork() as other:
            await other.exec("add b")
            await sandbox.exec("add c")
            assert await other.read_file("log") == b"ab"
            assert await sandbox.read_file("log") == b"ac"
            assert [len(item.log.actions) for item in (sandbox, other)] == [2, 2]
