"""The software-engineering environment: its order of calls, and forks that remember and then go their own ways."""

from __future__ import annotations

import pytest

from swe_rl.agents import FORMATS, TOOLSETS, SweEnvironment, load_prompt
from swe_rl.testing import FakeSandbox, make_task
from swe_rl.types import ToolCall

TASK = make_task()


def environment(toolset: str, prompt: str = "nano") -> tuple[SweEnvironment, FakeSandbox]:
    sandbox = FakeSandbox({f"/testbed/{path}": data for path, data in TASK.tree.items()})
    chosen = TOOLSETS[toolset]
    made = SweEnvironment(
        sandbox, prompt=load_prompt(prompt), action_format=FORMATS["xml"].bind(chosen.signatures), toolset=chosen
    )
    return made, sandbox


async def say(env: SweEnvironment, name: str, **arguments: str) -> str:
    return (await env.step(ToolCall(name=name, arguments=arguments))).observation


async def test_step_needs_reset() -> None:
    env, _ = environment("nebius")
    with pytest.raises(RuntimeError, match="before reset"):
        await say(env, "open", file="calc.py")


async def test_reset_forgets() -> None:
    env, _ = environment("nebius", "nebius")
    messages = await env.reset(TASK)
    assert [message["role"] for message in messages] == ["system", "user"]
    await say(env, "open", file="calc.py")
    assert "current file: /testbed/calc.py" in await say(env, "goto", line="1")
    await env.reset(TASK)
    assert await say(env, "goto", line="1") == (
        "error: no file is open: open one first\n(Current directory: /testbed, current file: n/a) bash-$"
    )


async def test_a_fork_remembers_and_goes_its_own_way() -> None:
    env, sandbox = environment("nebius")
    await env.reset(TASK)
    await say(env, "open", file="calc.py")
    other_sandbox = await sandbox.fork()
    other = env.fork(other_sandbox)
    assert "edited" not in await say(other, "edit", first="2", last="2", text="    return a + b")
    assert other_sandbox.files["/testbed/calc.py"].endswith(b"a + b\n")
    assert sandbox.files["/testbed/calc.py"].endswith(b"a - b\n")
    await say(other, "create", file="new.py")
    assert "current file: /testbed/new.py" in await say(other, "goto", line="1")
    assert "current file: /testbed/calc.py" in await say(env, "goto", line="1")


async def test_undo_of_a_fork_leaves_the_original_alone() -> None:
    env, sandbox = environment("r2e")
    await env.reset(TASK)
    await say(env, "file_editor", command="str_replace", path="calc.py", old_str="a - b", new_str="a + b")
    other = env.fork(await sandbox.fork())
    assert "took back" in await say(other, "file_editor", command="undo_edit", path="calc.py")
    assert "no edit" in await say(other, "file_editor", command="undo_edit", path="calc.py")
    assert "took back" in await say(env, "file_editor", command="undo_edit", path="calc.py")
    assert sandbox.files["/testbed/calc.py"] == TASK.tree["calc.py"]
