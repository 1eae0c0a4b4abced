"""Texts from which the nano tokenizer learns: what an agent reads and writes on minirepo's training tasks.

The corpus depends on nothing but the task generator: every run and every checkpoint of one version has one tokenizer.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping
from itertools import islice

from swe_rl.tasks.minirepo import generate
from swe_rl.tasks.minirepo.names import FUNCTIONS, MODULES, PACKAGES, VARIABLES
from swe_rl.tasks.oracle_calls import RUN_TESTS, Replacement, edit_call, look_call, run_call, submit_call

NUM_TASKS = 300
CORPUS_SEED = 12345
PHRASES: Mapping[str, tuple[str, ...]] = {  # what calls and observations of a toolset always have
    "r2e": (
        "str_replace",
        "Exit code: 0\nExecution output of [execute_bash]:\n[STDOUT]\n\n[STDERR]\n",
        "Exit code: Error: Exit code 1\nExecution output of [execute_bash]:\nThe command failed\n",
        "Execution output of [file_editor]:\nThe file has been edited.",
    ),
}


def whole_words(toolset: str) -> list[str]:
    """Identifiers, keywords and action tags of a toolset (agent.toolset) that are worth one token each."""
    return [
        *(_tags(toolset) if toolset != "minimal" else ()),  # the tokenizer knows those of minimal by itself
        *FUNCTIONS,
        *(word for pool in VARIABLES.values() for word in pool),
        *MODULES,
        *PACKAGES,
        *(word for word in keyword.kwlist if word.islower()),
    ]


def _tags(toolset: str) -> Iterator[str]:
    """The tags of the calls that a scripted demonstrator makes."""
    edit = Replacement(path="a.py", old="a\n", new="b\n", first_line=1, last_line=1)
    calls = (run_call(toolset, "ls"), look_call(toolset, "a.py", 1, 2), edit_call(toolset, edit), submit_call(toolset))
    for call in calls:
        yield f"<function={call.name}>"
        yield from (f"<parameter={name}>" for name in call.arguments)


def texts(toolset: str) -> Iterator[str]:
    """Issues, files, tool calls and tool output of the first training tasks."""
    if toolset != "minimal":
        yield from (RUN_TESTS, *PHRASES.get(toolset, ())) * NUM_TASKS
    for task in islice(generate(split="train", seed=CORPUS_SEED), NUM_TASKS):
        yield task.problem_statement
        for path, data in task.tree.items():
            yield data.decode()
            yield f"cat {path}"
        for bug in task.meta["bugs"]:
            yield f'grep -rn "def {bug["function"]}" *'
            yield f"{bug['path']}:7:{bug['clean'].splitlines()[0]}"
            yield bug["clean"]
    yield from ("passed", "failed", "1 passed", "2 passed", "1 failed", "edited", "submitted") * NUM_TASKS
