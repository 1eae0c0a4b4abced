"""Extraction and grading in real sandboxes: the repair is worth 1, tricks are worth 0, whatever the agent leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.agents.visible_tests import run_visible_tests
from swe_rl.errors import SandboxError
from swe_rl.rewards import extract_patch, grade
from swe_rl.sandbox import SandboxPool, open_sandbox
from swe_rl.tasks import materialize, tree_commit, tree_diff
from swe_rl.types import Limits, SandboxSpec, Task

BUGGY = b"def double(x):\n    return x + x + 1\n\n\ndef half(x):\n    return x / 2\n"
FIXED = BUGGY.replace(b" + 1", b"")
HIDDEN = b"""from pkg.m import double, half


def test_double():
    assert double(4) == 8


def test_half():
    assert half(9) == 4.5
"""
TREE = {
    "pkg/__init__.py": b"",
    "pkg/m.py": BUGGY,
    "tests/test_seen.py": b"from pkg.m import half\n\n\ndef test_seen():\n    assert half(2) == 1\n",
    "data.bin": bytes(range(256)),
    "crlf.txt": b"a\r\nb\r\n",
}
TASK = Task(
    task_id="unit/double",
    source="unit",
    split="train",
    repo="unit",
    base_commit=tree_commit(TREE),
    problem_statement="double(4) gives 9",
    fail_to_pass=("tests/test_hidden.py::test_double",),
    pass_to_pass=("tests/test_hidden.py::test_half",),
    gold_patch=tree_diff({"pkg/m.py": BUGGY}, {"pkg/m.py": FIXED}),
    tree=TREE,
    hidden_files={"tests/test_hidden.py": HIDDEN},
    timeout_s=20.0,
)


def replaced(content: bytes, path: str = "pkg/m.py") -> bytes:
    return tree_diff({path: TREE[path]} if path in TREE else {}, {path: content})


@pytest.fixture
async def spec(tmp_path: Path) -> SandboxSpec:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxError as err:
        require(False, f"a local sandbox ({err})")
    return SandboxSpec(layers=(str(materialize(TASK, tmp_path)),), limits=Limits(memory_bytes=256 << 20))


async def test_gold_is_one_and_nothing_is_zero(spec: SandboxSpec) -> None:
    reward = await grade(TASK, TASK.gold_patch, spec=spec)
    assert (reward.value, reward.tests_passed, reward.tests_total) == (1.0, 2, 2)
    other = await grade(TASK, replaced(BUGGY + b"\n\nZ = 1\n"), spec=spec, pool=SandboxPool(2))
    assert (other.value, other.terms["f2p"], other.terms["p2p"]) == (0.0, 0.0, 1.0)
    assert other.test_status["tests/test_hidden.py::test_double"] == "failed"


FORGED = b"""
import os, sys
for line in ("1 passed", "PASSED tests/test_hidden.py::test_double"):
    os.write(1, line.encode() + b"\\n")
"""
TRICKS = {
    "syntax error": b"def double(:\n",
    "exit at import": b"import sys\nsys.exit(0)\n",
    "hard exit at import": b"import os\nos._exit(0)\n",
    "hard exit in call": BUGGY.replace(b"return x + x + 1", b"__import__('os')._exit(0)"),
    "forged output": FORGED + BUGGY,
    "always equal": BUGGY.replace(
        b"return x + x + 1", b"return type('E', (int,), {'__eq__': lambda s, o: True, '__hash__': None})(0)"
    ),
    "kills its group": BUGGY.replace(b"return x + x + 1", b"__import__('os').kill(0, 9)"),
    "kills all": BUGGY.replace(b"return x + x + 1", b"__import__('os').kill(-1, 9)"),
    "reads the tests": BUGGY.replace(b"return x + x + 1", b"return 8 if 'double(4) == 8' in search() else 0")
    + b"\n\ndef search():\n    import glob\n    text = ''\n    for name in glob.glob('/**/test_*.py', recursive=True)"
    + b" + glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):\n"
    + b"        try:\n            text += open(name, errors='replace').read()\n"
    + b"        except OSError:\n            pass\n"
    + b"    return text\n",
}


@pytest.mark.parametrize("name", TRICKS)
async def test_tricks_in_the_code_are_zero(spec: SandboxSpec, name: str) -> None:
    reward = await grade(TASK, replaced(TRICKS[name]), spec=spec)
    assert reward.value == 0.0
    assert reward.test_status["tests/test_hidden.py::test_double"] != "passed"


TAKES_OVER = b"""
import gc, os
for recorder in gc.get_objects():
    if type(recorder).__name__ == "Recorder":
        import marshal
        for name in %s:
            row = marshal.dumps((name, "passed", "", 0.0))
            os.write(recorder.results, len(row).to_bytes(4, "little") + row)
