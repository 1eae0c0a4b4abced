"""Source distributions: hostile archives, layouts, pins, and one-line errors without an index."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from swe_rl.cli import main
from swe_rl.curation import pypi_sdist
from swe_rl.curation.pypi_sdist import download, load_package, parse_pin, refuse_second_copy, unpack
from swe_rl.errors import ConfigError

FILES = {
    "PKG-INFO": b"Name: demo\nRequires-Dist: attrs>=1\nRequires-Dist: numpy; extra == 'fast'\n\nRequires-Dist: no\n",
    "demo/__init__.py": b"",
    "demo/core.py": b"def f(x):\n    return x\n",
    "demo/_vendor/other.py": b"",
    "demo/tests/test_core.py": b"",
    "demo.egg-info/top_level.txt": b"demo\n",
    "build/lib/demo/core.py": b"clean copy",
    "docs/index.rst": b"",
    "setup.py": b"",
    "demo/_fast.so": b"\x7fELF",
}


def make_tar(
    path: Path, files: dict[str, bytes], *, top: str = "demo-1.0", extra: list[tarfile.TarInfo] | None = None
) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra or []:
            tar.addfile(info)
    return path


def test_flat_layout(tmp_path: Path) -> None:
    package = load_package("demo==1.0", make_tar(tmp_path / "demo-1.0.tar.gz", FILES))
    assert set(package.files) == {
        "demo/__init__.py", "demo/core.py", "demo/_vendor/other.py", "demo/tests/test_core.py", "setup.py"
    }  # fmt: skip
    assert package.source_files == ("demo/__init__.py", "demo/core.py")
    assert package.test_files == ("demo/tests/test_core.py",)
    assert (package.import_names, package.python_path) == (("demo",), ("",))
    assert package.requirements == ("attrs>=1",)


def test_src_layout_and_single_module(tmp_path: Path) -> None:
    files = {"src/demo/__init__.py": b"", "src/demo/a.py": b"", "tests/test_a.py": b"", "tests/__init__.py": b""}
    package = load_package("demo==1.0", make_tar(tmp_path / "a.tar.gz", files))
    assert (package.source_files, package.python_path) == (("src/demo/__init__.py", "src/demo/a.py"), ("src", ""))
    package = load_package(
        "demo==1.0", make_tar(tmp_path / "b.tar.gz", {"demo.py": b"", "test_demo.py": b"", "setup.py": b""})
    )
    assert (package.source_files, package.import_names) == (("demo.py",), ("demo",))


def test_hostile_members_are_left_out(tmp_path: Path) -> None:
    link = tarfile.TarInfo("demo-1.0/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    device = tarfile.TarInfo("demo-1.0/device")
    device.type = tarfile.CHRTYPE
    files = {"ok.py": b"1", "../../climb.py": b"2", "a/./b.py": b"3"}
    assert unpack(make_tar(tmp_path / "x.tar.gz", files, extra=[link, device])) == {"ok.py": b"1"}


def test_zip_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "demo-1.0.zip", "w") as bundle:
        bundle.writestr("demo-1.0/demo.py", b"x")
        bundle.writestr("demo-1.0/../evil.py", b"x")
    assert unpack(tmp_path / "demo-1.0.zip") == {"demo.py": b"x"}


def test_bombs_and_damage_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_tar(tmp_path / "x.tar.gz", {f"f{i}.py": b"x" * 100 for i in range(20)})
    monkeypatch.setattr(pypi_sdist, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match="holds more than"):
        unpack(archive)
    (tmp_path / "y.tar.gz").write_bytes(archive.read_bytes()[:50])
    with pytest.raises(ConfigError, match="no readable archive"):
        unpack(tmp_path / "y.tar.gz")


@pytest.mark.parametrize("files", [{"demo.py": b""}, {"test_a.py": b""}, {"README": b""}])
def test_missing_tests_or_sources(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError, match=r"demo==1\.0"):
        load_package("demo==1.0", make_tar(tmp_path / "x.tar.gz", files))


@pytest.mark.parametrize("pin", ["toolz", "toolz>=1", "toolz==", "-r x==1", "a b==1", "toolz==1; rm -rf /"])
def test_only_exact_pins(pin: str) -> None:
    with pytest.raises(ConfigError, match="NAME==VERSION"):
        parse_pin(pin)


def test_no_index_is_exit_code_two_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
        "SWE_RL_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    code = main(["tasks", "build", "--package", "toolz==1.2.0", "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert len(error.splitlines()) == 1
    assert "toolz==1.2.0" in error
    assert "index" in error


def test_download_is_cached(tmp_path: Path) -> None:
    folder = tmp_path / "sdists" / "demo-pkg-1.0"
    folder.mkdir(parents=True)
    archive = make_tar(folder / "demo_pkg-1.0.tar.gz", FILES)
    assert download("Demo.Pkg==1.0", tmp_path) == archive


def test_second_copy_is_refused(tmp_path: Path) -> None:
    package = load_package("demo==1.0", make_tar(tmp_path / "x.tar.gz", FILES))
    refuse_second_copy(package, tmp_path)
    (tmp_path / "demo").mkdir()
    with pytest.raises(ConfigError, match="correct code"):
        refuse_second_copy(package, tmp_path)
