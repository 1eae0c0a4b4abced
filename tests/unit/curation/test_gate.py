"""Each verdict on a task built to have it, in real sandboxes; the record; the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gate_tasks as built
import pytest
from real_parts import require

from swe_rl.cli import tasks as tasks_command
from swe_rl.curation.gate import GateOptions, GateResult, gate_digest, gate_tasks, read_record
from swe_rl.errors import ConfigError, SandboxError, SandboxUnavailable
from swe_rl.sandbox import open_sandbox
from swe_rl.tasks import load_tasks, write_tasks
from swe_rl.types import SandboxSpec, Task

FIX = {"pkg/stats.py": built.FIXED}
QUICK = GateOptions(repeats=2, limit_s=10.0, scan=False)
SCANNED = replace(QUICK, repeats=1, scan=True)


class CountingPool:
    """Sandboxes of its own, counted; the first `failures` leases are an outage."""

    def __init__(self, failures: int = 0, error: type[SandboxError] = SandboxError) -> None:
        self.leases, self.failures, self.error = 0, failures, error

    def lease(self, spec: SandboxSpec):
        self.leases += 1
        if self.leases <= self.failures:
            raise self.error("no room")
        return open_sandbox(spec)


@pytest.fixture(autouse=True)
async def _sandboxes() -> None:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxError as err:
        require(False, f"a local sandbox ({err})")


async def gate(
    tmp_path: Path, *tasks: Task, options: GateOptions = QUICK, pool: CountingPool | None = None
) -> GateResult:
    return await gate_tasks(
        tasks,
        options=options,
        record=tmp_path / "gate.jsonl",
        spec_of=built.spec_of(tmp_path / "trees"),
        pool=pool or CountingPool(),
    )


def verdicts(result: GateResult) -> dict[str, str]:
    return {row.task_id.removeprefix("gate/"): row.verdict for row in result.verdicts}


async def test_every_verdict_on_a_task_built_to_have_it(tmp_path: Path) -> None:
    good = built.make("good")
    tasks = [
        good,
        built.make("leaking tree", tree={"build/lib/pkg/stats.py": built.FIXED}),
        replace(built.make("solved already", tree=FIX), gold_patch=b""),
        replace(good, task_id="gate/no apply", gold_patch=good.gold_patch.replace(b"def half(x)", b"def third(x)")),
        replace(good, task_id="gate/no repair", gold_patch=good.gold_patch.replace(b"len(values)\n", b"3.5\n")),
        built.with_test("always fails", b"\n\ndef test_no():\n    assert False\n", "test_no"),
        built.with_test("slow", built.SLEEP, "test_sleep"),
    ]
    result = await gate(tmp_path, *tasks, options=replace(QUICK, limit_s=3.0))
    assert verdicts(result) == {
        "good": "ok",
        "leaking tree": "leaking",
        "solved already": "no-op passes",
        "no apply": "gold fails",
        "no repair": "gold fails",
        "always fails": "gold fails",
        "slow": "too slow",
    }
    reasons = {row.task_id.removeprefix("gate/"): row.reason for row in result.verdicts}
    assert reasons["good"] == ""
    assert "build/lib/pkg/stats.py" in reasons["leaking tree"]
    assert reasons["solved already"].startswith("1 of 1 FAIL_TO_PASS tests pass")
    assert reasons["no apply"].startswith("apply_failed")
    assert "test_mean is failed" in reasons["no repair"]
    assert "test_no is failed" in reasons["always fails"]
    assert "3 s" in reasons["slow"]


async def test_a_coin_is_flaky(tmp_path: Path) -> None:
    """Twenty throws agree once in half a million."""
    task = built.with_test("coin", built.COIN, "test_coin")
    result = await gate(tmp_path, task, options=replace(QUICK, repeats=20))
    assert verdicts(result) == {"coin": "flaky"}
    assert "test_coin is " in result.verdicts[0].reason


async def test_what_depends_on_the_order_of_tests_is_flaky(tmp_path: Path) -> None:
    task = built.order_task(built.pytest_packages())
    result = await gate(tmp_path, task)
    assert verdicts(result) == {"order": "flaky"}
    (tmp_path / "once").mkdir()
    once = await gate(tmp_path / "once", task, options=replace(QUICK, repeats=1))
    assert verdicts(once) == {"order": "ok"}, "one run cannot show it"


@pytest.mark.slow
async def test_the_answer_in_a_mounted_directory_is_a_leak(tmp_path: Path) -> None:
    layer = tmp_path / "layer" / "vendored"
    layer.mkdir(parents=True)
    (layer / "other_name.py").write_bytes(built.FIXED)
    copy = tmp_path / "copy" / "pkg"
    copy.mkdir(parents=True)
    (copy / "stats.py").write_bytes(b"# an older release\n")
    mounted = built.make("mounted", meta={"mounts": [[str(layer.parent), "/opt/layer"]]})
    copied = built.make("copied", meta={"mounts": [[str(copy.parent), "/opt/copy"]]})
    result = await gate(tmp_path, mounted, copied, options=SCANNED)
    assert verdicts(result) == {"mounted": "leaking", "copied": "leaking"}
    assert "/opt/layer/vendored/other_name.py" in result.verdicts[0].reason
    assert "another copy: /opt/copy/pkg/stats.py" in result.verdicts[1].reason
    unseen = await gate(tmp_path, mounted)
    assert verdicts(unseen) == {"mounted": "ok"}, "another option, another verdict"


async def test_a_second_run_has_nothing_to_do_and_a_killed_one_goes_on(tmp_path: Path) -> None:
    tasks = [built.make("one"), built.make("two"), built.make("three")]
    first = await gate(tmp_path, *tasks)
    pool = CountingPool()
    again = await gate(tmp_path, *tasks, pool=pool)
    assert (again.verdicts, again.reused, pool.leases) == (first.verdicts, 3, 0)
    record = tmp_path / "gate.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(lines[0] + lines[1] + lines[2][:20])  # killed while it wrote
    resumed = await gate(tmp_path, *tasks)
    assert (verdicts(resumed), resumed.reused) == (dict.fromkeys(("one", "two", "three"), "ok"), 2)
    assert len(read_record(record)) == 3
    assert [json.loads(line)["digest"] for line in record.read_bytes().splitlines()] == list(read_record(record))
    changed = replace(tasks[0], hidden_files={"tests/test_hidden.py": built.HIDDEN + b"# again\n"})
    third = await gate(tmp_path, changed, *tasks[1:])
    assert third.reused == 2


async def test_an_outage_is_no_verdict(tmp_path: Path) -> None:
    task = built.make("one")
    options = replace(QUICK, repeats=1)
    lost = await gate(tmp_path, task, options=options, pool=CountingPool(failures=99))
    assert (lost.verdicts, list(lost.undecided)) == ([], ["gate/one"])
    scanned = await gate(tmp_path, task, options=SCANNED, pool=CountingPool(failures=1))
    assert (scanned.verdicts, scanned.undecided) == ([], {"gate/one": "no room"})
    assert not (tmp_path / "gate.jsonl").exists()
    retried = await gate(tmp_path, task, options=options, pool=CountingPool(failures=1))
    assert verdicts(retried) == {"one": "ok"}
    for scan in (True, False):
        with pytest.raises((SandboxUnavailable, ExceptionGroup)):
            await gate(
                tmp_path, built.make("two"), options=replace(QUICK, scan=scan), pool=CountingPool(9, SandboxUnavailable)
            )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (GateOptions(repeats=0), "--repeats 0 must be at least 1"),
        (GateOptions(concurrency=0), "--concurrency 0"),
        (GateOptions(limit_s=0.0), "--time-limit 0.0 must be positive"),
        (GateOptions(limit_s=float("nan")), "--time-limit"),
    ],
)
async def test_options_that_cannot_work(tmp_path: Path, options: GateOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await gate(tmp_path, built.make("one"), options=options)


async def test_bad_records_and_double_ids(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the same id"):
        await gate(tmp_path, built.make("one"), built.make("one"))
    (tmp_path / "gate.jsonl").write_text("nonsense\n")
    with pytest.raises(ConfigError, match="line 1 is no verdict"):
        await gate(tmp_path, built.make("one"))


def test_the_digest_is_of_everything_that_decides() -> None:
    task = built.make("one")
    others = [
        replace(task, gold_patch=task.gold_patch + b"\n"),
        replace(task, hidden_files={}),
        replace(task, timeout_s=21.0),
        replace(task, pass_to_pass=()),
        replace(task, base_commit="0" * 40),
        replace(task, test_runner="pytest"),
        replace(task, meta={"env": {"A": "1"}}),
        replace(task, meta={"test_s": 3}),
    ]
    digests = {gate_digest(other, QUICK) for other in (task, *others)}
    digests |= {
        gate_digest(task, replace(QUICK, **change))
        for change in ({"repeats": 3}, {"limit_s": 9.0}, {"scan": True}, {"sandbox": "local/64"})
    }
    assert len(digests) == 1 + len(others) + 4
    assert gate_digest(replace(task, problem_statement="other"), QUICK) == gate_digest(task, QUICK)
    assert gate_digest(task, replace(QUICK, concurrency=7)) == gate_digest(task, QUICK)


async def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWE_RL_CACHE", str(tmp_path / "cache"))
    source, out = tmp_path / "set", tmp_path / "gated"
    leaking = built.make("leaking", tree={"old/stats.py": built.FIXED})
    write_tasks([built.make("good"), leaking], source)

    def command(*extra: str) -> tuple[int, str]:
        import asyncio
        import threading

        found: list[int] = []
        words = ["gate", "--source", str(source), "--out", str(out), "--repeats", "1", "--no-scan", *extra]
        thread = threading.Thread(target=lambda: found.append(tasks_command.main(words)))
        assert asyncio.get_running_loop()  # the command has a loop of its own
        thread.start()
        thread.join()
        return found[0], capsys.readouterr().out

    code, text = command()
    assert code == 0
    assert "gate/leaking: leaking: " in text
    assert "2 verdicts: " in text
    assert f"task.source={out}" in text
    assert [task.task_id for task in load_tasks(str(out), split="all", num_tasks=0, seed=0)] == ["gate/good"]
    assert "2 of them from" in command()[1]
    assert command("--task", "gate/good")[1].startswith("1 verdicts")
