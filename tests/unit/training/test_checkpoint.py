"""Checkpoints are whole or absent, whatever moment the writer is killed at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_worker
import forked_ranks
import pytest
import torch

from swe_rl.errors import CheckpointError
from swe_rl.models.attention import PACKED
from swe_rl.training import checkpoint

Make = Callable[..., Any]


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((2, 3), value)},
        "optimizer": {"w": {"step": torch.tensor(4.0), "exp_avg": torch.ones(2, 3)}},
        "step": 4,
        "policy_version": 3,
        "num_skipped_steps": 1,
    }


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, state(), step=12, counters={"phase": 1, "name": "rl"})
    assert path == tmp_path / "checkpoints" / "step-00000012" == checkpoint.latest(tmp_path)
    loaded = checkpoint.load(path)
    assert loaded.counters == {"phase": 1, "name": "rl"}
    assert torch.equal(loaded.backend["model"]["w"], torch.ones(2, 3))
    assert torch.equal(loaded.backend["optimizer"]["w"]["step"], torch.tensor(4.0))
    assert [loaded.backend[k] for k in ("step", "policy_version", "num_skipped_steps")] == [4, 3, 1]


def test_what_is_loaded_stays_in_the_files_until_it_is_copied(tmp_path: Path) -> None:
    """Of many ranks on a node, none has a copy of the whole state of its own; a pruned file stays readable."""
    size = 1 << 25
    whole = {"model": {"w": torch.ones(size // 4)}, "optimizer": {"w": {"m": torch.full((size // 4,), 2.0)}}}
    path = checkpoint.save(tmp_path, whole, step=1)
    command = [sys.executable, str(Path(__file__).with_name("checkpoint_memory.py")), str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    read, with_copy, copy = map(int, done.stdout.split())
    assert copy == size
    assert read < size // 4
    assert with_copy > size // 2, "the measure sees a copy"
    loaded = checkpoint.load(path).backend
    checkpoint.save(tmp_path, {"model": {}, "optimizer": {}}, step=1)  # replaced by the run that goes on
    assert torch.equal(loaded["optimizer"]["w"]["m"], whole["optimizer"]["w"]["m"])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        checkpoint.save(tmp_path, state(step), step=step, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000010", "step-00000100"]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert float(checkpoint.load(newest).backend["model"]["w"][0, 0]) == 100.0


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        path = checkpoint.save(tmp_path, state(value), step=5)
    assert float(checkpoint.load(path).backend["model"]["w"][0, 0]) == 2.0
    assert [p.name for p in path.parent.iterdir()] == ["step-00000005"]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path / "checkpoints" / "step-00000001")


def test_leftovers_of_a_killed_writer_are_ignored_and_removed(tmp_path: Path) -> None:
    good = checkpoint.save(tmp_path, state(), step=1)
    partial = good.parent / ".writing-step-00000002"
    partial.mkdir()
    (partial / "state.json").write_text("{}")
    (good.parent / "step-00000003").mkdir()  # a directory that only looks like one
    assert checkpoint.latest(tmp_path) == good
    checkpoint.save(tmp_path, state(), step=2)
    assert not partial.exists()


@pytest.mark.parametrize("name", ["state.json", "optimizer.pt", "model.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "overwritten"])
def test_damage_is_one_clear_line(tmp_path: Path, name: str, damage: str) -> None:
    path = checkpoint.save(tmp_path, state(), step=1)
    file = path / name
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-20])
    else:
        file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(CheckpointError) as failure:
        checkpoint.load(path)
    assert "\n" not in str(failure.value)
    assert str(path) in str(failure.value)


def test_a_failed_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        checkpoint.save(tmp_path, state(), step=1)


WRITER = """
import sys, torch
from swe_rl.training import checkpoint
step = 0
while True:
    step += 1
    whole = torch.full((300, 1000), float(step))
    value = {"model": {"w": whole}, "optimizer": {"w": {"m": whole}}}
    checkpoint.save(sys.argv[1], value, step=step)
    print(step, flush=True)
"""


def test_sigkill_while_writing_loses_at_most_the_checkpoint_under_way(tmp_path: Path) -> None:
    for attempt in range(3):
        run = tmp_path / str(attempt)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert writer.stdout is not None
        reported = 0
        while reported < 5:
            reported = int(writer.stdout.readline())
        time.sleep(0.003 * attempt)
        writer.send_signal(signal.SIGKILL)
        reported = max([reported, *(int(line) for line in writer.stdout.read().split())])
        writer.wait()
        newest = checkpoint.latest(run)
        assert newest is not None
        value = checkpoint.load(newest).backend
        step = int(newest.name.removeprefix("step-"))
        assert step in (reported, reported + 1)
        assert (value["model"]["w"] == step).all()
        assert (value["optimizer"]["w"]["m"] == step).all()


@pytest.mark.slow
def test_ranks_that_share_the_state_write_it_together(tmp_path: Path) -> None:
    """The worker asserts; a disk that is full, or its own, on one rank leaves the older checkpoint to all."""
    forked_ranks.start(checkpoint_worker, tmp_path)


def test_a_checkpoint_loads_with_transformers(tmp_path: Path, make_backend: Make, make_batches: Make) -> None:
    from transformers import AutoModelForCausalLM

    backend = make_backend()
    backend.train_step(make_batches(), learning_rate=1e-3)
    path = checkpoint.save(tmp_path, backend.state_dict(), step=1, model_config=backend.model.config)
    exported = checkpoint.export(tmp_path / "model", backend.weights(), model_config=backend.model.config)
    for directory in (path, exported):
        loaded = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=PACKED, dtype=torch.float32)
        parameters = dict(loaded.named_parameters())
        for name, weight in backend.weights().items():
            assert torch.equal(parameters[name], weight), name
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert set(checkpoint.load_weights(exported)) == set(backend.weights())
    with pytest.raises(CheckpointError, match=r"no readable model\.safetensors"):
        checkpoint.load_weights(tmp_path / "nowhere")
    resumed = make_backend(seed=3)
    resumed.load_state_dict(checkpoint.load(path).backend)
    for each in (resumed, backend):
        each.train_step(make_batches(seed=4), learning_rate=1e-3)
    assert all(torch.equal(resumed.weights()[name], tensor) for name, tensor in backend.weights().items())


def test_a_writer_killed_between_its_two_renames_leaves_the_older_one(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, state(1.0), step=5)
    aside = path.rename(path.parent / f".replaced-{path.name}")
    assert checkpoint.latest(tmp_path) == aside
    assert float(checkpoint.load(aside).backend["model"]["w"][0, 0]) == 1.0
    checkpoint.save(tmp_path, state(2.0), step=5)
    assert checkpoint.latest(tmp_path) == path
    assert [p.name for p in path.parent.iterdir()] == [path.name]
