"""`swe-rl eval` from end to end: the bounds of every task set, kills and resumes, servers, imports, selection."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swe_rl.agents.formats import FORMATS
from swe_rl.agents.toolsets import make_toolset
from swe_rl.cli.dispatch import main
from swe_rl.cli.eval_table import without_times
from swe_rl.config import AgentConfig, TaskConfig
from swe_rl.evaluation.candidates import read_candidates, update_candidates
from swe_rl.evaluation.scripts import oracle_demonstrator
from swe_rl.rollout.journal import read_parquet
from swe_rl.tasks import load_tasks, read_tasks, write_tasks
from swe_rl.types import Task
from tests.unit.inference.test_server_policy import chat, serving

# An untrained policy that rambles for a few turns: its rollouts differ, and none is quick to end.
NANO = ["model={hidden_size: 64, num_layers: 2, intermediate_size: 128, vocab_size: 640}", "threads=1"]
NANO += ["agent.max_turns=3", "agent.max_turn_tokens=48", "engine.num_slots=4", "sandbox.concurrency=4"]
NANO += ["agent.max_format_errors=3", "eval.splits={heldout: 5}", "eval.samples_per_task=4"]


def results(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "results.json").read_text())


@pytest.mark.parametrize(("policy", "rate"), [("oracle", 1.0), ("empty", 0.0)])
@pytest.mark.parametrize(
    ("source", "splits"),
    [("minirepo", "{train: 3, heldout: 3, hard: 4}"), ("bandit", "{heldout: 3}"), ("text_game", "{heldout: 4}")],
)
def test_the_oracle_solves_all_and_the_empty_policy_nothing(
    source: str, splits: str, policy: str, rate: float, tmp_path: Path
) -> None:
    words = [f"policy={policy}", f"task.source={source}", f"eval.splits={splits}", f"run_dir={tmp_path / 'run'}"]
    assert main(["eval", *words, "eval.samples_per_task=2"]) == 0
    rows = results(tmp_path / "run")
    assert rows
    for row in rows:
        assert (row["success"], row["num_lost"]) == (rate, 0), row["split"]
        assert row["num_samples"] == 2 * row["num_tasks"]
        assert row["phase"] == policy


@pytest.mark.parametrize("toolset", ["r2e", "nebius", "sweagent", "bash"])
def test_the_oracle_speaks_every_toolset(toolset: str, tmp_path: Path) -> None:
    agent = {"r2e": "deepswe_eval", "nebius": "nebius_eval"}.get(toolset, toolset)
    words = ["policy=oracle", f"agent={agent}", "eval.splits={hard: 1}", f"run_dir={tmp_path / 'run'}"]
    assert main(["eval", *words, "sandbox.lease_s=60000"]) == 0
    assert results(tmp_path / "run")[0]["success"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepswe_verified_16x", "nebius_10x", "verified50"])
def test_a_published_protocol_runs_on_this_machine(name: str, tmp_path: Path) -> None:
    """With the nano policy, untrained: everything of the protocol but its sizes."""
    split = "verified50" if name == "verified50" else "test"
    drawn = load_tasks("minirepo", split="heldout", num_tasks=2, seed=5)
    write_tasks([replace(task, split=split) for task in drawn], tmp_path / "tasks")
    words = [f"+eval={name}_smoke", "task=dataset", f"task.source={tmp_path / 'tasks'}", f"run_dir={tmp_path / 'run'}"]
    assert main(["eval", *words]) == 0
    (row,) = results(tmp_path / "run")
    assert (row["split"], row["num_tasks"], row["num_samples"], row["num_lost"]) == (split, 2, 4, 0)
    assert len(list((tmp_path / "run" / "predictions").glob("run*.jsonl"))) == 2


def test_patches_that_no_edit_of_lines_makes(tmp_path: Path) -> None:
    """A new file of 100 kB, a deleted and a renamed one: in several commands, by `git apply`."""
    task = load_tasks("minirepo", split="heldout", num_tasks=1, seed=3)[0]
    noise = random.Random(0).randbytes(75_000).hex().encode()
    added = b"diff --git a/notes.txt b/notes.txt\nnew file mode 100644\n--- /dev/null\n+++ b/notes.txt\n"
    added += b"@@ -0,0 +1 @@\n+" + noise + b"\n"
    whole = Task(**{**{f: getattr(task, f) for f in Task.__dataclass_fields__}, "gold_patch": task.gold_patch + added})
    write_tasks([whole], tmp_path / "set")
    words = ["policy=oracle", "task=dataset", f"task.source={tmp_path / 'set'}", f"run_dir={tmp_path / 'run'}"]
    assert main(["eval", *words]) == 0
    (row,) = results(tmp_path / "run")
    assert row["success"] == 1.0
    assert row["cost"]["num_turns"] > 4


def start(run: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "swe_rl", "eval", *NANO, f"run_dir={run}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def journal_bytes(run: Path) -> int:
    return sum(file.stat().st_size for file in run.glob("rollouts/*.journal"))


@pytest.mark.slow
def test_killed_anywhere_and_resumed_the_table_is_the_same(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = start(whole)
    text = process.communicate(timeout=500)[0]
    assert process.returncode == 0, text
    kills, more, words = 0, 0, []
    while True:
        process = start(broken, *words)
        while process.poll() is None and (kills >= 2 or journal_bytes(broken) <= more):
            time.sleep(0.01)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        more = journal_bytes(broken) + 1
        words = ["resume=true"]
    text = process.communicate()[0]
    assert process.returncode == 0, text
    assert kills >= 2, "it was over before it could be killed"
    assert list(map(without_times, results(broken))) == list(map(without_times, results(whole)))
    assert results(whole)[0]["num_samples"] == 20
    one, two = ([{**vars_of(c), "seconds": 0.0} for c in read_candidates(run)] for run in (whole, broken))
    assert one == two
    for name in ("run00.jsonl", "run03.jsonl"):
        assert (broken / "predictions" / name).read_bytes() == (whole / "predictions" / name).read_bytes()


def vars_of(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


@pytest.mark.slow
def test_interrupted_it_keeps_what_finished_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, "eval.samples_per_task=8")
    while process.poll() is None and not journal_bytes(run):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 130, text
    assert "resume=true" in text
    assert main(["eval", "show", str(run)]) == 0
    known = {item.trajectory_id for item in read_candidates(run)}
    assert 0 < len(known) < 40
    update_candidates(run, {min(known): {"ef_score": 0.5}})
    assert main(["eval", *NANO, "eval.samples_per_task=8", f"run_dir={run}", "seed=1", "resume=true"]) == 2
    assert main(["eval", *NANO, "eval.samples_per_task=8", f"run_dir={run}", "resume=true"]) == 0
    after = {item.trajectory_id: item for item in read_candidates(run)}
    assert len(after) == 40
    assert known < set(after)
    assert after[min(known)].ef_score == 0.5, "what a verifier said of a rollout stays"


def test_a_chat_server_is_a_policy(tmp_path: Path) -> None:
    """The server plays the oracle's calls, found by the number of turns so far and the issue in the first message."""
    tasks = load_tasks("minirepo", split="heldout", num_tasks=3, seed=TaskConfig().heldout_seed)
    toolset = make_toolset(AgentConfig())
    xml = FORMATS["xml"].bind(toolset.signatures)

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        messages = body["messages"]
        opening = "\n".join(m["content"] for m in messages[:2])
        task = next(task for task in tasks if task.problem_statement.strip() in opening)
        script = oracle_demonstrator(task, toolset="minimal")
        for _ in range(sum(m["role"] == "assistant" for m in messages) + 1):
            call = script.next_call(None, None)
        return 200, chat(xml.render(call.name, call.arguments))

    with serving(answer) as (url, seen):
        words = [f"policy={url}", "server.model=lab/model", "eval.splits={heldout: 3}", f"run_dir={tmp_path / 'run'}"]
        assert main(["eval", *words, "agent.max_context_tokens=40000", "agent.max_turn_tokens=20000"]) == 0
    (row,) = results(tmp_path / "run")
    assert row["success"] == 1.0
    assert row["phase"] == "lab/model"
    assert len(seen) == row["num_samples"] * row["cost"]["num_turns"]
    line = json.loads((tmp_path / "run" / "predictions" / "run00.jsonl").read_text().splitlines()[0])
    assert line["model_name_or_path"] == "lab/model"


