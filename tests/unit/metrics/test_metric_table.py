"""The table of metrics: names are unique and well formed, and every metric that code makes is in it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swe_rl.cli.report import main
from swe_rl.errors import ConfigError
from swe_rl.metric_table import METRICS, combine_steps, metric_of, metric_table
from swe_rl.metrics import NAME
from swe_rl.rollout.statistics import rollout_metrics
from swe_rl.training.stats import step_metrics
from swe_rl.types import StepStats

STATS = StepStats(
    step=1,
    policy_version=1,
    loss=0.5,
    grad_norm=2.0,
    skipped=True,
    num_loss_tokens=10,
    num_tokens=20,
    entropy=1.0,
    ratio_clip_frac=0.25,
    kl_rollout=0.1,
    logprob_abs_diff=0.2,
    tokens_per_s=100.0,
    peak_memory_bytes=1000,
    details={"train/ratio_max": 1.5, "grad_norm/mlp": 3.0},
)


def test_names_are_unique_and_well_formed() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(NAME.fullmatch(name.replace("*", "x")) for name in names)
    assert all(metric.unit and metric.reduction and metric.meaning for metric in METRICS)


def test_what_code_makes_is_in_the_table() -> None:
    made = {**step_metrics(STATS), **rollout_metrics({"trajectories": 1.0, "cut": 1.0, "kept": 1.0, "kept_s": 1.0})}
    made |= rollout_metrics({"cut": 1.0, "kept": 1.0, "cut_s": 2.0, "kept_s": 1.0, "filtered_oom": 1.0})
    assert [name for name in made if metric_of(name) is None] == []


def test_a_name_goes_before_its_family() -> None:
    exact, family = metric_of("engine/tokens_per_s"), metric_of("engine/tokens_sampled")
    assert exact is not None
    assert family is not None
    assert (exact.unit, family.unit) == ("tokens/s", "count")
    assert metric_of("nonsense/metric") is None


def test_steps_of_an_iteration_as_one() -> None:
    other = replace(
        STATS, loss=1.5, num_tokens=40, skipped=False, details={"train/ratio_max": 1.2, "train/kl_ref": 0.4}
    )
    found = combine_steps([step_metrics(STATS), step_metrics(other)])
    assert found["train/loss"] == 1.0
    assert found["train/num_tokens"] == 60
    assert found["train/skipped"] == 1
    assert found["train/ratio_max"] == 1.5
    assert found["train/kl_ref"] == 0.4  # only one step has it
    assert not any(math.isnan(value) for value in found.values())
    with pytest.raises(KeyError, match="nonsense/metric"):
        combine_steps([{"nonsense/metric": 1.0}])


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--metrics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == metric_table().splitlines()
    assert len(lines) == len(METRICS) + 2
    assert all(line.count(" | ") == 4 for line in lines)
    with pytest.raises(ConfigError, match="swe-rl report needs RUN"):
        main([])
