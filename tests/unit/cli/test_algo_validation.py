"""The group `algo`: combinations that would do nothing or mislead are refused, every file of conf/algo is what it
says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swe_rl.algorithms.aggregation import MODES
from swe_rl.algorithms.penalties import UNITS
from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import AlgoConfig, RolloutConfig, TrainConfig
from swe_rl.config.algo import BOUNDS, bypasses, validate_algo, validate_rl
from swe_rl.config.stop_presets import STOP_PRESETS, stop_map
from swe_rl.errors import ConfigError
from swe_rl.ops.token_loss import CORRECTIONS, KL_ESTIMATORS
from swe_rl.types import StopReason

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(path.stem for path in (ROOT / "conf" / "algo").glob("*.yaml"))


def check(algo: AlgoConfig, rollout: RolloutConfig) -> None:
    BOUNDS.check(algo, "algo")
    validate_algo(algo)
    validate_rl(algo, rollout)


def refusal(*, rollout: dict[str, Any] | None = None, **algo: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(AlgoConfig(**algo), RolloutConfig(**(rollout or {})))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"ratio_rule": "on_policy", "clip_high": 0.1},
            "algo.clip_high=0.1 does nothing with algo.ratio_rule=on_policy",
        ),
        ({"ratio_rule": "cispo", "dual_clip": 3.0}, "algo.dual_clip=3.0 does nothing with algo.ratio_rule=cispo"),
        ({"dual_clip": 0.5}, "algo.dual_clip=0.5 must be above 1"),
        ({"singleton": "reward", "drop_uniform_groups": True}, "algo.singleton=reward does nothing with algo.drop_uni"),
        ({"correction": "tis", "correction_low": 0.9}, "algo.correction_low=0.9 does nothing with algo.correction=tis"),
        ({"correction": "mask", "correction_low": 3.0}, "algo.correction_low=3.0 is above algo.correction_cap=2.0"),
        ({"gamma": 0.9}, "algo.gamma=0.9 does nothing with algo.advantage=leave_one_out, only with gae"),
        ({"gamma": 1.5, "advantage": "gae"}, "algo.gamma must be between 0 and 1"),
        ({"advantage": "gae", "permute_advantages": True}, "algo.permute_advantages=True does nothing with"),
        ({"aggregation": "token_mean", "normalizer_tokens": 9}, "algo.normalizer_tokens=9 does nothing with"),
        ({"refill_rounds": 3}, "algo.refill_rounds=3 does nothing with algo.drop_uniform_groups=False"),
        ({"length_penalty": "turns"}, "algo.length_penalty_end=0 must be more than algo.length_penalty_start=0"),
        ({"length_penalty_end": 4}, "algo.length_penalty_end=4 does nothing with algo.length_penalty=none"),
        ({"kl_in": "reward"}, "algo.kl_in=reward does nothing with algo.kl_coeff=0"),
        ({"stop_preset": "mine"}, "algo.stop_preset='mine' is unknown: use one of compact"),
        ({"stop_preset": "nebius", "run_tests_on_filtered": False}, "algo.run_tests_on_filtered=false does nothing"),
        ({"epochs": 0}, "algo.epochs must be positive"),
        (
            {"correction": "tis", "old_policy": "rollout"},
            "algo.correction=tis does nothing with algo.old_policy=rollout",
        ),
        ({"ratio_rule": "on_policy", "old_policy": "rollout"}, "algo.ratio_rule=on_policy uses no old policy"),
    ],
)
def test_what_cannot_act_is_refused(settings: dict[str, Any], words: str) -> None:
    assert words in refusal(**settings)


@pytest.mark.parametrize(
    ("algo", "rollout", "words"),
    [
        ({"correction": "mask"}, {"max_staleness": 1}, "the ratio is taken against the engine's logprobs already"),
        ({"old_policy": "recompute"}, {"max_staleness": 1}, "takes rollouts of older weights"),
        ({"advantage": "turn_level"}, {"group_size": 1}, "leaves nobody for algo.advantage=turn_level"),
        ({"advantage": "group_std"}, {"group_size": 1}, "rollout.group_size=1 makes every advantage 0"),
    ],
)
def test_against_the_rollouts(algo: dict[str, Any], rollout: dict[str, Any], words: str) -> None:
    assert words in refusal(rollout=rollout, **algo)


def test_stale_rollouts_may_be_decoupled_or_bypassed() -> None:
    stale = RolloutConfig(max_staleness=2)
    assert bypasses(AlgoConfig(), stale)
    assert not bypasses(AlgoConfig(), RolloutConfig())
    decoupled = AlgoConfig(old_policy="recompute", correction="tis")
    validate_rl(decoupled, stale)
    assert not bypasses(decoupled, stale)
    validate_rl(AlgoConfig(advantage="gae"), RolloutConfig(group_size=1))
    validate_rl(AlgoConfig(advantage="group_mean", singleton="reward"), RolloutConfig(group_size=1))


def test_names_are_those_of_the_code_behind_them() -> None:
    assert set(BOUNDS.choices["aggregation"]) == set(MODES)
    assert set(BOUNDS.choices["length_penalty"]) == set(UNITS)
    assert set(BOUNDS.choices["kl_estimator"]) == set(KL_ESTIMATORS)
    assert set(CORRECTIONS) <= set(BOUNDS.choices["correction"])


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_the_group_is_valid(name: str) -> None:
    algo = compose_config(TrainConfig, "train", [f"algo={name}"]).algo
    BOUNDS.check(algo, "algo")
    validate_algo(algo)
    validate_rl(algo, RolloutConfig())


def test_published_numbers() -> None:
    found = {name: compose_config(TrainConfig, "train", [f"algo={name}"]).algo for name in FILES}
    deepswe, nebius, dapo = found["deepswe_v01"], found["nebius"], found["dapo"]
    assert (deepswe.clip_low, deepswe.clip_high, deepswe.normalizer_tokens) == (0.2, 0.28, 32_768)
    assert (deepswe.advantage, deepswe.aggregation, deepswe.kl_coeff, deepswe.entropy_coeff) == (
        *("leave_one_out", "seq_sum_const"),
        *(0.0, 0.0),
    )
    assert (nebius.clip_low, nebius.clip_high, nebius.aggregation) == (0.2, 0.3, "token_mean")
    assert (nebius.length_penalty, nebius.length_penalty_start, nebius.length_penalty_end) == ("turns", 10, 40)
    assert (dapo.clip_low, dapo.clip_high, dapo.refill_rounds) == (0.2, 0.28, 9)
    assert (dapo.uniform_by, nebius.uniform_by) == ("reward", "worth")
    assert (found["gspo"].clip_low, found["gspo"].clip_high) == (3e-4, 4e-4)


def test_presets_of_the_stop_reason_map() -> None:
    """A4 of the notes: v0.1 leaves an outlasting command in, rLLM today drops, SkyRL masks and keeps turns, Nebius
    keeps all."""
    for name, reasons in STOP_PRESETS.items():
        assert set(reasons) <= {str(reason) for reason in StopReason}, name
        assert not {"infra_error", "cancelled"} & set(reasons), "outages are nobody's choice"
    v01, rllm, skyrl = (STOP_PRESETS[name] for name in ("deepswe_v01", "rllm_main", "skyrl"))
    assert set(v01) == {"max_tokens", "context_limit", "max_turns", "timeout"}
    assert set(v01.values()) == {"mask"}
    assert set(rllm.values()) == {"drop"}
    assert "max_turns" in rllm
    assert skyrl["no_tool_call"] == "mask"
    assert "max_turns" not in skyrl
    assert STOP_PRESETS["nebius"] == {}


def test_entries_override_their_preset() -> None:
    algo = AlgoConfig(stop_preset="compact", stop_reasons={"max_turns": "keep", "oom": "drop"})
    assert stop_map(algo) == {
        **STOP_PRESETS["compact"],
        "max_turns": "keep",
        "oom": "drop",
    }
