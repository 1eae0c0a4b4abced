"""Opens two busy sandboxes in containers, says so, and waits to be killed. Usage: docker_owner.py IMAGE LAYER"""

from __future__ import annotations

import asyncio
import sys

from swe_rl.sandbox import open_sandbox
from swe_rl.sandbox.owner import owner_label
from swe_rl.types import SandboxSpec


async def main() -> None:
    spec = SandboxSpec(backend="docker", image=sys.argv[1], layers=(sys.argv[2],))
    async with open_sandbox(spec) as one, open_sandbox(spec) as two:
        running = [asyncio.create_task(box.exec("(setsid sleep 1000 &); sleep 1000")) for box in (one, two)]
        await asyncio.sleep(0.5)
        print(owner_label(), flush=True)
        await asyncio.gather(*running)


asyncio.run(main())
