"""The script for plain test functions, run outside a sandbox: values, isolation, and hostile code under test."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import tasks_support as helpers

from swe_rl.tasks import load_tasks, materialize
from swe_rl.tasks.test_runner import RUNNER_SOURCE, parse_report

TEST = "tests/test_it.py"
GOOD = "def f(a):\n    return a + 1\n"
CHECK = "from pkg.mod import f\n\n\ndef test_f():\n    assert f(1) == 2\n"


def repository(root, module=GOOD, tests=CHECK, **more):
    root = root / "repo"
    helpers.write_files(root, {"pkg/__init__.py": "", "pkg/mod.py": module, TEST: tests, **more})
    return root


def verdict(root, name="test_f", **options):
    results = helpers.run_script(root, [f"{TEST}::{name}"], **options)
    assert list(results) == [f"{TEST}::{name}"]
    return results[f"{TEST}::{name}"]


def test_minirepo_tasks_end_as_promised(tmp_path):
    for split in ("train", "hard"):
        for task in load_tasks("minirepo", split=split, num_tasks=4, seed=11):
            ids = [*task.fail_to_pass, *task.pass_to_pass]
            root = tmp_path / task.task_id
            helpers.write_files(root, task.tree | task.hidden_files)
            before = helpers.run_script(root, ids)
            assert {test_id for test_id, row in before.items() if row.status == "failed"} == set(task.fail_to_pass)
            assert {test_id for test_id, row in before.items() if row.status == "passed"} == set(task.pass_to_pass)
            helpers.write_files(root, helpers.clean_tree(task))
            assert {row.status for row in helpers.run_script(root, ids).values()} == {"passed"}


def test_messages_say_what_came_out(tmp_path):
    tests = CHECK.replace("== 2", "== 5") + (
        "\n\ndef test_type():\n    f(None)\n\n\ndef test_index():\n    assert [1][f(1)]\n\n\n"
        "def test_said():\n    assert False, 'said \"so\" \\n\\\\ ü \U0001f600'\n"
    )
    results = helpers.run_script(repository(tmp_path, tests=tests), [TEST])
    messages = {test_id.rpartition("::")[2]: row.message for test_id, row in results.items()}
    assert messages["test_f"] == "assert f(1) == 5: got 2"
    assert messages["test_type"].startswith("f(None): TypeError: unsupported operand")
    assert messages["test_index"] == "assert [1][f(1)]: IndexError: list index out of range"
    assert 'said "so" \n\\ ü \U0001f600' in messages["test_said"]


def test_ways_to_import_and_call(tmp_path):
    module = (
        "LIMIT = 7\nNOTHING = None\nclass Box:\n    def __init__(self, x, y=0):\n        self.x = x + y\n"
        "    def get(self):\n        return {'x': (self.x, [1.5, b'z', {2}])}\n"
        "def size(box):\n    return box.x\ndef fail():\n    raise KeyError('k')\nclass Own(Exception):\n    pass\n"
        "def own():\n    raise Own('o')\n"
    )
    tests = """import math
import pkg.mod
import pkg.mod as renamed
from pkg import mod
from pkg.mod import LIMIT, NOTHING, Box, fail, own, size

def test_values():
    assert LIMIT == 7 and NOTHING is None and math.floor(2.5) == 2
    assert pkg.mod.LIMIT == renamed.LIMIT == mod.LIMIT == 7

def test_objects():
    box = Box(3, y=4)
    assert box.x == 7 and size(box) == 7
    assert box.get() == {'x': (7, [1.5, b'z', {2}])}

def test_builtin_exception():
    try:
        fail()
    except KeyError as error:
        assert 'k' in str(error)
    else:
        assert False

def test_own_exception():
    own()
