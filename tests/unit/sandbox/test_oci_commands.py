"""`swe-rl sandbox import|images|gc`, the key sandbox.image, and what doctor says about images and limits."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import oci_images as build
import pytest
from oci_images import Built

from swe_rl.cli import doctor_sandbox
from swe_rl.cli.dispatch import main
from swe_rl.config.sandbox import SandboxConfig, validate_sandbox
from swe_rl.errors import ConfigError
from swe_rl.rollout.wiring import sandbox_spec
from swe_rl.sandbox import cgroup, enforcement
from swe_rl.tasks import load_tasks
from swe_rl.types import Task


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=usage.total // 2))  # not this machine's
    monkeypatch.setenv("SWE_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_import_list_and_remove(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    device = build.entry("dev/x", type=build.tarfile.CHRTYPE, devmajor=1, devminor=1)
    built = Built([build.base_layer(), build.layer(build.folder("dev"), device)], {"User": "app", "WorkingDir": "/srv"})
    source = str(built.save(tmp_path / "image.tar", "mine:1"))
    assert main(["sandbox", "images"]) == 0
    assert main(["sandbox", "import", source]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == f"mine:1 sha256:{built.image_id}"
    assert "layer 2/2" in captured.err
    assert "note: skipped device node /dev/x" in captured.err
    assert main(["sandbox", "import", source, "--name", "other"]) == 0
    capsys.readouterr()
    assert main(["sandbox", "images", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["image_id"], row["names"]) == (built.image_id, ["mine:1", "other:latest"])
    assert (row["layers"], row["user"], row["workdir"], row["in_use"]) == (2, "app", "/srv", False)
    assert main(["sandbox", "images"]) == 0
    assert built.image_id[:12] in capsys.readouterr().out
    assert main(["sandbox", "gc", "--min-free", "0", "--remove", "mine:1"]) == 0
    assert capsys.readouterr().out.startswith("removed 1 images, 2 layers, ")
    assert main(["sandbox", "gc", "--min-free", "0"]) == 0
    assert capsys.readouterr().out == "removed 0 images, 0 layers, 0.0 MiB\n"


BAD = {
    "no such file": (["import", "/nowhere.tar"], "there is no /nowhere.tar"),
    "no archive": (["import", "README"], "is no readable archive"),
    "remove nothing": (["gc", "--remove", "x:1"], "image 'x:1' is not imported: swe-rl sandbox import x:1"),
    "too much": (["gc", "--min-free", "1.5"], "--min-free=1.5 must be at least 0 and below 1"),
    "no name": (["import", "image.tar", "--name", "a b"], "'a b' is no image name"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README").write_text("hello")
    Built([build.base_layer()]).save(Path("image.tar"))
    arguments, message = BAD[case]
    assert main(["sandbox", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_shell_in_an_image(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["sandbox", "import", str(Built([build.base_layer()]).save(tmp_path / "i.tar", "mine:1"))]) == 0
    script = tmp_path / "commands"
    script.write_text("cat /etc/group\n")
    with open(script) as commands:
        monkeypatch.setattr("sys.stdin", commands)
        assert main(["sandbox", "shell", "--image", "mine:1"]) == 0
    assert "staff:x:50:" in capsys.readouterr().out


def _task() -> Task:
    return load_tasks("minirepo", split="train", num_tasks=1, seed=0)[0]


def test_image_of_the_configuration_counts_for_tasks_without_one(tmp_path: Path) -> None:
    cfg = SandboxConfig(image="base:1")
    task = _task()
    spec = sandbox_spec(task, cfg, trees=tmp_path)
    assert (spec.image, spec.workdir, len(spec.layers)) == ("base:1", "/testbed", 1)
    assert sandbox_spec(replace(task, image="own:2"), cfg, trees=tmp_path).image == "own:2"
    assert sandbox_spec(task, SandboxConfig(), trees=tmp_path).image == ""


def test_training_with_a_missing_image_ends_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert main(["train", "experiment=smoke", "sandbox.image=no/such:1", f"run_dir={run_dir}"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1] == "swe-rl train: image 'no/such:1' is not imported: swe-rl sandbox import no/such:1"
    assert not run_dir.exists()


def test_image_without_isolation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.image=x needs sandbox\.isolation=namespaces"):
        validate_sandbox(SandboxConfig(image="x", isolation="none"))
    validate_sandbox(SandboxConfig(image="x"))


def test_doctor_names_every_limit_and_the_images() -> None:
    checks = [check() for check in doctor_sandbox.checks()]
    names = [check.name for check in checks]
    assert names == [f"limit: {name}" for name in ("memory", "swap", "processes", "cpu", "files")] + [
        "images",
        "skopeo",
    ]
    assert all(check.found and "\n" not in check.found and (check.ok or check.cure) for check in checks)
    assert not any(check.required for check in checks if check.name != "images")


def test_gaps_are_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cgroup, "parent", lambda: None)
    enforcement.bounds.cache_clear()
    enforcement.name_gaps_once.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            enforcement.name_gaps_once()
            enforcement.name_gaps_once()
        text = [record.getMessage() for record in caplog.records if "limit on memory" in record.getMessage()]
        assert len(text) == 1
        assert "a burst may exceed Limits.memory_bytes" in text[0]
        assert not doctor_sandbox.limit(enforcement.bounds()[0]).ok
    finally:
        enforcement.bounds.cache_clear()
        enforcement.name_gaps_once.cache_clear()


V2 = {
    "delegated to root": (
        "0::/job\n",
        {"cgroup.subtree_control": "cpu memory pids", "job/cgroup.subtree_control": ""},
        "",
    ),
    "own group hands down": ("0::/job\n", {"job/cgroup.subtree_control": "memory"}, "job"),
    "nobody hands down": ("0::/job/a\n", {"cgroup.subtree_control": "cpu", "job/cgroup.subtree_control": ""}, None),
    "hybrid, memory in version 1": ("4:memory:/x\n0::/job\n", {"cgroup.subtree_control": "memory"}, "v1"),
}


@pytest.mark.parametrize("case", V2)
def test_memory_groups_of_both_versions(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trees as the kernel shows them; this machine may have only one of the versions."""
    text, files, expected = V2[case]
    v2, v1 = tmp_path / "v2", tmp_path / "v1"
    (v1 / "x").mkdir(parents=True)
    for name, content in files.items():
        (v2 / name).parent.mkdir(parents=True, exist_ok=True)
        (v2 / name).write_text(content)
    for folder in (v2, v2 / "job", v1 / "x"):
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").write_text("")
    (tmp_path / "cgroup").write_text(text)
    real = cgroup._read
    monkeypatch.setattr(
        cgroup, "_read", lambda path: real(str(tmp_path / "cgroup") if path.startswith("/proc") else path)
    )
    monkeypatch.setattr(cgroup, "_V1", str(v1))
    monkeypatch.setattr(cgroup, "_V2", str(v2))
    cgroup.parent.cache_clear()
    try:
        wanted = {None: None, "v1": (str(v1 / "x"), "memory.limit_in_bytes")}.get(expected)
        if expected not in (None, "v1"):
            wanted = (str(v2 / expected) if expected else str(v2), "memory.max")
        assert cgroup.parent() == (wanted if os.geteuid() == 0 or expected != "v1" else None)
    finally:
        cgroup.parent.cache_clear()


def test_name_alone_is_asked_of_the_daemon_or_else_of_a_registry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert main(["sandbox", "import", "python:3"]) == 2
    assert "docker" in capsys.readouterr().err.lower()
    if not Path("/var/run/docker.sock").exists():
        monkeypatch.delenv("DOCKER_HOST")
        assert main(["sandbox", "import", "python:3"]) == 2
        assert "apt-get install skopeo" in capsys.readouterr().err
