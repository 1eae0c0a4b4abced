"""A run directory is made once, and goes on only with the configuration and the ranks it began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from swe_rl.errors import ConfigError
from swe_rl.training import mesh
from swe_rl.training.run_dir import RunDir, check_ranks_agree, open_run_dir

CONFIG = "seed: 0\nresume: false\nthreads: 0\nrun_dir: ''\nphases:\n- name: rl\n  steps: 2\n  betas: [0.9, 0.95]\n"


def make(path: Path, *, config: str = CONFIG, resume: bool = False, world_size: int = 1) -> RunDir:
    return open_run_dir(str(path), label="x", resume=resume, config_yaml=config, world_size=world_size)


def test_resume_takes_the_same_configuration_apart_from_what_is_free(tmp_path: Path) -> None:
    first = make(tmp_path / "run")
    again = make(
        tmp_path / "run",
        config=CONFIG.replace("resume: false", "resume: true").replace("threads: 0", "threads: 4"),
        resume=True,
    )
    assert again == first
    assert (first.path / "config.yaml").read_text() == CONFIG


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed: 0", "seed: 1", "seed=1 is 0 in the run"),
        ("steps: 2", "steps: 3", "phases.rl.steps=3 is 2"),
        ("0.95", "0.99", r"phases.rl.betas.1=0.99 is 0.95"),
        ("seed: 0", "seed: 0\nadded: 1", "added=1 is None"),
        ("seed: 0\n", "", "seed=None is 0"),
    ],
)
def test_another_configuration_is_refused_by_its_first_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    run = make(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "run", config=CONFIG.replace(old, new), resume=True)
    assert (run.path / "config.yaml").read_text() == CONFIG


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "run", world_size=2)
    make(tmp_path / "run", world_size=2, resume=True)
    with pytest.raises(ConfigError, match="has 2 ranks, this one 4"):
        make(tmp_path / "run", world_size=4, resume=True)


def test_a_directory_with_a_run_and_one_without(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        make(tmp_path / "run", resume=True)
    make(tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run"):
        make(tmp_path / "run")


def test_rollouts_of_a_phase_are_found_by_its_exact_name(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    for name in ("rl-2-000000.parquet", "eval-rl-heldout-sampled-000000.journal"):
        (run.rollouts / name).touch()
    assert not run.has_rollouts("rl")
    assert run.has_rollouts("rl-2")
    (run.rollouts / "rank1").mkdir()
    (run.rollouts / "rank1" / "rl-000003.journal").touch()
    assert run.has_rollouts("rl")


def test_a_megatron_run_may_resume_in_another_layout(tmp_path: Path) -> None:
    def config(backend: str, tensor: int) -> str:
        return f"trainer: {{backend: {backend}, tensor_parallel: {tensor}, learning_rate: 0.1}}\n"

    run = str(tmp_path / "megatron")
    open_run_dir(run, label="x", resume=False, config_yaml=config("megatron", 2), world_size=2)
    open_run_dir(run, label="x", resume=True, config_yaml=config("megatron", 1), world_size=2)
    changed = config("megatron", 1).replace("0.1", "0.2")
    with pytest.raises(ConfigError, match=r"trainer\.learning_rate=0\.2 is 0\.1"):
        open_run_dir(run, label="x", resume=True, config_yaml=changed, world_size=2)
    run = str(tmp_path / "torch")
    open_run_dir(run, label="x", resume=False, config_yaml=config("torch", 1))
    with pytest.raises(ConfigError, match=r"trainer\.tensor_parallel=2 is 1"):
        open_run_dir(run, label="x", resume=True, config_yaml=config("torch", 2))


def test_ranks_with_different_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    check_ranks_agree(CONFIG)
    other = CONFIG.replace("steps: 2", "steps: 3")
    monkeypatch.setattr(mesh, "gather_objects", lambda values: [*values, CONFIG, other])
    with pytest.raises(ConfigError, match=r"phases\.rl\.steps is 2 on rank 0 and 3 on rank 2: start all nodes"):
        check_ranks_agree(CONFIG)
