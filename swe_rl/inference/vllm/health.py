"""Whether a replica still answers: asked beside a call that takes long, so that one that hangs is known in seconds.

The question is for the process in front of the engine (a server, an actor), which has time while the engine computes:
a long step is no hang. An engine that hangs behind a process that answers is found by `engine.stall_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from swe_rl.inference.vllm.replica import Replica, ReplicaStalled

T = TypeVar("T")

QUIET_S = 10.0  # of silence before a replica is asked, and between two questions
HEALTH_S = 10.0  # for an answer
QUESTIONS = 2  # without an answer, after which it is lost: a busy machine may miss one


async def answers(replica: Replica) -> bool:
    """Whether it says that it is well, in up to QUESTIONS * HEALTH_S seconds."""
    for _ in range(QUESTIONS):
        try:
            if await asyncio.wait_for(replica.alive(), HEALTH_S):
                return True
        except TimeoutError:
            continue
    return False


async def watched(replica: Replica, call: Awaitable[T]) -> T:
    """The result of a call to `replica`. Raises ReplicaStalled when it stops answering meanwhile."""
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({task}, timeout=QUIET_S))[0]:
            if not await answers(replica) and not task.done():
                raise ReplicaStalled(f"{replica.name} does not answer")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
