"""The pass rules, each by the cases that tell it from the others."""

from __future__ import annotations

import pytest

from swe_rl.errors import ConfigError
from swe_rl.tasks.pass_rules import TestResults, bare_name, judge
from swe_rl.tasks.r2e_log import comparable, parse_r2e_log
from swe_rl.tasks.test_logs import read_log
from swe_rl.types import Task

BOTH = {"a": "passed", "b": "passed"}


def task(rule, *, f2p=("a",), p2p=("b",), **changes) -> Task:
    fields = {
        "task_id": "t",
        "source": "test",
        "split": "train",
        "repo": "lumen/lumen",
        "base_commit": "",
        "problem_statement": "",
        "fail_to_pass": tuple(f2p),
        "pass_to_pass": tuple(p2p),
        "gold_patch": b"",
        "pass_rule": rule,
    }
    return Task(**{**fields, **changes})


@pytest.mark.parametrize(
    ("statuses", "resolved_by"),
    [
        (BOTH, "strict f2p_p2p f2p_p2p_fail_only f2p_p2p_absent_ok all_passed"),
        ({**BOTH, "c": "failed"}, "strict f2p_p2p f2p_p2p_fail_only f2p_p2p_absent_ok all_passed"),
        ({"a": "xfail", "b": "passed"}, "f2p_p2p f2p_p2p_fail_only f2p_p2p_absent_ok"),
        ({"a": "passed", "b": "xfail"}, "f2p_p2p f2p_p2p_fail_only f2p_p2p_absent_ok"),
        ({"a": "passed", "b": "skipped"}, "f2p_p2p f2p_p2p_fail_only f2p_p2p_absent_ok"),
        ({"a": "skipped", "b": "passed"}, "f2p_p2p_fail_only f2p_p2p_absent_ok"),
        ({"b": "passed"}, "f2p_p2p_fail_only f2p_p2p_absent_ok"),
        ({"a": "passed"}, "f2p_p2p_fail_only f2p_p2p_absent_ok"),
        ({"a": "error", "b": "passed"}, "f2p_p2p_fail_only"),
        ({"a": "failed", "b": "passed"}, ""),
        ({"a": "passed", "b": "failed"}, ""),
        ({"other": "passed"}, "f2p_p2p_fail_only f2p_p2p_absent_ok"),
        ({}, ""),
    ],
)
def test_every_rule_on_the_same_results(statuses, resolved_by):
    for rule in ("strict", "f2p_p2p", "f2p_p2p_fail_only", "f2p_p2p_absent_ok", "all_passed"):
        found = judge(task(rule), TestResults(statuses))
        assert found.resolved == (rule in resolved_by.split()), rule
        assert set(found.statuses) == {"a", "b"}
        assert bool(found.reason) != found.resolved


def test_what_is_reported_besides():
    found = judge(
        task("f2p_p2p", f2p=("a", "c", "d", "e")), TestResults({"a": "passed", "c": "failed", "b": "skipped"})
    )
    assert (found.f2p, found.p2p, found.reason) == (0.25, 1.0, "tests")
    assert found.statuses == {"a": "passed", "b": "skipped", "c": "failed", "d": "missing", "e": "missing"}


@pytest.mark.parametrize("rule", ["strict", "f2p_p2p", "f2p_p2p_fail_only", "f2p_p2p_absent_ok", "all_passed"])
def test_an_unfinished_run_resolves_nothing(rule):
    found = judge(task(rule), TestResults(BOTH, complete=False))
    assert (found.resolved, found.reason, found.f2p) == (False, "incomplete", 0.0)
    assert judge(task(rule), TestResults({})).reason == "no_results"
    assert judge(task(rule, f2p=()), TestResults(BOTH)).resolved is False


def test_silence_counts_only_where_logs_name_failures_and_the_suite_ran():
    assert judge(task("f2p_p2p_fail_only"), TestResults({}, suite_ran=True)).resolved
    for rule in ("strict", "f2p_p2p", "f2p_p2p_absent_ok", "all_passed"):
        assert not judge(task(rule), TestResults({}, suite_ran=True)).resolved


def test_an_exit_status_without_a_failure_voids_a_run_of_swe_bench():
    assert judge(task("f2p_p2p"), TestResults(BOTH, exit_code=1)).reason == "exit_status"
    assert judge(task("f2p_p2p_fail_only"), TestResults(BOTH, exit_code=1)).reason == "exit_status"
    assert judge(task("f2p_p2p"), TestResults({**BOTH, "c": "failed"}, exit_code=1)).resolved
    assert judge(task("f2p_p2p"), TestResults(BOTH, exit_code=0)).resolved
    assert judge(task("all_passed"), TestResults(BOTH, exit_code=1)).resolved


@pytest.mark.parametrize(
    ("statuses", "resolved"),
    [
        ({"t[log(photon / cm)]": "passed"}, True),
        ({"t[log(photon a)]": "passed", "t[log(photon b)]": "xfail"}, True),
        ({"t[log(photon a)]": "passed", "t[log(photon b)]": "failed"}, False),  # they do not agree
        ({"t[log(photon a)]": "failed", "t[log(photon b)]": "error"}, False),
        ({"t[other]": "passed"}, False),
        ({"t[log(photon": "failed", "t[log(photon a)]": "passed"}, False),  # the exact id comes first
    ],
)
def test_ids_cut_inside_their_parameters(statuses, resolved):
    assert judge(task("f2p_p2p", f2p=("t[log(photon",), p2p=()), TestResults(statuses)).resolved is resolved


