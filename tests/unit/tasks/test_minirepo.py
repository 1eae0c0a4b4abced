from __future__ import annotations

import builtins
import keyword
import os
import re
import subprocess
import sys
from random import Random

import pytest
import tasks_support as helpers

from swe_rl.errors import ConfigError
from swe_rl.tasks import load_tasks, minirepo
from swe_rl.tasks.minirepo import names
from swe_rl.tasks.minirepo.generate import HIDDEN_PATH, Plan, build_task
from swe_rl.tasks.minirepo.mutators import BUG_KINDS
from swe_rl.tasks.minirepo.templates import HARD, STANDARD
from swe_rl.types import Task

ALL_PAIRS = [
    pytest.param(template, kind, id=f"{template.name}/{kind}")
    for split in minirepo.SPLITS
    for template, kind in minirepo.pairs(split)
]


def assert_sound(task: Task) -> None:
    buggy = dict(task.tree) | dict(task.hidden_files)
    fixed = helpers.clean_tree(task) | dict(task.hidden_files)
    before, after = helpers.outcomes(buggy, HIDDEN_PATH), helpers.outcomes(fixed, HIDDEN_PATH)
    failing, passing = helpers.names(task.fail_to_pass), helpers.names(task.pass_to_pass)
    assert failing
    assert passing
    assert {name for name, passed in before.items() if not passed} == failing
    assert {name for name, passed in before.items() if passed} == passing
    assert all(after.values())
    (visible,) = [path for path in task.tree if path.startswith("tests/")]
    assert not all(helpers.outcomes(task.tree, visible).values())
    assert all(helpers.outcomes(helpers.clean_tree(task), visible).values())


@pytest.mark.parametrize(("template", "kind"), ALL_PAIRS)
def test_every_pair_makes_a_sound_task(template, kind):
    rng = Random(f"{template.name}/{kind}")
    plan = Plan(bugs=((template, (kind,)),), distractors=(STANDARD[0] if template is not STANDARD[0] else HARD[0],))
    made = [build_task(plan, task_id="t", split="train", rng=rng) for _ in range(40)]
    tasks = [task for task in made if task is not None]
    assert len(tasks) >= 3, "the bug has hardly ever an effect"
    for task in tasks[:3]:
        assert_sound(task)


def test_family_is_as_large_as_promised():
    assert len(STANDARD) >= 16
    assert len(BUG_KINDS) == 7
    train, heldout = minirepo.pairs("train"), minirepo.pairs("heldout")
    assert not set(train) & set(heldout)
    assert 0.2 <= len(heldout) / len(train + heldout) <= 0.3
    assert {template for template, _ in heldout} <= set(STANDARD)
    assert {template for template, _ in train} == set(STANDARD)
    assert {kind for _, kind in train} == {kind for _, kind in heldout} == set(BUG_KINDS)
    assert not {template for template, _ in minirepo.pairs("hard")} & set(STANDARD)


@pytest.mark.parametrize("split", minirepo.SPLITS)
def test_generated_tasks_are_sound_and_of_their_split(split):
    allowed = {(template.name, kind) for template, kind in minirepo.pairs(split)}
    tasks = load_tasks("minirepo", split=split, num_tasks=80, seed=5)
    for task in tasks:
        assert_sound(task)
        used = {(bug["template"], kind) for bug in task.meta["bugs"] for kind in bug["kind"].split("+")}
        assert used <= allowed
        for bug in task.meta["bugs"]:
            lines = len(bug["clean"].split("\n"))
            assert 3 <= lines <= 8
            assert bug["clean"] != bug["buggy"]
    assert {task.meta["level"] for task in tasks} == ({3, 4, 5} if split == "hard" else {0, 1, 2})
    assert len({task.task_id for task in tasks}) == len(tasks)


def test_gold_patch_applies_with_git_and_gives_the_clean_tree(tmp_path):
    for split in minirepo.SPLITS:
        for task in load_tasks("minirepo", split=split, num_tasks=8, seed=3):
            root = tmp_path / task.task_id
            helpers.write_files(root, task.tree)
            subprocess.run(["git", "apply", "-"], input=task.gold_patch, cwd=root, check=True)
            assert {path: (root / path).read_bytes() for path in task.tree} == helpers.clean_tree(task)


