"""Whose failure is it: outages are retried and then raised, the agent's failures are 0.0. With scripted sandboxes."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from swe_rl import rewards
from swe_rl.errors import SandboxError, SandboxLost, SandboxUnavailable
from swe_rl.rewards import ResultCache, grade
from swe_rl.tasks.test_runner import MUST_FAIL
from swe_rl.types import ExecResult, Reward, SandboxSpec, Task

PATCH = b"diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
TASK = Task(
    task_id="t",
    source="unit",
    split="train",
    repo="r",
    base_commit="0" * 40,
    problem_statement="",
    fail_to_pass=("tests/test_m.py::test_a", "tests/test_m.py::test_b"),
    pass_to_pass=("tests/test_m.py::test_c",),
    gold_patch=PATCH,
    tree={"m.py": b"x = 1\n"},
    hidden_files={"tests/test_m.py": b""},
    test_runner="pytest",
)
ALL_PASS = dict.fromkeys((*TASK.fail_to_pass, *TASK.pass_to_pass), "passed")


def result(stdout: bytes = b"", *, outcome: str = "ok", exit_code: int = 0) -> ExecResult:
    return ExecResult(
        exit_code=exit_code,
        stdout=stdout,
        stderr=b"",
        outcome=outcome,  # type: ignore[arg-type]
        duration_s=0.0,
        stdout_bytes=len(stdout),
        stderr_bytes=0,
    )


class Script:
    """Opens sandboxes that act out one behaviour each: an exception on opening, or what the two commands do."""

    def __init__(self, *behaviours: object) -> None:
        self.behaviours = list(behaviours)
        self.opened = 0

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec):
        behaviour = self.behaviours[min(self.opened, len(self.behaviours) - 1)]
        self.opened += 1
        if isinstance(behaviour, Exception):
            raise behaviour
        yield ScriptedSandbox(behaviour)


class ScriptedSandbox:
    def __init__(self, behaviour: object) -> None:
        self.behaviour = behaviour
        self.files: dict[str, bytes] = {}

    async def write_file(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def exec(self, command: str, *, timeout_s=None, cwd=None, stdin=None) -> ExecResult:
        if "git" in command:
            assert self.files == {}  # hidden tests and runner come after the patch
            return self.behaviour["apply"] if "apply" in self.behaviour else result()
        assert "/testbed/tests/test_m.py" in self.files
        nonce, *ids = stdin.decode().split()
        assert ids[:-1] == list(ALL_PASS)
        canary = {ids[-1]: self.behaviour.get("canary", "failed")} if self.behaviour.get("canary") != "" else {}
        assert ids[-1].startswith(MUST_FAIL)
        source = self.files["/testbed/" + ids[-1].removeprefix(MUST_FAIL).partition("::")[0]].decode()
        text = "AssertionError: " + source.split("'")[1] if "message" not in self.behaviour else "other"
        if "tests" in self.behaviour:
            outcome = self.behaviour["tests"]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        return result(render(self.behaviour["status"] | canary, nonce, self.behaviour.get("message", text)))


def render(status: dict[str, str], nonce: str, message: str) -> bytes:
    rows = [json.dumps({"id": name, "status": state, "message": message}) for name, state in status.items()]
    return "\n".join(
        ["noise", f"{nonce} begin {len(rows)}", *(f"{nonce} {row}" for row in rows), f"{nonce} end {len(rows)}"]
    ).encode()


async def run(script: Script, *, retries: int = 2, cache: ResultCache | None = None, patch: bytes = PATCH) -> Reward:
    return await grade(TASK, patch, spec=SandboxSpec(), retries=retries, pool=script, cache=cache)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swe_rl.rewards.grading.RETRY_PAUSE_S", 0.0)


GOOD = {"status": ALL_PASS}


async def test_all_passed_is_one() -> None:
    reward = await run(Script(GOOD))
    assert (reward.value, reward.tests_passed, reward.tests_total) == (1.0, 3, 3)
    assert reward.terms["resolved"] == reward.terms["f2p"] == reward.terms["p2p"] == 1.0


@pytest.mark.parametrize("state", ["failed", "error", "skipped", "xfailed", "xpassed", "missing"])
@pytest.mark.parametrize("name", list(ALL_PASS))
async def test_anything_but_passed_is_zero(name: str, state: str) -> None:
    script = Script({"status": {**ALL_PASS, name: state}})
    reward = await run(script)
    assert (reward.value, reward.tests_passed) == (0.0, 2)
    assert script.opened == (2 if name in TASK.pass_to_pass else 1)  # PASS_TO_PASS alone: it may be flaky
    assert reward.terms["f2p"] == (1.0 if name in TASK.pass_to_pass else 0.5)


async def test_absent_id_is_missing() -> None:
    reward = await run(Script({"status": {k: v for k, v in ALL_PASS.items() if not k.endswith("_c")}}))
    assert (reward.value, reward.test_status[TASK.pass_to_pass[0]]) == (0.0, "missing")


@pytest.mark.parametrize(
    ("behaviour", "term"),
    [
        ({"apply": result(exit_code=1, outcome="nonzero")}, "apply_failed"),
        ({"tests": result(outcome="oom", exit_code=137)}, "oom"),
        ({"tests": result(outcome="pids_limit", exit_code=1)}, "pids_limit"),
    ],
)
async def test_failures_of_the_agent_are_zero_without_retry(behaviour: dict, term: str) -> None:
    script = Script(behaviour)
    reward = await run(script)
    assert (reward.value, reward.terms[term], script.opened) == (0.0, 1.0, 1)


@pytest.mark.parametrize(
    ("first", "term"),
    [
        (result(b"no report"), "incomplete"),
        (result(exit_code=137, outcome="nonzero"), "incomplete"),
        (result(exit_code=137, outcome="timeout"), "timeout"),
    ],
)
async def test_a_missing_report_counts_once_a_second_sandbox_agrees(first: ExecResult, term: str) -> None:
    script = Script({"tests": first})
    reward = await run(script)
    assert (reward.value, reward.terms[term], script.opened) == (0.0, 1.0, 2)
    assert (await run(Script({"tests": first}, GOOD))).value == 1.0
    alone = Script({"tests": first})
    assert ((await run(alone, retries=0)).value, alone.opened) == (0.0, 1)
    with pytest.raises(SandboxError):
        await run(Script({"tests": first}, SandboxError("no"), SandboxError("no")))


@pytest.mark.parametrize("message", ["BlockingIOError: [Errno 11]", "TestTimeout: time limit"])
async def test_failures_for_want_of_processes_or_time_are_asked_again(message: str) -> None:
    short = {"status": {**ALL_PASS, TASK.fail_to_pass[0]: "failed"}, "message": message}
    assert (await run(Script(short, GOOD))).value == 1.0
    script = Script(short)
    assert ((await run(script)).value, script.opened) == (0.0, 2)


@pytest.mark.parametrize(
    "canary", [{"canary": "passed"}, {"canary": "missing"}, {"canary": ""}, {"message": "forged"}, {"canary": "error"}]
)
async def test_a_test_that_must_fail_and_does_not_is_tampering(canary: dict) -> None:
    reward = await run(Script(GOOD | canary))
    assert (reward.value, reward.terms["tamper"]) == (0.0, 1.0)
    honest = await run(Script({"status": {**ALL_PASS, TASK.fail_to_pass[0]: "missing"}, "canary": "missing"}))
    assert (honest.value, honest.terms["tamper"]) == (0.0, 0.0)  # the process ended: no forgery, no pass either


async def test_a_failure_of_pass_to_pass_alone_is_asked_again() -> None:
    broken = {"status": {**ALL_PASS, TASK.pass_to_pass[0]: "failed"}}
    flaky = await run(Script(broken, GOOD))
    assert (flaky.value, flaky.terms["flaky"]) == (1.0, 1.0)
    steady = await run(Script(broken))
    assert (steady.value, steady.terms["flaky"], steady.terms["f2p"], steady.terms["p2p"]) == (0.0, 0.0, 1.0, 0.0)
    once = Script(broken, GOOD)
    reward = await grade(TASK, PATCH, spec=SandboxSpec(), pool=once, rerun=False)
    assert (reward.value, once.opened) == (0.0, 1)
    both = {"status": {**ALL_PASS, TASK.pass_to_pass[0]: "failed", TASK.fail_to_pass[0]: "failed"}}
    plain = Script(both, GOOD)
    assert ((await run(plain)).value, plain.opened) == (0.0, 1)  # not fixed: nothing depends on the other test


async def test_results_that_contradict_themselves_are_tampering() -> None:
    reward = await run(Script({"status": {**ALL_PASS, TASK.fail_to_pass[0]: "forged"}}))
    assert (reward.value, reward.terms["tamper"], reward.test_status[TASK.fail_to_pass[0]]) == (0.0, 1.0, "error")
    ended = await run(Script({"status": dict.fromkeys(ALL_PASS, "ended")}))
    assert (ended.value, ended.terms["tamper"], ended.terms["ended"]) == (0.0, 0.0, 3.0)
    assert set(ended.test_status.values()) == {"error"}


OUTAGES = {
    "cannot open": SandboxError("no"),
    "lost on opening": SandboxLost("gone"),
    "lost outcome when applying": {"apply": result(outcome="lost")},
    "lost outcome in tests": {"tests": result(outcome="lost")},
    "lost in tests": {"tests": SandboxLost("gone")},
    "no git": {"apply": result(exit_code=127, outcome="nonzero")},
    "no python": {"tests": result(exit_code=127, outcome="nonzero")},
}


@pytest.mark.parametrize("name", OUTAGES)
@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_outages_are_retried_then_raised(name: str, failures: int) -> None:
    script = Script(*[OUTAGES[name]] * failures, GOOD)
    if failures <= 2:
        assert (await run(script)).value == 1.0
        assert script.opened == failures + 1
    else:
        with pytest.raises(SandboxError):
            await run(script)
        assert script.opened == 3


async def test_a_machine_without_sandboxes_is_not_asked_again() -> None:
    script = Script(SandboxUnavailable("no user namespaces"))
    with pytest.raises(SandboxUnavailable):
        await run(script)
    assert script.opened == 1


@pytest.mark.parametrize(
    ("patch", "term"),
    [(b"", "empty"), (PATCH.replace(b"m.py", b"conftest.py"), "empty"), (b"nonsense\n", "malformed")],
)
async def test_nothing_to_run_opens_no_sandbox(patch: bytes, term: str) -> None:
    script = Script(GOOD)
    reward = await run(script, patch=patch)
    assert (reward.value, reward.terms[term], script.opened) == (0.0, 1.0, 0)
    assert reward.terms["tamper"] == (1.0 if b"conftest" in patch else 0.0)
    assert set(reward.test_status.values()) == {"missing"}


async def test_cache_is_by_filtered_patch_and_task() -> None:
    cache, script = ResultCache(), Script(GOOD)
    tests_too = PATCH.replace(b"m.py", b"tests/test_m.py")
    first = await run(script, cache=cache)
    second = await run(script, cache=cache, patch=PATCH + tests_too)
    assert (first.value, second.value, script.opened, cache.hits) == (1.0, 1.0, 1, 1)
    assert (first.terms["tamper"], second.terms["tamper"]) == (0.0, 1.0)
    other = replace(TASK, hidden_files={"tests/test_m.py": b"# other\n"})
    await grade(other, PATCH, spec=SandboxSpec(), pool=script, cache=cache)
    assert script.opened == 2


async def test_outages_and_timeouts_are_not_cached() -> None:
    cache = ResultCache()
    late = {"tests": result(outcome="timeout", exit_code=137)}
    script = Script(late, late, SandboxError("no"), GOOD)
    assert (await run(script, cache=cache)).value == 0.0
    with pytest.raises(SandboxError):
        await run(script, cache=cache, retries=0)
    assert (await run(script, cache=cache)).value == 1.0


def test_cache_forgets_the_oldest() -> None:
    cache = ResultCache(capacity=2)
    for key in "abc":
        cache.put(key, key)
    assert [cache.get(key) for key in "abc"] == [None, "b", "c"]


def test_public_names() -> None:
    assert sorted(rewards.__all__) == rewards.__all__
    assert all(hasattr(rewards, name) for name in rewards.__all__)
