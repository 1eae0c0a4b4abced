"""Our rules and log reading against the `swebench` package itself: the same verdict on every constructed case."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
from real_parts import require

from swe_rl.errors import ConfigError
from swe_rl.tasks.pass_rules import TestResults, judge
from swe_rl.tasks.test_logs import read_log
from swe_rl.types import PassRule, Task

IDS = ["m.py::test_a", "m.py::test_b[x]", "m.py::test_c[log(photon", "m.py::test_d[1 2]", "test_e (pkg.Tests)"]
LOGGED = [*IDS, "m.py::test_c[log(photon / cm)]", "m.py::test_c[log(photon)]", "m.py::test_b[x", "m.py::test_a2"]
STATUSES = ["PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL"]
RULES: dict[str, PassRule] = {"pass_and_fail": "f2p_p2p", "fail_only": "f2p_p2p_fail_only"}
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"


@pytest.fixture(scope="module")
def grading() -> Any:
    require(importlib.util.find_spec("swebench") is not None, "the package swebench")
    from swebench.harness import grading

    return grading


def make_task(f2p: list[str], p2p: list[str], *, eval_type: str = "pass_and_fail", parser: str = "parse_log_pytest"):
    return Task(
        task_id="lumen__lumen-17",
        source="swebench",
        split="train",
        repo="lumen/lumen",
        base_commit="",
        problem_statement="",
        fail_to_pass=tuple(f2p),
        pass_to_pass=tuple(p2p),
        gold_patch=b"",
        log_parser=parser,
        pass_rule=RULES[eval_type],
        meta={"row": {"version": "4.1"}},
    )


def theirs_from_map(grading: Any, task: Task, statuses: dict[str, str]) -> tuple[bool, float, float]:
    kind = next(name for name, rule in RULES.items() if rule == task.pass_rule)
    gold = {"FAIL_TO_PASS": list(task.fail_to_pass), "PASS_TO_PASS": list(task.pass_to_pass)}
    report = grading.get_eval_tests_report(statuses, gold, eval_type=grading.EvalType(kind))
    full = grading.get_resolution_status(report) == grading.ResolvedStatus.FULL.value
    return full, grading.compute_fail_to_pass(report), grading.compute_pass_to_pass(report)


def test_every_status_of_every_kind_of_test(grading):
    """One test to make pass, one to keep: all pairs of statuses and absence, under both evaluation types."""
    cases = 0
    for eval_type in RULES:
        task = make_task(IDS[:1], IDS[1:2], eval_type=eval_type)
        for first in [*STATUSES, None]:
            for second in [*STATUSES, None]:
                given = {IDS[0]: first, IDS[1]: second, "m.py::other": "PASSED"}
                statuses = {name: status for name, status in given.items() if status}
                found = judge(task, TestResults({name: status.lower() for name, status in statuses.items()}))
                assert (found.resolved, found.f2p, found.p2p) == theirs_from_map(grading, task, statuses), statuses
                cases += 1
    assert cases == 72


@pytest.mark.parametrize("eval_type", sorted(RULES))
def test_random_maps_with_cut_ids(grading, eval_type):
    draw = random.Random(7)
    verdicts = []
    for _ in range(400):
        required = draw.sample(IDS, draw.randint(1, len(IDS)))
        cut = draw.randint(1, len(required))
        logged = draw.sample(LOGGED, draw.randint(1, len(LOGGED)))
        weights = [6, 1, 1, 1, 1] if draw.random() < 0.7 else [1, 1, 1, 1, 1]
        statuses = {name: draw.choices(STATUSES, weights)[0] for name in logged}
        task = make_task(required[:cut], required[cut:], eval_type=eval_type)
        found = judge(task, TestResults({name: status.lower() for name, status in statuses.items()}))
        assert (found.resolved, found.f2p, found.p2p) == theirs_from_map(grading, task, statuses), (task, statuses)
        verdicts.append(found.resolved)
    assert 20 < sum(verdicts) < 380  # both outcomes occur


PYTEST = """\
=========================== short test summary info ============================
PASSED m.py::test_a
PASSED m.py::test_b[x]
SKIPPED [1] m.py:9: no reason
"""
SUMMARY = "========================= 2 passed, 1 skipped in 0.01s =========================\n"


def marked(body: str, *, before: str = "", after: str = "") -> str:
    return f"{before}+ : '{START}'\n{body}+ : '{END}'\n{after}"


def status_line(code: int) -> str:
    return f">>>>> Test Exit Code: {code}\n"


FAILED = PYTEST.replace("PASSED m.py::test_b[x]", "FAILED m.py::test_b[x] - assert 1 == 2")
LOGS = {
    "clean": marked(PYTEST + SUMMARY),
    "failure": marked(FAILED + SUMMARY),
    "error": marked(PYTEST.replace("PASSED m.py::test_a", "ERROR m.py::test_a") + SUMMARY),
    "xfail": marked(PYTEST.replace("PASSED m.py::test_a", "XFAIL m.py::test_a") + SUMMARY),
    "xpass": marked(PYTEST.replace("PASSED m.py::test_a", "XPASS m.py::test_a") + SUMMARY),
    "skipped": marked(PYTEST.replace("PASSED m.py::test_b[x]", "SKIPPED m.py::test_b[x]") + SUMMARY),
    "absent": marked(PYTEST.replace("PASSED m.py::test_a\n", "") + SUMMARY),
    "no markers": PYTEST + SUMMARY,
    "no start": f"{PYTEST}+ : '{END}'\n",
    "no end": f"+ : '{START}'\n{PYTEST}",
    "empty between": marked(""),
    "results after the end": marked("", after=PYTEST),
    "results before the start": marked("", before=PYTEST),
    "failure outside": marked(PYTEST, after="FAILED m.py::test_a\n"),
    "two starts": marked(f"+ : '{START}'\n{PYTEST}"),
    "forged section first": marked(PYTEST) + marked(FAILED),
    "forged section last": marked(FAILED) + marked(PYTEST),
    "start after end": f"+ : '{END}'\n+ : '{START}'\n{PYTEST}",
    "two ends": marked(PYTEST, after=f"+ : '{END}'\n"),
    "status 0": marked(PYTEST, after=status_line(0)),
    "status 1 without failure": marked(PYTEST, after=status_line(1)),
    "status 1 with failure elsewhere": marked(PYTEST + "FAILED m.py::other - x\n", after=status_line(1)),
    "status 1 with error elsewhere": marked(PYTEST + "ERROR m.py::other\n", after=status_line(1)),
    "negative status": marked(PYTEST, after=status_line(-9)),
    "two statuses": marked(PYTEST, after=status_line(0) + status_line(1)),
    "status 2 and nothing ran": marked("no tests ran\n", after=status_line(2)),
    "patch failed": ">>>>> Patch Apply Failed\n" + marked(PYTEST),
    "reset failed": marked(PYTEST, after=">>>>> Reset Failed\n"),
    "errored": marked(PYTEST, after=">>>>> Tests Errored\n"),
    "timed out": marked(PYTEST, after=">>>>> Tests Timed Out\n"),
    "suite ran silently": marked("  12 passing (3s)\n"),
    "suite ran nothing": marked("  0 passing (3s)\n"),
    "jasmine": marked("7 specs, 0 failures\n"),
    "karma without browser": marked("Executed 0 of 0\n"),
    "karma": marked("Executed 3 of 3\n", after=status_line(0)),
    "silent with failing status": marked("Executed 3 of 3\n", after=status_line(1)),
    "forged line in capital": marked("PASSED m.py::test_a\nPASSED m.py::test_b[x]\nFAILED m.py::test_a - real\n"),
    "carriage returns": marked(PYTEST.replace("\n", "\r\n")),
    "colour": marked(PYTEST.replace("PASSED", "\x1b[32mPASSED\x1b[0m")),
    "test named like a percentage": marked("PASSED [100%]\n" + PYTEST),
    "django": marked("test_a (m.Tests) ... ok\ntest_b (m.Tests) ... FAIL\ntest_c (m.Tests) ... skipped 'x'\n"),
    "empty": "",
}


@pytest.mark.parametrize("eval_type", sorted(RULES))
@pytest.mark.parametrize("name", sorted(LOGS))
def test_logs(grading, tmp_path, name, eval_type):
    """Log to verdict, through the whole of their reading and of ours: 84 cases."""
    parser = "parse_log_django" if name == "django" else "parse_log_pytest"
    required = ["test_a (m.Tests)", "test_c (m.Tests)"] if name == "django" else ["m.py::test_a", "m.py::test_b[x]"]
    agree(grading, tmp_path, LOGS[name], make_task(required[:1], required[1:], eval_type=eval_type, parser=parser))


@pytest.mark.parametrize(
    "parser",
    ["astropy", "pytest_options", "pytest_v2", "seaborn", "sympy", "matplotlib", "scikit", "marked", "jest", "cargo",
     "gotest", "phpunit"],
)  # fmt: skip
def test_other_parsers_through_the_same_door(grading, tmp_path, parser):
    body = (
        PYTEST + "test_f ok\ntest_g F\n\x1b[31mFAILED\x1b[0m m.py::test_h - x\n--- PASS: TestI (0.00s)\n"
        "test wick::trim ... ok\ntest wick::burn ... FAILED\n  ✓ lights (3 ms)\n  ✕ melts (1 ms)\nTests: 2\n"
    )
    names = ["m.py::test_a", "test_f", "TestI", "wick::trim", "lights", "m.py::test_h"]
    for required in names:
        agree(grading, tmp_path, marked(body), make_task([required], [], parser=f"parse_log_{parser}"))


def agree(grading: Any, folder: Any, log: str, task: Task) -> None:
    from swebench.types import TestSpec

    kind = next(name for name, rule in RULES.items() if rule == task.pass_rule)
    spec = TestSpec(
        instance_id=task.task_id,
        image="",
        eval_script_list=[],
        repo=task.repo,
        version="4.1",
        FAIL_TO_PASS=list(task.fail_to_pass),
        PASS_TO_PASS=list(task.pass_to_pass),
        log_parser=task.log_parser,
        eval_type=kind,
    )
    path = folder / "test_output.txt"
    path.write_bytes(log.encode())
    prediction = {"instance_id": task.task_id, "model_patch": "x", "model_name_or_path": "m"}
    theirs = grading.get_eval_report(spec, prediction, str(path), include_tests_status=True)[task.task_id]
    ours = judge(task, read_log(task, path.read_text()))  # text mode, as they read it
    assert ours.resolved == theirs["resolved"]
    if "tests_status" in theirs:
        good = theirs["tests_status"]["FAIL_TO_PASS"]["success"]
        assert ours.f2p == len(good) / len(task.fail_to_pass)


def test_the_parser_of_a_repository_is_known_without_a_column(grading):
    task = make_task(["test_a (m.Tests)"], [])
    django = Task(
        **{**{name: getattr(task, name) for name in task.__slots__}, "repo": "django/django", "log_parser": ""}
    )
    assert judge(django, read_log(django, LOGS["django"])).resolved
    with pytest.raises(ConfigError, match="no log parser parse_log_nothing"):
        read_log(make_task(["a"], [], parser="parse_log_nothing"), "")
