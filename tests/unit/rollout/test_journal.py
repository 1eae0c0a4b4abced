"""The journal: exact round trips, broken tails, kills in mid-write, Parquet."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from swe_rl.rollout import Journal, RolloutKey
from swe_rl.rollout.journal import read_journal
from swe_rl.types import Completion, Reward, StopReason, ToolCall, Trajectory, Turn


def test_reading_does_not_wait_for_a_write_of_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`get` runs on the event loop: a slow fsync elsewhere must not stop it."""
    journal = Journal(tmp_path)
    journal.append(RolloutKey("rl", 0, "t", 0), make_trajectory("t", 0))
    syncing, go_on, sync = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        syncing.set()
        assert go_on.wait(30)
        sync(descriptor)

    monkeypatch.setattr("swe_rl.rollout.journal.os.fsync", slow)
    writer = threading.Thread(target=journal.append, args=(RolloutKey("rl", 0, "t", 1), make_trajectory("t", 1)))
    writer.start()
    assert syncing.wait(30)
    reader = threading.Thread(target=journal.get, args=(RolloutKey("rl", 0, "t", 0),))
    reader.start()
    reader.join(5)
    blocked = reader.is_alive()
    unfinished = journal.get(RolloutKey("rl", 0, "t", 1)) if not blocked else None
    go_on.set()
    writer.join(30)
    assert (blocked, unfinished) == (False, None)
    assert journal.get(RolloutKey("rl", 0, "t", 1)) == make_trajectory("t", 1)
    journal.close()


def make_trajectory(task_id: str = "t", index: int = 0, *, seed: int = 0, reward: bool = True) -> Trajectory:
    """Random, awkward (empty turn list, odd texts, bytes that are no text); logprobs exact in fp32."""
    rng = random.Random(f"{task_id}/{index}/{seed}")
    turns = []
    for number in range(rng.randrange(4)):
        n = rng.randrange(1, 9)
        completion = Completion(
            token_ids=[rng.randrange(2**31 - 1) for _ in range(n)],
            rollout_logprobs=[-rng.randrange(1, 4096) / 256 for _ in range(n)],
            finish_reason=rng.choice(["stop", "length"]),
            policy_version=rng.randrange(9),
            policy_version_max=9,
        )
        call = ToolCall(name="bash", arguments={"command": "é\n\0\u2028</parameter>"}) if number % 2 == 0 else None
        turns.append(
            Turn(
                context_ids=[rng.randrange(1000) for _ in range(rng.randrange(5))],
                completion=completion,
                tool_call=call,
                observation="ok \U0001f600\n",
                format_error=call is None,
                repaired="a brace" if number == 1 else "",
                kept_context=3 if number == 2 else None,
            )
        )
    return Trajectory(
        trajectory_id=f"p/0/{task_id}/{index}",
        task_id=task_id,
        group_id=f"p/0/{task_id}",
        rollout_index=index,
        turns=turns,
        stop_reason=rng.choice(list(StopReason)),
        temperature=0.7,
        detail="why",
        patch=rng.choice([None, b"", bytes(range(256))]),
        reward=Reward(value=1.0, terms={"f2p": 0.5}, tests_passed=1, tests_total=2, test_status={"a::b": "passed"})
        if reward
        else None,
        timings_s={"policy": 0.1 + index, "grade": 1e-9},
    )


def key(index: int = 0, task_id: str = "t", step: int = 0, phase: str = "rl") -> RolloutKey:
    return RolloutKey(phase, step, task_id, index)


