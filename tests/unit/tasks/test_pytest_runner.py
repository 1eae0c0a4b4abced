from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import tasks_support as helpers

FILES = {
    "src/pkg/__init__.py": "def f(x):\n    return x + 1\n",
    "tests/test_a.py": """import time
import pytest
from pkg import f

@pytest.fixture
def bad():
    raise ValueError(3)

@pytest.fixture
def late():
    yield
    raise ValueError(4)

@pytest.mark.parametrize("x", ["a b", 2])
def test_many(x): assert f(1) == 2
def test_wrong(): assert f(1) == 3
@pytest.mark.xfail
def test_xfail(): assert 0
@pytest.mark.xfail
def test_xpass(): assert 1
def test_skip(): pytest.skip("no")
def test_slow(): time.sleep(9)
def test_setup(bad): pass
def test_teardown(late): pass

class TestClass:
    def test_in(self): pass
""",
    "tests/test_import.py": "import nope\ndef test_x(): pass\n",
    "tests/test_z.py": "import os\ndef test_ok(): pass\ndef test_exit(): os._exit(0)\ndef test_after(): pass\n",
    "pytest.ini": "[pytest]\naddopts = --no-such-option\n",
    "pytest.py": "raise SystemExit(0)\n",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("pytest") / "repo"
    helpers.write_files(root, FILES)
    ids = ["tests/test_a.py", "tests/test_a.py::test_none", "tests/test_import.py::test_x", "tests/none.py::test_x"]
    ids += [f"tests/test_z.py::test_{name}" for name in ("ok", "exit", "after")]
    start = time.monotonic()
    found = helpers.run_script(root, ids, runner="pytest", options="--test-s 1", env=environment())
    assert time.monotonic() - start < 20
    assert not list(root.rglob("__pycache__"))
    assert not list(root.rglob(".pytest_cache"))
    return {test_id.partition("::")[2]: row for test_id, row in found.items()} | found


def environment() -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(pytest.__file__).parents[1]),
        "PYTEST_ADDOPTS": "--bogus",
    }


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("test_many[a b]", "passed", ""),
        ("test_many[2]", "passed", ""),
        ("test_wrong", "failed", "assert 2 == 3"),
        ("test_xfail", "missing", "skipped or expected to fail"),
        ("test_xpass", "missing", "skipped or expected to fail"),
        ("test_skip", "missing", "skipped or expected to fail"),
        ("test_slow", "failed", "TestTimeout: time limit"),
        ("test_setup", "error", "ValueError: 3"),
        ("test_teardown", "error", "ValueError: 4"),
        ("TestClass::test_in", "passed", ""),
        ("test_none", "missing", "not run"),
        ("tests/none.py::test_x", "missing", "not run"),
        ("tests/test_import.py::test_x", "error", "E   ModuleNotFoundError: No module named 'nope'"),
        ("test_ok", "passed", ""),
        ("test_exit", "missing", "not run"),
        ("test_after", "missing", "not run"),
    ],
)
def test_status_of(results, name, status, message):
    assert (results[name].status, results[name].message) == (status, message)


def test_a_second_row_for_a_test_is_an_error(tmp_path):
    """Code under test that imitates the recorder on every descriptor it has."""
    forge = """import marshal, os
row = marshal.dumps(("tests/test_it.py::test_f", "passed", "", 0.0))
for fd in range(3, 32):
    try:
        os.write(fd, len(row).to_bytes(4, "little") + row)
    except OSError:
        pass
def f(): return 0
"""
    root = tmp_path / "repo"
    helpers.write_files(
        root, {"mod.py": forge, "tests/test_it.py": "from mod import f\ndef test_f(): assert f() == 1\n"}
    )
    found = helpers.run_script(root, ["tests/test_it.py::test_f"], runner="pytest", env=environment())
    assert found["tests/test_it.py::test_f"].status == "error"
