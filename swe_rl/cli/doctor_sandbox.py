"""Checks of `swe-rl doctor` about local sandboxes: how limits are kept here, and container images without a daemon."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial

from swe_rl.cli.doctor_checks import Check
from swe_rl.sandbox.enforcement import Bound, bounds


def limit(bound: Bound) -> Check:
    """One limit of a local sandbox: ok when it is kept exactly."""
    found = f"{bound.how}: {bound.gap}" if bound.gap else bound.how
    return Check(name=f"limit: {bound.name}", ok=not bound.gap, found=found, cure=bound.cure, required=False)


def images() -> Check:
    """The store of imported images."""
    from swe_rl.sandbox.oci import default_store

    store = default_store()
    cure = "set SWE_RL_CACHE to a directory of your own"
    try:
        found = store.images()
        total = sum(image.size_bytes for image in found) / 2**30
        return Check(name="images", ok=True, found=f"{len(found)} in {store.root}, {total:.1f} GiB", cure=cure)
    except Exception as err:  # whatever it is, the reader needs the cure beside it
        return Check(name="images", ok=False, found=f"{type(err).__name__}: {err}", cure=cure, required=False)


def registry() -> Check:
    """What fetches images of a registry without a daemon."""
    path = shutil.which("skopeo")
    cure = "apt-get install skopeo, to import images of a registry without Docker"
    return Check(name="skopeo", ok=bool(path), found=path or "not found", cure=cure, required=False)


def checks() -> list[Callable[[], Check]]:
    """The checks, in the order of the table."""
    return [*(partial(limit, bound) for bound in bounds()), images, registry]
