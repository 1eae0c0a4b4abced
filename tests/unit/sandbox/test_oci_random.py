"""Random stacks of layers: what a sandbox shows is what the specification of changesets says, kept as a dictionary."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import oci_images as build
import pytest
from oci_images import Built
from real_parts import require

from swe_rl.errors import SandboxUnavailable
from swe_rl.sandbox import open_sandbox
from swe_rl.sandbox.oci import default_store, lookup
from swe_rl.sandbox.oci.sources import open_source
from swe_rl.types import SandboxSpec

Tree = dict[str, str]  # path -> "d MODE", "f MODE CONTENT" or "l TARGET"
NAMES = ("a", "b", "c")


def _remove(tree: Tree, path: str, *, itself: bool = True) -> None:
    for other in [known for known in tree if known.startswith(path + "/") or (itself and known == path)]:
        del tree[other]


def _draw(rng: random.Random, below: Tree) -> tuple[list[Any], Tree]:
    """One layer over `below`: its entries, in an order that an archiver might write, and the tree with it."""
    tree, entries, made = dict(below), [], {"t"}
    entries.append(build.folder("t"))
    tree["t"] = "d 755"

    def list_parents(path: str) -> None:
        """Directories that the layer holds because of `path`; no file of it can be there."""
        made.update(path[:at] for at, char in enumerate(path) if char == "/")

    deleted = [path for path in below if path != "t" and rng.random() < 0.2]
    hidden = [path for path in below if path not in deleted and below[path].startswith("d") and rng.random() < 0.15]
    for path in deleted:
        _remove(tree, path)
        if not any(path.startswith(other + "/") for other in deleted):
            entries.append(build.whiteout(path))
            list_parents(path)
    for path in hidden:
        if path not in tree or path in made:
            continue
        _remove(tree, path, itself=False)
        entries += [build.folder(path, mode=0o755), build.opaque(path)]
        tree[path] = "d 755"
        made.add(path)
        list_parents(path)
    files: set[str] = set()
    for number in range(rng.randrange(8)):
        path = "t/" + "/".join(rng.choice(NAMES) for _ in range(rng.randint(1, 3)))
        parents = [path[:at] for at, char in enumerate(path) if char == "/"]
        if path in made or path in files or any(parent in files for parent in parents):
            continue
        for parent in parents:
            if parent not in made and rng.random() < 0.7:  # else left out: it looks as below, or is a plain folder
                mode = rng.choice((0o755, 0o711, 0o1777))
                entries.append(build.folder(parent, mode=mode))
                _become_directory(tree, parent, f"{mode:o}")
            elif parent not in made and not tree.get(parent, "").startswith("d"):
                _become_directory(tree, parent, "755")
            made.add(parent)
        kind = rng.choice("dffl")
        if kind == "d":
            entries.append(build.folder(path, mode=0o750))
            _become_directory(tree, path, "750")
            made.add(path)
            continue
        _remove(tree, path)
        files.add(path)
        if kind == "l":
            entries.append(build.symlink(path, f"to{number}"))
            tree[path] = f"l to{number}"
        else:
            entries.append(build.entry(path, b"%d" % number, mode=0o640))
            tree[path] = f"f 640 {number}"
    return entries, tree


def _become_directory(tree: Tree, path: str, mode: str) -> None:
    if not tree.get(path, "").startswith("d"):
        _remove(tree, path)
    tree[path] = f"d {mode}"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setenv("SWE_RL_CACHE", str(tmp_path / "cache"))
    return build.base_layer()


_LIST = (
    "cd /; find t -type d -printf '%p\\td %m\\n' -o -type l -printf '%p\\tl %l\\n'"
    " -o -printf '%p\\tf %m ' -exec cat {} \\; -printf '\\n'"
)


@pytest.mark.parametrize("seed", range(12))
async def test_random_layers(base: bytes, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tree: Tree = {}
    layers = [base]
    for _ in range(rng.randint(3, 6)):
        entries, tree = _draw(rng, tree)
        layers.append(build.layer(*entries))
    with open_source(str(Built(layers).save(tmp_path / "image.tar", "random:1"))) as images:
        image = default_store().add(images[0])
    stack = default_store().layer_paths(image)
    for path in [*tree, "t/a", "t/b", "t/c", "t/a/a"]:
        assert (lookup.find(stack, path) is not None) == (path in tree), path
    try:
        async with open_sandbox(SandboxSpec(image="random:1")) as sandbox:
            result = await sandbox.exec(_LIST)
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")
    assert result.outcome == "ok", result
    assert dict(line.split("\t") for line in result.stdout.decode().splitlines()) == tree
