"""A policy behind an OpenAI-compatible server, for evaluation.

    api=completions   token ids go out and come back (vLLM, with return_token_ids): exact, with logprobs
    api=chat          messages go out and text comes back: any server. Ids are then those of our tokenizer and its
                      logprobs are unknown (NaN), which no evaluation needs

Trouble of the server is EngineError after the retries: the rollout is lost, never scored. What no retry can cure
(a wrong key, model or address; a server that refuses requests before it has answered any) is EngineDead and stops the
run. One request that is refused among others that are not (HTTP 400: a filter, a context of its own that is shorter) is
EngineError at once.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Self

from swe_rl.config.evaluation import ServerConfig
from swe_rl.errors import ConfigError, EngineDead, EngineError
from swe_rl.inference.daemon_threads import in_daemon_thread
from swe_rl.protocols import SamplingParams
from swe_rl.types import Completion

HOPELESS = (401, 403, 404)  # HTTP statuses that stay
REFUSED = (400, 413, 422)  # what was asked is wrong: asked again it is refused again
FAILED = ("abort", "error")  # finish reasons of an answer that is none: vLLM, SGLang
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class ServerPolicy:
    """Implements Policy. An async context manager; `concurrency` requests at a time."""

    def __init__(self, url: str, cfg: ServerConfig, *, tokenizer: Any, concurrency: int) -> None:
        """Raises ConfigError when the tokenizer's ids cannot be cut into messages again (api=chat)."""
        self._url, self._cfg, self._tokenizer = url.rstrip("/"), cfg, tokenizer
        self._free = asyncio.Semaphore(concurrency)  # requests under way at a time
        self._answered = False  # some request was
        self._start, self._end = (tokenizer.convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|im_end|>"))
        unknown = getattr(tokenizer, "unk_token_id", None)
        if cfg.api == "chat" and (None in (self._start, self._end) or unknown in (self._start, self._end)):
            raise ConfigError(
                "server.api=chat needs a ChatML tokenizer, to cut the context into messages: leave server.tokenizer out"
            )

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Raises EngineError when the server gives no usable answer after retries, EngineDead when it never will."""
        ids = list(prompt_ids)
        if self._cfg.api == "completions":
            return self._of_ids(await self._post("/completions", self._completion_request(ids, params)))
        body = {
            "model": self._cfg.model,
            "messages": self.messages(ids),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": params.seed & 0x7FFFFFFF,  # signed 32 bits are what all servers take
        }
        return self._of_text(await self._post("/chat/completions", body))

    async def release(self, session: str) -> None:
        """Nothing is kept per session."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """A request under way is not waited for, not even by the end of the process."""

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """ChatML ids as messages; the assistant's opening at the end, which is no message yet, is left out."""
        found: list[dict[str, str]] = []
        begin: int | None = None
        for place, index in enumerate(ids):
            if index == self._start:
                begin = place + 1
            elif index == self._end and begin is not None:
                role, _, content = self._decode(ids[begin:place]).partition("\n")
                found.append({"role": role.strip(), "content": content})
                begin = None
        return found

    def _completion_request(self, ids: list[int], params: SamplingParams) -> dict[str, Any]:
        return {
            "model": self._cfg.model,
            "prompt": ids,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": params.seed & 0x7FFFFFFF,
            "stop_token_ids": list(params.stop_ids),
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

    def _of_ids(self, answer: Mapping[str, Any]) -> Completion:
        choice = _choice(answer)
        ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or not logprobs or len(ids) != len(logprobs):
            raise EngineDead("the server returns no token ids with logprobs, as vLLM does: set server.api=chat")
        return _completion([int(i) for i in ids], [float(x) for x in logprobs], choice)

    def _of_text(self, answer: Mapping[str, Any]) -> Completion:
        choice = _choice(answer)
        message = choice.get("message") or {}
        thought, text = message.get("reasoning_content") or "", message.get("content") or ""
        text = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        ids = [index for index in ids if index not in (self._start, self._end)]
        if choice.get("finish_reason") != "length":
            ids.append(self._end)
        if not ids:
            raise EngineError("the server answered with nothing")
        return _completion(ids, [math.nan] * len(ids), choice)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer, after retries with doubled pauses. Raises EngineError and EngineDead."""
        pause = FIRST_PAUSE_S
        for attempt in range(self._cfg.retries + 1):
            try:
                async with self._free:
                    answer = await in_daemon_thread(self._send, path, body)
                self._answered = True
                return answer
            except EngineDead:
                raise
            except _Refused as err:
                if not self._answered:
                    raise EngineDead(f"{err}; it has answered nothing so far, so it refuses them all") from err
                raise
            except EngineError:
                if attempt == self._cfg.retries:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        raise AssertionError("unreachable")

    def _send(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._cfg.key_env):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self._cfg.request_s) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as err:
            text = f"{self._url}{path} answered {err.code}: {err.read(300).decode('utf-8', 'replace')}"
            kind = EngineDead if err.code in HOPELESS else _Refused if err.code in REFUSED else EngineError
            raise kind(text) from err
        except (OSError, ValueError) as err:
            raise EngineError(f"{self._url}{path}: {err!r}") from err
        if not isinstance(answer, dict):
            raise EngineError(f"{self._url}{path} answered {str(answer)[:80]}")
        return answer


class _Refused(EngineError):
    """This request, whenever it is asked."""


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise EngineError(f"the server answered without choices: {str(answer)[:200]}")
    if choices[0].get("finish_reason") in FAILED:
        raise EngineError(f"the server ended the request itself: {choices[0]['finish_reason']}")
    return choices[0]


def _completion(ids: list[int], logprobs: list[float], choice: Mapping[str, Any]) -> Completion:
    return Completion(
        token_ids=ids,
        rollout_logprobs=logprobs,
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        policy_version=0,
        policy_version_max=0,
    )
