"""Bugs of other systems in tokens, masks and logprobs, each with its formula beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from immunity import immune
from torch import Tensor

from swe_rl import ops
from swe_rl.batching import pack_row, to_samples
from swe_rl.errors import InvariantError
from swe_rl.inference.sampling import sample
from swe_rl.types import Completion, Reward, StopReason, TrainSample, Trajectory, Turn

END, NEWLINE, HEADER, WORD = 90, 91, 92, 5


def trajectory(turns: Sequence[tuple[Sequence[int], Sequence[int]]], *, versions: Sequence[int] = ()) -> Trajectory:
    return Trajectory(
        trajectory_id="t",
        task_id="t",
        group_id="g",
        rollout_index=0,
        turns=[
            Turn(
                context_ids=list(context),
                completion=Completion(
                    token_ids=list(ids),
                    rollout_logprobs=[-0.5] * len(ids),
                    finish_reason="stop",
                    policy_version=versions[index] if versions else 0,
                    policy_version_max=(versions[index] if versions else 0) + 1,
                ),
                tool_call=None,
                observation="",
            )
            for index, (context, ids) in enumerate(turns)
        ],
        stop_reason=StopReason.SUBMITTED,
        temperature=1.0,
        reward=Reward(value=1.0),
    )


def test_history_tokenised_again() -> None:
    """rLLM 272, TRL 5242: text went back into tokens; "ab" sampled as a + b comes back as one token."""
    text_of, id_of = {1: "a", 2: "b", 3: "ab"}, {"ab": 3, "a": 1, "b": 2}

    def again(made: Trajectory) -> list[int]:
        text = "".join(text_of[i] for i in made.token_ids)
        ids = []
        while text:
            longest = max((piece for piece in id_of if text.startswith(piece)), key=len)
            ids.append(id_of[longest])
            text = text[len(longest) :]
        return ids

    def check(ids_of: Callable[[Trajectory], list[int]]) -> None:
        made = trajectory([([1], [1, 2])])
        assert ids_of(made) == [1, 1, 2]

    immune(check, ours=lambda made: to_samples(made, 1.0)[0].input_ids, buggy=again)


def test_loss_on_header_and_on_the_newline_after_the_end_token() -> None:
    """SkyRL 710, slime 1861: the mask came from roles or from a search for the end token."""
    made = trajectory([([HEADER, NEWLINE], [WORD, END]), ([NEWLINE, HEADER, 7, HEADER], [WORD, WORD, END])])

    def by_role(turns: Trajectory) -> list[bool]:
        mask, inside = [], False
        for token in turns.token_ids:
            inside = inside or token == HEADER
            mask.append(inside)
            inside = inside and token != NEWLINE
        return mask

    def check(mask_of: Callable[[Trajectory], list[bool]]) -> None:
        trained = [i for i, m in zip(made.token_ids, mask_of(made), strict=True) if m]
        assert trained == [WORD, END, WORD, WORD, END]

    immune(check, ours=lambda turns: to_samples(turns, 1.0)[0].loss_mask, buggy=by_role)


def test_training_on_history_turns() -> None:
    """NeMo-RL 2176: "assistant" in the prompt (a demonstration) trained like what the policy said itself."""
    made = trajectory([([HEADER, WORD, END, HEADER], [WORD, END])])

    def by_end_token(turns: Trajectory) -> list[bool]:
        return [token in (WORD, END) for token in turns.token_ids]

    def check(mask_of: Callable[[Trajectory], list[bool]]) -> None:
        assert mask_of(made) == [False] * 4 + [True] * 2

    immune(check, ours=lambda turns: to_samples(turns, 1.0)[0].loss_mask, buggy=by_end_token)


def test_an_appended_end_token_trains_without_a_logprob() -> None:
    """SkyRL 799: an end token that nobody sampled was appended; it must be context, or be refused."""
    cut = trajectory([([1], [WORD])])

    def appended(turns: Trajectory) -> tuple[list[int], list[bool]]:
        ids = [*turns.token_ids, END]
        return ids, [i in (WORD, END) for i in ids]

    def sampled_only(turns: Trajectory) -> tuple[list[int], list[bool]]:
        (found,) = to_samples(turns, 1.0)
        return found.input_ids, found.loss_mask

    def check(tokens_of: Callable[[Trajectory], tuple[list[int], list[bool]]]) -> None:
        assert sum(tokens_of(cut)[1]) == cut.num_sampled_tokens

    immune(check, ours=sampled_only, buggy=appended)
    missing = trajectory([([1], [WORD, END])])
    missing.turns[0].completion.rollout_logprobs.pop()
    with pytest.raises(InvariantError, match="2 sampled ids, 1 logprobs"):
        to_samples(missing, 1.0)


def test_logprob_of_the_first_entry_instead_of_the_sampled_token() -> None:
    """NeMo-RL 3297: with several logprobs per position the first is the most likely token, not the sampled one."""

    def first_entry(logits: Tensor, ids: Tensor) -> Tensor:
        return torch.log_softmax(logits, dim=-1).topk(2, dim=-1).values[:, 0]

    def engine(logits: Tensor, ids: Tensor) -> Tensor:
        draws = torch.tensor([0.999], dtype=torch.float64)
        found, logprobs = sample(logits, torch.ones(1), draws)
        assert torch.equal(found, ids)
        return logprobs

    def check(logprob_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        logits, unlikely = torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([2])
        want = torch.log_softmax(logits, dim=-1)[:, 2]
        torch.testing.assert_close(logprob_of(logits, unlikely), want)

    immune(check, ours=engine, buggy=first_entry)


def test_ratio_of_two_at_temperature_below_one() -> None:
    """TRL 4159, open-instruct 1678: the trainer did not divide logits by the sampling temperature."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 8), torch.randn(11, 8)
    labels = (hidden @ weight.T).argmax(dim=-1)
    engine = torch.log_softmax(hidden @ weight.T / 0.6, dim=-1).gather(1, labels[:, None])[:, 0]

    def raw(temperature: float) -> Tensor:
        return ops.linear_logprob(hidden, weight, labels)[0]

    def scaled(temperature: float) -> Tensor:
        return ops.linear_logprob(hidden, weight, labels, temperature=temperature)[0]

    def check(trainer: Callable[[float], Tensor]) -> None:
        torch.testing.assert_close((trainer(0.6) - engine).exp(), torch.ones(4), rtol=1e-5, atol=1e-5)

    immune(check, ours=scaled, buggy=raw)


