"""The binary, the base root, cgroup names and the reaper."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.cli import dispatch
from swe_rl.errors import SandboxUnavailable
from swe_rl.sandbox import bare, base_root, binary, cgroup
from swe_rl.sandbox.owner import is_alive, owner_label
from swe_rl.sandbox.reap import _reap_cgroups, reap
from swe_rl.types import SandboxSpec


def _dead_label() -> str:
    """Label of a process that has ended."""
    code = "from swe_rl.sandbox.owner import owner_label; print(owner_label())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_labels_tell_the_living_from_the_dead() -> None:
    assert is_alive(owner_label())
    assert not is_alive(_dead_label())
    assert not is_alive(f"{os.getpid()}-1")  # a recycled pid
    assert is_alive("not-ours")


def test_environment_is_built_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    env = base_root.environment(SandboxSpec(env={"LANG": "C", "EXTRA": "1"}))
    assert "SECRET_TOKEN" not in env
    assert (env["LANG"], env["EXTRA"], env["TERM"], env["HOME"]) == ("C", "1", "dumb", "/home/agent")
    assert env["PATH"].startswith(f"{sys.base_prefix}/bin:")


def test_package_directories_of_a_linked_prefix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for part in ("lib/python3.11/site-packages/pip", "pkgs/six", "lib/python3.11/json"):
        (tmp_path / "real" / part).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "link"))
    own = [path for path in base_root.package_directories() if path.startswith(str(tmp_path))]
    assert own == [f"{tmp_path}/link/lib/python3.11/site-packages", f"{tmp_path}/link/pkgs"]


def test_git_of_an_unusual_place_is_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "tools" / "git"
    tool.parent.mkdir()
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.setattr(base_root, "_SYSTEM", ("/usr", str(tmp_path)))
    base_root._search_path.cache_clear()
    assert base_root.environment(SandboxSpec())["PATH"].endswith(f":{tool.parent}")
    monkeypatch.setattr(base_root, "_SYSTEM", ("/usr",))  # not visible in a sandbox
    base_root._search_path.cache_clear()
    assert str(tool.parent) not in base_root.environment(SandboxSpec())["PATH"]
    monkeypatch.undo()
    base_root._search_path.cache_clear()


def test_binary_is_static() -> None:
    head = Path(binary.sandboxd_path()).read_bytes()
    assert head[:4] == b"\x7fELF"
    assert b"/ld-linux" not in head  # no program interpreter
    assert b"/ld-musl" not in head


def test_missing_binary_names_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(binary, "_BIN", tmp_path)
    monkeypatch.setattr(binary, "_SOURCES", tmp_path / "none")
    binary.sandboxd_path.cache_clear()
    with pytest.raises(SandboxUnavailable, match="install a C compiler"):
        binary.sandboxd_path()


def test_checkout_builds_on_demand_and_reports_a_broken_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(binary, "_BIN", tmp_path / "bin")
    binary.sandboxd_path.cache_clear()
    path = Path(binary.sandboxd_path())
    assert path == tmp_path / "bin" / "swe-sandboxd"
    assert os.access(path, os.X_OK)
    path.unlink()
    binary.sandboxd_path.cache_clear()
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "mkdir", "rm", "mv"):
        (tools / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(SandboxUnavailable, match=r"cannot be built: build\.sh: no compiler"):
        binary.sandboxd_path()
    monkeypatch.undo()
    binary.sandboxd_path.cache_clear()


def test_reaper_removes_only_what_the_dead_left() -> None:
    dead = Path(tempfile.mkdtemp(prefix=f"{bare.PREFIX}{_dead_label()}-"))
    mine = Path(tempfile.mkdtemp(prefix=f"{bare.PREFIX}{owner_label()}-"))
    (dead / "x").write_text("x")
    assert reap().directories >= 1
    assert not dead.exists()
    assert mine.exists()
    mine.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has cgroups to reap")
def test_reaper_ends_processes_in_dead_groups() -> None:
    found = cgroup.parent()
    require(found is not None, "a writable memory cgroup")
    assert found is not None
    group = Path(found[0], f"{cgroup.PREFIX}{_dead_label()}-0")
    group.mkdir()
    stray = subprocess.Popen(["sleep", "1000"])
    (group / "cgroup.procs").write_text(str(stray.pid))
    assert reap().cgroups >= 1
    assert not group.exists()
    assert stray.wait(timeout=5) == -9


def test_reaper_leaves_groups_with_processes_that_it_cannot_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lists a process of another PID namespace as 0, and kill(0) would end our own process group."""
    group = tmp_path / f"{cgroup.PREFIX}{_dead_label()}-0"
    group.mkdir()
    (group / "cgroup.procs").write_text("0\n12345678\n")
    killed: list[int] = []
    monkeypatch.setattr(cgroup, "places", lambda: [str(tmp_path)])
    monkeypatch.setattr("swe_rl.sandbox.reap.os.kill", lambda pid, _signal: killed.append(pid))
    assert _reap_cgroups() == 0
    assert killed == []
    assert group.exists()


def test_names_of_groups_differ_and_carry_the_owner() -> None:
    one, two = cgroup.new_group(), cgroup.new_group()
    if one is None or two is None:
        assert cgroup.parent() is None
        return
    assert one != two
    assert f"/{cgroup.PREFIX}{owner_label()}-" in one[0]


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "greeting").write_text("hello\n")
    script = tmp_path / "commands"
    script.write_text("cat greeting\n\nexit 3\n")
    with open(script) as commands:
        monkeypatch.setattr(sys, "stdin", commands)
        assert dispatch.main(["sandbox", "shell", "--layer", str(tmp_path)]) == 3
    assert capsys.readouterr().out == "hello\n"
    assert dispatch.main(["sandbox", "bench", "--num", "3", "--concurrency", "2"]) == 0
    assert "ready_ms_p50" in capsys.readouterr().out
    assert dispatch.main(["sandbox", "bench", "--num", "0"]) == 2
    assert dispatch.main(["sandbox", "nonsense"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_importing_sandboxes_is_light() -> None:
    heavy = ("torch", "numpy", "omegaconf", "transformers")
    code = f"import sys, swe_rl.sandbox; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []
