"""Opens three busy sandboxes, says so, and waits to be killed. Usage: sandbox_owner.py LAYER"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack

from swe_rl.sandbox import open_sandbox
from swe_rl.sandbox.owner import owner_label
from swe_rl.types import SandboxSpec


async def main() -> None:
    spec = SandboxSpec(layers=(sys.argv[1],))
    marker = f"7{os.getpid()}"  # seconds: finds the processes again
    async with AsyncExitStack() as stack:
        sandboxes = [await stack.enter_async_context(open_sandbox(spec)) for _ in range(3)]
        running = [asyncio.create_task(box.exec(f"(setsid sleep {marker} &); sleep {marker}")) for box in sandboxes]
        await asyncio.sleep(0.5)
        print(owner_label(), flush=True)
        await asyncio.gather(*running)


asyncio.run(main())
