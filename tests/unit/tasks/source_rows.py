"""Rows of every family with the fields of the published sets, about a package that does not exist."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

COMMIT = "3f" * 20
PARENT = "a1" * 20
FIX = """\
diff --git a/lumen/wick.py b/lumen/wick.py
index 1111111..2222222 100644
--- a/lumen/wick.py
+++ b/lumen/wick.py
@@ -1,3 +1,3 @@ def trim(length):
 def trim(length):
-    return length - 2
+    return length - 1
 # the end
"""
TEST_PATCH = """\
diff --git a/tests/test_wick.py b/tests/test_wick.py
index 3333333..4444444 100644
--- a/tests/test_wick.py
+++ b/tests/test_wick.py
@@ -4,2 +4,5 @@ from lumen.wick import trim
 def test_zero():
     assert trim(1) == 0
+
+def test_trim():
+    assert trim(5) == 4
diff --git a/tests/data/wicks.json b/tests/data/wicks.json
new file mode 100644
index 0000000..5555555
--- /dev/null
+++ b/tests/data/wicks.json
@@ -0,0 +1 @@
+[5]
"""
F2P = ["tests/test_wick.py::test_trim"]
P2P = ["tests/test_wick.py::test_zero", "tests/test_wick.py::test_sizes[a b]"]
ISSUE = "trim() takes two off\n\nA wick of 5 should come out as 4, and comes out as 3."


def swebench(**changes: Any) -> dict[str, Any]:
    """SWE-bench 4.x: lists as JSON text."""
    row = {
        "repo": "lumen-labs/lumen",
        "instance_id": "lumen-labs__lumen-17",
        "base_commit": PARENT,
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": ISSUE,
        "hints_text": "Look at the wick.",
        "created_at": "2021-03-04T05:06:07Z",
        "version": "2.1",
        "FAIL_TO_PASS": json.dumps(F2P),
        "PASS_TO_PASS": json.dumps(P2P),
        "environment_setup_commit": "b2" * 20,
    }
    return {**row, **changes}


def swebench_5(**changes: Any) -> dict[str, Any]:
    extra = {
        "image": "swebench/sweb.eval.x86_64.lumen-labs_1776_lumen-17:latest",
        "eval_script": "#!/bin/bash\ncd /testbed\n: '>>>>> Start Test Output'\npytest -rA\n: '>>>>> End Test Output'\n",
        "log_parser": "parse_log_pytest_v2",
        "eval_type": "pass_and_fail",
        "image_assets": None,
    }
    return {**swebench(), **extra, **changes}


def verified(**changes: Any) -> dict[str, Any]:
    return {**swebench(), "difficulty": "15 min - 1 hour", **changes}


def swe_gym(**changes: Any) -> dict[str, Any]:
    """Real lists, a date without zone, no environment_setup_commit."""
    row = swebench(FAIL_TO_PASS=F2P, PASS_TO_PASS=P2P, created_at="2021-03-04 05:06:07")
    del row["environment_setup_commit"]
    return {**row, **changes}


def swe_rebench(**changes: Any) -> dict[str, Any]:
    extra = {
        "FAIL_TO_PASS": F2P,
        "PASS_TO_PASS": P2P,
        "FAIL_TO_FAIL": [],
        "PASS_TO_FAIL": ["tests/test_wick.py::test_flaky"],
        "install_config": {
            "python": "3.9", "install": "pip install -e .", "pre_install": None, "packages": "requirements.txt",
            "pip_packages": ["pytest"], "reqs_path": None, "env_yml_path": None, "env_vars": None, "no_use_env": None,
            "test_cmd": "pytest -rA --color=no", "log_parser": "parse_log_pytest",
        },
        "meta": {
            "commit_name": "head_commit", "failed_lite_validators": ["has_hyperlinks"], "has_test_patch": True,
            "is_lite": False, "num_modified_files": 1,
            "llm_score": {"difficulty_score": 1, "issue_text_score": 2, "test_score": 0},
        },
        "requirements": "pytest==8.0.0\n",
        "environment": "name: lumen\n",
        "license_name": "MIT License",
        "docker_image": "swerebench/sweb.eval.x86_64.lumen-labs_1776_lumen-17",
    }  # fmt: skip
    return {**swebench(), **extra, **changes}


def swe_rebench_v2(**changes: Any) -> dict[str, Any]:
    row = {
        "repo": "lumen-labs/lumen-c",
        "instance_id": "lumen-labs__lumen-c-9",
        "base_commit": PARENT,
        "patch": FIX.replace(".py", ".c"),
        "test_patch": TEST_PATCH.replace(".py", ".c"),
        "problem_statement": ISSUE,
        "pr_description": "Trims by one.",
        "created_at": 1614834367000,
        "language": "c",
        "license": "mit",
        "interface": "int trim(int)",
        "FAIL_TO_PASS": ["trim (12ms)"],
        "PASS_TO_PASS": ["zero [0.4 ms]", "sizes"],
        "install_config": {
            "base_image_name": "c:latest", "docker_specs": None, "install": ["./configure", "make"],
            "log_parser": "parse_log_ctest", "log_parsers": None, "test_cmd": ["make check", "cat test.log"],
        },
        "image_name": "docker.io/swerebenchv2/lumen-labs-lumen-c:9-a1a1a1a",
        "meta": {"llm_metadata": [{"difficulty": "medium", "code": "A"}], "num_modified_files": 1, "pr_url": None},
    }  # fmt: skip
    return {**row, **changes}


def swe_smith(**changes: Any) -> dict[str, Any]:
    """The patch makes the bug."""
    bug = FIX.replace(
        "-    return length - 2\n+    return length - 1", "-    return length - 1\n+    return length - 2"
    )
    row = {
        "instance_id": "lumen-labs__lumen.0a1b2c3d.func_pm_op_change__x1y2z3",
        "repo": "swesmith/lumen-labs__lumen.0a1b2c3d",
        "patch": bug,
        "FAIL_TO_PASS": F2P,
        "PASS_TO_PASS": P2P,
        "created_at": "2025-03-21T08:23:31.701599",
        "image_name": "swesmith.x86_64.lumen-labs__lumen.0a1b2c3d",
        "base_commit": COMMIT,
        "problem_statement": ISSUE,
    }
    return {**row, **changes}


def parsed_commit() -> dict[str, Any]:
    """The same fix and its test as R2E-Gym parses a commit."""
    return {
        "file_diffs": [
            _file_diff("lumen/wick.py", "def trim(length):", [
                ("context", "def trim(length):"), ("deleted", "    return length - 2"),
                ("added", "    return length - 1"), ("context", "# the end"),
            ], old=(1, 3), new=(1, 3), entities=["trim"]),
            _file_diff("tests/test_wick.py", "", [
                ("context", "def test_zero():"), ("context", "    assert trim(1) == 0"), ("added", ""),
                ("added", "def test_trim():"), ("added", "    assert trim(5) == 4"),
            ], old=(4, 2), new=(4, 5), entities=["test_trim"]),
        ],
        "old_commit_hash": PARENT,
        "new_commit_hash": COMMIT,
        "commit_message": "Trim by one (#17)",
        "commit_date": "2021-03-04T05:06:07+00:00",
        "metadata": {},
    }  # fmt: skip


def _file_diff(
    path: str, section: str, lines: list[tuple[str, str]], *, old: tuple[int, int], new: tuple[int, int],
    entities: list[str],
) -> dict[str, Any]:  # fmt: skip
    return {
        "old_file_content": "",
        "new_file_content": "",
        "header": {"file": {"path": path}, "misc_line": None},
        "index_line": {"old_commit_hash": "1111111", "new_commit_hash": "2222222", "mode": "100644"},
        "is_binary_file": False,
        "binary_line": None,
        "minus_file": {"path": f"a/{path}"},
        "plus_file": {"path": f"b/{path}"},
        "hunks": [
            {
                "descriptor": {
                    "old_range": {"start": old[0], "length": old[1]},
                    "new_range": {"start": new[0], "length": new[1]},
                    "section": section,
                },
                "line_group": {"all_lines": [{"type": kind, "content": content} for kind, content in lines]},
                "modified_entities": [{"file_name": path, "name": name, "type": "function"} for name in entities],
                "added_entities": [],
                "deleted_entities": [],
            }
        ],
    }


def r2e_gym(**changes: Any) -> dict[str, Any]:
    row = {
        "repo_name": "lumen",
        "docker_image": f"namanjain12/lumen_final:{COMMIT}",
        "commit_hash": COMMIT,
        "parsed_commit_content": json.dumps(parsed_commit()),
        "execution_result_content": "{}",
        "modified_files": ["lumen/wick.py", "tests/test_wick.py"],
        "modified_entity_summaries": [
            {"ast_type_str": "FunctionDef", "start_lineno": 1, "end_lineno": 2, "file_name": "lumen/wick.py",
             "name": "trim", "type": "function"}
        ],
        "relevant_files": ["lumen/wick.py"],
        "num_non_test_files": 1,
        "num_non_test_func_methods": 1,
        "num_non_test_lines": 2,
        "prompt": "Write an issue.",
        "problem_statement": f"Some words before.\n[ISSUE]\n{ISSUE}\n[/ISSUE]",
        "expected_output_json": json.dumps(
            {"test_zero": "PASSED", "\x1b[1mtest_trim\x1b[0m": "PASSED", "test_broken": "FAILED"}
        ),
    }  # fmt: skip
    return {**row, **changes}


def swebench_pro(**changes: Any) -> dict[str, Any]:
    row = {
        "repo": "lumen-labs/lumen",
        "instance_id": f"instance_lumen-labs__lumen-{COMMIT}-v{PARENT}",
        "base_commit": PARENT,
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": ISSUE,
        "requirements": "- trim() takes one off",
        "interface": "No new interfaces are introduced",
        "repo_language": "python",
        "fail_to_pass": "['tests/test_wick.py::test_trim']",
        "pass_to_pass": json.dumps(P2P),
        "issue_specificity": '["minor_bug"]',
        "issue_categories": '["api_knowledge"]',
        "before_repo_set_cmd": f"git reset --hard {PARENT}\ngit clean -fd\ngit checkout {COMMIT} -- tests/test_wick.py",
        "selected_test_files_to_run": '["tests/test_wick.py"]',
        "dockerhub_tag": "lumen-labs.lumen-lumen-labs__lumen-17",
    }
    return {**row, **changes}


def multi_swe_bench(**changes: Any) -> dict[str, Any]:
    passing = {"run": "PASS", "test": "PASS", "fix": "PASS"}
    row = {
        "org": "Lumen-Labs",
        "repo": "lumen-c",
        "number": 17,
        "state": "closed",
        "title": "Trim by one",
        "body": "Fixes #12.",
        "base": {"label": "lumen-labs:main", "ref": "main", "sha": PARENT},
        "resolved_issues": [{"number": 12, "title": "trim() takes two off", "body": "A wick of 5 should be 4."}],
        "fix_patch": FIX,
        "test_patch": TEST_PATCH,
        "fixed_tests": {"wick/trim": {"run": "FAIL", "test": "FAIL", "fix": "PASS"}},
        "p2p_tests": {"wick/zero": passing, "wick/sizes": passing, "wick/gone": None},
        "f2p_tests": {"wick/trim": {"run": "FAIL", "test": "FAIL", "fix": "PASS"}},
        "s2p_tests": {},
        "n2p_tests": {},
        "run_result": {"passed_count": 2, "failed_count": 1, "skipped_count": 0, "passed_tests": [], "failed_tests": [],
                       "skipped_tests": []},
        "test_patch_result": {},
        "fix_patch_result": {},
        "instance_id": "lumen-labs__lumen-c-17",
    }  # fmt: skip
    return {**row, **changes}


def nemo_agent(inner: dict[str, Any], dataset: str) -> dict[str, Any]:
    """A row of the SWE agents: the source row is JSON text in the metadata."""
    return {
        "responses_create_params": {
            "input": [],
            "metadata": {
                "instance_id": inner.get("instance_id", ""),
                "dataset_name": dataset,
                "split": "train",
                "problem_statement": inner["problem_statement"],
                "instance_dict": json.dumps(inner),
            },
            "model": "some/model",
            "temperature": 0.7,
            "top_p": 0.8,
            "max_output_tokens": 12288,
        },
        "agent_ref": {"type": "responses_api_agents", "name": "swe_agents"},
    }


def nemo_single_turn() -> dict[str, Any]:
    scripts = {name: "#!/bin/bash\npytest\n" for name in ("regression_script", "setup_script", "test_script")}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "Fix it."}]},
        "metadata": {"relevant_file_contents": "{}", "image": "/images/lumen.sif", "remove_repo_name": False},
        "instance": {**swe_gym(), **scripts},
        "dataset_name": "SWE-Gym/SWE-Gym",
        "dataset_split": "train",
        "mode": "repro-gen",
        "agent_ref": {"type": "responses_api_agents", "name": "swerl_gen_simple_agent"},
    }


ROWS: dict[str, Any] = {
    "swebench": swebench,
    "swebench_lite": swebench_5,
    "swebench_verified": verified,
    "swebench_multilingual": swebench_5,
    "swe_gym": swe_gym,
    "swe_rebench": swe_rebench,
    "swe_rebench_v2": swe_rebench_v2,
    "swe_smith": swe_smith,
    "r2e_gym": r2e_gym,
    "swebench_pro": swebench_pro,
    "multi_swe_bench": multi_swe_bench,
    "nemo_gym": lambda: nemo_agent(swebench(), "princeton-nlp/SWE-bench_Verified"),
}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(deepcopy(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def write_harbor(folder: Path) -> Path:
    """A Harbor task folder."""
    files = {
        "task.toml": 'version = "1.0"\n[task]\nname = "lumen/trim"\n[metadata]\ndifficulty = "easy"\nrepo = "lumen"\n'
        "[verifier]\ntimeout_sec = 90.0\n[agent]\ntimeout_sec = 600.0\n[environment]\ncpus = 1\n",
        "instruction.md": ISSUE + "\n",
        "environment/Dockerfile": "FROM scratch\nWORKDIR /src/lumen\n",
        "tests/test.sh": "#!/bin/bash\npytest /tests/test_trim.py && echo 1 > /logs/verifier/reward.txt\n",
        "tests/test_trim.py": "from lumen.wick import trim\n\ndef test_trim():\n    assert trim(5) == 4\n",
        "solution/solve.sh": "#!/bin/bash\npatch -p1 < /solution/fix.patch\n",
        "solution/fix.patch": FIX,
        "trial/result.json": "{}\n",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def write_task_folder(folder: Path) -> Path:
    """A SWE-bench 5.x task folder."""
    row = swebench_5()
    plain = ("repo", "instance_id", "base_commit", "created_at", "version", "image", "log_parser", "eval_type")
    folder.mkdir(parents=True)
    (folder / "task.yaml").write_text(
        "".join(f"{name}: '{row[name]}'\n" for name in plain)
        + "datasets:\n- lumen/SWE-lumen\nsplit: dev\nimage_assets:\n  patch: []\n"
    )
    (folder / "tests.json").write_text(json.dumps({"FAIL_TO_PASS": F2P, "PASS_TO_PASS": P2P}))
    texts = {"problem_statement.md": "problem_statement", "hints.md": "hints_text", "gold.patch": "patch",
             "test.patch": "test_patch", "eval.sh": "eval_script"}  # fmt: skip
    for name, column in texts.items():
        (folder / name).write_text(row[column])
    return folder
