"""From `NAME==VERSION` to the files of a source distribution in memory, and to a directory of test requirements."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from swe_rl.errors import ConfigError
from swe_rl.rewards import is_test_path

MAX_FILES, MAX_BYTES = 5_000, 64 << 20  # of one unpacked sdist
PIP_TIMEOUT_S = 300

_DROPPED_DIRS = frozenset("build dist docs doc .git .github .circleci benchmarks __pycache__ site-packages".split())
_NOT_PACKAGES = frozenset("tests test testing docs doc examples example benchmarks tools scripts build dist".split())
_NOT_MODULES = frozenset("setup.py conftest.py noxfile.py versioneer.py tasks.py".split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A source distribution prepared as a task repository: no build output, no second copy of the code."""

    name: str  # as asked for, "toolz"
    version: str
    sha256: str  # of the sdist
    files: Mapping[str, bytes]
    source_files: tuple[str, ...]  # importable, no tests: where bugs may go
    test_files: tuple[str, ...]
    import_names: tuple[str, ...]  # top-level modules that the sources define
    python_path: tuple[str, ...]  # directories of the repository that go on sys.path, "" is its root
    requirements: tuple[str, ...]  # run-time requirements, as in the metadata

    @property
    def label(self) -> str:
        return f"{self.name}-{self.version}"


def parse_pin(pin: str) -> tuple[str, str]:
    """("toolz", "1.2.0") from "toolz==1.2.0". Raises ConfigError: only pinned versions are reproducible."""
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.+!_-]+)", pin.strip())
    if match is None:
        raise ConfigError(f"--package {pin!r} is not NAME==VERSION: pin an exact version, such as toolz==1.2.0")
    return match.group(1), match.group(2)


