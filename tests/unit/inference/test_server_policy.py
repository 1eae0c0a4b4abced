"""A policy behind an OpenAI-compatible server, against a real HTTP server of our own."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from swe_rl.agents import ChatRenderer
from swe_rl.config.evaluation import ServerConfig
from swe_rl.errors import ConfigError, EngineDead, EngineError
from swe_rl.inference import server
from swe_rl.inference.server import ServerPolicy
from swe_rl.protocols import SamplingParams
from swe_rl.testing import ByteTokenizer

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]
RENDERER = ChatRenderer(ByteTokenizer())
PARAMS = SamplingParams(temperature=0.5, max_new_tokens=40, stop_ids=RENDERER.stop_ids, seed=1 << 40 | 5)
MESSAGES = [{"role": "system", "content": "You work."}, {"role": "user", "content": "Fix\nit <b>."}]


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(address, requests so far); `answer` gives status and body for a path and a request."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            status, data = answer(self.path, body)
            raw = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *words: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}/v1", seen
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def chat(text: str, reason: str = "stop", **extra: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text, **extra}, "finish_reason": reason}]}


async def ask(url: str, cfg: ServerConfig) -> Any:
    async with ServerPolicy(url, cfg, tokenizer=ByteTokenizer(), concurrency=2) as policy:
        first = RENDERER.initial_ids(MESSAGES)
        sampled = RENDERER.action_ids("done <x>")
        ids = [*first, *sampled, *RENDERER.observation_ids("saw")]
        return await policy.generate(ids, PARAMS, session="s")


async def test_chat_sends_the_messages_that_the_ids_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame")
    with serving(lambda path, body: (200, chat("ls -l"))) as (url, seen):
        found = await ask(url, ServerConfig(model="m", key_env="SOME_KEY"))
    (request,) = seen
    assert request["path"] == "/v1/chat/completions"
    assert request["key"] == "Bearer sesame"
    assert request["messages"] == [
        *MESSAGES,
        {"role": "assistant", "content": "done <x>"},
        {"role": "user", "content": "saw"},
    ]
    assert (request["model"], request["max_tokens"], request["temperature"], request["seed"]) == ("m", 40, 0.5, 5)
    assert RENDERER.text(found.token_ids) == "ls -l"
    assert found.token_ids[-1] == RENDERER.end_id
    assert found.finish_reason == "stop"
    assert all(map(math.isnan, found.rollout_logprobs))


async def test_chat_keeps_a_thought_and_marks_a_cut_answer() -> None:
    with serving(lambda path, body: (200, chat("ls", "length", reasoning_content="hm"))) as (url, _):
        found = await ask(url, ServerConfig(model="m"))
    assert RENDERER.text(found.token_ids) == "<think>\nhm\n</think>\n\nls"
    assert found.finish_reason == "length"
    assert found.token_ids[-1] != RENDERER.end_id


async def test_completions_send_ids_and_take_ids() -> None:
    choice = {"token_ids": [65, 66], "logprobs": {"token_logprobs": [-0.5, -1.5]}, "finish_reason": "stop"}
    cfg = ServerConfig(model="m", api="completions", tokenizer="x")
    with serving(lambda path, body: (200, {"choices": [choice]})) as (url, seen):
        found = await ask(url, cfg)
    assert seen[0]["path"] == "/v1/completions"
    assert seen[0]["prompt"][: len(RENDERER.initial_ids(MESSAGES))] == RENDERER.initial_ids(MESSAGES)
    assert seen[0]["stop_token_ids"] == list(RENDERER.stop_ids)
    assert (found.token_ids, found.rollout_logprobs) == ([65, 66], [-0.5, -1.5])
    with serving(lambda path, body: (200, {"choices": [{"text": "AB", "finish_reason": "stop"}]})) as (url, _):
        with pytest.raises(EngineDead, match=r"set server.api=chat"):
            await ask(url, cfg)


async def test_a_busy_server_is_asked_again_and_a_lost_one_is_trouble_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "FIRST_PAUSE_S", 0.001)
    answers = iter([(503, {"error": "busy"}), (429, {"error": "slow"}), (200, chat("ls"))])
    with serving(lambda path, body: next(answers)) as (url, seen):
        found = await ask(url, ServerConfig(model="m"))
    assert len(seen) == 3
    assert RENDERER.text(found.token_ids) == "ls"
    with serving(lambda path, body: (500, {"error": "down"})) as (url, seen):
        with pytest.raises(EngineError, match="answered 500"):
            await ask(url, ServerConfig(model="m", retries=2))
    assert len(seen) == 3
    with pytest.raises(EngineError, match="refused"):
        await ask(url, ServerConfig(model="m", retries=0))


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (401, {"error": "key"}, EngineDead),
        (404, {"error": "model"}, EngineDead),
        (200, b"no json", EngineError),
        (200, [1], EngineError),
        (200, {"choices": []}, EngineError),
        (200, chat("", "length"), EngineError),
        (200, chat("ls", "abort"), EngineError),
        (200, chat("ls", "error"), EngineError),
    ],
)
async def test_answers_of_no_use(status: int, body: Any, error: type[Exception]) -> None:
    with serving(lambda path, request: (status, body)) as (url, seen):
        with pytest.raises(error):
            await ask(url, ServerConfig(model="m", retries=0))
    assert len(seen) == 1


async def test_requests_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=20)

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        both.wait()
        return 200, chat("ls")

    with serving(answer) as (url, _):
        async with ServerPolicy(url, ServerConfig(model="m"), tokenizer=ByteTokenizer(), concurrency=2) as policy:
            ids = RENDERER.initial_ids(MESSAGES)
            await asyncio.gather(*(policy.generate(ids, PARAMS, session=str(i)) for i in range(2)))


def test_a_tokenizer_without_chatml_cannot_make_messages() -> None:
    class Plain(ByteTokenizer):
        unk_token_id = 0

        def convert_tokens_to_ids(self, tokens: Any) -> Any:
            return 0

    with pytest.raises(ConfigError, match="needs a ChatML tokenizer"):
        ServerPolicy("http://x", ServerConfig(model="m"), tokenizer=Plain(), concurrency=1)


async def test_a_refused_request_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it is lost at once; a server that refuses its first one refuses all, and ends the run."""
    monkeypatch.setattr(server, "FIRST_PAUSE_S", 3600.0)
    refused = (400, {"error": "the context is longer than this model's"})
    with serving(lambda path, body: refused) as (url, seen):
        with pytest.raises(EngineDead, match=r"400: .*longer than this model's.*it refuses them all"):
            await ask(url, ServerConfig(model="m"))
    assert len(seen) == 1
    answers = iter([(200, chat("ls")), refused])
    with serving(lambda path, body: next(answers)) as (url, seen):
        async with ServerPolicy(url, ServerConfig(model="m"), tokenizer=ByteTokenizer(), concurrency=2) as policy:
            ids = RENDERER.initial_ids(MESSAGES)
            await policy.generate(ids, PARAMS, session="s")
            with pytest.raises(EngineError, match="answered 400") as caught:
                await policy.generate(ids, PARAMS, session="t")
    assert not isinstance(caught.value, EngineDead)
    assert len(seen) == 2


def test_a_request_under_way_does_not_hold_up_the_end_of_the_process() -> None:
    """A server that accepts and never answers: the interpreter ends although the call is still waiting."""
    program = """
import asyncio, socket, sys
from swe_rl.config.evaluation import ServerConfig
from swe_rl.inference.server import ServerPolicy
from swe_rl.protocols import SamplingParams
from swe_rl.testing import ByteTokenizer

async def main():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        cfg = ServerConfig(model="m", request_s=600.0)
        params = SamplingParams(max_new_tokens=4, stop_ids=(0,), seed=0)
        async with ServerPolicy(url, cfg, tokenizer=ByteTokenizer(), concurrency=1) as policy:
            try:
                await asyncio.wait_for(policy.generate([1], params, session="s"), timeout=0.2)
            except TimeoutError:
                print("gave up")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout == "gave up\n"
