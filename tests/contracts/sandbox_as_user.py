"""Runs the fault table as uid 1000 and prints what went wrong. Usage: sandbox_as_user.py BINARY WRITABLE_DIR

All imports happen as root, since the interpreter and the checkout may be closed to other users.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import sandbox_faults

from swe_rl.sandbox import base_root, launch, open_sandbox


def become_user(binary: str) -> None:
    os.setgroups([])
    os.setresgid(1000, 1000, 1000)
    os.setresuid(1000, 1000, 1000)
    if not os.access(sys.base_prefix, os.X_OK):
        sys.base_prefix = sys.base_exec_prefix = "/usr"  # an interpreter that this user may bind
    base_root._base_items.cache_clear()
    launch.sandboxd_path = functools.cache(lambda: binary)


async def run(directory: Path) -> dict[str, Any]:
    layer = directory / "layer of a user"
    layer.mkdir()
    (layer / "readme").write_text("hello\n")
    async with open_sandbox(replace(sandbox_faults.SPEC, layers=(str(layer),))) as sandbox:
        text = (await sandbox.exec("echo more >> readme; cat readme; rm readme; mkdir d; echo forked > d/x")).stdout
        other = await sandbox.fork()
        forked = (await other.exec("cat d/x; ls readme 2>/dev/null")).stdout
        await other.close()
    async with open_sandbox(sandbox_faults.SPEC) as sandbox:
        wrong = [await sandbox_faults.check(sandbox, fault) for fault in sandbox_faults.FAULTS]
    return {"uid": os.getuid(), "wrong": list(filter(None, wrong)), "layer": text.decode(), "fork": forked.decode()}


if __name__ == "__main__":
    directory = Path(sys.argv[2], "home")
    directory.mkdir()
    os.chown(directory, 1000, 1000)
    become_user(sys.argv[1])
    print(json.dumps(asyncio.run(run(directory))))
