"""A verifier at work: batches, the order of completion, and logs that it does not read."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from swe_rl.config import AgentConfig, ModelConfig
from swe_rl.config.evaluation import ServerConfig
from swe_rl.errors import ConfigError
from swe_rl.evaluation.verifier_model import Judgement, Manifest, add_answer_tokens, save_verifier
from swe_rl.evaluation.verifier_service import TrainedVerifier, open_served, open_verifier
from swe_rl.models.loading import load_model
from swe_rl.testing import make_task
from swe_rl.types import Trajectory
from tests.unit.evaluation.attempts import FIX, LOOK, RENDERER, SUBMIT, attempt

TINY = ModelConfig(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=64, vocab_size=400)
TASKS = {name: make_task(name) for name in ("a", "b")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, tokenizer = load_model(TINY, cache_dir="unused")
    add_answer_tokens(model, tokenizer)
    manifest = Manifest(form="nano", instruction_file="", max_tokens=1500, tasks=("z",), repositories=("elsewhere",))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    path = tmp_path_factory.mktemp("verifier")
    save_verifier(path, weights, manifest, model_config=model.config, tokenizer=tokenizer)
    return path


def opened(directory: Path) -> TrainedVerifier:
    return open_verifier(directory, agent=AgentConfig(), policy=RENDERER, max_batch_tokens=2000)


def attempts() -> list[Trajectory]:
    """Several of each task, all different."""
    made = [
        attempt(TASKS[name], [(LOOK, name + "x" * 7 * i), (FIX, "done"), (SUBMIT, "")], index=i)
        for name in TASKS
        for i in range(5)
    ]
    leaking = attempt(TASKS["a"], [(LOOK, "tests/test_hidden.py::test_add FAILED"), (SUBMIT, "")], index=5)
    return [*made, leaking, attempt(TASKS["b"], [("y" * 3000, ""), (SUBMIT, "")], index=6)]


def test_scores_go_by_trajectory_whatever_the_order(directory: Path) -> None:
    verifier, given = opened(directory), attempts()
    want = verifier.judge_all(given, TASKS)
    assert len({judgement.p_yes for judgement in want.values()}) > 8
    for seed in range(3):
        shuffled = random.Random(seed).sample(given, len(given))
        found = verifier.judge_all(shuffled, TASKS)
        assert {k: v.p_yes for k, v in found.items()} == pytest.approx({k: v.p_yes for k, v in want.items()})
    alone = verifier.judge_all([given[3]], TASKS)
    assert alone[given[3].trajectory_id].p_yes == pytest.approx(want[given[3].trajectory_id].p_yes, abs=1e-6)


def test_what_gives_the_answer_away_or_is_too_long_is_not_read(directory: Path) -> None:
    found = opened(directory).judge_all(attempts(), TASKS)
    leaking, long = found["phase/0/a/5"], found["phase/0/b/6"]
    assert leaking.p_yes == 0.0
    assert leaking.flag.startswith("leak: the output of step 1 shows the hidden test")
    assert long == Judgement(0.0, "too long")


async def test_questions_that_wait_together_are_answered_in_one_batch(directory: Path) -> None:
    verifier, given = opened(directory), attempts()
    calls: list[int] = []
    plain = verifier.judge
    verifier.judge = lambda prompts: (calls.append(len(prompts)), plain(prompts))[1]
    want = {name: judgement.p_yes for name, judgement in verifier.judge_all(given, TASKS).items()}
    calls.clear()
    scores = await asyncio.gather(*(verifier.score(TASKS[t.task_id], t) for t in given))
    for trajectory, score in zip(given, scores, strict=True):
        blocked = trajectory.trajectory_id in ("phase/0/a/5", "phase/0/b/6")
        assert math.isnan(score) if blocked else score == pytest.approx(want[trajectory.trajectory_id], abs=1e-6)
    assert sum(calls) == len(given) - 2
    assert len(calls) < len(given) - 2


async def test_a_failure_reaches_everybody_who_waits_and_the_next_question_is_answered(directory: Path) -> None:
    verifier, given = opened(directory), attempts()[:3]
    plain = verifier.judge

    def broken(prompts: object) -> list[Judgement]:
        raise RuntimeError("out of memory")

    verifier.judge = broken
    found = await asyncio.gather(*(verifier.score(TASKS["a"], t) for t in given), return_exceptions=True)
    assert [str(item) for item in found] == ["out of memory"] * 3
    verifier.judge = plain
    assert 0 <= await verifier.score(TASKS["a"], given[0]) <= 1


async def test_questions_are_answered_on_the_gpu_of_the_rank(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread would work on GPU 0, where this rank's weights are not."""
    verifier, used = opened(directory), list[tuple[int, bool]]()
    main = threading.current_thread()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda n: used.append((n, threading.current_thread() is main)))
    verifier.judge = lambda prompts: [Judgement(0.5)] * len(prompts)
    await verifier.score(TASKS["a"], attempts()[0])
    assert used == [(3, False)]


async def test_tasks_and_repositories_of_its_training_are_refused(directory: Path) -> None:
    verifier = opened(directory)
    trained = make_task("z")
    with pytest.raises(ConfigError, match="trained on task z"):
        await verifier.score(trained, attempt(trained))
    with pytest.raises(ConfigError, match="trained on task z"):
        verifier.judge_all([attempt(TASKS["a"]), attempt(trained)], {**TASKS, "z": trained})


def test_an_attempt_that_is_there_twice_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="there twice"):
        opened(directory).judge_all([attempt(TASKS["a"]), attempt(TASKS["a"])], TASKS)


def test_a_server_is_asked_for_its_likeliest_tokens(directory: Path) -> None:
    asked: list[dict[str, object]] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            first = {"YES": math.log(0.3), "NO": math.log(0.1)} if len(body["prompt"]) % 2 else {"NO": -0.1}
            answer = {"choices": [{"logprobs": {"top_logprobs": [first, {"</judgement>": 0.0}]}}]}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        verifier = open_served(
            directory,
            url=f"http://127.0.0.1:{server.server_port}/v1",
            cfg=ServerConfig(model="judge", api="completions", retries=0),
            agent=AgentConfig(),
            policy=RENDERER,
            concurrency=3,
        )
        given = attempts()[:8]
        found = verifier.judge_all(given, TASKS)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert len(asked) == 8
    assert all((body["model"], body["temperature"], body["logprobs"]) == ("judge", 0, 20) for body in asked)
    plain = opened(directory)
    for item in given:
        ids = plain.reader.question(item, TASKS[item.task_id]).prompt_ids
        odd = (len(ids) + 1) % 2  # with the one shared token of both answers
        want = (0.75, "") if odd else (0.0, "")
        assert (pytest.approx(found[item.trajectory_id].p_yes), found[item.trajectory_id].flag) == want