def test_whole_ids_do_not_match_by_their_beginning():
    results = TestResults({"test_trim_more": "passed", "t[x]y": "passed"})
    assert not judge(task("f2p_p2p", f2p=("test_trim",), p2p=()), results).resolved
    assert not judge(task("f2p_p2p", f2p=("t[x]",), p2p=()), results).resolved


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("works (12ms)", "works"),
        ("works (1.234s)", "works"),
        ("works [0.4 ms]", "works"),
        ("Suite ran 3 checks in 29.08 msec", "Suite ran 3 checks"),
        ("works in 1 sec now", "works now"),
        ("works (twice)", "works (twice)"),
        ("t[12ms-x]", "t[12ms-x]"),
    ],
)
def test_durations_in_names(name, bare):
    assert bare_name(name) == bare


def test_durations_do_not_matter_to_all_passed():
    asked = task("all_passed", f2p=("trim (12ms)",), p2p=("zero [0.4 ms]", "sizes"))
    results = {"trim (7ms)": "passed", "zero": "passed", "sizes (1s)": "passed"}
    assert judge(asked, TestResults(results)).resolved
    assert not judge(asked, TestResults({**results, "trim (7ms)": "failed"})).resolved


EXPECTED = {"one": "passed", "two": "failed"}


@pytest.mark.parametrize(
    ("expected", "statuses", "resolved", "share"),
    [
        (EXPECTED, {"one": "passed", "two": "failed"}, True, 1.0),
        (EXPECTED, {"one": "passed", "two": "passed"}, False, 0.5),  # what fails must go on failing
        (EXPECTED, {"one": "passed"}, False, 0.5),
        (EXPECTED, {"one": "passed", "two": "failed", "three": "passed"}, False, 1.0),
        (EXPECTED, {"one": "passed", "three": "failed"}, False, 0.5),
        ({}, {"one": "passed"}, False, 0.0),
        ({}, {}, False, 0.0),
        (EXPECTED, {}, False, 0.0),
    ],
)
def test_exact_maps(expected, statuses, resolved, share):
    found = judge(task("exact_map", expected_status=expected), TestResults(statuses))
    assert (found.resolved, found.f2p) == (resolved, share)


R2E_LOG = """\
r2e_tests/test_1.py::test_inside PASSED
=================== \x1b[36mshort test summary info\x1b[0m ===================
\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::\x1b[1mTestWick::test_trim\x1b[0m
PASSED r2e_tests/test_1.py::test_sizes[a - b]
FAILED r2e_tests/test_2.py::test_burn - AssertionError: PASSED
ERROR r2e_tests/test_3.py::test_melt - fixture 'x' not found
XFAIL r2e_tests/test_3.py::test_known
=================== 2 passed, 1 failed in 0.03s ===================
"""


def test_r2e_logs():
    """A line of a failure whose message says PASSED counts as passed: upstream looks for that word first."""
    assert parse_r2e_log(R2E_LOG) == {
        "TestWick.test_trim": "passed",
        "test_sizes[a": "passed",
        "test_burn": "passed",
        "test_melt": "error",
    }
    assert parse_r2e_log("no summary") == {}
    again = R2E_LOG.replace("test_trim", "test_after").partition("\n")[2]
    assert parse_r2e_log(R2E_LOG + again) == parse_r2e_log(R2E_LOG)  # only what stands before the second heading


def test_names_that_fall_together_keep_the_last_in_sorted_order():
    assert comparable({"t[a - 2]": "PASSED", "t[a - 1]": "FAILED", "\x1b[1mu\x1b[0m": "ERROR"}) == {
        "t[a": "passed",
        "u": "error",
    }


VERBOSE_LOG = """\
+ git checkout branch
+ : '>>>>> Start Test Output'
+ pytest --verbose tests
tests/test_wick.py::test_trim PASSED                                     [ 50%]
tests/test_wick.py::test_sizes[ab] XFAIL (known)                         [ 75%]
tests/test_wick.py::test_burn FAILED
FAILED tests/test_wick.py::test_burn - assert
+ : '>>>>> End Test Output'
tests/test_wick.py::test_late FAILED
"""


def test_verbose_logs_of_swe_smith():
    smith = task("f2p_p2p_absent_ok", log_parser="pytest_verbose")
    found = read_log(smith, VERBOSE_LOG)
    assert found.complete
    assert found.statuses == {
        "tests/test_wick.py::test_trim": "passed",
        "tests/test_wick.py::test_sizes[ab]": "xfail",
        "tests/test_wick.py::test_burn": "failed",
    }
    for broken in (
        VERBOSE_LOG.replace("Start Test", "Begin Test"),
        VERBOSE_LOG.replace("End Test", "Stop Test"),
        VERBOSE_LOG + ">>>>> Tests Timed Out\n",
        ">>>>> Patch Apply Failed\n" + VERBOSE_LOG,
    ):
        assert not read_log(smith, broken).complete
        assert not judge(smith, read_log(smith, broken)).resolved


def test_an_empty_run_of_swe_smith_resolves_nothing_although_absent_tests_pass():
    empty = VERBOSE_LOG.replace("PASSED", "").replace("XFAIL", "").replace("FAILED", "")
    smith = task("f2p_p2p_absent_ok", log_parser="pytest_verbose")
    assert judge(smith, read_log(smith, empty)).reason == "no_results"


def test_what_cannot_be_judged_says_so():
    with pytest.raises(ConfigError, match="judged by the file"):
        judge(task("reward_file"), TestResults(BOTH))
    with pytest.raises(ConfigError, match="no parser for swe_rebench_v2:parse_log_ctest"):
        read_log(task("all_passed", log_parser="swe_rebench_v2:parse_log_ctest"), "")
