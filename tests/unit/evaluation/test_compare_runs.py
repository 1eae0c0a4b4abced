"""Paired comparison of two evaluations, of ours and of reports that others write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_parts import real_data

from swe_rl.cli.dispatch import main
from swe_rl.errors import ConfigError
from swe_rl.evaluation.compare import compare, read_outcomes
from swe_rl.evaluation.statistics import clustered_mean, mean_of_runs, pass_at_k

FIRST = {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [1.0, 0.0], "d": [0.0, 0.0], "only": [1.0]}
SECOND = {"a": [1.0], "b": [0.0], "c": [0.0], "d": [1.0], "e": [1.0]}


def row(phase: str, by_task: dict[str, list[float]]) -> dict[str, object]:
    return {"phase": phase, "split": "heldout", "mode": "sampled", "by_task": by_task}


def test_by_hand() -> None:
    found = compare(FIRST, SECOND)
    assert found.difference.mean == pytest.approx((0 + 0.5 + 0.5 - 1) / 4)
    assert found.difference.num_tasks == 4
    assert (found.only_first, found.only_second, found.both, found.neither) == (1, 1, 1, 1)
    assert found.p_mcnemar == 1.0
    assert found.p_sign == 1.0
    assert found.better == ("b", "c")
    assert found.worse == ("d",)
    with pytest.raises(ValueError, match="no task in common"):
        compare({"a": [1.0]}, {"b": [1.0]})


def test_runs_reports_and_plain_objects_are_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "results.json").write_text(json.dumps([row("base", SECOND), row("rl", FIRST)]))
    assert read_outcomes(str(run)) == {"heldout sampled": FIRST}, "the last phase by default"
    assert read_outcomes(f"{run}:base") == {"heldout sampled": SECOND}
    report = tmp_path / "report.json"
    report.write_text(
        json.dumps({"resolved_ids": ["a"], "unresolved_ids": ["b"], "error_ids": [], "total_instances": 2})
    )
    assert read_outcomes(str(report)) == {"": {"a": [1.0], "b": [0.0]}}
    plain = tmp_path / "plain.json"
    plain.write_text('{"b": true, "a": false}')
    assert read_outcomes(str(plain)) == {"": {"a": [0.0], "b": [1.0]}}
    assert read_outcomes(f"{plain},{report}") == {"": {"a": [0.0, 1.0], "b": [1.0, 0.0]}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "holds no results"),
        ('{"a": 3}', "is needed"),
        ("[]", "has no results"),
        ('[{"phase": "x"}]', "no results of ours"),
        ('{"resolved_ids": ["a"], "total_instances": 500}', "1 of 500 tasks: the report was cut"),
    ],
)
def test_what_holds_no_results_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_outcomes(str(file))
    with pytest.raises(ConfigError, match="holds no results"):
        read_outcomes(str(tmp_path / "nowhere"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, outcomes in (("one", FIRST), ("two", SECOND)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps([row("p", outcomes)]))
    pair = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert main(["eval", "compare", *pair]) == 0
    text = capsys.readouterr().out
    assert "heldout sampled, 4 tasks" in text
    assert "A - B: +0.0 points" in text
    assert "only A 1, only B 1, both 1, neither 1; p = 1.0000" in text
    assert "b, c" in text
    assert main(["eval", "compare", "--json", *pair]) == 0
    assert json.loads(capsys.readouterr().out)["heldout sampled"]["better"] == ["b", "c"]
    (tmp_path / "two" / "results.json").write_text(json.dumps([row("p", {"z": [1.0]})]))
    assert main(["eval", "compare", *pair]) == 2
    assert "no task in common" in capsys.readouterr().err


def test_three_published_runs_of_one_agent() -> None:
    """R2EGym-32B on SWE-bench Verified: 156, 162 and 162 of 500."""
    files = [real_data(f"runs/r2egym_32b_verified_iter{i}.json") for i in (1, 2, 3)]
    merged = read_outcomes(",".join(map(str, files)))[""]
    assert len(merged) == 500
    assert {len(values) for values in merged.values()} == {3}
    runs = [sum(values[i] for values in merged.values()) / 500 for i in range(3)]
    assert runs == [156 / 500, 162 / 500, 162 / 500]
    mean, over_runs = mean_of_runs(runs)
    assert mean == pytest.approx(0.32)
    assert over_runs == pytest.approx(0.004)
    assert clustered_mean(merged)[1] > 3 * over_runs, "tasks differ far more than runs"
    at_three = sum(pass_at_k(3, int(sum(values)), 3) for values in merged.values()) / 500
    assert at_three == pytest.approx(sum(max(values) for values in merged.values()) / 500)
    found = compare(read_outcomes(str(files[0]))[""], read_outcomes(str(files[1]))[""])
    assert found.only_second - found.only_first == 6
    assert found.p_mcnemar > 0.05
