"""Unpacking of layers: what overlayfs then shows, and that nothing of an archive reaches further than its layer."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import oci_images as build
import pytest

from swe_rl.errors import ConfigError, ImageError
from swe_rl.sandbox.oci import lookup, unpack
from swe_rl.sandbox.oci.machine import remove_tree
from swe_rl.sandbox.oci.streams import DigestReader, uncompressed
from swe_rl.sandbox.oci.unpack import Unpacked, unpack_layer


def _unpack(target: Path, data: bytes, *below: Path) -> Unpacked:
    target.mkdir(parents=True)
    return unpack_layer(io.BytesIO(data), target, below=below)


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Directories of two layers, from top to bottom."""
    one = build.layer(
        build.folder("d", mode=0o1777, mtime=1_000_000_000),
        build.entry("d/file", b"data", mode=0o640),
        build.entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\n"),
        build.folder("usr"),
        build.folder("usr/bin"),
        build.symlink("bin", "usr/bin"),
        build.entry("usr/bin/sh", b"#!", mode=0o755),
        build.symlink("abs", "/usr/bin/../bin/sh"),
        build.symlink("loop", "loop"),
        build.symlink("out", "../../../etc/passwd"),
    )
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    _unpack(lower, one)
    _unpack(upper, build.layer(build.entry("d/more", b"x"), build.whiteout("usr/bin/sh")), lower)
    return [upper, lower]


def test_files_get_mode_time_and_one_owner(tmp_path: Path) -> None:
    target = tmp_path / "l"
    data = build.layer(
        build.folder("a", mode=0o555),
        build.entry("a/set-id", b"12345", mode=0o6711, uid=7, gid=8),
        build.symlink("a/link", "/nowhere"),
        build.entry("a/fifo", mode=0o620, type=tarfile.FIFOTYPE),
        build.hardlink("a/same", "a/set-id", mode=0o6711),
    )
    done = _unpack(target, data)
    info = (target / "a/set-id").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_mtime, info.st_nlink) == (0o6711, build.MTIME, 2)
    assert (info.st_uid, info.st_gid) == (os.geteuid(), os.getegid())
    assert stat.S_IMODE((target / "a").stat().st_mode) == 0o555
    assert os.readlink(target / "a/link") == "/nowhere"
    assert stat.S_ISFIFO((target / "a/fifo").lstat().st_mode)
    assert (done.size_bytes, done.num_entries, done.notes) == (5, 5, ())
    remove_tree(target)
    assert not target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owner_is_mapped_and_set_id_bits_survive(tmp_path: Path) -> None:
    target = tmp_path / "l"
    target.mkdir()
    data = build.layer(build.folder("d"), build.entry("d/f", b"x", mode=0o4755), build.symlink("s", "d"))
    unpack_layer(io.BytesIO(data), target, owner=(65521, 65521))
    for path in ("d", "d/f", "s"):
        assert (target / path).lstat().st_uid == (target / path).lstat().st_gid == 65521
    assert stat.S_IMODE((target / "d/f").stat().st_mode) == 0o4755


def test_whiteouts_and_opaque_directories(tmp_path: Path) -> None:
    target, below = tmp_path / "l", tmp_path / "below"
    names = ("gone", "deep/er/gone", "hidden/old", "anew/old", "early/old", "made", "replaced")
    _unpack(below, build.layer(*(build.entry(name) for name in names)))
    _unpack(
        target,
        build.layer(
            build.whiteout("gone"),
            build.whiteout("deep/er/gone"),
            build.folder("hidden"),
            build.opaque("hidden"),
            build.entry("hidden/new"),
            build.whiteout("anew"),
            build.folder("anew"),
            build.folder("early"),
            build.whiteout("early"),
            build.entry("made", b"1"),
            build.whiteout("made"),
            build.whiteout("replaced"),
            build.entry("replaced", b"2"),
            build.entry(".wh..wh.plnk"),
            build.whiteout("never/was"),
            build.whiteout("hidden/old"),
        ),
        below,
    )
    assert lookup.is_whiteout((target / "gone").lstat())
    assert lookup.is_whiteout((target / "deep/er/gone").lstat())
    assert {path for path in ("hidden", "anew", "early", "deep") if lookup.is_opaque(target / path)} == {
        "hidden",
        "anew",
        "early",
    }
    assert (target / "made").read_text() + (target / "replaced").read_text() == "12"
    assert sorted(path.name for path in target.iterdir()) == sorted(
        ["gone", "deep", "hidden", "anew", "early", "made", "replaced"]
    )


