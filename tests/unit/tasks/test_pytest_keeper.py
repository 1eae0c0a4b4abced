"""A process per test file, and what its parent compares: run outside any sandbox, and on made-up answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tasks_support as helpers

from swe_rl.tasks import test_runner
from swe_rl.tasks.runner import pytest_keeper
from swe_rl.tasks.runner.pytest_keeper import contradiction, groups, worse
from swe_rl.tasks.test_runner import MUST_FAIL, Verdict

PACKAGES = str(Path(pytest.__file__).parents[1])
STATE = {
    "pkg/__init__.py": "",
    "pkg/m.py": "seen = []\ndef f():\n    seen.append(1)\n    return len(seen)\n",
    "tests/test_a.py": "from pkg.m import f\ndef test_first(): assert f() == 1\ndef test_second(): assert f() == 2\n",
    "tests/test_b.py": "from pkg.m import f\ndef test_fresh(): assert f() == 1\n",
    "tests/test_b_x.py": "def test_no(): raise AssertionError('as it should')\n",
}
IDS = ["tests/test_b.py::test_fresh", "tests/test_a.py::test_second", "tests/test_a.py::test_first"]
TRAP = f"{MUST_FAIL}tests/test_b_x.py::test_no"


def run(root: Path, ids: list[str], options: str = "") -> dict[str, Verdict]:
    helpers.write_files(root, STATE)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES}
    found = helpers.run_script(root, ids, runner="pytest", options=options, env=env)
    assert found is not None
    return found


def status(found: dict[str, Verdict]) -> dict[str, str]:
    return {name.partition("::")[2]: verdict.status for name, verdict in found.items()}


def test_the_mark_of_a_test_that_must_fail_is_one_word() -> None:
    assert test_runner.MUST_FAIL == pytest_keeper.TRAP


def test_what_a_file_leaves_behind_does_not_reach_the_next(tmp_path: Path) -> None:
    together = run(tmp_path / "repo", IDS)
    assert status(together) == {"test_first": "passed", "test_second": "passed", "test_fresh": "failed"}
    apart = run(tmp_path / "repo", IDS, "--per-file")
    assert status(apart) == {"test_first": "passed", "test_second": "passed", "test_fresh": "passed"}


@pytest.mark.parametrize("options", ["", "--per-file"])
def test_a_test_that_must_fail_is_reported_under_its_mark_once(tmp_path: Path, options: str) -> None:
    found = run(tmp_path / "repo", [*IDS, TRAP], options)
    assert found[TRAP] == Verdict("failed", "AssertionError: as it should")
    assert set(found) == {*IDS, TRAP}


def test_shuffling_changes_the_order_and_names_its_seed(tmp_path: Path) -> None:
    orders = [status(run(tmp_path / "repo", IDS, f"--per-file --shuffle {seed}")) for seed in (1, 5, 7, 1)]
    assert orders[0] == orders[-1]
    firsts = {order["test_first"] for order in orders}
    assert firsts == {"passed", "failed"}, "no seed ran test_second first"


def test_a_process_that_ends_early_takes_its_whole_file_and_no_other(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    exits = "import os\ndef test_good(): pass\ndef test_exit(): os._exit(0)\n"
    helpers.write_files(root, {"tests/test_c.py": exits})
    ids = ["tests/test_c.py::test_good", "tests/test_c.py::test_exit"]
    assert status(run(root, [*ids, TRAP], "--per-file")) == {
        "test_good": "ended",
        "test_exit": "ended",
        "test_no": "missing",
    }
    found = status(run(root, [*IDS, *ids, TRAP], "--per-file"))
    assert found == dict.fromkeys(("test_first", "test_second", "test_fresh"), "passed") | {
        "test_good": "ended",
        "test_exit": "ended",
        "test_no": "failed",
    }


GOOD = [("a", "passed", "", 0.01), ("b", "failed", "no", 0.02), ("", "end", "", 1.0, 2, 1)]
TIMES = [0.1, 0.2, 0.3]


def test_an_honest_answer_agrees_with_itself() -> None:
    assert contradiction(GOOD, TIMES, 65) is None
    assert contradiction([("a", "passed", "", 0.1), ("", "end", "", 0.0, 1, 0)], [0.1, 0.2], 64) is None
    assert contradiction([("", "end", "", 5.0, 0, 0)], [0.1], 69) is None
    broken = [("a", "error", "no module", 0.0), ("b", "error", "no module", 0.0), ("", "end", "", 1.0, 0, 1)]
    assert contradiction(broken, TIMES, 65) is None  # one file could not be collected, two tests are missed


@pytest.mark.parametrize(
    ("frames", "code", "verdict"),
    [
        ([], 0, "ended"),
        (GOOD[:2], 0, "ended"),
        (GOOD[:2], -11, "ended"),
        ([*GOOD[:2], ("noise",)], 0, "forged"),
        ([("a", "passed", ""), *GOOD[1:]], 65, "forged"),
        ([("a", "wonderful", "", 0.01), *GOOD[1:]], 65, "forged"),
        ([GOOD[0], GOOD[0], GOOD[2]], 65, "forged"),
        (GOOD, 64, "forged"),
        (GOOD, 0, "forged"),
        (GOOD, -9, "ended"),
        ([*GOOD[:2], ("", "end", "", 3.0, 2, 1)], 67, "ended"),
        ([*GOOD[:2], ("", "end", "", 0.0, 2, 1)], 64, "forged"),
        ([*GOOD[:2], ("", "end", "", 1.0, 2, 0)], 65, "forged"),
        ([*GOOD[:2], ("", "end", "", 1.0, 3, 1)], 65, "forged"),
        ([*GOOD[:2], ("", "end", "", 1.0, 1, 1)], 65, "forged"),
        ([("a", "passed", "", 0.5), *GOOD[1:]], 65, "forged"),
        ([("a", "passed", "", -0.5), *GOOD[1:]], 65, "forged"),
    ],
)
def test_contradictions(frames: list, code: int, verdict: str) -> None:
    found = contradiction(frames, [0.1 * (i + 1) for i in range(len(frames))], code)
    assert found is not None
    assert found[0] == verdict


def test_groups_and_the_worst_of_two_verdicts() -> None:
    ids = ["b.py::x", "a.py::y", "b.py::z", "c.py"]
    assert groups(ids, True) == [["a.py::y"], ["b.py::x", "b.py::z"], ["c.py"]]
    assert groups(ids, False) == [ids]
    failed, other, passed = ("failed", "right"), ("failed", "wrong"), ("passed", "")
    assert worse(None, failed) == worse(failed, failed) == failed
    assert worse(failed, passed) == worse(passed, failed) == worse(("missing", ""), passed) == passed
    assert worse(failed, ("missing", "")) == ("missing", "")
    assert worse(failed, other)[0] == "failed"
    assert "right" not in worse(failed, other)[1]
