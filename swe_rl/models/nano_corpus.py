"""Texts from which the nano tokenizer learns: what an agent reads and writes on minirepo's training tasks.

The corpus depends on nothing but the task generator: every run and every checkpoint of one version has one tokenizer.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from itertools import islice

from swe_rl.tasks.minirepo import generate
from swe_rl.tasks.minirepo.names import FUNCTIONS, MODULES, PACKAGES, VARIABLES

NUM_TASKS = 300
CORPUS_SEED = 12345


def whole_words() -> list[str]:
    """Identifiers and keywords that are worth one token each."""
    return [
        *FUNCTIONS,
        *(word for pool in VARIABLES.values() for word in pool),
        *MODULES,
        *PACKAGES,
        *(word for word in keyword.kwlist if word.islower()),
    ]


def texts() -> Iterator[str]:
    """Issues, files, tool calls and tool output of the first training tasks."""
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
