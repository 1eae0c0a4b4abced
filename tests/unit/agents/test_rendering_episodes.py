"""Episodes in every family and thinking mode: what was sampled is what trains, each token once, under the very context
that the policy saw."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import chat_reference as reference
import chat_tokenizers as tokenizers
import pytest

from swe_rl.agents.episode import run_episode
from swe_rl.agents.formats import FORMATS
from swe_rl.agents.rendering import make_renderer
from swe_rl.batching import to_samples
from swe_rl.config import AgentConfig
from swe_rl.protocols import EnvStep, SamplingParams
from swe_rl.testing import ByteTokenizer, make_task, scripted_logprob
from swe_rl.types import Completion, ToolCall, Trajectory

EPISODES = 100
SETUPS: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "bytes": (ByteTokenizer, {}),
    "chatml": (tokenizers.smollm2, {}),
    "chatml-tool": (tokenizers.thinking, {"observations": "tool"}),
    "qwen3-off": (tokenizers.thinking, {"thinking": "off"}),
    "qwen3-kept": (tokenizers.thinking, {"thinking": "kept", "observations": "tool"}),
    "qwen3-stripped": (tokenizers.thinking, {"thinking": "stripped"}),
    "llama3": (tokenizers.llama3, {}),
    "gpt-oss": (tokenizers.harmony, {}),
    "gpt-oss-stripped": (tokenizers.harmony, {"thinking": "stripped"}),
}


@dataclass
class RandomPolicy:
    """Samples texts in any tokenisation: now and then a word is cut in two, which no tokenizer would do."""

    tokenizer: Any
    renderer: Any
    rng: random.Random
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        self.prompts.append(list(prompt_ids))
        ids = [*self._ids(self._text()), self.renderer.action_ids("")[-1]]
        finished = len(ids) <= params.max_new_tokens and self.rng.random() < 0.9
        ids = ids[: params.max_new_tokens] if finished else ids[: self.rng.randrange(1, len(ids) + 1)]
        self.completions.append(ids)
        return Completion(
            token_ids=ids,
            rollout_logprobs=[scripted_logprob(i) for i in ids],
            finish_reason="stop" if finished else "length",
            policy_version=len(self.prompts),
            policy_version_max=len(self.prompts),
        )

    async def release(self, session: str) -> None:
        pass

    def _text(self) -> str:
        rng = self.rng
        call = FORMATS["hermes"].render("bash", {"command": reference.text(rng, [])})
        answer = reference.text(rng, []) + rng.choice([call, call, call, "no call", "<tool_call>{"])
        thought = rng.choice(["", "<think>\nSo.\n</think>\n\n", "<think></think>", "<think>never closed"])
        if type(self.renderer).__name__ != "HarmonyRenderer":
            return thought + answer
        analysis = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant" if thought else ""
        return f"{analysis}<|channel|>final<|message|>{answer}"

    def _ids(self, text: str) -> list[int]:
        if self.rng.random() < 0.5:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        cuts = sorted(self.rng.randrange(len(text) + 1) for _ in range(2))
        parts = [text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]]
        return [i for part in parts if part for i in self.tokenizer.encode(part, add_special_tokens=False)]


@dataclass
class RandomEnvironment:
    rng: random.Random
    looks: list[str]

    async def reset(self, task: Any) -> list[dict[str, str]]:
        return [{"role": "system", "content": "You repair bugs."}, {"role": "user", "content": "fix it"}]

    async def step(self, call: ToolCall) -> EnvStep:
        done = self.rng.random() < 0.1
        return EnvStep(observation=reference.observation(self.rng, self.looks)[:400], done=done)


def check(trajectory: Trajectory, policy: RandomPolicy, *, branches: bool) -> int:
    """Number of samples. The ids that train in turn n follow exactly the prompt that the policy had in turn n."""
    samples = to_samples(trajectory, 1.0)
    trained = [(sample, at) for sample in samples for at, trains in enumerate(sample.loss_mask) if trains]
    assert len(trained) == sum(len(ids) for ids in policy.completions) == trajectory.num_sampled_tokens
    assert [sample.input_ids[at] for sample, at in trained] == [i for ids in policy.completions for i in ids]
    starts = {sample.turn_ids[at]: (sample, at) for sample, at in reversed(trained)}
    assert sorted(starts) == list(range(len(policy.prompts)))
    for turn, prompt in enumerate(policy.prompts):
        sample, at = starts[turn]
        assert sample.input_ids[:at] == prompt
        logprobs = sample.rollout_logprobs[at : at + len(policy.completions[turn])]
        assert logprobs == [scripted_logprob(i) for i in policy.completions[turn]]
    assert branches or len(samples) == 1
    return len(samples)


@pytest.mark.parametrize("drop", [False, True], ids=["all", "old-dropped"])
@pytest.mark.parametrize("name", SETUPS)
async def test_every_sampled_token_of_a_hundred_episodes_trains_once(name: str, drop: bool) -> None:
    make_tokenizer, settings = SETUPS[name]
    tokenizer = make_tokenizer()
    if name == "llama3":
        tokenizer.chat_template = "no dates"
    renderer = make_renderer(tokenizer, **settings)
    looks = [*map(str, getattr(tokenizer, "all_special_tokens", ())), "<think>", "</tool_response>"]
    limits = AgentConfig(
        max_turns=12,
        max_context_tokens=4000,
        max_turn_tokens=200,
        max_observation_tokens=150,
        keep_observations=1 if drop else 0,
    )
    turns = num_samples = 0
    for episode in range(EPISODES):
        rng = random.Random(f"{name}/{drop}/{episode}")
        policy = RandomPolicy(tokenizer, renderer, rng)
        trajectory = await run_episode(
            make_task(),
            RandomEnvironment(rng, looks),
            policy,
            renderer=renderer,
            action_format=FORMATS["hermes"],
            limits=limits,
            trajectory_id="t",
            group_id="g",
            rollout_index=0,
            seeds=lambda turn: turn,
        )
        num_samples += check(trajectory, policy, branches=drop or "stripped" in name)
        turns += len(trajectory.turns)
    assert renderer.retokenized == 0
    assert turns > 3 * EPISODES
    assert (num_samples > EPISODES) == (drop or "stripped" in name)


def test_the_counter_sees_ids_that_were_not_sampled() -> None:
    renderer = make_renderer(ByteTokenizer())
    renderer._history = lambda sampled: [sampled[0], 7, sampled[2]]  # type: ignore[method-assign]
    assert renderer.history([1, 2, 3]) == [1, 7, 3]
    assert renderer.retokenized == 2, "7, and what follows it"
