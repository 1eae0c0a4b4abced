"""The test agent: the same episode loop, sandbox and tools as every agent, asked for reproduction tests, not for a fix.

Its work is a patch that adds a test file, extracted like any other; execution_bench.py tells what it is worth. For
minirepo there is a demonstrator that knows the right function: the nano policy imitates what it writes, and then writes
by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

from swe_rl.agents.environment import SweEnvironment
from swe_rl.agents.formats import FORMATS
from swe_rl.agents.prompts import Prompt, load_prompt
from swe_rl.agents.toolsets import make_toolset
from swe_rl.agents.visible_tests import visible_test_files
from swe_rl.config import AgentConfig
from swe_rl.errors import ConfigError
from swe_rl.protocols import Sandbox
from swe_rl.tasks.minirepo.functions import answers
from swe_rl.tasks.oracle_calls import run_call, submit_call
from swe_rl.types import Task, ToolCall

TEST_FILE = "test_issue.py"
_NANO = "tests\n{{ issue }}"  # one word tells it from the request for a fix
_FUNCTIONS = (
    "Each test is a plain function whose name begins with test_, without arguments: it fails as long as the report is "
    "true, and passes once the behaviour is as the report wants it."
)
_PRINTING = (
    f'The file is run as `python3 {TEST_FILE}`. It prints exactly one line: "Issue reproduced" if the wrong behaviour '
    'of the report is there, "Issue resolved" if the right one is, "Other issues" if neither can be told.'
)
_FULL = f"""\
The repository is in {{{{ workdir }}}}. This is a report about it:

{{{{ issue }}}}

Do not fix it. Write tests that show whether it is fixed, into the new file {TEST_FILE} in {{{{ workdir }}}}, and change
nothing else. %s

Look at the code first. Test the example of the report, and cases like it at the edges. Be sure of what you expect: a
test that a right repair fails does harm. Run the tests once: now they must fail, for the reason that the report gives.
Then submit."""
_MAX_DRAWS = 60


def open_test_environment(sandbox: Sandbox, *, cfg: AgentConfig, prints: bool) -> SweEnvironment:
    """The environment of a test agent with the tools of `cfg`. prints: tests are scripts that print their outcome, for
    tasks without a runner of plain functions."""
    toolset = make_toolset(cfg)
    action_format = FORMATS[cfg.action_format].bind(toolset.signatures)
    return SweEnvironment(sandbox, prompt=_prompt(cfg.prompt, prints), action_format=action_format, toolset=toolset)


@cache
def _prompt(name: str, prints: bool) -> Prompt:
    """The request for tests; what the tools are is told as by the agent's own prompt."""
    from jinja2 import Environment, StrictUndefined

    text = _NANO if name == "nano" else _FULL % (_PRINTING if prints else _FUNCTIONS)
    jinja = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    return Prompt(jinja.from_string(text), load_prompt(name).system)


class TestDemonstrator:
    """Plays the writing of a test file for a minirepo task. Equal (task, seed) give equal calls."""

    __test__ = False

    def __init__(self, task: Task, seed: int, *, num_asserts: int, toolset: str) -> None:
        """num_asserts: tests in the file, the first of the issue's own example. ConfigError for another source."""
        if task.source != "minirepo":
            raise ConfigError(f"task {task.task_id} has no test-writing demonstrator: only minirepo tasks have one")
        self._task, self._toolset = task, toolset
        self._source = reference_tests(task, seed=seed, num_asserts=num_asserts)
        self._calls = self._play()

    def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
        """The next action; ignores what it sees. Raises StopIteration after `submit`."""
        return next(self._calls)

    def _play(self) -> Iterator[ToolCall]:
        bug = self._task.meta["bugs"][0]
        yield run_call(self._toolset, f'grep -rn "def {bug["function"]}" *')
        yield run_call(self._toolset, f"cat {bug['path']}")
        yield run_call(self._toolset, f"cat > {TEST_FILE} <<EOF\n{self._source}EOF")
        yield submit_call(self._toolset)


def reference_tests(task: Task, *, seed: int, num_asserts: int) -> str:
    """A test file about the first bug of a minirepo task: the issue's own example, then inputs near it on which the
    buggy function answers otherwise than the right one. Fewer tests where there are not enough such inputs."""
    bug = task.meta["bugs"][0]
    name, rng = bug["function"], Random(f"tests/{task.task_id}/{seed}")
    example = _example(task, name)
    chosen: dict[str, tuple[Any, ...]] = {repr(example): example}
    for _ in range(_MAX_DRAWS):
        if len(chosen) >= num_asserts:
            break
        drawn = tuple(_near(value, rng) for value in example)
        right, wrong = (answers(bug[version], name=name, inputs=[drawn])[0] for version in ("clean", "buggy"))
        if right != wrong and right[0] == "value":
            chosen.setdefault(repr(drawn), drawn)
    inputs = list(chosen.values())
    expected = answers(bug["clean"], name=name, inputs=inputs)
    calls = [f"{name}({', '.join(map(repr, given))})" for given in inputs]
    tests = [
        f"\n\ndef test_{number}():\n    assert {call} == {value!r}\n"
        for number, (call, (_, value)) in enumerate(zip(calls, expected, strict=True), 1)
    ]
    return f"from {bug['path'][:-3].replace('/', '.')} import {name}\n" + "".join(tests)


def _example(task: Task, name: str) -> tuple[Any, ...]:
    """Arguments of the first assertion about `name` in the visible tests: it is the example of the issue."""
    for path in visible_test_files(task):
        for node in ast.walk(ast.parse(task.tree[path])):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                return tuple(ast.literal_eval(argument) for argument in node.args)
    raise ConfigError(f"task {task.task_id} has no visible test of {name}")


def _near(value: Any, rng: Random) -> Any:
    """A value like this one, often the same."""
    if isinstance(value, str):
        return rng.choice((value, value[:-1], value + value[:1]))
    if isinstance(value, list):
        changed = list(value)
        if changed and rng.random() < 0.3:
            changed.pop(rng.randrange(len(changed)))
        if changed and rng.random() < 0.7:
            place = rng.randrange(len(changed))
            changed[place] = _near(changed[place], rng)
        return changed
    return value + rng.choice((-1, 0, 0, 1)) if isinstance(value, int) else value
