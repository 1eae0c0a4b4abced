"""The store of images: reading every form, verification, concurrency, interrupted imports, garbage collection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import oci_images as build
import pytest
from oci_images import Built

from swe_rl.errors import ConfigError, ImageError, SandboxError
from swe_rl.sandbox.oci import gc, names
from swe_rl.sandbox.oci.image_config import Image
from swe_rl.sandbox.oci.machine import has_sys_admin
from swe_rl.sandbox.oci.sources import open_source
from swe_rl.sandbox.oci.store import KEPT_FREE_BYTES, ImageStore

SH = (
    build.folder("bin"),
    build.entry("bin/sh", b"#!", mode=0o755),
    build.entry("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nbob:x:1234:77:Bob:/users/bob:/bin/sh\n"),
    build.entry("etc/group", b"staff:x:50:\n"),
)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def tiny(*more: Any, settings: dict[str, Any] | None = None, tag: bytes = b"") -> Built:
    return Built(
        [build.layer(*SH, build.entry("tag", tag)), build.layer(*more, build.entry("top", b"x"))], settings or {}
    )


def add(store: ImageStore, source: Path, *given: str) -> Image:
    with open_source(str(source)) as images:
        assert len(images) == 1
        return store.add(images[0], given)


def test_names() -> None:
    assert names.normal_name("python") == "python:latest"
    assert names.normal_name("docker.io/library/python:3.12") == "python:3.12"
    assert names.normal_name("index.docker.io/me/x") == "me/x:latest"
    assert names.normal_name("ghcr.io/a/b:1") == "ghcr.io/a/b:1"
    assert names.normal_name("host:5000/a") == "host:5000/a:latest"
    for bad in ("", " ", "a b", "/a", "a:", "-x", "a\nb", "\ud800:1"):
        with pytest.raises(ConfigError, match="no image name"):
            names.normal_name(bad)
    assert names.digest_prefix("sha256:" + "a" * 64) == names.digest_prefix("x@sha256:" + "a" * 64) == "a" * 64
    assert (names.digest_prefix("abc"), names.digest_prefix("python")) == ("", "")


def test_image_that_would_fill_the_disk(store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    tiny(build.entry("zeros", bytes(3000))).save(source)
    room = 2000
    usage = shutil.disk_usage(tmp_path)._replace(free=KEPT_FREE_BYTES + room)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ImageError, match="unpacks to more than"):
        add(store, source)
    assert not list(store.root.glob("images/*"))
    assert not [path for path in store.root.glob("staging/*") if path.is_dir()]
    usage = usage._replace(free=KEPT_FREE_BYTES + room + 3000)
    assert add(store, source).size_bytes > 3000


@pytest.mark.parametrize("form", ["save", "gzipped save", "layout", "plain layout", "nested layout", "layout archive"])
def test_every_form_of_an_image_is_the_same_image(store: ImageStore, tmp_path: Path, form: str) -> None:
    built = tiny(settings={"Env": ["A=1"], "WorkingDir": "/srv"})
    source = tmp_path / "source"
    if form.endswith("save"):
        built.save(source)
        if form.startswith("gzipped"):
            subprocess.run(["gzip", str(source)], check=True)
            source = source.with_name("source.gz")
    elif form == "layout archive":
        with tarfile.open(source, "w") as tar:
            tar.add(built.layout(tmp_path / "folder"), arcname=".")
    else:
        built.layout(
            source, compress=bytes if form.startswith("plain") else build.gzip.compress, nested="nested" in form
        )
    image = add(store, source)
    assert (image.image_id, image.env, image.workdir, image.shell) == (built.image_id, ("A=1",), "/srv", "/bin/sh")
    assert store.find("test:1") == store.find(built.image_id[:12]) == store.find(f"sha256:{built.image_id}") == image
    if "layout" in form:
        assert store.find(f"test@{image.manifest_digest}") == image
    top, bottom = store.layer_paths(image)
    assert (top / "top").read_text() == "x"
    assert (bottom / "bin/sh").exists()
    assert store.root.stat().st_mode & 0o777 == 0o700  # it may hold set-id programs


def test_layers_are_shared_and_imports_idempotent(store: ImageStore, tmp_path: Path) -> None:
    one = add(store, tiny().save(tmp_path / "a"), "one")
    other = add(store, tiny(build.entry("more", b"y")).save(tmp_path / "b"), "two")
    assert one.layers[0] == other.layers[0]
    assert one.layers[1] != other.layers[1]
    inode = store.layer_paths(one)[0].stat().st_ino
    assert add(store, tiny().save(tmp_path / "a"), "three") == one
    assert store.layer_paths(one)[0].stat().st_ino == inode
    assert sorted(store.names()) == ["one:latest", "three:latest", "two:latest"]
    assert len(list(store.root.glob("layers/*.json"))) == 3


def test_configuration_is_understood(store: ImageStore, tmp_path: Path) -> None:
    cases = {
        "": (1000, 1000, "/root"),
        "bob": (1234, 77, "/users/bob"),
        "1234": (1234, 77, "/users/bob"),
        "bob:staff": (1234, 50, "/users/bob"),
        "5:6": (5, 6, "/"),
        "5": (5, 0, "/"),
        "root": (0, 0, "/root"),
        "0:0": (0, 0, "/root"),
    }
    for number, (user, expected) in enumerate(cases.items()):
        settings = {"User": user, "Entrypoint": ["/entry.sh", "-x"], "Cmd": "echo hi"}
        image = add(store, tiny(settings=settings).save(tmp_path / f"{number}"))
        assert (image.uid, image.gid, image.home) == expected, user
        assert (image.entrypoint, image.cmd) == (("/entry.sh", "-x"), ("/bin/sh", "-c", "echo hi"))
        assert image.notes == ("entry point not run: /entry.sh -x",)
        assert image.workdir == "/"


BAD_CONFIGS = {
    "nobody by that name": ({"User": "eve"}, "user 'eve'"),
    "no such group": ({"User": "bob:wheel"}, "group 'wheel'"),
    "ids that mean somebody else": ({"User": "65534"}, "65534"),
    "environment of numbers": ({"Env": [1]}, "malformed"),
    "NUL": ({"WorkingDir": "a\0b"}, "no text"),
    "half a character": ({"Env": ["A=\ud800"]}, "no text"),
    "digits that are no number": ({"User": "\u00b2"}, "not in its /etc/passwd"),
    "a group of such digits": ({"User": "5:\u00b2"}, "not in its /etc/group"),
    "a number without end": ({"User": "9" * 5000}, "not in its /etc/passwd"),
    "a user whose id is no number": ({"User": "mal"}, "id 'none'"),
    "a user whose id is negative": ({"User": "neg"}, "id '-5'"),
    "a group whose id is no number": ({"User": "bob:odd"}, "id 'none'"),
    "more variables than fit": ({"Env": [f"A{i}=" for i in range(2000)]}, "2000 environment variables"),
    "longer variables than fit": ({"Env": ["A=" + "x" * 200_000]}, "200002 bytes"),
    "a work directory without end": ({"WorkingDir": "/" + "a" * 5000}, "5001 bytes"),
}
ODD = (
    build.entry("etc/passwd", b"mal:x:none:1::/:\nneg:x:-5:1::/:\nbob:x:1234:77:Bob:/users/bob:/bin/sh\n"),
    build.entry("etc/group", b"odd:x:none:\n"),
)


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configurations_end_in_one_line(store: ImageStore, tmp_path: Path, case: str) -> None:
    settings, match = BAD_CONFIGS[case]
    with pytest.raises(ImageError, match=match) as caught:
        add(store, tiny(*ODD, settings=settings).save(tmp_path / "a"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert store.images() == []


@pytest.mark.parametrize("name", ["manifest.json", "index.json"])
def test_deeply_nested_json_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[" * 200_000)
    with pytest.raises(ImageError, match="not JSON"), open_source(str(tmp_path)):
        pass


def test_home_that_is_no_path_is_the_root(store: ImageStore, tmp_path: Path) -> None:
    odd = build.entry("etc/passwd", b"bob:x:5:6::/a\0b:\n")
    image = add(store, tiny(odd, settings={"User": "bob"}).save(tmp_path / "a"))
    assert (image.uid, image.gid, image.home) == (5, 6, "/")


def test_images_without_a_shell_or_for_other_machines(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no shell"):
        add(store, Built([build.layer(build.entry("f"))]).save(tmp_path / "a"))
    with pytest.raises(ImageError, match="is for linux/vax, this machine is linux/"):
        add(store, Built([build.layer(*SH)], architecture="vax").save(tmp_path / "b"))
    with pytest.raises(ImageError, match="0 layers"):
        add(store, Built([]).save(tmp_path / "c"))
    with pytest.raises(ImageError, match="129 layers"):
        add(store, Built([build.layer(*SH)] * 129).save(tmp_path / "d"))


def _damage(built: Built, folder: Path, case: str) -> Path:
    """A damaged form of the image."""
    if case.startswith("save"):
        path = built.save(folder / "a.tar")
        data = path.read_bytes()
        if case == "save: cut":
            path.write_bytes(data[: len(data) // 2])
        elif case == "save: flipped bit":
            at = data.index(b"PAYLOAD")
            path.write_bytes(data[:at] + b"Q" + data[at + 1 :])
        elif case == "save: other configuration":
            path.write_bytes(data.replace(b'"test"', b'"tent"'))
        elif case == "save: no manifest":
            path.write_bytes(data.replace(b"manifest.json", b"manifest.nope"))
        else:
            path.write_bytes(b"")
        return path
    path = built.layout(folder / "layout")
    index = json.loads((path / "index.json").read_text())
    manifest = path / "blobs/sha256" / index["manifests"][0]["digest"][7:]
    blob = path / "blobs/sha256" / json.loads(manifest.read_text())["layers"][1]["digest"][7:]
    if case == "layout: cut layer":
        blob.write_bytes(blob.read_bytes()[:-20])
    elif case == "layout: other layer":
        blob.write_bytes(build.gzip.compress(build.layer(build.entry("evil"))))
    elif case == "layout: no layer":
        blob.unlink()
    elif case == "layout: manifest":
        manifest.write_text(manifest.read_text() + " ")
    elif case == "layout: digest with a path":
        index["manifests"][0]["digest"] = "sha256:../../../../etc/passwd"
        (path / "index.json").write_text(json.dumps(index))
    else:
        (path / "index.json").write_text("{")
    return path


DAMAGES = ["save: cut", "save: flipped bit", "save: other configuration", "save: no manifest", "save: empty",
           "layout: cut layer", "layout: other layer", "layout: no layer", "layout: manifest",
           "layout: digest with a path", "layout: index"]  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_images_end_in_one_line_and_leave_nothing(store: ImageStore, tmp_path: Path, case: str) -> None:
    built = tiny(build.entry("big", b"PAYLOAD" + bytes(9000)))
    (tmp_path / "in").mkdir()
    source = _damage(built, tmp_path / "in", case)
    with pytest.raises(ImageError) as caught:
        add(store, source)
    assert "\n" not in str(caught.value)
    assert store.images() == []
    assert len(list(store.root.glob("layers/*.json"))) <= 1  # the sound one below may stay
    assert [path for path in store.root.glob("staging/*") if path.is_dir()] == []
    add(store, built.save(tmp_path / "good"))  # and nothing is in the way


def test_source_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no /nowhere"), open_source("/nowhere"):
        pass
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="holds no image"), open_source(str(tmp_path / "empty")):
        pass


def test_registry_needs_skopeo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install skopeo"), open_source("docker://python"):
        pass


def test_registry_through_skopeo(store: ImageStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in that copies a layout, or fails, as skopeo would: what is asked of it and what becomes of its words."""
    tiny().layout(tmp_path / "remote", "python:3")
    tool = tmp_path / "bin" / "skopeo"
    tool.parent.mkdir()
    tool.write_text(
        '#!/bin/sh\n[ "$3" = docker://python:3 ] || { echo "manifest unknown" >&2; exit 1; }\n'
        f'D=${{4#oci:}}; cp -r {tmp_path}/remote/. "${{D%:image}}"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    with open_source("docker://python:3") as images:
        assert store.add(images[0]).layers
    with pytest.raises(ImageError, match="skopeo could not fetch docker://nope: manifest unknown"):
        with open_source("docker://nope"):
            pass


def test_missing_image_says_which_and_what_to_do(store: ImageStore) -> None:
    for reference in ("swebench/x:1", "sha256:" + "0" * 64):
        with pytest.raises(ImageError) as caught:
            store.find(reference)
        assert str(caught.value) == f"image {reference!r} is not imported: swe-rl sandbox import {reference}"


_WORKER = """
import sys
from pathlib import Path
from swe_rl.sandbox.oci.sources import open_source
from swe_rl.sandbox.oci.store import ImageStore
with open_source(sys.argv[2]) as images:
    print(ImageStore(Path(sys.argv[1])).add(images[0]).image_id)
"""


def test_concurrent_importers_do_not_meet(store: ImageStore, tmp_path: Path) -> None:
    files = [build.entry(f"f{i}", os.urandom(2000)) for i in range(200)]
    source = tiny(*files).save(tmp_path / "a")
    command = [sys.executable, "-c", _WORKER, str(store.root), str(source)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {worker.communicate(timeout=120)[0] for worker in workers}
    image = store.find("test:1")
    assert answers == {image.image_id + "\n"}
    assert len(list(store.layer_paths(image)[0].iterdir())) == 201
    assert [path for path in store.root.glob("staging/*") if path.is_dir()] == []


def test_killed_importer_leaves_only_what_gc_removes(store: ImageStore, tmp_path: Path) -> None:
    source = tiny(*(build.entry(f"f{i}", os.urandom(100)) for i in range(20_000))).save(tmp_path / "a")
    worker = subprocess.Popen([sys.executable, "-c", _WORKER, str(store.root), str(source)])
    deadline = time.monotonic() + 60
    while not list(store.root.glob("staging/*/layer/f1*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    worker.kill()
    worker.wait()
    assert len(list(store.root.glob("staging/*/layer"))) == 1
    with pytest.raises(ImageError, match="not imported"):
        store.find("test:1")
    assert gc.collect(store).layers == 1  # the finished one, of no image
    assert list(store.root.glob("staging/*")) == []
    assert list(store.root.glob("layers/*")) == []
    image = add(store, source)
    assert len(list(store.layer_paths(image)[0].iterdir())) == 20_001


def test_gc_keeps_what_is_referenced_and_what_is_in_use(store: ImageStore, tmp_path: Path) -> None:
    old, used, new = (add(store, tiny(tag=tag.encode()).save(tmp_path / tag), tag) for tag in ("old", "used", "new"))
    assert gc.collect(store) == gc.Collected(images=0, layers=0, freed_bytes=0, kept_in_use=0)
    store.open("used")
    assert gc.in_use(store) == {used.image_id}
    with pytest.raises(ConfigError, match="in use"):
        gc.collect(store, remove="used")
    assert gc.collect(store, remove="old").layers == 2
    assert [image.image_id for image in store.images()] == [used.image_id, new.image_id]
    found = gc.collect(store, min_free=1.0)  # a disk that is always too full
    assert (found.images, found.layers, found.kept_in_use) == (1, 2, 1)
    assert store.images() == [used]
    assert all(path.is_dir() for path in store.layer_paths(used))
    assert store.names() == {"used:latest": used.image_id}
    assert old.image_id != new.image_id
    with pytest.raises(ImageError, match="not imported"):
        gc.collect(store, remove="old")


def test_longest_unused_goes_first(store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [add(store, tiny(tag=bytes([n])).save(tmp_path / str(n)), str(n)).image_id for n in range(3)]
    for age, n in enumerate((1, 2, 0)):
        os.utime(store.root / "images" / f"{ids[n]}.json", (1e9 + age, 1e9 + age))
    parts = iter([0.0, 0.5, 0.5])
    monkeypatch.setattr(gc, "free_part", lambda _store: next(parts))
    assert gc.collect(store, min_free=0.4).images == 1
    assert {image.image_id for image in store.images()} == {ids[0], ids[2]}


def test_uses_of_the_dead_do_not_count_and_those_elsewhere_for_a_day(store: ImageStore, tmp_path: Path) -> None:
    image = add(store, tiny().save(tmp_path / "a"))
    code = (
        "import sys; from pathlib import Path; from swe_rl.sandbox.oci.store import ImageStore;"
        "ImageStore(Path(sys.argv[1])).open('test:1')"
    )
    subprocess.run([sys.executable, "-c", code, str(store.root)], check=True)
    assert len(list(store.root.glob("use/*/*"))) == 1
    assert gc.in_use(store) == set()
    mark = store.root / "use" / "elsewhere.1~77-88"
    mark.mkdir()
    (mark / image.image_id).touch()
    assert gc.in_use(store) == {image.image_id}
    os.utime(mark, (1e9, 1e9))
    assert gc.in_use(store) == set()
    assert list(store.root.glob("use/*")) == []


def test_files_of_somebody_else_are_of_no_use(store: ImageStore, tmp_path: Path) -> None:
    add(store, tiny().save(tmp_path / "a"))
    with pytest.raises(ImageError, match=r"belong to uid \d+, sandboxes of this process need \d+: set SWE_RL_CACHE"):
        ImageStore(store.root).open("test:1", as_root=not has_sys_admin())


def test_image_that_vanished_or_is_incomplete(store: ImageStore, tmp_path: Path) -> None:
    image = add(store, tiny().save(tmp_path / "a"))
    moved = store.layer_paths(image)[0]
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(ImageError, match="incomplete: swe-rl sandbox import test:1"):
        store.open("test:1")
    (tmp_path / "elsewhere").rename(moved)
    assert store.open("test:1") == image
    record = store.root / "images" / f"{image.image_id}.json"
    record.write_text('{"of": "another version"}')
    with pytest.raises(ImageError, match="import it again"):
        ImageStore(store.root).find("test:1")


def test_full_disk_is_the_machines_failure(store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    source = tiny().save(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr("swe_rl.sandbox.oci.unpack.shutil.copyfileobj", full)
        with pytest.raises(SandboxError, match="No space left on device: swe-rl sandbox gc"):
            add(store, source)
    assert [path for path in store.root.glob("staging/*") if path.is_dir()] == []
    add(store, source)


def test_a_store_that_cannot_be_locked_is_one_line(store: ImageStore, tmp_path: Path) -> None:
    image = add(store, tiny().save(tmp_path / "a"))
    (store.root / "lock").unlink()
    (store.root / "lock").mkdir()  # as a read-only disk, for root too
    for use in (lambda: gc.collect(store), lambda: store.open(image.image_id), lambda: store.open("test:1")):
        with pytest.raises(SandboxError, match="cannot be locked: Is a directory"):
            use()
