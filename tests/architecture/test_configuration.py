"""Every file in conf/ composes with its schema, every experiment passes validation, the README's commands are real."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

from swe_rl.cli.dispatch import COMMANDS
from swe_rl.cli.eval import WORDS as EVAL_WORDS
from swe_rl.cli.eval_policy import spelt_out
from swe_rl.cli.hydra_entry import compose_config, parse_options
from swe_rl.config import TrainConfig, validate
from swe_rl.config.evaluation import EvaluationConfig, validate_evaluation

CONF = ROOT / "conf"
ROOTS = {  # root file -> its schema
    "train": "swe_rl.config:TrainConfig",
    "rft": "swe_rl.config:TrainConfig",
    "eval": "swe_rl.config.evaluation:EvaluationConfig",
}


def schema_of(root: str) -> type[Any]:
    module, name = ROOTS[root].split(":")
    return getattr(importlib.import_module(module), name)


def group_files() -> list[Path]:
    """conf/<group>/<option>.yaml, without experiments."""
    return sorted(p for p in CONF.rglob("*.yaml") if p.parent != CONF and p.parent.name != "experiment")


def roots_using(group: str) -> list[str]:
    """The root files whose schema has that group."""
    return [root for root in root_names() if group in schema_of(root).__dataclass_fields__]


def root_names() -> list[str]:
    return sorted(path.stem for path in CONF.glob("*.yaml"))


def experiments() -> list[str]:
    return sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def test_every_root_file_has_a_schema_and_composes() -> None:
    for root in root_names():
        assert root in ROOTS, f"conf/{root}.yaml: name its schema in ROOTS"
        compose_config(schema_of(root), root, [])


@pytest.mark.parametrize("path", group_files(), ids=lambda p: p.relative_to(CONF).as_posix())
def test_every_group_option_composes(path: Path) -> None:
    group = path.relative_to(CONF).parent.as_posix()
    users = roots_using(group)
    assert users, f"no schema has the group {group}"
    for root in users:
        config = compose_config(schema_of(root), root, [_choose(root, group, path.stem)])
        assert config


def _choose(root: str, group: str, option: str) -> str:
    """An override for a group that the root lists, an addition for one that it does not."""
    listed = re.search(rf"^\s*- (optional )?{group}\s*:", (CONF / f"{root}.yaml").read_text(), flags=re.MULTILINE)
    return f"{'' if listed else '+'}{group}={option}"


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_is_valid(name: str) -> None:
    config = compose_config(TrainConfig, "train", [f"experiment={name}"])
    validate(config)
    assert config.phases


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "eval").glob("*.yaml")))
def test_every_evaluation_protocol_is_valid(name: str) -> None:
    config = compose_config(TrainConfig, "train", ["experiment=dataset_rl", f"+eval={name}"])
    validate(config)
    assert config.eval.splits


def readme_lines() -> list[str]:
    """Lines of the README's code blocks."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_the_readme_has_one_command_that_trains_and_one_that_tests() -> None:
    installing = [line for line in readme_lines() if "pip install" in line]
    assert len(installing) == 2, f"two set-up commands, each one line; found {installing}"
    assert any("swe-rl train" in line for line in installing)
    assert any("-m pytest" in line for line in installing)
    for line in installing:
        subprocess.run(["bash", "-n", "-c", line], check=True)


def test_every_command_in_the_readme_exists_and_composes() -> None:
    schemas = {"train": (TrainConfig, validate), "rft": (TrainConfig, validate)}
    schemas["eval"] = (EvaluationConfig, validate_evaluation)
    for line in readme_lines():
        for call in re.findall(r"(?:swe-rl|-m swe_rl) ([a-z]+[^&|;#\n]*)", line):
            name, *words = shlex.split(call)
            assert name in COMMANDS, line
            if name in schemas and words[:1] not in [[word] for word in EVAL_WORDS] and "..." not in "".join(words):
                options = parse_options(words)
                schema, check = schemas[name]
                if not options.multirun:
                    check(compose_config(schema, name, spelt_out(options.overrides)))


def test_ci_runs_the_test_command_of_the_readme() -> None:
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if re.search(r"^[^#]*-m pytest", line)]
    assert len(lines) == 1, f".ci/run takes the one line that runs pytest; found {lines}"
    for script in ("run", "nightly"):
        subprocess.run(["bash", "-n", str(ROOT / ".ci" / script)], check=True)
