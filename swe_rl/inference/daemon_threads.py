"""Blocking calls that may never return: in threads that nobody waits for when the process ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[..., T], *arguments: object) -> T:
    """As asyncio.to_thread, but a call that hangs does not keep the process from ending. When the caller is cancelled
    the thread goes on, and its result is dropped."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():  # the caller was cancelled
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = function(*arguments)
        except BaseException as err:
            error = err
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return

    threading.Thread(target=run, name=f"swe-rl-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await answer