def write_episode(path: Path, task: Task, patch: bytes, *, status: str = "Submitted") -> None:
    say = {"role": "assistant", "content": "```bash\nls\n```"}
    messages = [{"role": "user", "content": task.problem_statement}, say, {"role": "user", "content": "x"}, say]
    info = {"exit_status": status, "submission": patch.decode(), "config": {"model": {"model_name": "lab/other"}}}
    path.write_text(json.dumps({"info": info, "messages": messages, "instance_id": task.task_id}))


def test_episodes_of_mini_swe_agent_are_imported_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = load_tasks("minirepo", split="heldout", num_tasks=3, seed=5)
    write_tasks(tasks, tmp_path / "set")
    folder = tmp_path / "theirs"
    folder.mkdir()
    for index, task in enumerate(read_tasks(tmp_path / "set")):
        write_episode(folder / f"{index}.traj.json", task, task.gold_patch.rstrip(b"\n"))
        write_episode(folder / f"{index}-again.traj.json", task, b"")
    write_episode(folder / "9-lost.traj.json", tasks[0], b"", status="APIError")
    other = load_tasks("minirepo", split="hard", num_tasks=1, seed=5)[0]
    write_episode(folder / "9-other.traj.json", other, other.gold_patch)
    words = ["task=dataset", f"task.source={tmp_path / 'set'}", f"run_dir={tmp_path / 'run'}"]
    assert main(["eval", "import", str(folder), *words]) == 0
    assert "1 of 8 episodes are of tasks that are not in the source" in capsys.readouterr().out
    (row,) = results(tmp_path / "run")
    assert (row["num_tasks"], row["num_samples"], row["num_lost"]) == (3, 6, 1)
    assert row["success"] == 0.5
    assert row["outcomes"] == {"passed": 3, "no_patch": 3}
    assert row["pass_at"]["2"][0] == 1.0
    assert row["phase"] == "lab/other"
    # the same patches as predictions of SWE-bench
    preds = tmp_path / "run" / "predictions" / "run00.jsonl"
    words[-1] = f"run_dir={tmp_path / 'again'}"
    assert main(["eval", "import", str(preds), *words]) == 0
    again = results(tmp_path / "again")[0]
    assert set(again["by_task"]) == set(row["by_task"])
    assert again["success"] == sum(values[0] for values in row["by_task"].values()) / 3
    assert main(["eval", "compare", str(tmp_path / "run"), str(tmp_path / "again")]) == 0


