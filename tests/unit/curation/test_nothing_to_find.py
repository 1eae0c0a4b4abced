"""What an agent can do in the sandbox of a task of ours to find the answer: every command, for every gold line."""

from __future__ import annotations

import shlex
from pathlib import Path

import gate_tasks as built
import pytest
from real_parts import require

from swe_rl.curation.leaks import gold_blocks, scan_environment, scan_workspace
from swe_rl.errors import SandboxError
from swe_rl.sandbox import open_sandbox
from swe_rl.types import Task

NOTHING = (  # each prints nothing; LINE is a line of the gold patch, quoted
    "git log --all -p | grep -F -- LINE",
    "git log --all --reflog -p | grep -F -- LINE",
    "git reflog",
    "git stash list; git stash show -p stash@{0} 2>/dev/null",
    "git notes list; git replace -l; git tag; git remote",
    "git for-each-ref | grep -v 'refs/heads/main$'",
    "git fsck --unreachable --dangling --no-reflogs 2>/dev/null",
    "git cat-file --batch-all-objects --batch | grep -aF -- LINE",
    "find / -path /proc -prune -o -name '*.pack' -print 2>/dev/null",
    "ls -A ~/.cache /var/cache/pip /root/.cache 2>/dev/null",
    "find / -path /proc -prune -o -name 'stats.*.pyc' -print 2>/dev/null",
    "grep -rIF --include='*.py' --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev -- LINE / 2>/dev/null",
    "find / -path /proc -prune -o -name 'test_hidden*' -print 2>/dev/null",
    "env | grep -i -e proxy -e token -e key",
    "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://192.0.2.1\", timeout=3).read())' 2>/dev/null",
    "pip download --no-deps toolz==1.2.0 2>/dev/null | grep -i saved",
    "getent hosts example.org",
)


def gold_lines(task: Task) -> list[str]:
    lines = task.gold_patch.decode().splitlines()
    return [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]


async def test_a_search_for_each_gold_line_finds_nothing(tmp_path: Path) -> None:
    task = built.make("search")
    assert gold_lines(task) == ["return total / len(values)"]
    try:
        async with open_sandbox(built.spec_of(tmp_path)(task)) as sandbox:
            for command in NOTHING:
                for line in gold_lines(task):
                    seen = await sandbox.exec(command.replace("LINE", shlex.quote(line)), cwd=task.workdir)
                    assert seen.stdout.strip() == b"", (command, seen.stdout)
            commits = await sandbox.exec("git rev-list --all --reflog --count", cwd=task.workdir)
            assert commits.stdout.strip() == b"1"
            found = await scan_workspace(sandbox, task)
            assert (found.reason, found.files > 0) == ("", True)
    except SandboxError as err:
        require(False, f"a local sandbox ({err})")


@pytest.mark.slow
async def test_a_scan_of_everything_finds_what_was_put_there_and_nothing_else(tmp_path: Path) -> None:
    task = built.make("scan")
    async with open_sandbox(built.spec_of(tmp_path)(task)) as sandbox:
        put = "mkdir -p ~/.cache/pip && sed 's/(len(values) + 1)/len(values)/' pkg/stats.py > ~/.cache/pip/x"
        assert (await sandbox.exec(put, cwd=task.workdir)).exit_code == 0
        found = await scan_environment(sandbox, [task], workdir=task.workdir)
    (block,) = gold_blocks(task, context=1)
    assert found.hits == ((f"{task.task_id} {block.name}", "/home/agent/.cache/pip/x"),)
    assert (found.copies, found.history) == ((), ())
    assert found.files > 100, "it must have read the base root"
