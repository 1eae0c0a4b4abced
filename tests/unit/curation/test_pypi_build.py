"""A whole build from a tiny source distribution made here: no network, real sandboxes."""

from __future__ import annotations

import importlib.util
import io
import shutil
import tarfile
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.agents.visible_tests import run_visible_tests
from swe_rl.curation import pypi
from swe_rl.curation.mutators import Mutation
from swe_rl.curation.pypi import BuildOptions, build_tasks
from swe_rl.curation.pypi_issue import issue_text, pick_behaviours
from swe_rl.curation.pypi_probe import Example
from swe_rl.errors import ConfigError, SandboxError
from swe_rl.rewards import grade
from swe_rl.sandbox import open_sandbox
from swe_rl.tasks import load_tasks, materialize, task_spec
from swe_rl.types import SandboxSpec, Task

CORE = '''\
"""Little helpers."""


def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high
    return value


def running(values):
    total = 0
    for value in values:
        total += value
        yield total


def initials(name):
    parts = [part for part in name.split() if part]
    return "".join(part[0] for part in parts).upper()


def checked(value):
    if value < 0 or value > 100:
        raise ValueError("out of range")
    return value * 2


def unused(value):
    return value + 1
'''
TESTS = """\
import time

import pytest
from tinylib.core import checked, clamp, initials, running


@pytest.mark.parametrize("value", [0, 1, 5, 9, 10])
def test_clamp_inside(value):
    assert clamp(value, 0, 10) == value


def test_clamp_outside():
    low, high = 2, 4
    assert clamp(1, low, high) == 2
    assert clamp(7, low, high) == 4


def test_running():
    result = list(running([1, 2, 3]))
    assert result == [1, 3, 6]


class TestInitials:
    def test_two(self):
        assert initials("ada  lovelace") == "AL"

    def test_none(self):
        assert initials("") == ""


def test_checked():
    assert checked(50) == 100
    with pytest.raises(ValueError):
        checked(101)


def test_slow_clock():
    time.sleep(0.01)
    assert clamp(3, 0, 5) == 3


def test_fails_always():
    assert clamp(3, 0, 5) == 4
"""
OTHER = "from tinylib.core import clamp\n\n\ndef test_here():\n    assert clamp(3, 1, 2) == 2\n"


def write_sdist(cache: Path) -> None:
    folder = cache / "sdists" / "tinylib-1.0"
    folder.mkdir(parents=True)
    files = {
        "tinylib/__init__.py": "",
        "tinylib/core.py": CORE,
        "tests/test_core.py": TESTS,
        "tests/test_other.py": OTHER,
        "build/lib/tinylib/core.py": CORE,
    }
    with tarfile.open(folder / "tinylib-1.0.tar.gz", "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"tinylib-1.0/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))


def pytest_layer(_requirements: object, cache: Path) -> Path:
    """A layer like pip's, copied from the pytest that runs this."""
    target = cache / "layers" / "copied"
    if not target.is_dir():
        target.mkdir(parents=True)
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            shutil.copytree(Path(spec.origin).parent, target / name)
        shutil.copy(Path(pytest.__file__).parents[1] / "py.py", target)
    return target


async def build(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, **options: int) -> tuple[Path, list[str]]:
    monkeypatch.setattr(pypi, "requirements_layer", pytest_layer)
    cache = tmp_path / "cache"
    if not cache.exists():
        write_sdist(cache)
    lines: list[str] = []
    out = tmp_path / name
    await build_tasks(["tinylib==1.0"], options=BuildOptions(**options), out=out, cache_dir=cache, report=lines.append)
    return out, lines


async def can_open_sandbox() -> bool:
    try:
        async with open_sandbox(SandboxSpec()):
            return True
    except SandboxError:
        return False


@pytest.mark.slow
async def test_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(await can_open_sandbox(), "a local sandbox")
    out, lines = await build(tmp_path, "a", monkeypatch, num_tasks=4)
    tasks = load_tasks(str(out), split="all", num_tasks=0, seed=0)
    assert len(tasks) == 4
    assert len({task.task_id for task in tasks}) == 4
    assert len({task.meta["operator"] for task in tasks}) >= 3
    assert any(line.startswith("[4/4] tinylib-1.0 ") for line in lines)
    for task in tasks:
        await check_task(task, tmp_path / "trees")
    again, _ = await build(tmp_path, "b", monkeypatch, num_tasks=4, concurrency=1)
    assert (again / "tasks.jsonl").read_bytes() == (out / "tasks.jsonl").read_bytes()
    assert not list((tmp_path / "cache").glob(".trees-*"))


