"""A sandbox that outlives its machine: what was done in it is done again in a fresh one when it is lost.

Between two commands a sandbox is its files, and those follow from the commands and writes so far: that list is kept.
When the sandbox is lost, a fresh one is leased, the list is replayed with results compared by hash, and the call that
was under way is made again. Whoever uses the sandbox notices nothing, so an episode keeps the tokens it has sampled.

    exit code or outcome differ    the fresh sandbox is not in the same state: SandboxError, the attempt is over
    only the output differs        counted as `replay_mismatches` (times, process ids and the like), the episode goes on

Whose doing is a loss? The machine's, unless ALL of this holds, then the agent's (outcome "lost"):
  1. the same command was under way in two fresh sandboxes in a row, the second one in the state of the first;
  2. both were ended from inside (SandboxLost.from_inside): no lease ran out, nobody closed them, no transport broke;
  3. between the two losses the pool lost no other sandbox: a machine in trouble rarely picks the same one twice.
Anything else is retried up to `retries` times per call and then passed on as SandboxLost: an outage, never a reward.
A loss while reading or writing a file is never the agent's.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from swe_rl.errors import SandboxError, SandboxLost, SandboxUnavailable
from swe_rl.protocols import Sandbox
from swe_rl.types import ExecResult, SandboxSpec

_T = TypeVar("_T")


class Leases(Protocol):
    """The part of a pool that replay needs: leases, and the counters of what happened ("lost" above all)."""

    counts: Counter[str]

    def lease(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One call that may have changed the sandbox, and what came of it."""

    command: str | None = None  # None: a write
    timeout_s: float | None = None
    cwd: str | None = None
    stdin: bytes | None = None
    path: str = ""  # of a write
    data: bytes = b""
    status: str  # exit code and outcome of a command, errno of a write
    digest: str = ""  # of both output streams


@dataclass(slots=True)
class ActionLog:
    """Everything that was done in a sandbox, in order."""

    actions: list[Action] = field(default_factory=list)

    async def replay(self, sandbox: Sandbox) -> int:
        """Does it all again; returns how many outputs differ. Raises SandboxError when an exit code does."""
        mismatches = 0
        for number, action in enumerate(self.actions):
            again = await _perform(sandbox, action)
            if again.status != action.status:
                what = action.command if action.command is not None else f"write {action.path}"
                raise SandboxError(
                    f"replay of action {number} ended differently, {again.status} instead of {action.status}: "
                    f"{what[:80]!r}"
                )
            mismatches += again.digest != action.digest
        return mismatches


async def _perform(sandbox: Sandbox, action: Action) -> Action:
    if action.command is not None:
        result = await sandbox.exec(action.command, timeout_s=action.timeout_s, cwd=action.cwd, stdin=action.stdin)
        return _executed(action.command, action.timeout_s, action.cwd, action.stdin, result)
    return _written(action.path, action.data, await _errno(sandbox.write_file(action.path, action.data)))


def _executed(
    command: str, timeout_s: float | None, cwd: str | None, stdin: bytes | None, result: ExecResult
) -> Action:
    digest = hashlib.blake2b(result.stdout + b"\0" + result.stderr, digest_size=16).hexdigest()
    status = f"{result.outcome} {result.exit_code}"
    return Action(command=command, timeout_s=timeout_s, cwd=cwd, stdin=stdin, status=status, digest=digest)


def _written(path: str, data: bytes, errno: int) -> Action:
    return Action(path=path, data=data, status=f"errno {errno}")


async def _errno(call: Awaitable[None]) -> int:
    try:
        await call
    except OSError as err:
        return err.errno or -1
    return 0