def test_append_get_reopen(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    items = {
        key(i, step=i % 2, phase=p): make_trajectory(index=i, reward=i != 3) for i in range(5) for p in ("rl", "a/b c")
    }
    for where, item in items.items():
        journal.append(where, item)
    for reader in (journal, Journal(tmp_path)):
        for where, item in items.items():
            assert reader.get(where) == item
        assert reader.get(key(9)) is None
        assert [t.rollout_index for t in reader.finished("rl", 0)] == [0, 2, 4]
    with pytest.raises(ValueError, match="is in the journal already"):
        Journal(tmp_path).append(key(0), items[key(0)])
    journal.close()


@pytest.mark.parametrize("cut", [1, 4, 8, 9, 50])
def test_a_broken_tail_is_ignored_and_written_over(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path)
    for i in range(3):
        journal.append(key(i), make_trajectory(index=i))
    journal.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    second = len(data) - _last_frame_bytes(data)
    for broken in (data[: second + cut], data[:-1] + bytes([data[-1] ^ 1]), data[:second] + bytes(cut)):
        path.write_bytes(broken)
        again = Journal(tmp_path)
        assert [t.rollout_index for t in again.finished("rl", 0)] == [0, 1]
        again.append(key(2), make_trajectory(index=2, seed=1))
        again.close()
        assert list(read_journal(path))[2] == make_trajectory(index=2, seed=1)


def _last_frame_bytes(data: bytes) -> int:
    position = 0
    while True:
        length = 8 + int.from_bytes(data[position : position + 4], "little")
        if position + length == len(data):
            return length
        position += length


def test_parquet_round_trip_and_columns(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    items = [make_trajectory(f"t{i % 3}", i, reward=i % 4 != 0) for i in range(12)]
    for item in items:
        journal.append(key(item.rollout_index, item.task_id), item)
    path = journal.compact("rl", 0)
    assert [p.name for p in tmp_path.iterdir()] == [path.name] == ["rl-000000.parquet"]
    want = sorted(items, key=lambda t: (t.task_id, t.rollout_index))
    for reader in (journal, Journal(tmp_path)):
        assert reader.finished("rl", 0) == want
    assert journal.compact("rl", 0) == path
    rows = pq.read_table(path).to_pylist()
    for row, item in zip(rows, want, strict=True):
        assert row["token_ids"] == item.token_ids
        assert sum(row["loss_mask"]) == item.num_sampled_tokens
        assert [p for p, m in zip(row["rollout_logprobs"], row["loss_mask"], strict=True) if m] == [
            p for turn in item.turns for p in turn.completion.rollout_logprobs
        ]
        assert all(p == 0 for p, m in zip(row["rollout_logprobs"], row["loss_mask"], strict=True) if not m)
        assert row["reward"] == (item.reward.value if item.reward else None)
        assert row["patch"] == item.patch
        assert row["stop_reason"] == item.stop_reason


def test_additions_after_compaction_and_both_files(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(key(0), make_trajectory(index=0))
    before = (tmp_path / "rl-000000.journal").read_bytes()
    journal.compact("rl", 0)
    (tmp_path / "rl-000000.journal").write_bytes(before)  # killed between rename and removal
    again = Journal(tmp_path)
    assert again.finished("rl", 0) == [make_trajectory(index=0)]
    again.append(key(1), make_trajectory(index=1))
    again.compact("rl", 0)
    assert Journal(tmp_path).finished("rl", 0) == [make_trajectory(index=0), make_trajectory(index=1)]
    assert len(list(tmp_path.iterdir())) == 1
    assert journal.compact("empty", 3).exists()
    assert Journal(tmp_path).finished("empty", 3) == []


def test_compact_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    keys = [key(0), key(0, step=12), key(0, phase="eval-a/b-c.d", step=3)]
    for where in keys:
        journal.append(where, make_trajectory())
    assert len(journal.compact_all()) == 3
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet"}
    assert all(Journal(tmp_path).get(where) == make_trajectory() for where in keys)
    assert journal.compact_all() == []


def test_a_failed_write_leaves_no_broken_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append(key(0), make_trajectory(index=0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _disk_full)
        with pytest.raises(OSError, match="No space left"):
            journal.append(key(1), make_trajectory(index=1))
    journal.append(key(2), make_trajectory(index=2))
    assert [t.rollout_index for t in Journal(tmp_path).finished("rl", 0)] == [0, 2]
    journal.close()


def _disk_full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_threads(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    def write(part: int) -> None:
        for i in range(part, 40, 4):
            journal.append(key(i), make_trajectory(index=i))

    threads = [threading.Thread(target=write, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert Journal(tmp_path).finished("rl", 0) == [make_trajectory(index=i) for i in range(40)]


WRITER = """
import sys
from swe_rl.rollout import Journal, RolloutKey
from tests.unit.rollout.test_journal import make_trajectory
journal = Journal(sys.argv[1])
for i in range(100000):
    if journal.get(RolloutKey("rl", 0, "t", i)) is None:
        journal.append(RolloutKey("rl", 0, "t", i), make_trajectory(index=i))
        print(i, flush=True)
"""


def test_sigkill_loses_nothing_that_was_reported(tmp_path: Path) -> None:
    reported = -1
    for round_number in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                assert int(line) == reported + 1 or int(line) == reported + 2  # one may be on disk but not yet reported
                reported = int(line)
                if reported >= 10 * (round_number + 1):
                    process.send_signal(signal.SIGKILL)
                    break
    found = [t.rollout_index for t in Journal(tmp_path).finished("rl", 0)]
    assert found == list(range(len(found)))
    assert len(found) >= reported + 1