def test_unlisted_directories_look_as_below(two: list[Path]) -> None:
    info = (two[0] / "d").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_mtime) == (0o1777, 1_000_000_000)


def test_lookup_over_layers(two: list[Path]) -> None:
    assert lookup.find(two, "d/file") == two[1] / "d/file"
    assert lookup.find(two, "d/more") == two[0] / "d/more"
    assert lookup.find(two, "usr/bin/sh") is None  # deleted
    assert lookup.resolve(two, "/bin/sh") is None
    assert lookup.resolve(two[1:], "/bin/sh") == two[1] / "usr/bin/sh"
    assert lookup.resolve(two[1:], "/abs") == two[1] / "usr/bin/sh"
    assert lookup.resolve(two, "/out") == two[1] / "etc/passwd"
    assert lookup.resolve(two, "/loop") is None
    assert lookup.find(two, "nowhere/x") is None
    assert lookup.find(two, "d/file/x") is None


def test_hard_link_to_a_lower_layer_brings_the_file_along(tmp_path: Path, two: list[Path]) -> None:
    target = tmp_path / "third"
    _unpack(target, build.layer(build.hardlink("d/second", "d/file", mode=0o640)), *two)
    assert (target / "d/second").read_text() == "data"
    assert (target / "d/second").stat().st_ino == (target / "d/file").stat().st_ino
    assert stat.S_IMODE((target / "d/file").stat().st_mode) == 0o640
    for name in ("usr/bin/sh", "nowhere", "d"):
        with pytest.raises(ImageError, match="hard link"):
            _unpack(tmp_path / f"bad{len(name)}", build.layer(build.hardlink("x", name)), *two)


def test_devices_and_strange_attributes_are_noted(tmp_path: Path) -> None:
    target = tmp_path / "l"
    device = build.entry("dev/sda", type=tarfile.BLKTYPE, devmajor=8, devminor=0)
    native = build.entry("dev/wh", type=tarfile.CHRTYPE, devmajor=0, devminor=0)  # not how archives delete
    capable = build.entry("f", b"x", pax_headers={"SCHILY.xattr.security.capability": "abc"})
    kept = build.entry("g", b"x", pax_headers={"SCHILY.xattr.user.note": "hello"})
    done = _unpack(target, build.layer(build.folder("dev"), device, native, capable, kept))
    assert done.notes[:3] == (
        "skipped device node /dev/sda",
        "skipped device node /dev/wh",
        "skipped attribute security.capability",
    )
    assert list((target / "dev").iterdir()) == []
    assert os.getxattr(target / "g", "user.note") == b"hello" or "user.note" in done.notes[-1]


