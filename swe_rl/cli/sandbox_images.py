"""`swe-rl sandbox import|images|gc`: container images for local sandboxes, without a daemon."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swe_rl.cli.arguments import ArgumentParser
from swe_rl.errors import ConfigError
from swe_rl.sandbox.oci.gc import MIN_FREE, collect, free_part, in_use
from swe_rl.sandbox.oci.image_config import Image
from swe_rl.sandbox.oci.sources import DAEMON, REGISTRY, open_source
from swe_rl.sandbox.oci.store import ImageStore, default_store

SOURCES = (
    f"a `docker save` archive, an OCI layout (folder or archive), {DAEMON}NAME, {REGISTRY}NAME (needs skopeo), or NAME"
)


def add_parsers(add: Callable[..., ArgumentParser]) -> None:
    """Adds the three subcommands; `add` is add_parser of the parser of `swe-rl sandbox`."""
    importer = add(
        "import",
        help="unpack a container image for local sandboxes",
        example=f"swe-rl sandbox import {DAEMON}python:3.12-slim",
    )
    importer.add_argument("source", help=SOURCES)
    importer.add_argument("--name", default="", help="name of the image here (default: the one it comes with)")
    importer.set_defaults(run=_import)
    images = add("images", help="list the imported images", example="swe-rl sandbox images")
    images.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    images.set_defaults(run=_images)
    collector = add(
        "gc", help="remove what no image needs, and old images when the disk is full", example="swe-rl sandbox gc"
    )
    collector.add_argument("--remove", default="", metavar="IMAGE", help="also this image, by name or digest")
    collector.add_argument(
        "--min-free",
        type=float,
        default=MIN_FREE,
        metavar="PART",
        help=f"remove images, the longest unused first, until this part of the disk is free (default {MIN_FREE})",
    )
    collector.set_defaults(run=_gc)


def _import(arguments: Namespace) -> int:
    store = default_store()
    if free_part(store) < MIN_FREE:
        freed = collect(store, min_free=MIN_FREE)
        print(f"disk nearly full: removed {freed.images} images, {freed.freed_bytes / 2**20:.0f} MiB", file=sys.stderr)
    with open_source(_source(arguments.source)) as images:
        if arguments.name and len(images) > 1:
            raise ConfigError(f"--name={arguments.name} fits one image, {arguments.source} holds {len(images)}")
        for found in images:
            names = (arguments.name,) if arguments.name else found.names
            image = store.add(found, names, lambda line: print(line, file=sys.stderr))
            for note in image.notes[:10]:
                print(f"note: {note}", file=sys.stderr)
            if len(image.notes) > 10:
                print(f"note: and {len(image.notes) - 10} more", file=sys.stderr)
            print(f"{', '.join(names) or '(no name)'} sha256:{image.image_id}")
    return 0


def _source(text: str) -> str:
    """A name alone, as in the message of a missing image, is one of the daemon if there is one, else of a registry."""
    if Path(text).exists() or text.startswith((DAEMON, REGISTRY, "/", ".")) or ".tar" in text:
        return text
    has_daemon = "DOCKER_HOST" in os.environ or Path("/var/run/docker.sock").exists()
    return (DAEMON if has_daemon else REGISTRY) + text


def _images(arguments: Namespace) -> int:
    store = default_store()
    images = store.images()
    rows = [_row(store, image) for image in images]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'IMAGE':<16}{'LAYERS':>8}{'MiB':>10}  {'USER':<12}{'WORKDIR':<20}{'IN USE':<8}NAMES")
    for row in rows:
        used = "yes" if row["in_use"] else "-"
        print(
            f"{row['image_id'][:12]:<16}{row['layers']:>8}{row['size_bytes'] / 2**20:>10.1f}  "
            f"{row['user'] or '-':<12}{row['workdir']:<20}{used:<8}{', '.join(row['names']) or '-'}"
        )
    return 0


def _row(store: ImageStore, image: Image) -> dict[str, Any]:
    return {
        "image_id": image.image_id,
        "names": [name for name, image_id in store.names().items() if image_id == image.image_id],
        "layers": len(image.layers),
        "size_bytes": image.size_bytes,
        "user": image.user,
        "workdir": image.workdir,
        "entrypoint": list(image.entrypoint),
        "in_use": image.image_id in in_use(store),
        "notes": list(image.notes),
    }


def _gc(arguments: Namespace) -> int:
    if not 0.0 <= arguments.min_free < 1.0:
        raise ConfigError(f"--min-free={arguments.min_free} must be at least 0 and below 1")
    found = collect(default_store(), min_free=arguments.min_free, remove=arguments.remove)
    print(f"removed {found.images} images, {found.layers} layers, {found.freed_bytes / 2**20:.1f} MiB", end="")
    print(f"; kept {found.kept_in_use} images in use" if found.kept_in_use else "")
    return 0
