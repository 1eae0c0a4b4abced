"""Questions to a package in a sandbox: which tests are stable, what covers what, what a changed file breaks."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swe_rl.curation.pypi_sdist import Package
from swe_rl.errors import ConfigError, SandboxError
from swe_rl.protocols import Sandbox

_INSIDE, _ANSWER_PATH = "/tmp/.probe", "/tmp/.probe.json"
BASELINE_S = 600.0  # wall limit of one whole suite
MAX_TEST_S = 1.0  # CPU time; slower tests are left out
MUTANT_WALL_FACTOR = 10.0  # wall limit over CPU limit: a loaded machine must not change the outcome
EXPLAINED_TESTS = 12  # failed tests asked for examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A call that stands alone, and what it gives."""

    expression: str
    imports: tuple[str, ...]
    kind: str  # "value" | "raises"
    text: str  # repr of the value, or "Type: message"

    def request(self) -> dict[str, Any]:
        return {"expression": self.expression, "imports": list(self.imports)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One code object: a function, with the stable tests that enter it."""

    file: str
    first: int  # lines, 1-based, both inclusive
    last: int
    tests: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    stable: tuple[str, ...]  # test ids that pass in every run and order, fast, without clocks, threads and sockets
    seconds: Mapping[str, float]  # CPU time of each stable test
    unstable: tuple[str, ...]  # all other test ids: failing, skipped, slow, or unsteady
    spans: tuple[Span, ...]
    lines: Mapping[str, frozenset[int]]  # source file -> lines that ran

    def covering(self, file: str, line: int) -> tuple[str, ...]:
        """Stable tests that enter a function around that line, in suite order."""
        tests: set[str] = set()
        for span in self.spans:
            if span.file == file and span.first <= line <= span.last:
                tests |= span.tests
        return tuple(test for test in self.stable if test in tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantRun:
    status: Mapping[str, str]
    examples: tuple[Example, ...] = field(default=())
    finished: bool = True  # False: time, memory or a crash ended it

    def failed(self, tests: Sequence[str]) -> tuple[str, ...]:
        return tuple(test for test in tests if self.status.get(test, "missing") != "passed")


class Probe:
    """Asks one sandbox, which holds the correct package in its workdir; a changed file is put back afterwards."""

    def __init__(self, sandbox: Sandbox, package: Package, *, workdir: str, layer_path: str) -> None:
        self._sandbox = sandbox
        self._package = package
        self._workdir = workdir
        self._path = [layer_path, *(f"{workdir}/{part}".rstrip("/") for part in package.python_path)]

    async def start(self) -> None:
        """Puts the scripts into the sandbox."""
        for name in ("probe.py", "examples.py"):
            await self._write(f"{_INSIDE}/{name}", _script(name))

    async def refuse_copies(self) -> None:
        """Raises ConfigError if the package is installed anywhere that a sandbox can read."""
        names = " -o ".join(f"-path '*/{name}/__init__.py' -o -name {name}.py" for name in self._package.import_names)
        skipped = f"-path {self._workdir} -o -path /proc -o -path /sys"
        command = f"find / \\( {skipped} \\) -prune -o \\( {names} \\) -print 2>/dev/null"
        found = (await self._sandbox.exec(command, cwd="/", timeout_s=60)).stdout.decode("utf-8", "replace")
        copies = [path for path in found.split("\n") if "/site-packages/" in path or "/dist-packages/" in path]
        if copies:
            raise ConfigError(
                f"{self._package.label}: {copies[0]} on this machine would be readable in every sandbox and "
                "holds correct code; uninstall it there or choose another package"
            )

    async def baseline(self) -> Baseline:
        """Runs the whole suite three times: traced, in order, reversed. Raises ConfigError when nothing is stable."""
        files = list(self._package.test_files)
        traced = await self._ask_whole(files, trace=True, sources=list(self._package.source_files))
        plain = await self._ask_whole(files)
        reverse = await self._ask_whole(files, reverse=True)
        unsteady = frozenset(traced["unsteady"])
        stable = tuple(
            test
            for test, status in plain["status"].items()
            if "::" in test
            and "\n" not in test
            and test not in unsteady
            and status == traced["status"].get(test) == reverse["status"].get(test) == "passed"
            and plain["seconds"].get(test, MAX_TEST_S) < MAX_TEST_S
        )
        if not stable:
            raise ConfigError(f"{self._package.label}: none of its tests passes here; it may need more --test-requires")
        kept = frozenset(stable)
        spans = [Span(file=f, first=a, last=b, tests=kept & frozenset(tests)) for f, a, b, tests in traced["spans"]]
        return Baseline(
            stable=stable,
            unstable=tuple(sorted({name for run in (traced, plain, reverse) for name in run["status"]} - set(stable))),
            seconds={test: plain["seconds"][test] for test in stable},
            spans=tuple(span for span in spans if span.tests),
            lines={name: frozenset(lines) for name, lines in traced["lines"].items()},
        )

    async def run_mutant(self, path: str, content: bytes, tests: Sequence[str], *, cpu_s: int) -> MutantRun:
        """Runs `tests` with one file changed."""
        await self._write(f"{self._workdir}/{path}", content)
        try:
            answer = await self._ask(
                {
                    "mode": "tests",
                    "tests": list(tests),
                    "explain": EXPLAINED_TESTS,
                    "imports": list(self._package.import_names),
                    "cpu_s": cpu_s,
                },
                limit_s=cpu_s * MUTANT_WALL_FACTOR,
            )
        finally:
            await self._write(f"{self._workdir}/{path}", self._package.files[path])
        if answer is None or "error" in answer:
            return MutantRun(status={}, finished=False)
        examples = tuple(
            Example(expression=e["expression"], imports=tuple(e["imports"]), kind=e["got"][0], text=e["got"][1])
            for e in answer["examples"]
        )
        return MutantRun(status=answer["status"], examples=examples)

    async def evaluate(self, examples: Sequence[Example]) -> list[tuple[str, str] | None]:
        """(kind, text) of each call in the correct package; None where it is unstable, slow or long."""
        request = {"mode": "evaluate", "examples": [example.request() for example in examples], "cpu_s": 30}
        answer = await self._ask(request, limit_s=60.0)
        if answer is None or "error" in answer:
            return [None] * len(examples)
        return [tuple(result) if result else None for result in answer["results"]]

    async def _ask_whole(self, files: list[str], **options: Any) -> dict[str, Any]:
        answer = await self._ask({"mode": "tests", "tests": files, **options}, limit_s=BASELINE_S)
        if answer is None or "error" in answer:
            reason = answer["error"] if answer else f"not finished within {BASELINE_S:.0f} s"
            raise ConfigError(f"{self._package.label}: its tests cannot be run here ({reason}); choose another package")
        return answer

    async def _ask(self, request: dict[str, Any], *, limit_s: float) -> dict[str, Any] | None:
        """The script's answer, None when it was ended before it had one."""
        request |= {"root": self._workdir, "path": self._path, "answer": _ANSWER_PATH}
        command = f"rm -f {_ANSWER_PATH}; exec python3 -I -S {_INSIDE}/probe.py"
        result = await self._sandbox.exec(
            command, timeout_s=limit_s, cwd=self._workdir, stdin=json.dumps(request).encode()
        )
        if result.outcome == "lost" or result.exit_code in (126, 127):
            raise SandboxError(f"the probe cannot run: {result.outcome} {result.stderr[-200:]!r}")
        if result.exit_code != 0:
            return None
        try:
            return json.loads(await self._sandbox.read_file(_ANSWER_PATH))
        except FileNotFoundError:
            return None  # the tested code ended the process before the end

    async def _write(self, path: str, data: bytes) -> None:
        try:
            await self._sandbox.write_file(path, data)
        except OSError as err:
            raise SandboxError(f"writing {path} failed: {err}") from err


@functools.cache
def _script(name: str) -> bytes:
    return importlib.resources.files("swe_rl.curation.pypi_inside").joinpath(name).read_bytes()
