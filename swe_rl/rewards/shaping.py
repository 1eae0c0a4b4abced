"""What a configuration may add to the binary reward. Everything here is off by default.

The value stays a function of the episode; `resolved` in the terms stays what the hidden tests say, so success is
measured the same whatever is shaped. All but the potential (potential.py) may change which policy is best: a price on
lines favours short patches that solve less, a bonus for running tests is earned by running them.
"""

from __future__ import annotations

import re
from dataclasses import replace

from swe_rl.config import RewardConfig
from swe_rl.types import Reward, ToolCall, Trajectory

_RUNS_TESTS = re.compile(
    r"\b(pytest|py\.test|unittest|nosetests|tox|nox|ctest)\b|\brun_?tests?\b|\b(go|cargo|npm|mvn|gradle|make) test\b"
)


def shape_reward(reward: Reward, trajectory: Trajectory, cfg: RewardConfig) -> Reward:
    """`reward` with `agent_tests` (test runs of the agent) among the terms, and the value that `cfg` asks for: each
    summand is a term named like its key. Unchanged value with the defaults."""
    terms = {**reward.terms, "agent_tests": float(num_test_runs(trajectory))}
    value = reward.value
    if cfg.value == "fraction" and "f2p" in terms:
        value = terms["f2p"] * terms["p2p"] if not _failed_before_tests(terms) else 0.0
    for key, amount in (
        ("patch_line_cost", -cfg.patch_line_cost * terms.get("patch_lines", 0.0)),
        ("tamper_cost", -cfg.tamper_cost * terms.get("tamper", 0.0)),
        ("test_bonus", cfg.test_bonus * float(terms["agent_tests"] > 0)),
    ):
        if amount:
            terms[key] = amount
            value += amount
    return replace(reward, value=value, terms=terms)


def num_test_runs(trajectory: Trajectory) -> int:
    """Turns of the agent that ran tests, by the tool for it or by a command that names a test runner."""
    return sum(runs_tests(turn.tool_call) for turn in trajectory.turns if turn.tool_call is not None)


def runs_tests(call: ToolCall) -> bool:
    command = call.arguments.get("command", call.arguments.get("cmd", ""))
    return call.name == "test" or (call.name in ("bash", "execute_bash") and bool(_RUNS_TESTS.search(command)))


def _failed_before_tests(terms: dict[str, float]) -> bool:
    """Nothing was tested: then the fraction of no tests at all must not count as all of them."""
    return not terms.get("tests_run", 0.0)
