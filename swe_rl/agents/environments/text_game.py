"""A text game with partial observation: a note says where the key lies; only its tag says where the door is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import ClassVar

from swe_rl.protocols import EnvStep
from swe_rl.types import Reward, StopReason, Task, ToolCall

WAYS = ("north", "east", "south", "west")
FEWEST = 2  # moves of the best player
LOST_PER_MOVE = 0.3  # of the value, for each move more
P_RIGHT = 0.6  # chance that the player of the warm start does what it was told
WALL = "a wall"


class TextGame:
    """Implements Game. `task.meta` holds the two ways; the policy sees one of them, and the other when it earned it."""

    signatures: ClassVar[Mapping[str, tuple[str, ...]]] = {"go": ("way",)}

    def __init__(self) -> None:
        self._key, self._door = "", ""
        self._moves: list[str] = []
        self._has_key = False

    async def reset(self, task: Task) -> list[Mapping[str, str]]:
        self._key, self._door = task.meta["key"], task.meta["door"]
        self._moves, self._has_key = [], False
        return [{"role": "user", "content": task.problem_statement}]

    async def step(self, call: ToolCall) -> EnvStep:
        way = call.arguments.get("way", "").strip()
        if call.name != "go" or way not in WAYS:
            return EnvStep(observation="go " + ", ".join(WAYS))
        self._moves.append(way)
        if not self._has_key:
            self._has_key = way == self._key
            return EnvStep(observation=_tag(self._door) if self._has_key else WALL)
        if way == self._door:
            return EnvStep(observation="open", done=True, stop_reason=StopReason.SUBMITTED)
        return EnvStep(observation=WALL)

    def result(self) -> bytes:
        return " ".join(self._moves).encode()

    @staticmethod
    def score(task: Task, result: bytes) -> Reward:
        """1 for the fewest moves, less for each more, 0 when the door stayed shut; resolved with the fewest."""
        moves = result.decode().split()
        after_key = moves[moves.index(task.meta["key"]) + 1 :] if task.meta["key"] in moves else []
        is_open = task.meta["door"] in after_key
        value = max(0.0, 1.0 - LOST_PER_MOVE * (len(moves) - FEWEST)) if is_open else 0.0
        return Reward(value=value, terms={"resolved": float(is_open and len(moves) == FEWEST)}, tests_total=1)

    @staticmethod
    def tasks(*, split: str, num_tasks: int, seed: int) -> list[Task]:
        rng = Random(f"text_game/{split}/{seed}")
        return [_task(f"{split}/{seed}/{k}", split, rng.choice(WAYS), rng.choice(WAYS)) for k in range(num_tasks)]

    @staticmethod
    def texts() -> Iterator[str]:
        for way in WAYS:
            yield from (_note(way), _tag(way), WALL, f"<function=go><parameter=way>{way}</parameter></function>") * 2

    @staticmethod
    def play(task: Task, rng: Random, last_observation: str | None) -> ToolCall:
        """Often where it was told to go: by the note, or by the tag once it was read; else anywhere."""
        told = task.meta["door"] if last_observation == _tag(task.meta["door"]) else task.meta["key"]
        return ToolCall(name="go", arguments={"way": told if rng.random() < P_RIGHT else rng.choice(WAYS)})


def _note(way: str) -> str:
    return f"the key lies {way}"


def _tag(way: str) -> str:
    return f"the key has a tag: {way}"


def _task(name: str, split: str, key: str, door: str) -> Task:
    return Task(
        task_id=f"text_game/{name}",
        source="text_game",
        split=split,
        repo="",
        base_commit="",
        problem_statement=_note(key),
        fail_to_pass=(),
        pass_to_pass=(),
        gold_patch=f"{key} {door}".encode(),
        meta={"key": key, "door": door},
    )