async def check_task(task: Task, trees: Path) -> None:
    assert set(task.hidden_files) == {test.partition("::")[0] for test in task.fail_to_pass}
    assert not set(task.hidden_files) & set(task.tree)
    assert "build/lib/tinylib/core.py" not in task.tree
    every = {*task.fail_to_pass, *task.pass_to_pass}
    assert not every & {"tests/test_core.py::test_fails_always", "tests/test_core.py::test_slow_clock"}
    fixed = [line[1:].strip() for line in task.gold_patch.decode().splitlines() if line[:1] == "+" and line[:2] != "++"]
    assert not any(line in task.problem_statement for line in fixed if len(line) > 8)
    for word in ("assert", "def test", "test_"):
        assert word not in task.problem_statement
    assert "unused" not in task.problem_statement
    assert "tests/test_core.py::test_fails_always" in task.meta["unstable_tests"]
    spec = task_spec(task, SandboxSpec(), tree=materialize(task, trees))
    reward = await grade(task, task.gold_patch, spec=spec)
    assert reward.value == 1.0
    assert (await grade(task, b"", spec=spec)).value == 0.0
    harmless = b"diff --git a/note b/note\nnew file mode 100644\n--- /dev/null\n+++ b/note\n@@ -0,0 +1 @@\n+x\n"
    nothing = await grade(task, harmless, spec=spec)
    assert (nothing.value, nothing.terms["f2p"], nothing.terms["p2p"]) == (0.0, 0.0, 1.0)
    async with open_sandbox(spec) as sandbox:  # the agent can run what is left of the tests
        shown = await sandbox.exec("python3 -m pytest -q --co; grep -rl 'def clamp' / --include=core.py 2>/dev/null")
        assert shown.stdout.split().count(b"/testbed/tinylib/core.py") == 1
        assert b"/build/" not in shown.stdout
        left = {"tests/test_core.py", "tests/test_other.py"} & set(task.tree)
        assert (await run_visible_tests(sandbox, task=task)).endswith(" passed" if left else "no tests")


async def test_unusable_input_is_a_config_error(tmp_path: Path) -> None:
    for pins, options in (
        ([], {"num_tasks": 1}),
        (["tinylib==1.0"], {"num_tasks": 0}),
        (["tinylib"], {"num_tasks": 1}),
    ):
        with pytest.raises(ConfigError):
            await build_tasks(pins, options=BuildOptions(**options), out=tmp_path / "o", cache_dir=tmp_path / "c")


def test_issue_text_is_chosen_from_what_differs() -> None:
    def example(expression: str, text: str, kind: str = "value") -> Example:
        return Example(expression=expression, imports=("from m import f",), kind=kind, text=text)

    examples = [
        example("f(1)", "1"),
        example("f(22)", "5"),
        example("f(2)", "E: no", "raises"),
        example("f(3) == 4", "False"),
    ]
    expected = [("value", "1"), ("value", "6"), ("value", "7"), ("value", "True")]
    chosen = pick_behaviours(examples, expected)
    assert [b.example.expression for b in chosen] == ["f(22)", "f(2)"]
    within = pick_behaviours(
        [example("f(22)", "5"), example("f(22) == 6", "False")], [("value", "6"), ("value", "True")]
    )
    assert [b.example.expression for b in within] == ["f(22)"]
    import random

    text = issue_text(chosen, label="m 1.0", rng=random.Random(0))
    assert text == issue_text(chosen, label="m 1.0", rng=random.Random(0))
    for part in (">>> from m import f\n>>> f(22)\n5\n>>> f(2)\nTraceback", "`f(22)`", "`6`", "`7`", "m 1.0"):
        assert part in text
    raised = pick_behaviours([example("f(0)", "0")], [("raises", "ValueError: zero")])
    assert "raises `ValueError: zero`" in issue_text(raised, label="m 1.0", rng=random.Random(1))
    assert pick_behaviours([example("f(0)", "0")], [None]) == []


def test_mutation_record_applies_by_offset() -> None:
    mutation = Mutation(operator="o", function="f", function_line=1, line=1, start=1, end=3, replacement=b"XYZ")
    assert mutation.apply(b"abcd") == b"aXYZd"