HOSTILE = {
    "parent": build.layer(build.entry("../escape", b"x")),
    "parent inside": build.layer(build.entry("a/b/../../../escape", b"x")),
    "link to parent": build.layer(build.hardlink("x", "../../etc/passwd")),
    "absolute link": build.layer(build.symlink("d", "/tmp"), build.entry("d/escape", b"x")),
    "relative link": build.layer(build.symlink("d", ".."), build.entry("d/escape", b"x")),
    "folder over link": build.layer(build.symlink("d", ".."), build.folder("d")),
    "opaque through link": build.layer(build.symlink("d", "/tmp"), build.opaque("d")),
    "link through link": build.layer(build.symlink("d", ".."), build.hardlink("x", "d/secret")),
    "file below a file": build.layer(build.entry("f", b"x"), build.entry("f/g", b"x")),
    "twice": build.layer(build.entry("f", b"x"), build.entry("f", b"y")),
    "twice, links": build.layer(build.symlink("f", "x"), build.symlink("f", "y")),
    "file and folder": build.layer(build.folder("f"), build.entry("f", b"y")),
    "root as a file": build.layer(build.entry(".", b"y")),
    "whiteout of dots": build.layer(build.entry("a/.wh...", b"")),
    "whiteout of nothing": build.layer(build.entry("a/.wh.", b"")),
    "overlay attribute": build.layer(build.folder("f", pax_headers={"SCHILY.xattr.trusted.overlay.redirect": "/etc"})),
    "user overlay attribute": build.layer(
        build.folder("f", pax_headers={"SCHILY.xattr.user.overlay.redirect": "/etc"})
    ),
    "large attribute": build.layer(build.entry("f", pax_headers={"SCHILY.xattr.user.x": "x" * 70_000})),
    "huge attribute": build.layer(build.entry("f", pax_headers={"SCHILY.xattr.user.x": "x" * 2_000_000})),
    "long name": build.layer(build.entry("n" * 300, b"x")),
    "huge name": build.layer(build.entry("n/" * 1_000_000 + "f", b"x")),
    "deep": build.layer(build.folder("d/" * 300)),
    "no archive": b"not a tar" * 1000,
    "hard link to a folder": build.layer(build.folder("d"), build.hardlink("e", "d")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_end_in_one_line(tmp_path: Path, case: str) -> None:
    outside = tmp_path / "in" / "secret"
    outside.parent.mkdir()
    outside.write_text("untouched")
    with pytest.raises(ImageError) as caught:
        _unpack(tmp_path / "in" / "l", HOSTILE[case])
    assert isinstance(caught.value, ConfigError)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["l", "secret"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert outside.stat().st_nlink == 1
    assert outside.read_text() == "untouched"
    assert not Path("/tmp/escape").exists()


def test_small_archive_that_unpacks_to_too_much(tmp_path: Path, two: list[Path]) -> None:
    data = build.layer(
        build.entry("a", b"x" * 600), build.entry("b", b"y" * 400), build.hardlink("passwd", "etc/passwd")
    )
    size = 1000 + len(b"root:x:0:0::/root:/bin/sh\n")  # a link to a lower layer copies the file
    for max_bytes, fits in ((size, True), (size - 1, False), (999, False), (0, False)):
        target = tmp_path / f"l{max_bytes}"
        target.mkdir()
        if fits:
            assert unpack_layer(io.BytesIO(data), target, below=two, max_bytes=max_bytes).size_bytes == size
            continue
        with pytest.raises(ImageError, match=r"unpacks to more than 0\.0 GiB"):
            unpack_layer(io.BytesIO(data), target, below=two, max_bytes=max_bytes)


def test_cut_archive_is_noticed(tmp_path: Path) -> None:
    data = build.layer(build.entry("f", b"x" * 100_000))
    with pytest.raises(ImageError, match="damaged"):
        _unpack(tmp_path / "l", data[:50_000])


@pytest.mark.parametrize("form", ["plain", "gzip", "gzip members", "zstd"])
def test_compressed_streams_and_both_digests(tmp_path: Path, form: str) -> None:
    import gzip
    import shutil
    import subprocess

    plain = os.urandom(3_000_001)
    stored = plain
    if form == "gzip":
        stored = gzip.compress(plain) + bytes(512)  # some builders pad
    elif form == "gzip members":
        stored = gzip.compress(plain[:1000]) + gzip.compress(plain[1000:])
    elif form == "zstd":
        if not shutil.which("zstd"):
            with (
                pytest.raises(ConfigError, match="apt-get install zstd"),
                uncompressed(io.BytesIO(b"\x28\xb5\x2f\xfd")),
            ):
                pass
            return
        stored = subprocess.run(["zstd", "-qc"], input=plain, capture_output=True, check=True).stdout
    outer = DigestReader(io.BytesIO(stored))
    with uncompressed(outer) as stream:  # type: ignore[arg-type]
        inner = DigestReader(stream)
        inner.drain()
    outer.drain()
    assert (inner.digest, outer.digest) == (build.digest(plain), build.digest(stored))
    if form != "plain":
        with pytest.raises(ImageError, match="damaged"), uncompressed(io.BytesIO(stored[: len(stored) // 2])) as stream:
            DigestReader(stream).drain()


def test_safe_path() -> None:
    assert [unpack.safe_path(name) for name in ("/a//b/./c", "./", "a", "a/")] == ["a/b/c", "", "a", "a"]


def test_whiteout_behind_a_link_of_the_same_layer_is_refused(tmp_path: Path) -> None:
    below = tmp_path / "below"
    _unpack(below, build.layer(build.entry("d/f")))
    with pytest.raises(ImageError, match="link"):
        _unpack(tmp_path / "l", build.layer(build.symlink("d", ".."), build.whiteout("d/f")), below)
