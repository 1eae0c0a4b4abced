"""A fake of each seam, for tests of the whole loop without a model, a sandbox or a network.

- ByteTokenizer: one id per UTF-8 byte and three special tokens
- ScriptedPolicy: answers with given texts; its logprobs are a function of the ids
- FakeSandbox: a dict of files and a table of command results; failures on demand
- FaultInjector: a pool in which a share of all operations fails as machines do
- FakeEnvironment: answers with given steps
- make_task: a one-file bug-fix task
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from swe_rl.errors import SandboxError, SandboxLost
from swe_rl.protocols import EnvStep, SamplingParams, Sandbox
from swe_rl.types import Completion, ExecResult, Outcome, SandboxSpec, Task, ToolCall

_T = TypeVar("_T")


class ByteTokenizer:
    """Ids 0..255 are bytes; 256.. are special tokens, found in text like a real tokenizer does."""

    all_special_tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    eos_token_id = 258
    vocab_size = 259

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        while text:
            for index, special in enumerate(self.all_special_tokens):
                if text.startswith(special):
                    ids.append(256 + index)
                    text = text[len(special) :]
                    break
            else:
                ids += text[0].encode("utf-8", "replace")
                text = text[1:]
        return ids

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        parts = (bytes([i]) if i < 256 else self.all_special_tokens[i - 256].encode() for i in token_ids)
        return b"".join(parts).decode("utf-8", "replace")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return 256 + self.all_special_tokens.index(token) if token in self.all_special_tokens else None


def scripted_logprob(token_id: int) -> float:
    """Logprob that ScriptedPolicy reports for an id; exact in fp32."""
    return -((token_id % 16) + 1) / 16


@dataclass
class ScriptedPolicy:
    """Implements Policy. Turn n of a session gets `script(session, n)`; a list of texts is the same for every session.

    A text is cut at `max_new_tokens` (finish_reason "length"); otherwise the stop id follows. An exception instead of a
    text is raised. Checks that the prompt of a turn starts with the ids of the turn before.
    """

    script: Sequence[str | Exception] | Callable[[str, int], str | Exception]
    tokenizer: Any = field(default_factory=ByteTokenizer)
    version: int = 0
    delay_s: float = 0.0
    seeds: dict[tuple[str, int], int] = field(default_factory=dict)  # (session, turn) -> seed it was asked with
    released: list[str] = field(default_factory=list)
    histories: dict[str, list[int]] = field(default_factory=dict)
    _turns: dict[str, int] = field(default_factory=dict)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        history = self.histories.get(session, [])
        assert list(prompt_ids[: len(history)]) == history, "the prompt does not continue the session's ids"
        turn = self._turns.get(session, 0)
        self.seeds[session, turn] = params.seed
        await asyncio.sleep(self.delay_s)
        text = self.script(session, turn) if callable(self.script) else self.script[turn]
        if isinstance(text, Exception):
            raise text
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), params.stop_ids[0]]
        finished = len(ids) <= params.max_new_tokens
        ids = ids[: params.max_new_tokens]
        self._turns[session] = turn + 1
        self.histories[session] = [*prompt_ids, *ids]
        return Completion(
            token_ids=ids,
            rollout_logprobs=[scripted_logprob(i) for i in ids],
            finish_reason="stop" if finished else "length",
            policy_version=self.version,
            policy_version_max=self.version,
        )

    async def release(self, session: str) -> None:
        self.released.append(session)
        self._turns.pop(session, None)
        self.histories.pop(session, None)


def exec_result(
    stdout: str | bytes = "", *, stderr: str | bytes = "", exit_code: int = 0, outcome: Outcome | None = None
) -> ExecResult:
    """An ExecResult with the rest filled in."""
    out, err = (part.encode() if isinstance(part, str) else part for part in (stdout, stderr))
    return ExecResult(
        exit_code=exit_code,
        stdout=out,
        stderr=err,
        outcome=outcome or ("nonzero" if exit_code else "ok"),
        duration_s=0.0,
        stdout_bytes=len(out),
        stderr_bytes=len(err),
    )


CommandResult = ExecResult | Exception
Handler = Callable[["FakeSandbox", str], CommandResult | Awaitable[CommandResult]]


class FakeSandbox:
    """Implements Sandbox over a dict. A command is looked up in `commands` (whole text, then first word, then "*")."""

    def __init__(
        self, files: Mapping[str, bytes] | None = None, *, commands: Mapping[str, CommandResult | Handler] | None = None
    ) -> None:
        self.files = dict(files or {})
        self.commands = dict(commands or {})
        self.executed: list[str] = []
        self.stdin: bytes | None = None  # of the last command
        self.closed = False

    async def exec(
        self, command: str, *, timeout_s: float | None = None, cwd: str | None = None, stdin: bytes | None = None
    ) -> ExecResult:
        self._check_open()
        self.executed.append(command)
        self.stdin = stdin
        keys = (command, command.split(" ")[0], "*")
        entry = next((self.commands[key] for key in keys if key in self.commands), None)
        result = entry(self, command) if callable(entry) else entry
        if result is None:
            return exec_result(stderr=f"{command.split(' ')[0]}: not found", exit_code=127)
        if isinstance(result, Awaitable):
            result = await result
        if isinstance(result, Exception):
            raise result
        return result

    async def read_file(self, path: str) -> bytes:
        self._check_open()
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[path]

    async def write_file(self, path: str, data: bytes) -> None:
        self._check_open()
        self.files[path] = data

    async def fork(self) -> FakeSandbox:
        self._check_open()
        return FakeSandbox(self.files, commands=self.commands)

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxLost("the sandbox is closed")


class Leases(Protocol):
    """A pool, as the fault injector and whoever uses it see one."""

    counts: Counter[str]

    def lease(self, spec: SandboxSpec, **options: Any) -> AbstractAsyncContextManager[Sandbox]: ...
    def expect(self, specs: Iterable[SandboxSpec]) -> None: ...
    def snapshot(self) -> Counter[str]: ...


class FaultInjector:
    """A pool around a real one: each operation (open, exec, read, write, close) fails with probability `rate`.

    A failing call may have had its effect or not, half of the time each; the sandbox is gone after it, really closed.
    `injected` counts by operation. The choices follow `seed` and the order of operations.
    """

    def __init__(self, pool: Leases, *, rate: float, seed: int = 0) -> None:
        self._pool, self._rate = pool, rate
        self._random = random.Random(seed)
        self.counts = pool.counts
        self.injected: Counter[str] = Counter()
        self.operations = 0
        self.expect, self.snapshot = pool.expect, pool.snapshot

    def strikes(self, operation: str) -> bool:
        """Whether this operation is to fail."""
        self.operations += 1
        struck = self._random.random() < self._rate
        self.injected[operation] += struck
        return struck

    def before(self) -> bool:
        """Whether a failure comes before the call has its effect."""
        return self._random.random() < 0.5

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, **options: Any) -> AsyncIterator[FaultySandbox]:
        if self.strikes("open"):
            raise SandboxError("injected: the sandbox could not be started")
        async with self._pool.lease(spec, **options) as sandbox:
            yield FaultySandbox(sandbox, self)
            if self.strikes("close"):
                raise SandboxError("injected: the sandbox could not be closed")


class FaultySandbox:
    """Implements Sandbox around another one; see FaultInjector."""

    def __init__(self, inner: Sandbox, faults: FaultInjector) -> None:
        self._inner, self._faults = inner, faults

    async def exec(
        self, command: str, *, timeout_s: float | None = None, cwd: str | None = None, stdin: bytes | None = None
    ) -> ExecResult:
        return await self._struck("exec", lambda: self._inner.exec(command, timeout_s=timeout_s, cwd=cwd, stdin=stdin))

    async def read_file(self, path: str) -> bytes:
        return await self._struck("read", lambda: self._inner.read_file(path))

    async def write_file(self, path: str, data: bytes) -> None:
        await self._struck("write", lambda: self._inner.write_file(path, data))

    async def fork(self) -> FaultySandbox:
        return FaultySandbox(await self._inner.fork(), self._faults)

    async def close(self) -> None:
        await self._inner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _struck(self, operation: str, call: Callable[[], Awaitable[_T]]) -> _T:
        if not self._faults.strikes(operation):
            return await call()
        if not self._faults.before():
            await call()
        await self._inner.close()
        self._faults.counts["lost"] += 1
        raise SandboxLost(f"injected: the sandbox was lost during {operation}")


@dataclass
class FakeEnvironment:
    """Implements Environment: step n gives `steps[n]`, the last one for ever; an exception is raised."""

    steps: Sequence[EnvStep | Exception]
    messages: Sequence[Mapping[str, str]] = ({"role": "user", "content": "fix it"},)
    delay_s: float = 0.0
    calls: list[ToolCall] = field(default_factory=list)

    async def reset(self, task: Task) -> list[Mapping[str, str]]:
        return list(self.messages)

    async def step(self, call: ToolCall) -> EnvStep:
        self.calls.append(call)
        await asyncio.sleep(self.delay_s)
        step = self.steps[min(len(self.calls), len(self.steps)) - 1]
        if isinstance(step, Exception):
            raise step
        return step


def make_task(task_id: str = "add-0", *, split: str = "train") -> Task:
    """`add` subtracts. Two hidden tests; the gold patch repairs it."""
    return Task(
        task_id=task_id,
        source="fake",
        split=split,
        repo="calc",
        base_commit="",
        problem_statement="add(1, 2) gave -1, expected 3.",
        fail_to_pass=("tests/test_hidden.py::test_add",),
        pass_to_pass=("tests/test_hidden.py::test_zero",),
        gold_patch=b"--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n"
        b"-    return a - b\n+    return a + b\n",
        tree={
            "calc.py": b"def add(a, b):\n    return a - b\n",
            "tests/test_calc.py": b"from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
        },
        hidden_files={
            "tests/test_hidden.py": b"from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
            b"def test_zero():\n    assert add(0, 0) == 0\n"
        },
    )