"""
    results = helpers.run_script(repository(tmp_path, module, tests), [TEST])
    assert {key.rpartition("::")[2]: row.status for key, row in results.items()} == {
        "test_values": "passed",
        "test_objects": "passed",
        "test_builtin_exception": "passed",
        "test_own_exception": "failed",
    }
    assert results[f"{TEST}::test_own_exception"].message == "own(): RuntimeError: Own: o"


def test_each_test_has_a_fresh_module(tmp_path):
    module = "seen = []\ndef f(a):\n    seen.append(a)\n    return len(seen)\n"
    tests = "from pkg.mod import f\n" + "".join(f"def test_{i}():\n    assert f(0) == 1\n" for i in range(4))
    results = helpers.run_script(repository(tmp_path, module, tests), [TEST])
    assert [row.status for row in results.values()] == ["passed"] * 4


def test_absent_things_are_missing_and_broken_ones_errors(tmp_path):
    root = repository(
        tmp_path,
        **{"tests/test_bad.py": "def test_x(:\n", "tests/test_gone.py": "import pkg.gone\ndef test_x(): pass\n"},
    )
    ids = [
        f"{TEST}::test_f",
        f"{TEST}::test_none",
        "tests/none.py::test_f",
        "tests/test_bad.py::test_x",
        "tests/test_gone.py::test_x",
    ]
    results = helpers.run_script(root, ids)
    assert [results[key].status for key in ids] == ["passed", "missing", "missing", "error", "error"]
    assert "No module named" in results[ids[4]].message
    assert helpers.run_script(root, ["tests/test_bad.py"])["tests/test_bad.py::(file)"].status == "error"


_EQUAL = "class E(int):\n    def __eq__(self, other):\n        return True\n"
HOSTILE = {
    "exit on import": "import sys\nsys.exit(0)\n",
    "exit when called": "import sys\ndef f(a):\n    sys.exit(0)\n",
    "hard exit on import": "import os\nos._exit(0)\n",
    "hard exit when called": "import os\ndef f(a):\n    os._exit(0)\n",
    "keyboard interrupt": "def f(a):\n    raise KeyboardInterrupt\n",
    "always equal": "class E:\n    def __eq__(self, other):\n        return True\ndef f(a):\n    return E()\n",
    "always equal number": _EQUAL + "def f(a):\n    return E(9)\n",
    "always equal item": _EQUAL + "def f(a):\n    return [E(9)]\n",
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = StopIteration\nbuiltins.repr = lambda x: '2'\n"
        "builtins.int = str\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda *a: type(None)\n"
        "def f(a):\n    return 3\n"
    ),
    "patched os": (
        "import os\nos.write = lambda fd, data: len(data)\nos._exit = lambda code: None\ndef f(a):\n    return 3\n"
    ),
    "patched runner": (
        "import sys\nspace = sys.modules['__main__'].__dict__\n"
        "for name in ('send', 'run_test', 'answer', 'report', 'is_plain'):\n"
        "    space[name] = lambda *a, **k: ('passed', '')\ndef f(a):\n    return 3\n"
    ),
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(a):\n    return 3\n",
    "kills its group": "import os, signal\ndef f(a):\n    os.killpg(0, signal.SIGKILL)\n",
    "writes to every descriptor": (
        "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'passed' * 9)\n    except OSError:\n"
        "        pass\ndef f(a):\n    return 3\n"
    ),
    "recursion": "def f(a):\n    return f(a)\n",
    "huge answer": "def f(a):\n    return 'x' * (1 << 25)\n",
    "nested answer": "def f(a):\n    x = []\n    for _ in range(10 ** 5):\n        x = [x]\n    return x\n",
    "lying exception": (
        "class E(Exception):\n    def __str__(self):\n        raise SystemExit(0)\ndef f(a):\n    raise E\n"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_fails_and_does_not_spoil_the_report(tmp_path, name):
    tests = CHECK + "\n\ndef test_own():\n    assert 1 + 1 == 2\n"
    results = helpers.run_script(repository(tmp_path, HOSTILE[name], tests), [f"{TEST}::test_f"], options="--test-s 3")
    assert results is not None
    assert results[f"{TEST}::test_f"].status in ("failed", "error")


def test_an_endless_loop_ends_at_the_limit_and_the_next_test_runs(tmp_path):
    module = "def f(a):\n    while a:\n        pass\n    return 2\n"
    tests = CHECK + "\n\ndef test_zero():\n    assert f(0) == 2\n\n\ndef test_self():\n    while True:\n        pass\n"
    start = time.monotonic()
    results = helpers.run_script(repository(tmp_path, module, tests), [TEST], options="--test-s 0.5")
    assert time.monotonic() - start < 5
    assert [(row.status, row.message) for row in results.values()] == [
        ("failed", "assert f(1) == 2: time limit"),
        ("passed", ""),
        ("failed", "time limit"),
    ]


def test_code_under_test_finds_neither_tests_nor_nonce(tmp_path):
    """It answers with whatever it can find; nothing of it may hold the expected value or the nonce."""
    module = f"""import gc, os, sys
