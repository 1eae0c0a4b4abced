"""Replay over real sandboxes whose supervisor is killed: once it goes on, twice at one command it is the agent's."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.errors import SandboxLost, SandboxUnavailable
from swe_rl.sandbox import SandboxPool, open_sandbox
from swe_rl.sandbox.leased import LeasedSandbox
from swe_rl.sandbox.local import LocalSandbox
from swe_rl.sandbox.replay import ReplayedSandbox, replayed
from swe_rl.types import Limits, SandboxSpec


async def _need_sandboxes() -> None:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")


def kill_supervisor(sandbox: ReplayedSandbox) -> None:
    leased = sandbox._inner
    assert isinstance(leased, LeasedSandbox)
    assert isinstance(leased.inner, LocalSandbox)
    launcher = leased.inner._launcher
    (supervisor,) = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    os.kill(int(supervisor), signal.SIGKILL)


async def exec_and_kill(sandbox: ReplayedSandbox, command: str, *, times: int) -> asyncio.Task[object]:
    """Starts `command` and kills the supervisor under it so many times, each in another sandbox."""
    task: asyncio.Task[object] = asyncio.create_task(sandbox.exec(command))
    for number in range(times):
        async with asyncio.timeout(20):
            while sandbox._generation < number or sandbox._inner is None:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        kill_supervisor(sandbox)
    return task


@pytest.mark.skipif(os.geteuid() != 0, reason="the supervisor is another user's unless root started it")
async def test_killed_once_it_goes_on_and_killed_twice_it_is_the_agents_doing() -> None:
    await _need_sandboxes()
    pool = SandboxPool(2)
    async with replayed(pool, SandboxSpec(), retries=2) as sandbox:
        await sandbox.exec("echo one > kept; cd /tmp")
        result = await (await exec_and_kill(sandbox, "sleep 0.5; cat kept", times=1))
        assert (result.outcome, result.stdout) == ("ok", b"one\n")  # type: ignore[attr-defined]
        assert pool.counts["replays"] == 1
        result = await (await exec_and_kill(sandbox, "sleep 0.4; cat kept", times=0))
        assert result.outcome == "ok"  # type: ignore[attr-defined]
    async with replayed(pool, SandboxSpec(), retries=2) as sandbox:
        result = await (await exec_and_kill(sandbox, "sleep 0.6", times=2))
        assert result.outcome == "lost"  # type: ignore[attr-defined]
    assert pool.counts["ended_by_agent"] == 1
    assert pool.num_open == 0


async def test_a_lease_that_ends_again_and_again_is_no_proof() -> None:
    await _need_sandboxes()
    pool = SandboxPool(2)
    async with replayed(pool, SandboxSpec(limits=Limits(lease_s=0.3)), retries=1) as sandbox:
        with pytest.raises(SandboxLost, match="lease ended"):
            await sandbox.exec("sleep 5")
    assert pool.counts["ended_by_agent"] == 0
