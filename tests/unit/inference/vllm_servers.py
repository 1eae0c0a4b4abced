"""Servers that speak vLLM's token protocol without vLLM, on this machine's loopback, and can stop answering."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from vllm_fakes import STOP, VOCAB


class FakeServer:
    """Token k after n ids is (n + k) % VOCAB, two in a message, as vllm_fakes.FakeReplica. After `hang` it accepts
    connections and answers nothing, also on those that are open."""

    def __init__(self, *, hang_after: int | None = None) -> None:
        """`hang_after` tokens of the first request that gets so far it hangs."""
        self.answering = asyncio.Event()
        self.answering.set()
        self.requests: list[dict[str, Any]] = []
        self.num_sampled = 0
        self.label = "default"  # of the weights
        self.hang_after = hang_after
        self._runner: Any = None

    async def __aenter__(self) -> FakeServer:
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_route("*", "/{name}", self._other)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.answering.set()
        await self._runner.cleanup()

    async def _other(self, request: Any) -> Any:
        from aiohttp import web

        await self.answering.wait()
        name = request.match_info["name"]
        if name == "finish_weight_update":
            self.label = (await request.json())["weight_version"]
        answers = {"reset_prefix_cache": {"success": True}, "weight_info": {"weight_version": self.label}}
        return web.json_response(answers.get(name, {}))

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        await self.answering.wait()
        body = await request.json()
        self.requests.append(body)
        answer = web.StreamResponse()
        await answer.prepare(request)
        start, limit, sent = len(body["token_ids"]), body["sampling_params"]["max_tokens"], 0
        while sent < limit:
            if self.hang_after is not None and sent >= self.hang_after:
                self.hang_after = None
                self.answering.clear()
            await self.answering.wait()
            ids = [(start + sent + i) % VOCAB for i in range(min(2, limit - sent))]
            ids = ids[: ids.index(STOP) + 1] if STOP in ids else ids
            sent += len(ids)
            self.num_sampled += len(ids)
            ended = "stop" if STOP in ids else "length" if sent == limit else None
            await answer.write(b"data: " + json.dumps(self._message(ids, ended)).encode() + b"\n\n")
            if ended == "stop":
                break
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _message(self, ids: list[int], ended: str | None) -> dict[str, Any]:
        content = [{"token_id": token, "logprob": -0.01 * token} for token in ids]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": ended}
        versions = [{"version": self.label, "start": 0, "end": 1}] if ended else []
        return {"choices": [{**choice, "weight_versions": versions}]}
