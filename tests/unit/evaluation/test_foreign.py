"""Episodes of mini-swe-agent, of both of its formats, as trajectories."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from real_parts import real_data

from swe_rl.agents import ChatRenderer
from swe_rl.errors import ConfigError
from swe_rl.evaluation.foreign import mini_swe_agent, read_foreign
from swe_rl.rollout.journal import RolloutKey
from swe_rl.testing import ByteTokenizer
from swe_rl.types import StopReason

KEY = RolloutKey("eval-imported-all-sampled", 0, "o__r-1", 2)
OPENING = [{"role": "system", "content": "You work."}, {"role": "user", "content": "Fix it."}]


def fenced(command: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"THOUGHT: so.\n\n```bash\n{command}\n```"}


def called(command: str) -> dict[str, Any]:
    call = {"function": {"name": "bash", "arguments": json.dumps({"command": command})}, "id": "1", "type": "function"}
    return {"role": "assistant", "content": "So.", "tool_calls": [call]}


def document(
    *messages: dict[str, Any], status: str = "Submitted", patch: str = "diff --git a/x b/x\n"
) -> dict[str, Any]:
    info = {"exit_status": status, "submission": patch, "config": {"model": {"model_name": "lab/model"}}}
    return {"info": info, "messages": [*OPENING, *messages], "instance_id": "o__r-1"}


@pytest.mark.parametrize("say", [fenced, called])
def test_turns_commands_and_observations(say: Any) -> None:
    role = "user" if say is fenced else "tool"
    seen = {"role": role, "content": "<returncode>0</returncode>"}
    found = mini_swe_agent(document(say("ls"), seen, say("cat x"), {"role": "exit", "content": "diff"}), where="f")
    assert (found.task_id, found.model, found.patch) == ("o__r-1", "lab/model", b"diff --git a/x b/x\n")
    renderer = ChatRenderer(ByteTokenizer())
    trajectory = found.trajectory(KEY, renderer)
    assert trajectory.trajectory_id == "eval-imported-all-sampled/0/o__r-1/2"
    assert trajectory.stop_reason is StopReason.SUBMITTED
    assert [turn.tool_call.arguments["command"] for turn in trajectory.turns if turn.tool_call] == ["ls", "cat x"]
    assert [turn.observation for turn in trajectory.turns] == ["<returncode>0</returncode>", ""]
    text = ByteTokenizer().decode(trajectory.token_ids)
    for part in ("You work.", "Fix it.", "```bash\nls\n```", "<returncode>0</returncode>", "```bash\ncat x\n```"):
        assert part in text
    assert all(math.isnan(x) for turn in trajectory.turns for x in turn.completion.rollout_logprobs)


def test_a_message_without_a_command_is_a_format_error() -> None:
    lost = {"role": "assistant", "content": "I think."}
    broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}
    trajectory = mini_swe_agent(document(lost, broken), where="f").trajectory(KEY, ChatRenderer(ByteTokenizer()))
    assert [turn.format_error for turn in trajectory.turns] == [True, True]


@pytest.mark.parametrize(
    ("status", "reason", "has_patch"),
    [
        ("LimitsExceeded", StopReason.MAX_TURNS, True),
        ("ContextWindowExceededError", StopReason.CONTEXT_LIMIT, True),
        ("APIConnectionError", StopReason.INFRA_ERROR, False),
        ("", StopReason.INFRA_ERROR, False),
    ],
)
def test_endings(status: str, reason: StopReason, has_patch: bool) -> None:
    """An exception is trouble of the machine: no attempt, and never a failure of the policy."""
    found = mini_swe_agent(document(status=status), where="f").trajectory(KEY, ChatRenderer(ByteTokenizer()))
    assert found.stop_reason is reason
    assert (found.patch is not None) == has_patch
    assert found.turns == []


def test_what_cannot_be_graded_is_refused(tmp_path: Path) -> None:
    for bad, words in (([], "messages only"), ({"info": {}}, "needs instance_id and messages")):
        with pytest.raises(ConfigError, match=words):
            mini_swe_agent(bad, where="f")
    with pytest.raises(ConfigError, match=r"has no \*.traj.json"):
        read_foreign(tmp_path)
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ConfigError, match="jsonl file of predictions"):
        read_foreign(tmp_path / "x.txt")
    (tmp_path / "a.traj.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_foreign(tmp_path)


def test_a_submission_that_lost_its_last_newline_gets_it_back() -> None:
    assert mini_swe_agent(document(patch="diff\n+x"), where="f").patch == b"diff\n+x\n"
    assert mini_swe_agent(document(patch=" \n"), where="f").patch == b" \n"


def test_real_episodes() -> None:
    folder = real_data("trajectories/mini_swe_agent")
    (old,) = read_foreign(folder / "django__django-16255.traj.json")
    (new,) = read_foreign(folder / "sqlfluff__sqlfluff-2419.toolcall.traj.json")
    renderer = ChatRenderer(ByteTokenizer())
    for found, turns, model in ((old, 17, "google/gemini-3-pro-preview"), (new, None, "deepseek/deepseek-chat")):
        assert found.patch.startswith(b"diff --git a/")
        assert found.model == model
        trajectory = found.trajectory(KEY, renderer)
        assert trajectory.stop_reason is StopReason.SUBMITTED
        assert not any(turn.format_error for turn in trajectory.turns)
        assert turns is None or len(trajectory.turns) == turns
    with pytest.raises(ConfigError, match="messages only"):
        read_foreign(folder / "local.traj.json")
