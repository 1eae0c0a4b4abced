"""What is asked of vLLM and read from its answers, against hand-written ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from swe_rl.config import EngineConfig
from swe_rl.errors import ConfigError, EngineError, InvariantError
from swe_rl.inference.vllm.devices import replica_gpus, visible_devices
from swe_rl.inference.vllm.requests import ReplicaChunk, sampled_logprobs, sampling_fields
from swe_rl.inference.vllm.server import _chunk, _messages, command_line
from swe_rl.inference.vllm.turn import TurnProgress
from swe_rl.protocols import SamplingParams


@dataclass
class Logprob:
    logprob: float


def turn(limit: int = 10) -> TurnProgress:
    return TurnProgress("s", [1, 2, 3], SamplingParams(max_new_tokens=limit, stop_ids=(7,), seed=11), limit=limit)


def test_logprobs_are_looked_up_by_the_sampled_id() -> None:
    table = [{5: Logprob(-0.1), 9: Logprob(-2.5)}, {4: Logprob(-1.0)}]
    assert sampled_logprobs([9, 4], table) == [-2.5, -1.0]
    with pytest.raises(InvariantError, match="no logprob for sampled token 8"):
        sampled_logprobs([9, 8], table)
    with pytest.raises(InvariantError, match="2 ids with 1 logprobs"):
        sampled_logprobs([9, 4], table[:1])


def test_seeds_are_what_vllm_takes() -> None:
    params = SamplingParams(max_new_tokens=4, stop_ids=(), seed=2**64 - 1)
    assert 0 <= sampling_fields(params, max_tokens=4, seed=params.seed)["seed"] < 2**63


def test_a_turn_is_put_together_from_parts_and_knows_its_versions() -> None:
    progress = turn()
    first = progress.next_request("a", version=3)
    assert (first.prompt_ids, first.sampling["max_tokens"], first.cache_salt) == ([1, 2, 3], 10, "v3")
    progress.add(ReplicaChunk(token_ids=[4, 5], logprobs=[-0.5, -0.25], cached_tokens=2), version=3)
    second = progress.next_request("b", version=4)
    assert (second.prompt_ids, second.sampling["max_tokens"]) == ([1, 2, 3, 4, 5], 8)
    assert second.sampling["seed"] != first.sampling["seed"]
    progress.add(ReplicaChunk(token_ids=[6], logprobs=[-1.0], cached_tokens=5), version=4)
    progress.add(ReplicaChunk(token_ids=[7], logprobs=[-2.0], finish_reason="stop", spans=[(0, 4), (1, 5)]), version=5)
    progress.add(ReplicaChunk(token_ids=[], logprobs=[], cached_tokens=5), version=6)  # how much was used comes last
    got = progress.completion(version=9)
    assert (got.token_ids, got.rollout_logprobs) == ([4, 5, 6, 7], [-0.5, -0.25, -1.0, -2.0])
    assert (got.finish_reason, got.policy_version, got.policy_version_max) == ("stop", 3, 5)
    assert progress.cached_tokens == 2  # of what the session had: the rest of a turn is no reuse


def test_what_vllm_says_about_versions_wins_over_what_we_assume() -> None:
    progress = turn()
    progress.next_request("a", version=1)
    progress.add(ReplicaChunk(token_ids=[4], logprobs=[-1.0]), version=2)  # an update finished meanwhile
    progress.add(
        ReplicaChunk(token_ids=[5], logprobs=[-1.0], finish_reason="length", spans=[(0, 1), (1, 2)]), version=2
    )
    got = progress.completion(version=2)
    assert (got.policy_version, got.policy_version_max) == (1, 2)


def test_a_part_that_is_lost_before_its_last_chunk_keeps_the_version_it_began_with() -> None:
    progress = turn()
    progress.next_request("a", version=3)
    progress.add(ReplicaChunk(token_ids=[4], logprobs=[-0.5]), version=3)
    progress.add(ReplicaChunk(token_ids=[5], logprobs=[-0.5]), version=4)  # new weights came; then it was lost
    progress.next_request("b", version=4)
    progress.add(ReplicaChunk(token_ids=[7], logprobs=[-1.0], finish_reason="stop", spans=[(0, 4)]), version=4)
    got = progress.completion(version=9)
    assert (got.policy_version, got.policy_version_max) == (3, 4)


@pytest.mark.parametrize("reason", ["error", "repetition"])
def test_a_part_that_vllm_could_not_finish_is_no_answer(reason: str) -> None:
    progress = turn()
    progress.next_request("a", version=3)
    with pytest.raises(EngineError, match=reason):
        progress.add(ReplicaChunk(token_ids=[4], logprobs=[-0.5], finish_reason=reason, spans=[(0, 3)]), version=3)
    assert not progress.finish_reason


def test_an_aborted_part_goes_on_unless_the_session_was_released() -> None:
    progress = turn()
    progress.next_request("a", version=0)
    progress.add(ReplicaChunk(token_ids=[4], logprobs=[-1.0], finish_reason="abort", spans=[(0, 0)]), version=0)
    assert progress.finish_reason == ""
    progress.next_request("b", version=1)
    progress.drop_part()
    assert progress.token_ids == [4]
    progress.released = True
    progress.add(ReplicaChunk(token_ids=[], logprobs=[], finish_reason="abort"), version=1)
    got = progress.completion(version=1)
    assert (got.finish_reason, got.token_ids, got.policy_version) == ("cancelled", [4], 0)
    empty = turn()
    empty.next_request("c", version=2)
    empty.released = True
    empty.add(ReplicaChunk(token_ids=[], logprobs=[], finish_reason="abort"), version=2)
    assert empty.completion(version=2).policy_version == 2


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_logprobs_that_are_not_finite_stop_the_run(logprob: float) -> None:
    progress = turn()
    progress.next_request("a", version=0)
    with pytest.raises(InvariantError, match="non-finite logprob in session 's'"):
        progress.add(ReplicaChunk(token_ids=[4], logprobs=[logprob]), version=0)


def test_a_servers_message_is_read() -> None:
    content = [{"token_id": 4, "logprob": -0.5, "top_logprobs": []}, {"token_id": 5, "logprob": -1.5}]
    versions = [{"version": "12", "start": 0, "end": 1}, {"version": "default", "start": 1, "end": 2}]
    choice = {"token_ids": [4, 5], "logprobs": {"content": content}, "finish_reason": "length"}
    got = _chunk({"choices": [{**choice, "weight_versions": versions}]})
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([4, 5], [-0.5, -1.5], "length")
    assert got.spans == [(0, 12), (1, -1)]
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 96}}}
    assert _chunk(usage).cached_tokens == 96
    with pytest.raises(InvariantError, match="logprobs of others"):
        _chunk({"choices": [{**choice, "token_ids": [4, 6]}]})


async def test_a_stream_of_events_may_be_cut_anywhere() -> None:
    text = b'data: {"a": 1}\n\ndata: {"b": "x\\ny"}\n\ndata: [DONE]\n\n'

    class Content:
        def __init__(self, size: int) -> None:
            self._size = size

        async def iter_any(self):  # type: ignore[no-untyped-def]
            for start in range(0, len(text), self._size):
                yield text[start : start + self._size]

    for size in range(1, len(text) + 1):
        assert [message async for message in _messages(Content(size))] == [{"a": 1}, {"b": "x\ny"}]


def test_arguments_become_options_of_the_server() -> None:
    args = {
        "model": "/m",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "hf_overrides": {"head_dtype": "float32"},
    }
    words = command_line({**args, "max_model_len": 512, "disable_log_stats": True})
    assert words[:2] == ["--model", "/m"]
    assert "--enforce-eager" in words
    assert "--no-enable-prefix-caching" in words
    assert words[words.index("--hf-overrides") + 1] == '{"head_dtype": "float32"}'
    assert words[words.index("--max-model-len") + 1] == "512"
    assert "--enable-scale-out" in words
    assert not any("log-stats" in word for word in words)


def test_every_replica_has_gpus_of_its_own() -> None:
    cfg = EngineConfig(backend="vllm", replicas=2, tensor_parallel=2)
    taken = []
    for rank in range(2):
        environment = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        for index in range(2):
            taken += replica_gpus(cfg, index=index, num_gpus=10, environment=environment)
    assert sorted(taken) == list(range(2, 10))  # 0 and 1 train
    with pytest.raises(ConfigError, match="needs 10 GPUs on this node"):
        replica_gpus(cfg, index=0, num_gpus=8, environment={"LOCAL_WORLD_SIZE": "2"})
    shared = EngineConfig(backend="vllm", layout="colocated")
    assert replica_gpus(shared, index=0, num_gpus=8, environment={"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}) == [5]
    with pytest.raises(ConfigError, match="cannot be colocated"):
        replica_gpus(EngineConfig(layout="colocated", tensor_parallel=2), index=0, num_gpus=8, environment={})
    assert replica_gpus(cfg, index=0, num_gpus=0, environment={}) == []
    assert visible_devices([1, 3], {"CUDA_VISIBLE_DEVICES": "4,5,6,GPU-x"}) == "5,GPU-x"
    assert visible_devices([1, 3], {}) == "1,3"
