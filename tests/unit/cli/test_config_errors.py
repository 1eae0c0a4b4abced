"""What a wrong override or file says: one line that names the key, the nearest known one and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from swe_rl.cli.config_errors import suggest
from swe_rl.cli.hydra_entry import compose_all, compose_config, parse_options, sweep_jobs
from swe_rl.config import TrainConfig
from swe_rl.errors import ConfigError


def compose(*overrides: str, config_dir: str = "") -> TrainConfig:
    return compose_config(TrainConfig, "train", overrides, config_dir=config_dir)


def test_overrides_and_experiments_take_effect() -> None:
    plain, changed = (
        compose("experiment=smoke"),
        compose("experiment=smoke", "seed=5", "algo.clip_high=0.5", "phases.0.steps=9"),
    )
    assert isinstance(plain, TrainConfig)
    assert (changed.seed, changed.algo.clip_high, changed.phases[0].steps) == (5, 0.5, 9)
    assert changed.phases[0].name == plain.phases[0].name
    composed = compose_all(TrainConfig, "train", ["experiment=smoke"])
    assert composed.label == "smoke"
    assert "phases:" in composed.yaml


def test_entries_of_a_mapping_can_be_added() -> None:
    assert compose("+algo.stop_reasons.oom=drop").algo.stop_reasons["oom"] == "drop"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo.clip_hgih=1", "algo.clip_hgih is no configuration key: did you mean algo.clip_high?"),
        ("clip_high=1", "clip_high is no configuration key: did you mean algo.clip_high?"),
        ("trainer.clip_high=1", "trainer.clip_high is no configuration key: did you mean algo.clip_high?"),
        ("experimnt=smoke", "experimnt is no configuration key: did you mean experiment?"),
        ("zzz.yyy=3", "zzz is no configuration key: --help lists the keys"),
        ("+algo.invented=1", "algo.invented is no configuration key"),
        ("++invented=1", "invented is no configuration key"),
        ("phases.0.stepz=1", "phases.0.stepz is no configuration key: did you mean phases.0.steps?"),
        ("algo.stop_reasons.oom=mask", "write +algo.stop_reasons.oom=value to add it"),
        (
            "algo.clip_high=abc",
            "algo.clip_high: Value 'abc' of type 'str' could not be converted to Float: give a number",
        ),
        ("model.hidden_size=1.5", "model.hidden_size: Value '1.5' of type 'float' could not be converted to Integer"),
        ("resume=maybe", "resume: Value 'maybe' is not a valid bool (type str): give true or false"),
        ("model.name=null", "model.name: field 'model.name' is not Optional: give a value, not null"),
        ("experiment=smokk", "experiment=smokk does not exist: did you mean smoke?"),
        ("algo.clip_high", "the override 'algo.clip_high' cannot be read"),
        ("algo.clip_high=[1", "the override 'algo.clip_high=[1' cannot be read"),
        ("=3", "the override '=3' names no key"),
        ("", "the override '' names no key"),
        ("~algo.clip_low", "algo.clip_low: AlgoConfig (DictConfig) does not support deletion"),
        ("~seed", "seed"),
        ("algo.clip_high=1,2", "algo.clip_high=1,2 has several values: add -m"),
        ("algo.clip_high=${algo.nothing}", "algo.clip_high: Interpolation key 'algo.nothing' not found"),
        ("phases=[{steps: 3}]", "phases.0.name"),
    ],
)
def test_a_wrong_override_is_one_line_with_key_and_cure(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("experiment=smoke", override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "algo: {clip_hgih: 1}",
            "conf/experiment/mine.yaml: algo.clip_hgih is no configuration key: did you mean algo.clip_high?",
        ),
        ("algo: {clip_high: high}", "algo.clip_high: Value 'high'"),
        ("algo: {clip_high: [1", "a configuration file is no valid YAML"),
        ("phases: [{name: a, stepz: 1}]", "phases.*.stepz is no configuration key: did you mean phases.*.steps?"),
    ],
)
def test_a_wrong_file_is_one_line_with_file_or_key(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{body}\n")
    with pytest.raises(ConfigError) as caught:
        compose("experiment=mine", config_dir=str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_of_own_experiments_is_found(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 77\n")
    assert compose("experiment=mine", config_dir=str(tmp_path)).seed == 77
    with pytest.raises(ConfigError, match="is no directory"):
        compose(config_dir=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("lr", None), ("learning_rate", "trainer.learning_rate"), ("phases.3.nme", "phases.3.name"), ("a.b", "a.c")],
)
def test_suggestions(key: str, nearest: str | None) -> None:
    assert suggest(key, ["trainer.learning_rate", "phases.*.name", "a.c"]) == (nearest if key != "a.b" else None)


def test_options_are_told_from_overrides() -> None:
    options = parse_options(["a=1", "-m", "--config-dir", "d", "b=2"])
    assert (options.overrides, options.multirun, options.config_dir) == (("a=1", "b=2"), True, "d")
    assert parse_options(["--cfg", "job", "a=1"]).overrides == ("a=1",)
    assert parse_options(["--cfg=job"]).show_config
    assert parse_options(["--config-dir=x"]).config_dir == "x"
    for words in (["--multi"], ["-x"], ["--config-dir"]):
        with pytest.raises(ConfigError):
            parse_options(words)


def test_sweeps_are_the_product_of_lists_choices_and_ranges() -> None:
    jobs = sweep_jobs(["seed=1,2", "a.b=range(0,3)", "c=choice(x,y)", "d=[1,2]", "+e.f=1"])
    assert len(jobs) == 2 * 3 * 2
    assert jobs[0] == ("seed=1", "a.b=0", "c=x", "d=[1,2]", "+e.f=1")
    assert jobs[-1] == ("seed=2", "a.b=2", "c=y", "d=[1,2]", "+e.f=1")
    assert sweep_jobs([]) == [()]
    with pytest.raises(ConfigError, match="interval"):
        sweep_jobs(["a=interval(0,1)"])