class ReplayedSandbox:
    """Implements Sandbox over a chain of leases. Open one with `replayed`."""

    def __init__(self, pool: Leases, spec: SandboxSpec, *, retries: int, log: ActionLog | None = None) -> None:
        self.spec = spec
        self.log = log or ActionLog()
        self.recovery_s = 0.0  # spent on leasing and replaying after losses
        self._pool, self._retries = pool, retries
        self._lease = AsyncExitStack()
        self._inner: Sandbox | None = None
        self._generation = 0
        self._recovering = asyncio.Lock()

    async def open(self) -> Self:
        """Leases the first sandbox."""
        self._inner = await self._lease.enter_async_context(self._pool.lease(self.spec))
        return self

    async def exec(
        self, command: str, *, timeout_s: float | None = None, cwd: str | None = None, stdin: bytes | None = None
    ) -> ExecResult:
        """As the sandbox's own. Outcome "lost" says that the command ended the sandbox, by the rule above."""
        losses: list[_Loss] = []
        try:
            result = await self._surviving(
                lambda sandbox: sandbox.exec(command, timeout_s=timeout_s, cwd=cwd, stdin=stdin), losses
            )
        except _AgentsDoing as err:
            self._pool.counts["ended_by_agent"] += 1
            return _lost(str(err))
        self.log.actions.append(_executed(command, timeout_s, cwd, stdin, result))
        return result

    async def read_file(self, path: str) -> bytes:
        return await self._surviving(lambda sandbox: sandbox.read_file(path), None)

    async def write_file(self, path: str, data: bytes) -> None:
        async def write(sandbox: Sandbox) -> OSError | None:
            try:
                await sandbox.write_file(path, data)
            except OSError as err:
                return err
            return None

        failure = await self._surviving(write, None)
        self.log.actions.append(_written(path, data, 0 if failure is None else failure.errno or -1))
        if failure is not None:
            raise failure

    async def fork(self) -> ReplayedSandbox:
        """A fork with its own copy of the log; the caller closes it."""
        inner = await self._surviving(lambda sandbox: sandbox.fork(), None)
        other = ReplayedSandbox(self._pool, self.spec, retries=self._retries, log=ActionLog(list(self.log.actions)))
        other._inner = await other._lease.enter_async_context(inner)
        return other

    async def close(self) -> None:
        self._inner = None
        await self._lease.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- losses ---------------------------------------------------------------------------------------------

    async def _surviving(self, call: Callable[[Sandbox], Awaitable[_T]], losses: list[_Loss] | None) -> _T:
        """`call` on the sandbox, repeated in fresh ones. `losses` is given where the agent can be to blame."""
        for attempt in range(self._retries + 1):
            generation, sandbox = self._generation, self._inner
            if sandbox is None:
                raise SandboxLost("the sandbox is closed")
            try:
                return await call(sandbox)
            except SandboxLost as err:
                if losses is not None:
                    losses.append(_Loss(err.from_inside, self._pool.counts["lost"]))
                    if _is_agents_doing(losses):
                        raise _AgentsDoing(f"the command ended two sandboxes in a row: {err}") from err
                if attempt == self._retries:
                    raise
                await self._recover(generation)
        raise AssertionError("unreachable: the last try returns or raises")

    async def _recover(self, generation: int) -> None:
        """Leads to a fresh sandbox in the same state. Of several calls that were lost together one does it."""
        async with self._recovering:
            if self._generation != generation:
                return
            start = time.monotonic()
            try:
                for attempt in range(self._retries + 1):
                    try:
                        await self._replace()
                        break
                    except SandboxUnavailable:
                        raise
                    except SandboxLost:
                        if attempt == self._retries:
                            raise
            finally:
                self.recovery_s += time.monotonic() - start
            self._generation += 1

    async def _replace(self) -> None:
        old, self._lease, self._inner = self._lease, AsyncExitStack(), None
        try:
            await old.aclose()
        except SandboxError:
            self._pool.counts["close_failures"] += 1  # it was lost already; its lease ends what is left of it
        fresh = await self._lease.enter_async_context(self._pool.lease(self.spec))
        self._pool.counts["replays"] += 1
        self._pool.counts["replayed_actions"] += len(self.log.actions)
        self._pool.counts["replay_mismatches"] += await self.log.replay(fresh)
        self._inner = fresh


@dataclass(frozen=True, slots=True)
class _Loss:
    from_inside: bool
    lost_so_far: int  # of the whole pool, this one included


class _AgentsDoing(Exception):
    """The rule in the module's docstring holds."""


def _is_agents_doing(losses: list[_Loss]) -> bool:
    """Whether the last two losses at one command are its doing; see the module's docstring."""
    if len(losses) < 2 or not (losses[-2].from_inside and losses[-1].from_inside):
        return False
    return losses[-1].lost_so_far - losses[-2].lost_so_far <= 1  # this one, and none beside it


def _lost(reason: str) -> ExecResult:
    text = f"sandbox: {reason}\n".encode()
    return ExecResult(
        exit_code=137,
        stdout=b"",
        stderr=text,
        outcome="lost",
        duration_s=0.0,
        stdout_bytes=0,
        stderr_bytes=len(text),
    )


@asynccontextmanager
async def replayed(pool: Leases, spec: SandboxSpec, *, retries: int) -> AsyncIterator[ReplayedSandbox]:
    """A leased sandbox that is replaced and replayed when it is lost, up to `retries` times per call."""
    sandbox = ReplayedSandbox(pool, spec, retries=retries)
    try:
        yield await sandbox.open()
    finally:
        await asyncio.shield(sandbox.close())