def test_issue_tells_behaviour_and_nothing_hidden_is_visible():
    for split in minirepo.SPLITS:
        for task in load_tasks("minirepo", split=split, num_tasks=60, seed=9):
            hidden = [line.strip() for line in task.hidden_files[HIDDEN_PATH].decode().splitlines() if "assert" in line]
            visible = b"\n".join(task.tree.values()).decode()
            assert HIDDEN_PATH not in task.tree
            for line in hidden:
                assert line not in visible
                assert line.removeprefix("assert ").partition(" == ")[0] not in task.problem_statement
            for bug in task.meta["bugs"]:
                assert bug["clean"] not in visible
                assert bug["function"] + "(" in task.problem_statement
                assert bug["path"] not in task.problem_statement
            assert len(task.problem_statement) <= 110 * len(task.meta["bugs"])


def digests(tasks: list[Task]) -> set[str]:
    return {task.base_commit for task in tasks}


def test_tasks_are_distinct_within_and_between_seeds_and_splits():
    sets = [
        digests(load_tasks("minirepo", split=split, num_tasks=150, seed=seed))
        for split in minirepo.SPLITS
        for seed in (0, 1)
    ]
    assert [len(found) for found in sets] == [150] * 6
    assert len(set.union(*sets)) == 900


def test_a_memorised_body_does_not_come_back():
    """No clean function of another seed's tasks fits: names and constants are drawn anew."""
    seen = {
        bug["clean"]
        for task in load_tasks("minirepo", split="train", num_tasks=400, seed=0)
        for bug in task.meta["bugs"]
    }
    new = [
        bug["clean"]
        for task in load_tasks("minirepo", split="train", num_tasks=400, seed=1)
        for bug in task.meta["bugs"]
    ]
    assert not seen & set(new)


def test_more_tasks_start_with_the_same_tasks():
    few = load_tasks("minirepo", split="train", num_tasks=5, seed=2)
    assert load_tasks("minirepo", split="train", num_tasks=9, seed=2)[:5] == few


def test_generation_does_not_depend_on_the_hash_seed():
    code = (
        "from swe_rl.tasks import load_tasks\n"
        "for split in ('train', 'heldout', 'hard'):\n"
        "    for task in load_tasks('minirepo', split=split, num_tasks=15, seed=4):\n"
        "        print(task.base_commit, task.problem_statement, task.fail_to_pass, dict(task.hidden_files))\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.splitlines()) == 45


def test_name_pools_are_disjoint_and_safe():
    pools = [names.FUNCTIONS, *names.VARIABLES.values(), names.MODULES, names.PACKAGES]
    words = [word for pool in pools for word in pool]
    assert len(words) == len(set(words))
    used = set(re.findall(r"[a-z]+", "\n".join(template.source for template in STANDARD + HARD).lower()))
    assert not set(words) & used
    assert not set(words) & set(dir(builtins))
    assert not set(words) & {*keyword.kwlist, *keyword.softkwlist, *sys.stdlib_module_names}


def test_filters():
    tasks = load_tasks("minirepo", split="train", num_tasks=6, seed=0, level=[0, 1], template="count")
    assert {task.meta["template"] for task in tasks} == {"count"}
    assert {task.meta["level"] for task in tasks} <= {0, 1}
    assert len(tasks) == 6


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"num_tasks": 0}, "above 0"),
        ({"num_tasks": -1}, "positive"),
        ({"split": "test"}, "train, heldout, hard"),
        ({"level": 7, "num_tasks": 1}, "no task left"),
        ({"colour": "red"}, "colour"),
        ({"source": "/nowhere"}, "swe-rl tasks build"),
    ],
)
def test_bad_input_is_one_line_with_the_cure(arguments, cure):
    call = {"source": "minirepo", "split": "train", "num_tasks": 3, "seed": 0} | arguments
    with pytest.raises(ConfigError, match=re.escape(cure)) as caught:
        load_tasks(call.pop("source"), **call)
    assert "\n" not in str(caught.value)
