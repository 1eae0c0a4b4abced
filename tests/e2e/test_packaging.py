"""What `pip install` leaves on a machine: wheel, editable and source distribution, with and without a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from real_parts import require

ROOT = Path(__file__).resolve().parents[2]
MAPPED = {"swe_rl": "swe_rl", "conf": "swe_rl/conf", "kernels/triton_ops": "swe_rl/kernels"}  # tree -> wheel
BINARY = "swe_rl/sandbox/bin/swe-sandboxd"
LIBRARY = "swe_rl/ops/bin/libhead_rows-default.so"

pytestmark = pytest.mark.slow


def run(*words: str | Path, cwd: Path, path: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command in a clean directory; its output is shown when it fails."""
    env = {**os.environ, **({} if path is None else {"PATH": path})}
    env.pop("PYTHONPATH", None)
    done = subprocess.run([str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or not check, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def pip(*words: str | Path, cwd: Path, python: Path | None = None, path: str | None = None) -> None:
    chosen = ["--python", str(python)] if python else []
    run(sys.executable, "-m", "pip", *chosen, *words, "--no-deps", "-q", cwd=cwd, path=path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a clone has it (new files that are not ignored included)."""
    require(shutil.which("git") is not None and (ROOT / ".git").exists(), "a git clone")
    target = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def tracked(source: Path) -> list[str]:
    return sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(shutil.which("gcc") is not None, "a C compiler")
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", copy(source, out / "source"), "-w", out, cwd=out)
    return next(out.glob("swe_rl-*.whl"))


def copy(source: Path, target: Path) -> Path:
    """A tree of its own: builds leave files in theirs."""
    shutil.copytree(source, target)
    return target


def fresh_venv(target: Path) -> Path:
    """A virtual environment that sees the installed dependencies, but not this project. Returns its python."""
    run(sys.executable, "-m", "venv", "--without-pip", target, cwd=target.parent)
    python = target / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=target).stdout.strip()
    # A line of a .pth file joins sys.path without the .pth files over there being read: no editable install leaks in.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def installed_binary(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(BINARY)


def test_the_wheel_has_every_file_of_the_tree_and_the_static_binary(wheel: Path, tracked: list[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        mode = archive.getinfo(BINARY).external_attr >> 16
    wanted = {
        f"{there}/{n.removeprefix(here + '/')}"
        for here, there in MAPPED.items()
        for n in tracked
        if n.startswith(here + "/")
    }
    assert not wanted - inside, f"not in the wheel: {sorted(wanted - inside)}"
    assert not {name for name in inside if name.startswith(("tests", "kernels", "conf", "csrc"))}
    assert mode & 0o111, "the binary is not executable"
    assert LIBRARY in inside
    assert "-py3-none-linux_" in wheel.name


def test_the_binary_is_static(wheel: Path, tmp_path: Path) -> None:
    data = installed_binary(wheel)
    assert data[:4] == b"\x7fELF"
    header = {"offset": int.from_bytes(data[32:40], "little"), "size": data[54], "count": data[56]}
    kinds = [data[header["offset"] + i * header["size"]] for i in range(header["count"])]
    assert 3 not in kinds, "PT_INTERP: it needs a dynamic loader, which a sandbox's root may not have"


def test_an_installed_wheel_works_from_any_directory(wheel: Path, tmp_path: Path) -> None:
    python = fresh_venv(tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", wheel, cwd=elsewhere, python=python)
    command = python.parent / "swe-rl"
    assert "commands, each with an example" in run(command, "--help", cwd=elsewhere).stdout
    place = run(
        python, "-c", "import swe_rl, swe_rl.kernels, swe_rl.conf; print(swe_rl.__file__)", cwd=elsewhere
    ).stdout
    assert place.startswith(str(tmp_path / "venv"))
    config = run(command, "train", "--cfg", "experiment=smoke", "seed=3", cwd=elsewhere).stdout
    assert "seed: 3" in config
    assert "swe_rl" in run(python, "-m", "swe_rl", "--help", cwd=elsewhere).stdout
    assert status_of("sandbox binary", command, elsewhere)["found"] == "swe-sandboxd"
    assert str(status_of("head kernels", command, elsewhere)["found"]).startswith("libhead_rows-")
    assert list(elsewhere.iterdir()) == [], "looking around leaves nothing behind"


def test_a_wheel_without_a_compiler_installs_and_says_what_is_missing(source: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "empty_path"
    nothing.mkdir()
    pip("wheel", copy(source, tmp_path / "source"), "-w", tmp_path, cwd=tmp_path, path=str(nothing))
    built = next(tmp_path.glob("swe_rl-*.whl"))
    with zipfile.ZipFile(built) as archive:
        assert not {BINARY, LIBRARY} & set(archive.namelist())
        assert b"no C++ compiler was found" in archive.read("swe_rl/ops/bin/MISSING.txt")
        assert b"no C compiler was found" in archive.read("swe_rl/sandbox/bin/MISSING.txt")
    python = fresh_venv(tmp_path / "venv")
    pip("install", built, cwd=tmp_path, python=python)
    command = python.parent / "swe-rl"
    assert run(command, "--help", cwd=tmp_path).returncode == 0
    check = status_of("sandbox binary", command, tmp_path)
    assert check["status"] == "missing"
    assert "no C compiler was found" in str(check["found"])
    assert status_of("head kernels", command, tmp_path)["status"] == "optional"
    assert "gcc" in str(check["cure"])


def test_an_editable_installation_builds_into_the_tree(source: Path, tmp_path: Path) -> None:
    require(shutil.which("gcc") is not None, "a C compiler")
    tree = copy(source, tmp_path / "source")
    python = fresh_venv(tmp_path / "venv")
    pip("install", "-e", tree, cwd=tmp_path, python=python)
    assert os.access(tree / BINARY, os.X_OK)
    code = "import swe_rl.kernels, swe_rl.conf; print(swe_rl.__file__, swe_rl.kernels.__file__, swe_rl.conf.__file__)"
    places = run(python, "-c", code, cwd=tmp_path).stdout.split()
    folders = ("swe_rl", "kernels/triton_ops", "conf")
    assert places == [str(tree / folder / "__init__.py") for folder in folders]
    assert "seed: 0" in run(python.parent / "swe-rl", "train", "--cfg", "experiment=smoke", cwd=tmp_path).stdout


def test_the_source_distribution_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--sdist", "-o", tmp_path, copy(source, tmp_path / "source"), cwd=tmp_path)
    pip("wheel", next(tmp_path.glob("swe_rl-*.tar.gz")), "-w", tmp_path, cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("swe_rl-*.whl"))) as ours, zipfile.ZipFile(wheel) as other:
        assert set(ours.namelist()) == set(other.namelist())


def status_of(name: str, command: Path, cwd: Path) -> dict[str, object]:
    """One row of `swe-rl doctor`."""
    rows = json.loads(run(command, "doctor", "--json", cwd=cwd, check=False).stdout)
    return next(row for row in rows if row["name"] == name)