def f(a):
    found = [repr(sys.argv), repr(dict(os.environ)), repr(os.listdir("tests"))]
    for pid in ("self", str(os.getppid())):
        for name in ("environ", "cmdline"):
            try:
                found.append(repr(open("/proc/" + pid + "/" + name, "rb").read()))
            except OSError:
                pass
    frame = sys._getframe()
    while frame:
        found.append(repr(frame.f_locals) + repr([k for k in frame.f_globals]))
        frame = frame.f_back
    for item in gc.get_objects():
        if isinstance(item, (list, dict, tuple)) and len(item) < 500:
            found.append(repr(item)[:5000])
    for fd in range(3, 64):
        try:
            found.append(os.readlink("/proc/self/fd/%d" % fd))
        except OSError:
            pass
    text = "".join(found)
    open({str(tmp_path / "loot")!r}, "w").write(text)
    return len(text)
"""
    tests = CHECK.replace("== 2", "== 987654321")
    root = repository(tmp_path, module, tests)
    script = tmp_path / "runner.py"
    script.write_text(RUNNER_SOURCE)
    command = [sys.executable, "-I", "-S", str(script), "--root", str(root), "--remove-tests", "-"]
    done = subprocess.run(command, input=f"n0nce4711\n{TEST}::test_f\n".encode(), capture_output=True, check=True)
    results = parse_report(done.stdout, nonce="n0nce4711")
    assert results[f"{TEST}::test_f"].status == "failed"
    loot = (tmp_path / "loot").read_text()
    assert len(loot) > 1000
    assert "987654321" not in loot
    assert "n0nce4711" not in loot
    assert "test_it" not in loot
    assert not (root / TEST).exists()


def test_forged_caches_and_shadowed_modules_are_not_used(tmp_path):
    root = repository(
        tmp_path,
        "def f(a):\n    return 0\n",
        **{"marshal.py": "raise SystemExit\n", "builtins.py": "", "os.py": "x = 1\n"},
    )
    good = tmp_path / "good.py"
    good.write_text(GOOD)
    code = (
        "import py_compile, sys\n"
        "mode = py_compile.PycInvalidationMode.UNCHECKED_HASH\n"
        "py_compile.compile(sys.argv[1], cfile=sys.argv[2], invalidation_mode=mode)"
    )
    (root / "pkg/__pycache__").mkdir()
    cached = root / "pkg/__pycache__" / f"mod.{sys.implementation.cache_tag}.pyc"
    subprocess.run([sys.executable, "-c", code, str(good), str(cached)], check=True)
    assert verdict(root).message == "assert f(1) == 2: got 0"


def test_leaves_no_files_and_no_processes(tmp_path):
    module = "import subprocess\ndef f(a):\n    subprocess.Popen(['sleep', '61.5'])\n    return 2\n"
    root = repository(tmp_path, module)
    before = sorted(root.rglob("*"))
    assert verdict(root).status == "passed"
    assert sorted(root.rglob("*")) == before
    time.sleep(0.1)
    assert subprocess.run(["pgrep", "-f", "sleep 61.5"], capture_output=True).stdout == b""


def test_report_needs_its_end_and_ignores_forged_lines():
    good = b'\nN begin 1\nN {"id": "a::b", "status": "passed", "message": ""}\nN end 1\n'
    assert parse_report(good, nonce="N")["a::b"].status == "passed"
    assert parse_report(good, nonce="N", ids=["a::b", "a::c"])["a::c"].status == "missing"
    assert parse_report(good[:-9], nonce="N") is None
    assert parse_report(b"", nonce="N") is None
    forged = good.replace(b"passed", b"failed") + b'M {"id": "a::b", "status": "passed", "message": ""}\nM end 1\n'
    assert parse_report(forged, nonce="N")["a::b"].status == "failed"


def test_nonce_may_come_from_the_environment(tmp_path):
    root = repository(tmp_path)
    script = tmp_path / "runner.py"
    script.write_text(RUNNER_SOURCE)
    command = [sys.executable, "-I", "-S", str(script), "--root", str(root), TEST]
    done = subprocess.run(command, env={"SWE_RL_NONCE": "E"}, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert parse_report(done.stdout, nonce="E")[f"{TEST}::test_f"].status == "passed"


def test_six_tests_take_milliseconds(tmp_path):
    task = load_tasks("minirepo", split="train", num_tasks=1, seed=0)[0]
    root = tmp_path / "repo"
    helpers.write_files(root, task.tree | task.hidden_files)
    ids = [*task.fail_to_pass, *task.pass_to_pass][:6]
    took = []
    for _ in range(5):
        start = time.perf_counter()
        helpers.run_script(root, ids)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.5  # tens of milliseconds on an idle machine
    assert materialize(task, tmp_path / "cache").is_dir()