def test_the_label_shift_happens_once() -> None:
    """Old logprobs, mask and advantages must move with the labels, all of them exactly once."""
    made = TrainSample(
        trajectory_id="t",
        input_ids=[1, 2, 3],
        loss_mask=[False, False, True],
        rollout_logprobs=[0.0, 0.0, -0.3],
        advantages=[0.0, 0.0, 2.0],
        turn_ids=[-1, -1, 0],
        policy_version=0,
        temperature=1.0,
        token_weights=[0.0, 0.0, 1.0],
        old_logprobs=[0.0, 0.0, -0.4],
        ref_logprobs=[0.0, 0.0, -0.5],
        sequence_coeff=[3.0, 3.0, 3.0],
        value_targets=[math.nan, math.nan, 0.7],
    )

    def unshifted(source: TrainSample) -> dict[str, list[float]]:
        return {"old_logprobs": source.old_logprobs, "value_targets": source.value_targets}

    def packed(source: TrainSample) -> dict[str, list[float]]:
        batch = pack_row([source])
        assert batch.old_logprobs is not None
        assert batch.value_targets is not None
        return {"old_logprobs": batch.old_logprobs.tolist(), "value_targets": batch.value_targets.tolist()}

    def check(columns: Callable[[TrainSample], dict[str, list[float]]]) -> None:
        found = columns(made)
        assert found["old_logprobs"][1] == pytest.approx(-0.4)  # token 1 predicts token 2
        assert found["value_targets"][1] == pytest.approx(0.7)  # and its hidden state is the state before the turn

    immune(check, ours=packed, buggy=unshifted)


def test_the_version_of_a_rollout_is_the_oldest_that_sampled_it() -> None:
    """rLLM 622, AReaL 1569: the version was read after generation, so staleness was under-counted; a placeholder of -1
    for prompt tokens poisoned the minimum."""
    made = trajectory([([1], [2]), ([3], [4])], versions=[3, 5])

    def read_late(turns: Trajectory) -> int:
        return max(turn.completion.policy_version_max for turn in turns.turns)

    def with_placeholder(turns: Trajectory) -> int:
        return min(-1, *(turn.completion.policy_version for turn in turns.turns))

    def check(version_of: Callable[[Trajectory], int]) -> None:
        assert version_of(made) == 3

    for buggy in (read_late, with_placeholder):
        immune(check, ours=lambda turns: to_samples(turns, 1.0)[0].policy_version, buggy=buggy)


def test_a_rollout_without_logprobs_does_not_crash_the_batch() -> None:
    """slime 2124: an aborted rollout had no logprobs and took the whole batch down. Here it has no token either."""
    aborted = trajectory([([1, 2], [])])

    def indexed(turns: Trajectory) -> list[float]:
        return [turns.turns[0].completion.rollout_logprobs[0]]

    def check(logprobs_of: Callable[[Trajectory], list[float]]) -> None:
        assert logprobs_of(aborted) == [0.0, 0.0]

    immune(check, ours=lambda turns: to_samples(turns, 1.0)[0].rollout_logprobs, buggy=indexed)


def test_two_documents_of_a_row_do_not_see_each_other() -> None:
    """prime-rl 3003: packed documents leaked state. Positions restart, and no key is visible beyond its document."""
    one, two = (to_samples(trajectory([([1], [2, 3])]), 1.0)[0] for _ in range(2))

    def glued(samples: Sequence[TrainSample]) -> list[int]:
        return list(range(sum(len(s.input_ids) for s in samples)))

    def check(positions: Callable[[Sequence[TrainSample]], list[int]]) -> None:
        assert positions([one, two]) == [0, 1, 2, 0, 1, 2]

    immune(check, ours=lambda samples: pack_row(samples).position_ids.tolist(), buggy=glued)