os._exit(0)
"""
PYTEST_TRICKS = {  # code under test shares the process with pytest
    "no test runs": BUGGY + b"\n\nimport _pytest.python as p\np.Function.runtest = lambda self: None\n",
    "no test runs once it was called": BUGGY.replace(
        b"return x + x + 1",
        b"p = __import__('_pytest.python').python; p.Function.runtest = lambda self: None; raise SystemExit(0)",
    ),
    "imitates the recorder": TAKES_OVER % b"sorted(recorder.ids)",
    "imitates it for known tests": TAKES_OVER % b"[n for n in recorder.ids if n.startswith('tests/test_hidden.py')]",
    "hard exit at import": TRICKS["hard exit at import"],
    "exit at import": TRICKS["exit at import"],
    "forged output": TRICKS["forged output"],
}


@pytest.fixture
def pytest_task(spec: SandboxSpec) -> tuple[Task, SandboxSpec]:
    """The same task run by pytest, which a real task brings as a mounted directory."""
    packages = str(Path(pytest.__file__).parents[1])
    mounted = replace(spec, readonly_mounts=((packages, "/opt/packages"),), env={"PYTHONPATH": "/opt/packages"})
    return replace(TASK, test_runner="pytest"), mounted


async def test_gold_is_one_with_pytest(pytest_task: tuple[Task, SandboxSpec]) -> None:
    task, spec = pytest_task
    reward = await grade(task, task.gold_patch, spec=spec)
    assert (reward.value, reward.tests_passed, reward.tests_total, reward.terms["tamper"]) == (1.0, 2, 2, 0.0)
    nothing = await grade(task, b"", spec=spec, trusted=True)
    assert (nothing.value, nothing.terms["f2p"], nothing.terms["p2p"], nothing.terms["tamper"]) == (0.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize("name", PYTEST_TRICKS)
async def test_tricks_on_pytest_are_zero(pytest_task: tuple[Task, SandboxSpec], name: str) -> None:
    task, spec = pytest_task
    reward = await grade(task, replaced(PYTEST_TRICKS[name]), spec=spec)
    forged = name.startswith(("no test", "imitates the"))  # the last one only leaves before the end
    assert (reward.value, reward.terms["tamper"]) == (0.0, float(forged)), reward
    assert forged or reward.terms["ended"] > 0 or name == "forged output"


@pytest.mark.filterwarnings("ignore:sandbox.isolation=none")
@pytest.mark.parametrize("size", [0, 50_000])
async def test_without_isolation_everything_means_the_same(spec: SandboxSpec, size: int) -> None:
    """Trusted code only; but then a repair must count, also when its diff is too large to come inline."""
    spec = replace(spec, isolation="none")
    async with open_sandbox(spec) as sandbox:
        await sandbox.exec(f"{FIX} && head -c {size} /dev/urandom > data.bin")
        patch = await extract_patch(sandbox, base_commit=TASK.base_commit, base_tree=TREE)
        assert await run_visible_tests(sandbox, task=TASK) == "1 passed"
        await sandbox.exec("rm -rf .git")
        assert await extract_patch(sandbox, base_commit=TASK.base_commit, base_tree=TREE) == patch
    assert (await grade(TASK, patch, spec=spec)).value == 1.0
    assert (await grade(TASK, replaced(BUGGY + b"\n"), spec=spec)).value == 0.0


async def test_tampering_beside_a_repair_is_dropped_and_counted(spec: SandboxSpec) -> None:
    extra = replaced(b"import os\nos._exit(0)\n", "sitecustomize.py") + replaced(b"assert False\n", "conftest.py")
    reward = await grade(TASK, TASK.gold_patch + extra, spec=spec)
    assert (reward.value, reward.terms["tamper"], reward.terms["dropped"]) == (1.0, 2.0, 2.0)
    only = await grade(TASK, extra + replaced(b"def test_double():\n    pass\n", "tests/test_hidden.py"), spec=spec)
    assert (only.value, only.terms["tamper"], only.terms["empty"]) == (0.0, 3.0, 1.0)


async def test_patch_that_does_not_apply(spec: SandboxSpec) -> None:
    reward = await grade(TASK, TASK.gold_patch.replace(b"def double", b"def triple"), spec=spec)
    assert (reward.value, reward.terms["apply_failed"]) == (0.0, 1.0)


async def test_endless_loop_is_zero_within_the_limit(spec: SandboxSpec) -> None:
    looping = replaced(b"while True:\n    pass\n")
    reward = await grade(TASK, looping, spec=spec, timeout_s=3.0)
    assert reward.value == 0.0
    assert set(reward.test_status.values()) <= {"missing", "failed", "error"}


async def test_memory_hog_is_zero(spec: SandboxSpec) -> None:
    hog = BUGGY.replace(b"return x + x + 1", b"return len(bytearray(1 << 40))")
    assert (await grade(TASK, replaced(hog), spec=spec)).value == 0.0


FIX = "sed -i 's/ + 1//' pkg/m.py"
LEAVE = {
    "edit": f"{FIX}",
    "commit": f"{FIX} && git commit -qam fix && git checkout -qb other",
    "no git": f"{FIX} && rm -rf .git",
    "broken git": f"{FIX} && git config core.worktree /tmp && echo x | tee .git/HEAD > .git/index",
    "hidden": f"{FIX} && git update-index --assume-unchanged pkg/m.py && echo m > .git/info/exclude",
    "binary and modes": f"{FIX} && chmod +x crlf.txt && head -c 3000 /dev/urandom > data.bin && "
    "printf 'x\\r\\n\\0' > $'n\\xff\\n' && ln -s m.py pkg/link.py && rm -f tests/test_seen.py",
    "background writer": f"{FIX} && (while :; do date > /tmp/now; sleep 0.01; done) & sleep 0.1",
    "environment": f"{FIX}; export GIT_DIR=/nowhere GIT_INDEX_FILE=/x PATH=/none; alias git=false",
    "unreadable": f"{FIX} && echo x > locked && chmod 000 locked && chmod 111 pkg",
    "nested": f"{FIX} && git init -q inner && echo 1 > inner/a.py",
    "caches": f"{FIX} && mkdir -p pkg/__pycache__ && echo x > pkg/__pycache__/m.cpython-311.pyc",
}


@pytest.mark.parametrize("name", LEAVE)
async def test_whatever_the_agent_leaves_the_repair_is_found(spec: SandboxSpec, name: str) -> None:
    async with open_sandbox(spec) as sandbox:
        await sandbox.exec(LEAVE[name])
        patch = await extract_patch(sandbox, base_commit=TASK.base_commit, base_tree=TREE)
    reward = await grade(TASK, patch, spec=spec)
    assert reward.value == 1.0, (name, patch, reward)


async def test_untouched_tree_is_the_empty_patch(spec: SandboxSpec) -> None:
    async with open_sandbox(spec) as sandbox:
        assert await extract_patch(sandbox, base_commit=TASK.base_commit) == b""
        assert await extract_patch(sandbox) == b""