def download(pin: str, cache_dir: Path) -> Path:
    """The sdist of a pinned package, from the cache or through pip. Raises ConfigError when there is none or no index.

    pip runs the package's own build metadata hook; use packages you would also install.
    """
    name, version = parse_pin(pin)
    folder = cache_dir / "sdists" / f"{_normalize(name)}-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder.parent))
        try:
            _pip("download", "--no-binary", ":all:", "--no-deps", "--dest", str(staging), pin, subject=pin)
            staging.chmod(0o755)
            _rename(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    archives = sorted(
        p for p in folder.iterdir() if p.name.endswith((".tar.gz", ".zip", ".tar.bz2", ".tgz", ".tar.xz"))
    )
    if not archives:
        raise ConfigError(f"{pin} has no source distribution: choose a package that publishes one")
    return archives[0]


def load_package(pin: str, archive: Path) -> Package:
    """Unpacks in memory and finds sources and tests. Raises ConfigError if either is missing."""
    name, version = parse_pin(pin)
    raw = unpack(archive)
    files = {path: data for path, data in sorted(raw.items()) if _wanted(path)}
    root = "src/" if any(path.startswith("src/") and path.endswith("/__init__.py") for path in files) else ""
    sources, imports = _sources(files, root)
    tests = tuple(p for p in files if re.fullmatch(r"test_.*\.py|.*_test\.py", posixpath.basename(p)))
    if not sources:
        raise ConfigError(f"{pin}: no importable pure-Python module found in its source distribution; choose another")
    if not tests:
        raise ConfigError(f"{pin} ships no test files in its source distribution; choose a package that does")
    return Package(
        name=name,
        version=version,
        sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
        files=files,
        source_files=sources,
        test_files=tests,
        import_names=imports,
        python_path=("src", "") if root else ("",),
        requirements=_requirements(raw.get("PKG-INFO", b"")),
    )


def unpack(archive: Path) -> dict[str, bytes]:
    """Regular files by path below the archive's one top folder. Links, devices and names that climb out are left out.

    Nothing is written to disk. Raises ConfigError for an archive that is damaged or unreasonably large.
    """
    files: dict[str, bytes] = {}
    total = 0
    try:
        for path, size, reader in _members(archive):
            parts = path.split("/")[1:]  # the top folder is NAME-VERSION
            if not parts or any(part in ("", ".", "..") for part in parts) or path.startswith("/"):
                continue
            total += size
            if len(files) >= MAX_FILES or total > MAX_BYTES:
                raise ConfigError(f"{archive.name} holds more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
            files["/".join(parts)] = reader.read(size)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, EOFError) as err:
        raise ConfigError(f"{archive} is no readable archive ({err}): delete it and build again") from err
    return files


def requirements_layer(requirements: Sequence[str], cache_dir: Path) -> Path:
    """Directory with `requirements` installed (pip --target), made once per list. Raises ConfigError if pip fails."""
    wanted = sorted(set(requirements))
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    digest = hashlib.sha256("\n".join((tag, *wanted)).encode()).hexdigest()[:16]
    target = cache_dir / "layers" / digest
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=target.parent))
        try:
            _pip("install", "--target", str(staging), "--no-warn-script-location", *wanted, subject=" ".join(wanted))
            shutil.rmtree(staging / "bin", ignore_errors=True)
            staging.chmod(0o755)
            _rename(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def refuse_second_copy(package: Package, layer: Path) -> None:
    """Raises ConfigError when the layer holds the package itself: its clean code would solve every task."""
    for name in package.import_names:
        if (layer / name).exists() or (layer / f"{name}.py").exists():
            raise ConfigError(
                f"{package.label}: {name!r} is also among the test requirements, so its correct code would be readable "
                "in every sandbox; choose another package"
            )


def _members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """(path, size, reader) of every regular file."""
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as bundle:
            for entry in bundle.infolist():
                if not entry.is_dir() and (entry.external_attr >> 28) in (0, 8):  # no links
                    with bundle.open(entry) as unzipped:
                        yield entry.filename, entry.file_size, unzipped
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            reader = tar.extractfile(member) if member.isreg() else None
            if reader is not None:
                yield member.name, member.size, reader


def _wanted(path: str) -> bool:
    *folders, name = path.split("/")
    if any(f in _DROPPED_DIRS or f.endswith((".egg-info", ".dist-info")) for f in folders[:1]):
        return False
    if "__pycache__" in folders or name in ("PKG-INFO", ".gitattributes", ".gitmodules") or name.startswith(".git"):
        return False
    return not name.endswith((".pyc", ".so", ".pyd", ".whl", ".egg"))


def _sources(files: Mapping[str, bytes], root: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names: set[str] = set()
    chosen = []
    for path in files:
        if not path.startswith(root) or not path.endswith(".py") or is_test_path(path.encode()):
            continue
        pieces = path.removeprefix(root).split("/")
        is_package = len(pieces) > 1 and f"{root}{pieces[0]}/__init__.py" in files and pieces[0] not in _NOT_PACKAGES
        if is_package or (len(pieces) == 1 and pieces[0] not in _NOT_MODULES):
            names.add(pieces[0].removesuffix(".py"))
            if not any(piece in ("_vendor", "vendor", "_version.py", "__main__.py") for piece in pieces):
                chosen.append(path)
    return tuple(chosen), tuple(sorted(names))


def _requirements(metadata: bytes) -> tuple[str, ...]:
    """Requires-Dist lines without an extra."""
    header = metadata.split(b"\n\n")[0].decode("utf-8", "replace")
    lines = re.findall(r"^Requires-Dist: (.+)$", header, re.MULTILINE)
    return tuple(line.strip() for line in lines if "extra ==" not in line and "extra==" not in line)


def _pip(*args: str, subject: str) -> None:
    command = [sys.executable, "-m", "pip", *args, "--quiet", "--disable-pip-version-check", "--no-input"]
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired as err:
        raise ConfigError(
            f"pip {args[0]} {subject} took more than {PIP_TIMEOUT_S} s: is the package index up?"
        ) from err
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else "no message"
        raise ConfigError(
            f"pip {args[0]} {subject} failed: {reason[:200]}; check the name and version, and that a package index is "
            "reachable (PIP_INDEX_URL)"
        )


def _rename(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another build was first, with the same content
            raise


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
