"""Small images for tests, made without a registry: a static shell and whatever files are given."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Mapping, Sequence

import docker
from real_parts import require

APPLETS = ("cat", "dd", "id", "ls", "mkdir", "mv", "rm", "sleep", "stat", "true")


def make_image(
    client: docker.APIClient,
    name: str,
    *,
    applets: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
    changes: Sequence[str] = (),
) -> str:
    """Imports an image of /bin/sh, links to it for `applets`, and `files`; `changes` are Dockerfile instructions."""
    busybox = shutil.which("busybox")
    require(busybox is not None, "a static busybox (apt-get install busybox-static)")
    assert busybox is not None
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(busybox, "bin/sh")
        for applet in applets:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname, link.mode = tarfile.SYMTYPE, "sh", 0o777
            archive.addfile(link)
        for path, content in (files or {}).items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    client.import_image_from_data(stream.getvalue(), repository=name, changes=list(changes))
    return name
