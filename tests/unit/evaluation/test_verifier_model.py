"""The score of an answer against the model's own softmax, answers of servers, and what must never be judged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from swe_rl.agents.rendering import make_renderer
from swe_rl.config import ModelConfig
from swe_rl.errors import CheckpointError, ConfigError, InvariantError
from swe_rl.evaluation.verifier_model import (
    Manifest,
    add_answer_tokens,
    answer_probability,
    answers_of,
    judge,
    load_verifier,
    read_manifest,
    save_verifier,
    write_manifest,
)
from swe_rl.evaluation.verifier_prompt import answer
from swe_rl.models.loading import load_model

TINY = ModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=64, vocab_size=400)
PROMPTS = ["user\nadd(1, 2) gave -1\npatch\n+1\n", "user\nYES and NO\n", "x", "a longer one " * 9]
MANIFEST = Manifest(form="nano", instruction_file="", max_tokens=99, tasks=("t1",), repositories=("r1", "r2"))


@pytest.fixture(scope="module")
def made() -> tuple[Any, Any]:
    return load_model(TINY, cache_dir="unused", texts=PROMPTS)


@pytest.fixture(scope="module")
def with_tokens() -> tuple[Any, Any]:
    model, tokenizer = load_model(TINY, cache_dir="unused", texts=PROMPTS)
    add_answer_tokens(model, tokenizer)
    return model, tokenizer


def test_new_tokens_are_one_id_each_and_the_old_ones_keep_their_probabilities(
    made: tuple[Any, Any], with_tokens: tuple[Any, Any]
) -> None:
    old, plain = made
    model, tokenizer = with_tokens
    assert len(tokenizer) == len(plain) + 4 == model.config.vocab_size
    for word in ("YES", "NO", "<judgement>", "</judgement>"):
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1
    assert tokenizer.decode(tokenizer.encode(answer(True))) == answer(True)
    weight = model.get_input_embeddings().weight
    assert weight is model.get_output_embeddings().weight
    torch.testing.assert_close(weight[: len(plain)], old.get_input_embeddings().weight)
    pieces = plain.encode("NO", add_special_tokens=False)
    torch.testing.assert_close(weight[tokenizer.encode("NO")[0]], weight[pieces].mean(dim=0))
    before = len(tokenizer)
    add_answer_tokens(model, tokenizer)  # they are there already
    assert len(tokenizer) == before


@pytest.mark.parametrize("which", ["made", "with_tokens"])
@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_scores_are_the_softmax_at_the_place_where_the_answers_part(
    which: str, max_tokens: int, request: pytest.FixtureRequest
) -> None:
    model, tokenizer = request.getfixturevalue(which)
    renderer = make_renderer(tokenizer)
    prompts = [renderer.initial_ids([{"role": "user", "content": text}]) for text in PROMPTS]
    found = judge(model, prompts, answers_of(renderer), max_tokens=max_tokens)
    yes, no = renderer.action_ids(answer(True)), renderer.action_ids(answer(False))
    place = next(i for i, (a, b) in enumerate(zip(yes, no, strict=False)) if a != b)
    for ids, judgement in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*ids, *yes[:place]]])).logits[0, -1].double()
        share = torch.softmax(logits[[yes[place], no[place]]], dim=0)[0]
        assert judgement.p_yes == pytest.approx(float(share), abs=2e-5)
        mass = torch.softmax(logits, dim=0)[[yes[place], no[place]]].sum()
        assert bool(judgement.flag) == bool(mass < 1e-3)


def test_nothing_to_judge_is_no_error(made: tuple[Any, Any]) -> None:
    model, tokenizer = made
    assert judge(model, [], answers_of(make_renderer(tokenizer)), max_tokens=100) == []


def test_answers_that_look_alike_are_refused() -> None:
    class Same:
        def action_ids(self, text: str) -> list[int]:
            return [1, 2]

    with pytest.raises(InvariantError, match="alike"):
        answers_of(Same())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("positions", "p_yes", "flag"),
    [
        ([{"<": 0.0}, {"YES": math.log(0.6), "NO": math.log(0.2)}], 0.75, ""),
        ([{" YES": math.log(0.3), "YES": math.log(0.1), "no": 0.0, ">NO": math.log(0.3)}], 0.5, ""),
        ([{"judgement": 0.0}, {"YES": -3.0, "I": -0.1}], 1.0, ""),  # a missing word counts as exp(-10000)
        ([{"NO": -0.5}], 0.0, ""),
        ([{"<": -0.1, "YES": -9.0}, {"NO": -0.1, "YES": -9.0}], 1 / (1 + math.exp(8.9)), ""),  # no answer yet
        ([{"<": 0.0, "NO": -9.0}, {"I": 0.0}], 0.0, "mass 1.2e-04"),
        ([{"YESTERDAY": 0.0}, {"NOW": 0.0}], 0.0, "no answer"),
        ([], 0.0, "no answer"),
        ([{"NO": -0.1}, {"YES": -0.1, "NO": -9.0}], 0.0, ""),  # the first place counts
    ],
)
def test_likely_tokens_of_a_server(positions: list[dict[str, float]], p_yes: float, flag: str) -> None:
    found = answer_probability(positions)
    assert found.p_yes == pytest.approx(p_yes)
    assert found.flag == flag


def test_a_verifier_never_judges_what_it_was_trained_on() -> None:
    MANIFEST.check([("t2", "r3"), ("t3", "r4")])
    with pytest.raises(ConfigError, match="trained on task t1"):
        MANIFEST.check([("t2", "r3"), ("t1", "elsewhere")])
    with pytest.raises(ConfigError, match=r"trained on repository r2 \(of task t9\)"):
        MANIFEST.check([("t9", "r2")])


def test_a_verifier_comes_back_with_its_manifest(tmp_path: Path, with_tokens: tuple[Any, Any]) -> None:
    model, tokenizer = with_tokens
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_verifier(tmp_path / "v", weights, MANIFEST, model_config=model.config, tokenizer=tokenizer)
    again, other, manifest = load_verifier(tmp_path / "v")
    assert manifest == MANIFEST
    answers = answers_of(make_renderer(tokenizer))
    assert answers_of(make_renderer(other)) == answers
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    assert judge(again, prompts, answers, max_tokens=99) == judge(model, prompts, answers, max_tokens=99)


def test_weights_without_a_manifest_are_no_verifier(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no readable verifier\.json"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
