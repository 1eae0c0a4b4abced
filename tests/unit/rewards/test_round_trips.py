"""From an agent's sandbox to the grader's: what was changed arrives byte for byte, with modes and kinds of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_parts import require

from swe_rl.errors import PatchError, SandboxError
from swe_rl.rewards import extract_patch, filter_patch
from swe_rl.rewards.grading import _APPLY
from swe_rl.sandbox import open_sandbox
from swe_rl.tasks import materialize, tree_commit
from swe_rl.types import Limits, SandboxSpec, Task

TREE = {
    "pkg/__init__.py": b"",
    "pkg/m.py": b"def f(x):\n    return x\n",
    "pkg/data.bin": bytes(range(256)) * 8,
    "pkg/crlf.py": b"a = 1\r\nb = 2\r\n",
    "pkg/last.py": b"a = 1\nb = 2",
    "pkg/run.sh": b"#!/bin/sh\necho 1\n",
    "docs/old name.txt": b"text\n" * 40,
    "empty": b"",
}
TASK = Task(
    task_id="unit/round-trip",
    source="unit",
    split="train",
    repo="unit",
    base_commit=tree_commit(TREE),
    problem_statement="",
    fail_to_pass=(),
    pass_to_pass=(),
    gold_patch=b"",
    tree=TREE,
)
CHANGES = {
    "text": "sed -i 's/return x/return x + 1/' pkg/m.py",
    "binary": "head -c 5000 /dev/urandom > pkg/data.bin && head -c 300 /dev/urandom > new.bin",
    "NUL and no newline": "printf 'a\\0b' > pkg/m.py && printf 'a = 1\\nb = 3' > pkg/last.py",
    "mode bits": "chmod 755 pkg/run.sh && chmod 755 pkg/m.py && printf x > new.sh && chmod 755 new.sh",
    "symbolic link": "ln -s m.py pkg/link.py && ln -s pkg linked && rm pkg/run.sh && ln -s m.py pkg/run.sh",
    "link to nowhere": "ln -s not-there pkg/dangling",
    "CRLF": "sed -i 's/a = 1/a = 7/' pkg/crlf.py && printf 'x\\r\\n\\r\\ny\\r' > pkg/new.py",
    "rename": "mv 'docs/old name.txt' 'docs/new name.txt' && mv pkg/data.bin moved.bin",
    "rename with a change": "mv pkg/m.py pkg/n.py && echo 'y = 1' >> pkg/n.py && git add -A",
    "rename of a folder": "mv pkg lib_pkg",
    "deletion": "rm pkg/m.py empty && git rm -q pkg/run.sh",
    "new untracked file": "mkdir -p new/deep && echo 'z = 1' > new/deep/z.py && : > new/empty.py",
    "non-UTF-8 name": "printf 1 > $'caf\\xe9.txt' && printf 2 > $'tab\\tquote\"back\\\\slash' && "
    "printf 3 > $'line\\nend'",
    "Unicode name": "printf 1 > 'naïve ☃.txt'",
    "submodule": "git init -q vendored && echo 'v = 1' > vendored/v.py && git -C vendored add -A && "
    "git -C vendored commit -qm v && git add vendored 2>/dev/null",
    "file becomes folder": "rm empty && mkdir empty && echo x > empty/x",
    "folder becomes file": "rm -r docs && echo x > docs",
    "almost a megabyte": "head -c 700000 /dev/urandom | base64 -w 76 > big.txt && truncate -s 900000 big.txt",
    "everything at once": "sed -i 's/x/y/' pkg/m.py && chmod 755 pkg/run.sh && rm empty && ln -s pkg/m.py l && "
    "printf 'q\\r\\n' > $'\\xff' && head -c 99 /dev/zero > zeros && git add -A && git commit -qm all",
}
MANIFEST = """
find . -name .git -prune -o \\( -type f -o -type l \\) -print0 | sort -z | while IFS= read -r -d '' F; do
  printf '%s\\0%s\\0' "$F" "$(stat -c %A "$F" | cut -c1-4)"
  if [ -L "$F" ]; then readlink -n "$F"; else cat "$F"; fi | sha256sum
done
"""


@pytest.fixture
async def spec(tmp_path: Path) -> SandboxSpec:
    spec = SandboxSpec(layers=(str(materialize(TASK, tmp_path)),), limits=Limits(disk_bytes=64 << 20))
    try:
        async with open_sandbox(spec):
            pass
    except SandboxError as err:
        require(False, f"a local sandbox ({err})")
    return spec


async def manifest(sandbox) -> bytes:
    """Name, kind and owner's mode bits, and content of every file."""
    listed = await sandbox.exec(MANIFEST, cwd="/testbed")
    assert listed.outcome == "ok", listed
    return listed.stdout


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_arrives(spec: SandboxSpec, name: str) -> None:
    async with open_sandbox(spec) as agent, open_sandbox(spec) as grader:
        before = await manifest(agent)
        done = await agent.exec(CHANGES[name], cwd="/testbed")
        assert done.exit_code == 0, done
        changed = await manifest(agent)
        assert changed != before
        patch = await extract_patch(agent, base_commit=TASK.base_commit, base_tree=TREE)
        kept = filter_patch(patch, existing=TREE)
        assert (kept.patch, kept.dropped, kept.tamper) == (patch, (), 0)
        applied = await grader.exec(_APPLY, cwd="/testbed", stdin=patch)
        assert applied.exit_code == 0, applied
        assert await manifest(grader) == changed


@pytest.mark.parametrize(("size", "fits"), [(700_000, True), (900_000, False)])
async def test_the_limit_is_a_megabyte_of_patch(spec: SandboxSpec, size: int, fits: bool) -> None:
    async with open_sandbox(spec) as agent:
        await agent.exec(f"head -c {size} /dev/urandom > noise.bin", cwd="/testbed")
        if fits:
            patch = await extract_patch(agent, base_commit=TASK.base_commit)
            assert size < len(patch) <= 1 << 20
        else:
            with pytest.raises(PatchError) as err:
                await extract_patch(agent, base_commit=TASK.base_commit)
            assert err.value.reason == "too_large"
