"""The report of real run files: numbers arrive, text is escaped, broken input is one line."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from swe_rl.cli import report
from swe_rl.cli.dispatch import main
from swe_rl.cli.report_data import read_run
from swe_rl.cli.svg import Series, bar_chart, line_chart, tick_label, ticks
from swe_rl.metrics import open_metrics
from swe_rl.rollout.journal import Journal, RolloutKey
from swe_rl.types import Completion, Reward, StopReason, ToolCall, Trajectory, Turn

EVIL = '<script>alert("x")</script> & ]]>'


def trajectory(key: RolloutKey, *, value: float | None, stop: StopReason = StopReason.SUBMITTED) -> Trajectory:
    completion = Completion(
        token_ids=[5, 6, 7],
        rollout_logprobs=[-0.5, -0.25, -1.0],
        finish_reason="stop",
        policy_version=0,
        policy_version_max=0,
    )
    call = ToolCall(name="bash", arguments={"command": EVIL})
    turn = Turn(context_ids=[1, 2], completion=completion, tool_call=call, observation=f"seen {EVIL}")
    return Trajectory(
        trajectory_id=key.trajectory_id,
        task_id=key.task_id,
        group_id=key.group_id,
        rollout_index=key.rollout_index,
        turns=[turn, Turn(context_ids=[3], completion=completion, tool_call=None, observation="", format_error=True)],
        stop_reason=stop,
        temperature=1.0,
        patch=b"--- a/x\n+++ b/x\n\xff\n",
        reward=None if value is None else Reward(value=value, tests_passed=1, tests_total=2),
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run <1>"
    with open_metrics(path, console=False, tensorboard=False) as log:
        for step in range(1, 4):
            log.log({"train/loss": 3.0 / step, "train/entropy": math.nan}, phase="warm", step=step)
        for step in range(1, 6):
            counts = {"rollout/solve_none": 4.0 - step, "rollout/solve_partial": step, "rollout/solve_all": 1.0}
            log.log({"rollout/reward_mean": 0.1 * step, "extra/thing_s": 1.5, **counts}, phase="rl", step=step)
    journal = Journal(path / "rollouts")
    for index, value in enumerate([0.0, 1.0, None]):
        key = RolloutKey("rl/x", 3, f"task-{EVIL}", index)
        stop = StopReason.MAX_TURNS if index == 0 else StopReason.SUBMITTED
        journal.append(key, trajectory(key, value=value, stop=stop))
    journal.compact("rl/x", 3)
    journal.close()
    rows = [
        {"phase": "warm", "split": "heldout", "mode": "sampled", "success": 0.45, "stderr": 0.031, "num_tasks": 256},
        {"phase": "rl", "split": "heldout", "mode": "sampled", "success": 0.875, "stderr": 0.0207, "num_tasks": 256},
        {"phase": "rl", "split": "hard", "mode": "greedy", "success": 1, "stderr": math.nan, "num_tasks": 9},
    ]
    (path / "results.json").write_text(json.dumps(rows))
    (path / "config.yaml").write_text(f"seed: 0\nname: '{EVIL}'\n")
    return path


class Collector(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Collector:
    collector = Collector()
    collector.feed(page)
    return collector


def test_the_page_shows_the_numbers_of_every_part(run_dir: Path) -> None:
    page = parsed(report.render(read_run(run_dir)))
    assert "0.875 ± 0.021 n=256" in page.text
    assert "0.450 ± 0.031 n=256" in page.text
    assert "1.000 n=9" in page.text  # no standard error: none is invented
    assert "rollouts: share that passes, and mean reward" in page.text
    assert "extra/thing_s" in page.text
    assert "submitted" in page.text
    assert "max_turns" in page.text
    assert "reward 1, submitted, 2 turns" in page.text
    assert "reward 0, max_turns" in page.text
    assert "no action could be parsed" in page.text
    assert "seed: 0" in page.text


def test_nothing_from_the_run_becomes_markup_and_nothing_is_loaded(run_dir: Path) -> None:
    html = report.render(read_run(run_dir))
    page = parsed(html)
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count(EVIL) >= 5  # task, action, observation, configuration: as text
    for tag, attributes in page.tags:
        assert tag not in ("img", "link", "iframe", "object"), tag
        assert not {"src", "href"} & set(attributes), (tag, attributes)
    assert "url(" not in html
    assert "@import" not in html


def test_every_chart_is_well_formed_and_inside_its_frame(run_dir: Path) -> None:
    html = report.render(read_run(run_dir))
    charts = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(charts) >= 4
    for chart in charts:
        root = ElementTree.fromstring(chart)
        for line in root.iter("polyline"):
            for point in line.get("points", "").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= 420
                assert 0 <= y <= 200


def test_rollouts_of_an_unfinished_step_count_once(run_dir: Path) -> None:
    key = RolloutKey("rl/x", 3, "later", 0)
    journal = Journal(run_dir / "rollouts")
    journal.append(key, trajectory(key, value=None, stop=StopReason.OOM))
    journal.close()
    compacted = read_run(run_dir).stop_reasons["rl/x"]
    assert compacted == {"submitted": 2, "max_turns": 1, "oom": 1}
    other = Journal(run_dir / "journal")
    first = RolloutKey("rl/x", 3, f"task-{EVIL}", 0)
    other.append(first, trajectory(first, value=0.0, stop=StopReason.MAX_TURNS))  # the same rollout again
    other.close()
    assert read_run(run_dir).stop_reasons["rl/x"] == compacted


def test_sampled_text_is_decoded_with_the_tokenizer_of_the_run(run_dir: Path) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({f"word{i}": i for i in range(10)}, unk_token="word0"))
    (run_dir / "phases" / "rl").mkdir(parents=True)
    tokenizer.save(str(run_dir / "phases" / "rl" / "tokenizer.json"))
    turns = read_run(run_dir).samples[0].turns
    assert (turns[0].context, turns[0].action) == ("word1 word2", "word5 word6 word7")
    assert turns[1].context == "word3"


def test_phases_share_the_axis_equally_however_long_they_are(tmp_path: Path) -> None:
    with open_metrics(tmp_path, console=False, tensorboard=False) as log:
        for step in range(1, 101):
            log.log({"train/loss": 1.0 + step}, phase="warm", step=step)
        for step in (1, 2):
            log.log({"train/loss": 1.0 + step, "rollout/reward_mean": 0.5}, phase="rl", step=step)
    html = report.render(read_run(tmp_path))
    loss = re.search(r'<svg[^>]*aria-label="loss">.*?</svg>', html, flags=re.DOTALL)
    assert loss is not None
    assert "warm, 100 steps" in loss.group()
    lines = [p.get("points", "").split() for p in ElementTree.fromstring(loss.group()).iter("polyline")]
    ends = [(float(line[0].split(",")[0]), float(line[-1].split(",")[0])) for line in lines]
    middle, right = (52 + 410) / 2, 410
    assert ends[0][1] == pytest.approx(middle, abs=0.1)
    assert ends[1] == pytest.approx((middle + (right - middle) / 2, right), abs=0.1)
    reward = re.search(r'aria-label="rollouts: share that passes, and mean reward">.*?</svg>', html, flags=re.DOTALL)
    assert reward is not None
    assert "steps" not in reward.group()  # one phase: numbers on the axis


def test_the_command_writes_the_file_and_prints_its_path(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html")
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(run_dir), "--out", str(run_dir / "sub" / "x.html")]) == 0
    assert sorted(p.name for p in (run_dir / "sub").iterdir()) == ["x.html"]


def test_a_run_with_only_a_configuration_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert parsed(report.render(read_run(tmp_path))).text.count("Nothing was recorded.") == len(report.SECTIONS) - 1


def test_missing_empty_and_broken_run_directories_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    (broken / "rollouts").mkdir(parents=True)
    (broken / "rollouts" / "rl-000001.parquet").write_bytes(b"not parquet")
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "results.json").write_text('[{"phase": ')
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty", "broken", "torn"):
        assert main(["report", str(tmp_path / name)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
        assert name in printed.err
    assert main(["report"]) == 2
    assert main(["report", str(tmp_path), "--colour"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_gap_splits_the_line_and_a_lone_point_is_a_dot() -> None:
    nan = math.nan
    chart = line_chart("t", [Series(label="a", x=[0, 1, 2, 3, 4, 5], y=[1, 2, nan, 3, nan, nan], colour=8)])
    root = ElementTree.fromstring(re.search(r"<svg.*</svg>", chart, flags=re.DOTALL).group())  # type: ignore[union-attr]
    assert [len(p.get("points", "").split()) for p in root.iter("polyline")] == [2]
    assert len(list(root.iter("circle"))) == 1
    assert "c2" in chart  # colours wrap around
    assert line_chart("t", [Series(label="a", x=[0.0], y=[nan], colour=0)]) == ""
    assert line_chart("t", []) == ""


def test_a_constant_line_has_an_axis_around_it() -> None:
    chart = line_chart("t", [Series(label="a", x=[7.0], y=[0.0], colour=0)])
    assert ">0<" in chart
    assert "nan" not in chart


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1.0]), (0, 0.0004, [0, 0.0001, 0.0002, 0.0003, 0.0004]), (-3, 17, [0, 5, 10, 15])],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "label"), [(0, "0"), (1200, "1.2k"), (3e6, "3M"), (-0.5, "-0.5"), (1e-4, "0.0001"), (2.5e-6, "2.5e-6")]
)
def test_tick_labels_are_short(value: float, label: str) -> None:
    assert tick_label(value) == label


def test_bars_fill_the_row_in_proportion() -> None:
    chart = bar_chart("t", [("rl", [3.0, 1.0, 0.0]), ("none", [0.0, 0.0, 0.0])], keys=["a", "b", "c"])
    assert re.findall(r"width:([\d.]+)%", chart) == ["75.00", "25.00"]
