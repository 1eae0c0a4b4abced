"""Runs a minirepo task's tests in this process, without a sandbox: the tests of generation need hundreds of runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swe_rl.tasks.test_runner import Verdict, command_line, new_nonce, parse_report, run_input, runner_source
from swe_rl.types import Task


def outcomes(files: Mapping[str, bytes], test_path: str) -> dict[str, bool]:
    """Test name -> passed, with all modules of `files` in one namespace (function names are unique in a task)."""
    space: dict[str, Any] = {}
    for path, content in files.items():
        if not path.startswith("tests/"):
            exec(compile(content, path, "exec"), space)
    lines = files[test_path].decode().splitlines()
    exec("\n".join(line for line in lines if not line.startswith("from ")), space)
    results = {}
    for name in [name for name in space if name.startswith("test_")]:
        try:
            space[name]()
            results[name] = True
        except Exception:
            results[name] = False
    return results


def clean_tree(task: Task) -> dict[str, bytes]:
    tree = dict(task.tree)
    for bug in task.meta["bugs"]:
        tree[bug["path"]] = tree[bug["path"]].replace(bug["buggy"].encode(), bug["clean"].encode())
    return tree


def names(ids: Sequence[str]) -> set[str]:
    return {test_id.rpartition("::")[2] for test_id in ids}


def write_files(root: Path, files: Mapping[str, bytes | str]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content.encode() if isinstance(content, str) else content)


def run_script(
    root: Path, ids: Sequence[str], *, runner: str = "functions", options: str = "", **popen: Any
) -> dict[str, Verdict] | None:
    """What the runner's script reports for `ids`, run outside any sandbox."""
    script = root.parent / f"{runner}.py"
    script.write_text(runner_source(runner))
    task = bare_task(root, runner=runner)
    command = command_line(task, path=str(script)).replace("python3", sys.executable, 1)
    command = command.removesuffix(" -") + f" {options} -"  # later options win
    nonce = new_nonce()
    done = subprocess.run(
        command, shell=True, input=run_input(nonce, ids), capture_output=True, timeout=60, cwd=root, **popen
    )
    assert not done.stderr, done.stderr.decode()
    return parse_report(done.stdout, nonce=nonce, ids=ids)


def bare_task(root: Path, *, runner: Any = "functions") -> Task:
    return Task(
        task_id="t",
        source="test",
        split="train",
        repo="r",
        base_commit="",
        problem_statement="",
        fail_to_pass=(),
        pass_to_pass=(),
        gold_patch=b"",
        workdir=str(root),
        test_runner=runner,
    )