def test_selection_among_scored_candidates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right patches beside empty ones, scored by a verifier that is right three times out of four."""
    tasks = load_tasks("minirepo", split="heldout", num_tasks=6, seed=6)
    write_tasks(tasks, tmp_path / "set")
    folder = tmp_path / "theirs"
    folder.mkdir()
    for index, task in enumerate(tasks):
        for copy in range(4):
            write_episode(folder / f"{index}-{copy}.traj.json", task, task.gold_patch if copy % 2 else b"")
    run = tmp_path / "run"
    words = ["task=dataset", f"task.source={tmp_path / 'set'}", f"run_dir={run}"]
    assert main(["eval", "import", str(folder), *words]) == 0
    draw = random.Random(1)
    scores = {
        c.trajectory_id: {
            "ef_score": float(bool(c.passed) != (draw.random() < 0.25)),
            "regression": {"t": "passed"},
            "reproduction": {"w": "resolved" if c.passed else "unresolved"},
        }
        for c in read_candidates(run)
    }
    update_candidates(run, scores)
    assert main(["verify", "select", str(run), "--limits", "50", "--limits", "5000"]) == 0
    text = capsys.readouterr().out
    assert "Best@k" in text
    with (run / "selection" / "selection.csv").open() as file:
        rows = {(row["selector"], int(row["k"])): row for row in csv.DictReader(file)}
    for name in ("hybrid", "ef", "eb", "majority", "shortest", "random", "oracle"):
        assert float(rows[name, 1]["best_at_k"]) == 0.5
    assert float(rows["oracle", 4]["best_at_k"]) == float(rows["eb", 4]["best_at_k"]) == 1.0
    assert float(rows["random", 4]["best_at_k"]) == 0.5
    assert float(rows["hybrid", 4]["best_at_k"]) >= float(rows["ef", 4]["best_at_k"])
    assert float(rows["eb", 4]["gain_low"]) == 0.5
    for name in ("abstention.csv", "sequential.csv", "tokens.csv", "hybrid.jsonl"):
        assert (run / "selection" / name).stat().st_size > 0
    lines = [json.loads(line) for line in (run / "selection" / "eb.jsonl").read_text().splitlines()]
    assert [line["instance_id"] for line in lines] == sorted(task.task_id for task in tasks)
    assert all(line["model_patch"] for line in lines)
    with (run / "selection" / "sequential.csv").open() as file:
        spent = list(csv.DictReader(file))
    assert float(spent[-1]["rollouts"]) == 4.0
    assert min(float(row["rollouts"]) for row in spent) == 1.0
    assert not math.isnan(float(spent[-1]["success"]))
    assert main(["verify", "select", str(run), "--k", "9"]) == 2
    assert "no task has more than 4 candidates" in capsys.readouterr().err
    assert main(["verify", "select", str(tmp_path / "set")]) == 2


@pytest.mark.slow
def test_training_is_evaluated_on_the_way_and_does_not_notice(tmp_path: Path) -> None:
    """The weights after step 2 of 3, played while step 3 is sampled; those at the end are evaluated as ever."""
    words = ["experiment=smoke", "threads=1", "phases=[{name: rl, data: rollouts, steps: 3, tasks_per_step: 2}]"]
    words += [
        "eval={splits: {heldout: 3}, greedy_tasks: 0, base_tasks: 0}",
        "rollout.group_size=2",
        "agent.max_turns=2",
    ]
    with_it, without = tmp_path / "with", tmp_path / "without"
    assert main(["train", *words, "eval.every=2", "eval.every_tasks=2", f"run_dir={with_it}"]) == 0
    assert main(["train", *words, f"run_dir={without}"]) == 0
    rows = {row["phase"]: row for row in results(with_it)}
    assert set(rows) == {"rl-step2", "rl"}
    assert rows["rl-step2"]["num_tasks"] == 2
    assert rows["rl"]["by_task"] == results(without)[0]["by_task"]
    (file,) = (with_it / "rollouts").glob("eval-rl-step2-heldout-sampled-*.parquet")
    evaluated = {turn.completion.policy_version for t in read_parquet(file) for turn in t.turns}
    assert len(evaluated) == 1
    for step in range(3):
        one, other = (read_parquet(run / "rollouts" / f"rl-{step:06d}.parquet") for run in (with_it, without))
        assert [t.token_ids for t in one] == [t.token_ids for t in other]
    assert {turn.completion.policy_version for t in one for turn in t.turns} == evaluated, "they sample step 3"
