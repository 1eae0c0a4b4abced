"""Every family: a row becomes a task, the task becomes the row again, and wrong rows say what is wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import source_rows as rows

from swe_rl.errors import ConfigError
from swe_rl.tasks import load_tasks, read_tasks, write_tasks
from swe_rl.tasks.export import SHAPED, export_tasks
from swe_rl.tasks.sources import SOURCES, TASK_SET, ImportReport, RowError, import_tasks
from swe_rl.tasks.sources.kept import source_row
from swe_rl.types import Task

BUGGY = "def trim(length):\n    return length - 2\n# the end\n"


def one(tmp_path: Path, source: str, row: dict, **options) -> Task:
    path = rows.write_jsonl(tmp_path / "rows.jsonl", [row])
    (task,) = import_tasks(source, str(path), **options)
    return task


@pytest.mark.parametrize("source", sorted(rows.ROWS))
def test_the_common_fields_of_every_family(tmp_path, source):
    task = one(tmp_path, source, rows.ROWS[source]())
    assert task.source == source
    assert task.problem_statement.startswith("trim() takes two off")
    assert b"return length - 1" in task.gold_patch
    assert task.image
    assert task.test_runner == "script"
    assert task.fail_to_pass
    assert task.timeout_s in (120.0, 300.0, 1800.0)


@pytest.mark.parametrize("source", sorted(set(rows.ROWS) - {"swe_rebench_v2"}))  # its solution is a .c file
def test_the_gold_patch_of_every_family_mends_the_bug(tmp_path, source):
    task = one(tmp_path, source, rows.ROWS[source]())
    tree = tmp_path / "tree"
    (tree / "lumen").mkdir(parents=True)
    (tree / "lumen/wick.py").write_text(BUGGY)
    subprocess.run(["git", "apply", "-"], input=task.gold_patch, cwd=tree, check=True)
    assert (tree / "lumen/wick.py").read_text() == BUGGY.replace("- 2", "- 1")


@pytest.mark.parametrize("source", sorted(rows.ROWS))
def test_tasks_and_rows_survive_the_disk(tmp_path, source):
    row = rows.ROWS[source]()
    task = one(tmp_path, source, row)
    write_tasks([task], tmp_path / "set")
    assert read_tasks(tmp_path / "set") == [task]
    export_tasks(tmp_path / "set", tmp_path / "out" / "source.jsonl", form="source")
    exported = json.loads((tmp_path / "out" / "source.jsonl").read_text())
    assert exported == {key: value for key, value in row.items() if key not in SOURCES[source].dropped}


@pytest.mark.parametrize("source", sorted(rows.ROWS))
def test_export_in_the_form_of_swe_bench_loses_nothing(tmp_path, source):
    row = rows.ROWS[source]()
    task = one(tmp_path, source, row)
    write_tasks([task], tmp_path / "set")
    assert export_tasks(tmp_path / "set", tmp_path / "swebench.jsonl") == 1
    exported = json.loads((tmp_path / "swebench.jsonl").read_text())
    columns = {"instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement", "FAIL_TO_PASS"}
    assert columns <= set(exported)
    if source in SHAPED:
        assert exported == row
        (again,) = import_tasks(source, str(tmp_path / "swebench.jsonl"))
        assert again == task
    else:
        assert exported["patch"].encode() == task.gold_patch
        assert read_tasks(tmp_path / "swebench.jsonl") == [task]


def test_swebench_4(tmp_path):
    task = one(tmp_path, "swebench", rows.swebench())
    assert task.task_id == "lumen-labs__lumen-17"
    assert task.fail_to_pass == tuple(rows.F2P)
    assert task.pass_to_pass == tuple(rows.P2P)
    assert task.image == "swebench/sweb.eval.x86_64.lumen-labs_1776_lumen-17:latest"
    assert task.test_patch.decode() == rows.TEST_PATCH
    assert task.test_files == ("tests/test_wick.py",)  # not the data file
    assert task.test_cmd == "pytest -rA tests/test_wick.py"
    assert task.pass_rule == "f2p_p2p"
    assert task.created_at == "2021-03-04T05:06:07Z"
    assert task.timeout_s == 1800.0
    assert task.meta["env"]["PATH"].startswith("/opt/miniconda3/envs/testbed/bin:")


@pytest.mark.parametrize(
    ("repo", "command"),
    [
        ("django/django", "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 test_wick"),
        ("sphinx-doc/sphinx", "tox --current-env -epy39 -v -- tests/test_wick.py"),
    ],
)
def test_the_test_commands_of_swebench_4_that_are_not_pytest(tmp_path, repo, command):
    assert one(tmp_path, "swebench", rows.swebench(repo=repo)).test_cmd == command


def test_swebench_5_brings_its_own_script_image_and_rule(tmp_path):
    row = rows.swebench_5(eval_type="fail_only", image="registry.test/lumen:1")
    task = one(tmp_path, "swebench", row)
    assert (task.test_cmd, task.log_parser) == (row["eval_script"], "parse_log_pytest_v2")
    assert (task.image, task.pass_rule) == ("registry.test/lumen:1", "f2p_p2p_fail_only")


def test_task_folders_of_swebench_5(tmp_path):
    rows.write_task_folder(tmp_path / "tasks" / "lumen-labs__lumen-17")
    (task,) = import_tasks("swebench", str(tmp_path))
    expected = one(tmp_path, "swebench", rows.swebench_5(split="dev", image_assets={"patch": []}))
    expected.meta["row"].pop("environment_setup_commit")
    for meta in (task.meta, expected.meta):
        meta["row"].pop("FAIL_TO_PASS", None)
        meta["row"].pop("PASS_TO_PASS", None)
    assert task == expected


def test_swe_gym(tmp_path):
    task = one(tmp_path, "swe_gym", rows.swe_gym())
    assert task.image == "xingyaoww/sweb.eval.x86_64.lumen-labs_s_lumen-17:latest"
    assert (task.fail_to_pass, task.pass_rule) == (tuple(rows.F2P), "f2p_p2p")


def test_swe_rebench(tmp_path):
    task = one(tmp_path, "swe_rebench", rows.swe_rebench())
    assert task.image == "swerebench/sweb.eval.x86_64.lumen-labs_1776_lumen-17"
    assert task.test_cmd == "pytest -rA --color=no tests/test_wick.py"
    assert task.log_parser == "parse_log_pytest"
    assert task.meta["difficulty"] == "1 of 3"
    assert task.meta["quality"]["llm_score"]["issue_text_score"] == 2


def test_swe_rebench_without_its_own_image_and_command(tmp_path):
    row = rows.swe_rebench(docker_image=None, install_config=None, meta=None)
    task = one(tmp_path, "swe_rebench", row)
    assert task.image == "swerebench/sweb.eval.x86_64.lumen-labs_1776_lumen-17:latest"
    assert task.test_cmd.startswith("pytest ")


def test_swe_rebench_v2(tmp_path):
    task = one(tmp_path, "swe_rebench_v2", rows.swe_rebench_v2())
    assert task.test_cmd == "make check\ncat test.log"
    assert task.log_parser == "swe_rebench_v2:parse_log_ctest"
    assert (task.workdir, task.language, task.pass_rule) == ("/lumen-c", "c", "all_passed")
    assert task.created_at == "2021-03-04T05:06:07+00:00"
    assert task.meta["difficulty"] == "medium"
    feature = {"llm_metadata": [{"pr_categories": ["core_feature"], "difficulty": "hard"}]}
    assert one(tmp_path, "swe_rebench_v2", rows.swe_rebench_v2(meta=feature)).kind == "feature"


def test_swe_smith(tmp_path):
    task = one(tmp_path, "swe_smith", rows.swe_smith())
    assert task.image == "jyangballin/swesmith.x86_64.lumen-labs_1776_lumen.0a1b2c3d:latest"
    assert task.setup_cmd == "git checkout lumen-labs__lumen.0a1b2c3d.func_pm_op_change__x1y2z3"
    assert task.test_cmd.splitlines()[0].endswith("func_pm_op_change__x1y2z3~1 -- tests/test_wick.py")
    assert (task.pass_rule, task.timeout_s) == ("f2p_p2p_absent_ok", 120.0)
    assert task.meta["strategy"] == "func_pm_op_change"


def test_r2e_gym(tmp_path):
    task = one(tmp_path, "r2e_gym", rows.r2e_gym())
    assert task.task_id == f"lumen__{rows.COMMIT}"
    assert task.base_commit == rows.PARENT
    assert task.problem_statement == rows.ISSUE
    assert task.gold_patch.decode() == rows.FIX
    assert task.expected_status == {"test_zero": "passed", "test_trim": "passed", "test_broken": "failed"}
    assert set(task.fail_to_pass) == {"test_zero", "test_trim"}
    assert {"/testbed/r2e_tests", "/r2e_tests", "/root/run_tests.sh"} <= set(task.hidden_paths)
    assert task.pass_rule == "exact_map"
    assert task.meta["entities"] == {"deleted": 0, "added": 0, "modified": 1, "statements": 0}
    assert "parsed_commit_content" not in source_row(task)


def test_r2e_gym_rows_of_others_have_the_patch_instead_of_the_commit(tmp_path):
    row = rows.r2e_gym(patch=rows.FIX, instance_id="lumen__3f", expected_output_json={"test_trim": "PASSED"})
    del row["parsed_commit_content"]
    task = one(tmp_path, "r2e_gym", row)
    assert (task.gold_patch.decode(), task.base_commit) == (rows.FIX, rows.COMMIT + "~1")


def test_swebench_pro(tmp_path):
    task = one(tmp_path, "swebench_pro", rows.swebench_pro())
    assert task.image == "jefzda/sweap-images:lumen-labs.lumen-lumen-labs__lumen-17"
    assert task.fail_to_pass == tuple(rows.F2P)  # given in Python's notation
    assert task.test_cmd == f"git checkout {rows.COMMIT} -- tests/test_wick.py"
    assert "Requirements:\n- trim() takes one off" in task.problem_statement
    assert (task.workdir, task.pass_rule, task.kind) == ("/app", "all_passed", "bugfix")
    other = rows.swebench_pro(issue_specificity='["refactoring_enh"]', repo_language="go")
    assert (one(tmp_path, "swebench_pro", other).kind, one(tmp_path, "swebench_pro", other).language) == (
        "refactor",
        "go",
    )


def test_multi_swe_bench(tmp_path):
    task = one(tmp_path, "multi_swe_bench", rows.multi_swe_bench())
    assert task.fail_to_pass == ("wick/trim",)
    assert task.pass_to_pass == ("wick/zero", "wick/sizes")  # a null name belongs to another row of the Parquet file
    assert task.image == "mswebench/lumen-labs_m_lumen-c:pr-17"
    assert (task.repo, task.base_commit) == ("Lumen-Labs/lumen-c", rows.PARENT)
    assert task.problem_statement == "trim() takes two off\n\nA wick of 5 should be 4."


@pytest.mark.parametrize(
    ("row", "family", "image"),
    [
        (rows.nemo_agent(rows.swebench(), "princeton-nlp/SWE-bench_Verified"), "swebench", "swebench/"),
        (rows.nemo_agent(rows.swe_gym(), "SWE-Gym/SWE-Gym"), "swe_gym", "xingyaoww/"),
        (rows.nemo_agent(rows.r2e_gym(), "R2E-Gym/R2E-Gym-Subset"), "r2e_gym", "namanjain12/"),
        (rows.nemo_agent(rows.swe_rebench(), "nebius/SWE-rebench"), "swe_rebench", "swerebench/"),
        (rows.nemo_single_turn(), "swe_gym", "xingyaoww/"),
        ({**rows.verified(), "subset": "verified", "split": "test", "responses_create_params": {"input": []}},
         "swebench", "swebench/"),
        ({**rows.swe_gym(), "subset": "gym", "split": "train", "responses_create_params": {"input": []}},
         "swe_gym", "xingyaoww/"),
        ({**rows.swebench_pro(), "subset": "pro", "responses_create_params": {"input": []}}, "swebench_pro", "jefzda/"),
    ],
)  # fmt: skip
def test_nemo_gym_reads_what_is_in_the_wrapping(tmp_path, row, family, image):
    task = one(tmp_path, "nemo_gym", row)
    assert task.meta["family"] == family
    assert task.image.startswith(image)
    assert source_row(task) == row


def test_nemo_gym_rows_without_a_repository_are_skipped_with_the_reason(tmp_path):
    pivot = {"uuid": "1", "responses_create_params": {"input": []}, "expected_action": {"name": "bash"}}
    named = {"instance_id": "terminal_bench::x", "responses_create_params": {"input": []}}
    judge = {"options": [], "expected_answer": "A", "instance_id": "lumen-17"}
    path = rows.write_jsonl(tmp_path / "rows.jsonl", [pivot, named, judge, rows.nemo_single_turn()])
    report = ImportReport()
    assert len(list(import_tasks("nemo_gym", str(path), report=report))) == 1
    assert sum(report.skipped.values()) == 3
    assert "one tool call of a conversation, not a repository task" in report.skipped


def test_harbor(tmp_path):
    folder = rows.write_harbor(tmp_path / "trim-task")
    (task,) = import_tasks("harbor", str(tmp_path))
    assert (task,) == tuple(import_tasks("harbor", str(folder)))
    assert task.task_id == "harbor/lumen/trim"
    assert task.pass_rule == "reward_file"
    assert set(task.hidden_files) == {"/tests/test.sh", "/tests/test_trim.py"}
    assert task.gold_patch.decode() == rows.FIX
    assert task.workdir == "/src/lumen"
    assert task.image.startswith("swe-rl/harbor-trim-task:")
    assert (task.timeout_s, task.meta["difficulty"]) == (90.0, "easy")
    write_tasks([task], tmp_path / "set")
    assert read_tasks(tmp_path / "set") == [task]
    export_tasks(tmp_path / "set", tmp_path / "out.jsonl")
    assert read_tasks(tmp_path / "out.jsonl") == [task]


@pytest.mark.parametrize("source", sorted(set(rows.ROWS) - {"nemo_gym"}))
@pytest.mark.parametrize("extra", ["gold_path", "Repo"])
def test_an_unknown_field_is_named_or_carried_along(tmp_path, source, extra):
    row = {**rows.ROWS[source](), extra: 7}
    with pytest.raises(RowError, match=rf"rows.jsonl row 1: field {extra} \(int\) is unknown"):
        one(tmp_path, source, row)
    assert source_row(one(tmp_path, source, row, keep_unknown=True))[extra] == 7


REQUIRED = [
    *[(source, field) for source in ("swebench", "swe_gym", "swe_rebench", "swe_rebench_v2") for field in
      ("repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement", "FAIL_TO_PASS",
       "PASS_TO_PASS")],
    ("swe_rebench_v2", "image_name"), ("swe_rebench_v2", "install_config"),
    *[("swe_smith", field) for field in ("instance_id", "repo", "patch", "FAIL_TO_PASS", "image_name")],
    *[("r2e_gym", field) for field in ("repo_name", "commit_hash", "problem_statement", "expected_output_json")],
    *[("swebench_pro", field) for field in ("instance_id", "repo", "base_commit", "patch", "fail_to_pass",
                                            "pass_to_pass", "dockerhub_tag", "test_patch")],
    *[("multi_swe_bench", field) for field in ("org", "repo", "number", "base", "fix_patch", "fixed_tests",
                                               "p2p_tests")],
]  # fmt: skip


@pytest.mark.parametrize(("source", "field"), REQUIRED)
def test_missing_null_and_malformed_fields_are_named_with_row_and_type(tmp_path, source, field):
    good = rows.ROWS[source]()
    without = {key: value for key, value in good.items() if key != field}
    for bad, problem in ((without, "is missing, expected"), ({**good, field: None}, "is null, expected"),
                         ({**good, field: 3.5 if field != "number" else "x"}, "expected")):  # fmt: skip
        path = rows.write_jsonl(tmp_path / "rows.jsonl", [good, bad])
        stream = import_tasks(source, str(path))
        assert next(stream)
        with pytest.raises(RowError, match=f"rows.jsonl row 2: field {field} .*{problem}"):
            next(stream)


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("swebench", {"FAIL_TO_PASS": '["a", 3]'}, "FAIL_TO_PASS is .* expected a list of strings"),
        ("swebench", {"FAIL_TO_PASS": "tests/test_wick.py"}, "FAIL_TO_PASS is .* expected a list of strings"),
        ("swebench", {"hints_text": 3}, r"hints_text is 3 \(int\), expected a string"),
        ("swebench", {"created_at": [1]}, "created_at .* expected a date as text"),
        ("swebench", {"repo": "a\nb"}, "repo .* expected a name on one line"),
        ("swebench", {"patch": "  \n"}, "patch is empty"),
        ("swebench", {"eval_type": "all"}, "eval_type .* expected pass_and_fail or fail_only"),
        ("swe_rebench_v2", {"install_config": {"test_cmd": "make"}}, "install_config.log_parser .* log parser"),
        ("swe_rebench_v2", {"install_config": {"log_parser": "p", "test_cmd": [1]}}, "install_config.test_cmd"),
        ("swe_smith", {"patch": "no diff"}, "patch .* a diff that can be reversed"),
        ("r2e_gym", {"expected_output_json": '{"a": "OK"}'}, "expected_output_json .* PASSED, FAILED"),
        (
            "r2e_gym",
            {"parsed_commit_content": '{"file_diffs": [{"header": {}}]}'},
            "parsed_commit_content has no 'file'",
        ),
        ("multi_swe_bench", {"fixed_tests": {"a": 3}}, "fixed_tests .* test name to its statuses"),
        ("multi_swe_bench", {"base": {"ref": "main"}}, "in base: field sha is missing"),
    ],
)
def test_malformed_contents(tmp_path, source, changes, message):
    with pytest.raises(RowError, match=message):
        one(tmp_path, source, {**rows.ROWS[source](), **changes})


@pytest.mark.parametrize(
    ("source", "changes", "reason"),
    [
        ("swebench", {"FAIL_TO_PASS": "[]"}, "no FAIL_TO_PASS test"),
        ("swe_smith", {"problem_statement": ""}, "no issue text"),
        ("r2e_gym", {"expected_output_json": "{}"}, "empty map of expected statuses"),
        ("r2e_gym", {"expected_output_json": '{"a": "FAILED"}'}, "no test is expected to pass"),
        ("multi_swe_bench", {"fixed_tests": {}}, "no fixed test"),
    ],
)
def test_rows_that_would_reward_nothing_are_skipped_with_the_reason(tmp_path, source, changes, reason):
    path = rows.write_jsonl(tmp_path / "rows.jsonl", [{**rows.ROWS[source](), **changes}, rows.ROWS[source]()])
    report = ImportReport()
    assert len(list(import_tasks(source, str(path), report=report))) == 1
    assert [name for name in report.skipped if reason in name]
    assert (report.rows, report.tasks) == (2, 1)


def test_malformed_rows_can_be_counted_and_repeated_ids_are(tmp_path):
    bad = rows.swebench(repo=3)
    path = rows.write_jsonl(tmp_path / "rows.jsonl", [rows.swebench(), bad, rows.swebench()])
    report = ImportReport()
    assert len(list(import_tasks("swebench", str(path), skip_invalid=True, report=report))) == 1
    assert report.num_invalid == 1
    assert "row 2: field repo" in report.invalid[0]
    assert report.skipped == {"task id seen before": 1}


def test_paths_that_hold_no_rows(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\nnot json\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing PAR1")
    for path, message in (
        (tmp_path / "empty", "has no data file"),
        (tmp_path / "rows.csv", "unknown ending"),
        (tmp_path / "nowhere.jsonl", "neither a file, a folder nor"),
        (tmp_path / "list.jsonl", "row 1 is list, expected an object"),
        (tmp_path / "broken.parquet", "cannot be read as Parquet"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(import_tasks("swebench", str(path)))
    with pytest.raises(ConfigError, match="row 2 is not JSON"):
        list(import_tasks("nemo_gym", str(tmp_path / "rows.jsonl")))
    with pytest.raises(ConfigError, match="source 'swebnch' is unknown"):
        list(import_tasks("swebnch", "x"))
    with pytest.raises(ConfigError, match="no published data set"):
        list(import_tasks("nemo_gym"))


def test_our_own_sets_go_out_and_come_back(tmp_path):
    tasks = load_tasks("minirepo", split="train", num_tasks=3, seed=0)
    write_tasks(tasks, tmp_path / "set")
    assert export_tasks(tmp_path / "set", tmp_path / "out" / "rows.jsonl") == 3
    row = json.loads((tmp_path / "out/rows.jsonl").read_text().splitlines()[0])
    assert {"instance_id", "patch", "test_patch", "FAIL_TO_PASS", "problem_statement"} <= set(row)
    report = ImportReport()
    back = list(import_tasks(TASK_SET, str(tmp_path / "out" / "rows.jsonl"), report=report))
    assert back == tasks  # trees and hidden tests come from the tars beside the file
    assert (report.rows, report.tasks) == (3, 3)
    with pytest.raises(ConfigError, match="came from no row"):
        export_tasks(tmp_path / "set", tmp_path / "source.jsonl", form="source")


def test_rows_of_other_languages(tmp_path):
    """Multilingual rows of 4.x name neither language nor command."""
    row = rows.swebench(patch=rows.FIX.replace(".py", ".rs"), test_patch=rows.TEST_PATCH.replace(".py", ".rs"))
    report = ImportReport()
    path = rows.write_jsonl(tmp_path / "rows.jsonl", [row])
    (task,) = import_tasks("swebench_multilingual", str(path), report=report)
    assert (task.language, task.test_cmd) == ("rust", "")
    assert "env" not in task.meta
    assert report.ungradable == {"it has no test command": 1}
    assert one(tmp_path, "multi_swe_bench", rows.multi_swe_bench(lang="ts")).language == "typescript"


def test_rows_below_a_heading(tmp_path):
    (tmp_path / "set.json").write_text(json.dumps({"_meta": {"name": "x"}, "instances": [rows.swebench()]}))
    assert len(list(import_tasks("swebench", str(tmp_path / "set.json")))) == 1
