"""The test agent: what it is asked, and what the demonstrator writes."""

from __future__ import annotations

import pytest

from swe_rl.agents.formats import FORMATS
from swe_rl.config import AgentConfig
from swe_rl.errors import ConfigError
from swe_rl.evaluation.execution_agent import TestDemonstrator, open_test_environment, reference_tests
from swe_rl.evaluation.execution_tests import functions_in_file
from swe_rl.tasks import load_tasks
from swe_rl.testing import FakeSandbox, make_task

TASKS = [
    *load_tasks("minirepo", split="train", num_tasks=12, seed=4),
    *load_tasks("minirepo", split="hard", num_tasks=6, seed=4),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.task_id)
def test_reference_tests_fail_on_the_bug_and_pass_on_the_repair(task) -> None:  # type: ignore[no-untyped-def]
    source = reference_tests(task, seed=1, num_asserts=3)
    assert source == reference_tests(task, seed=1, num_asserts=3)
    tests = functions_in_file(task, source.encode(), path="test_issue.py", name="x")
    assert 1 <= len(tests) <= 3
    bug = task.meta["bugs"][0]
    for version, passes in (("clean", True), ("buggy", False)):
        scope: dict[str, object] = {}
        exec(bug[version], scope)
        body = source.partition("\n")[2]
        exec(body, scope)
        for test in tests:
            try:
                scope[test.function]()  # type: ignore[operator]
                passed = True
            except Exception:
                passed = False
            assert passed is passes, (version, source)


def test_the_first_test_is_the_example_of_the_issue() -> None:
    for task in TASKS[:12]:
        call = reference_tests(task, seed=0, num_asserts=1).rpartition("assert ")[2].partition(" == ")[0]
        assert call in task.problem_statement


def test_the_demonstrator_looks_writes_and_submits() -> None:
    player = TestDemonstrator(TASKS[0], 1, num_asserts=2, toolset="minimal")
    calls = [player.next_call(None, None) for _ in range(4)]
    assert [call.name for call in calls] == ["bash", "bash", "bash", "submit"]
    command = calls[2].arguments["command"]
    assert command.startswith("cat > test_issue.py <<EOF\nfrom ")
    assert command.endswith("EOF")
    with pytest.raises(ConfigError, match="only minirepo tasks"):
        TestDemonstrator(make_task(), 1, num_asserts=2, toolset="minimal")


@pytest.mark.parametrize(
    ("cfg", "prints", "words"),
    [
        (AgentConfig(), False, ["tests\nadd(1, 2) gave -1"]),
        (AgentConfig(prompt="default"), False, ["add(1, 2) gave -1", "test_issue.py", "begins with test_"]),
        (
            AgentConfig(prompt="deepswe", toolset="r2e"),
            True,
            ["/testbed", '"Issue reproduced"', "python3 test_issue.py"],
        ),
    ],
)
async def test_the_request_asks_for_tests(cfg: AgentConfig, prints: bool, words: list[str]) -> None:
    environment = open_test_environment(FakeSandbox(), cfg=cfg, prints=prints)
    messages = await environment.reset(make_task())
    assert all(word in messages[-1]["content"] for word in words)
    assert len(messages) == (1 if cfg.prompt == "nano" else 2)
    if len(messages) == 2:
        assert FORMATS[cfg.action_format].help in messages[0]["content"]
