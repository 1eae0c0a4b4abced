"""A one-turn bandit: some arms, each pays its own amount. Nothing tells which one is best; only rewards do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import ClassVar

from swe_rl.protocols import EnvStep
from swe_rl.types import Reward, StopReason, Task, ToolCall

PAYS: Mapping[str, float] = {"red": 0.2, "green": 0.6, "blue": 1.0, "white": 0.4}
PROMPT = "pull one arm: " + ", ".join(PAYS)


class Bandit:
    """Implements Game. The episode is over with the first arm."""

    signatures: ClassVar[Mapping[str, tuple[str, ...]]] = {"pull": ("arm",)}

    def __init__(self) -> None:
        self._arm = ""

    async def reset(self, task: Task) -> list[Mapping[str, str]]:
        self._arm = ""
        return [{"role": "user", "content": task.problem_statement}]

    async def step(self, call: ToolCall) -> EnvStep:
        arm = call.arguments.get("arm", "").strip()
        if call.name != "pull" or arm not in PAYS:
            return EnvStep(observation=f"there is no such arm; {PROMPT}")
        self._arm = arm
        return EnvStep(observation="", done=True, stop_reason=StopReason.SUBMITTED)

    def result(self) -> bytes:
        return self._arm.encode()

    @staticmethod
    def score(task: Task, result: bytes) -> Reward:
        """What the arm pays; resolved when none pays more."""
        value = PAYS.get(result.decode(), 0.0)
        return Reward(value=value, terms={"resolved": float(value == max(PAYS.values()))}, tests_total=1)

    @staticmethod
    def tasks(*, split: str, num_tasks: int, seed: int) -> list[Task]:
        return [
            Task(
                task_id=f"bandit/{split}/{seed}/{number}",
                source="bandit",
                split=split,
                repo="",
                base_commit="",
                problem_statement=PROMPT,
                fail_to_pass=(),
                pass_to_pass=(),
                gold_patch=max(PAYS, key=PAYS.__getitem__).encode(),
            )
            for number in range(num_tasks)
        ]

    @staticmethod
    def texts() -> Iterator[str]:
        for arm in PAYS:
            yield from (PROMPT, f"<function=pull><parameter=arm>{arm}</parameter></function>") * 2

    @staticmethod
    def play(task: Task, rng: Random, last_observation: str | None) -> ToolCall:
        """Any arm."""
        return ToolCall(name="pull", arguments={"arm": rng.choice(list(PAYS))})
