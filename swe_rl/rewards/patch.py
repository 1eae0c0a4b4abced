"""What an agent changed, as one binary-safe diff. The agent's own Git settings, index and refs have no say in it.

The diff is taken with a private GIT_DIR that borrows only the object store of the workspace: configuration, hooks,
filters, attributes, replace refs, skip-worktree bits and commits the agent made there cannot hide or alter a change.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from swe_rl.errors import PatchError, SandboxError, SandboxLost

if TYPE_CHECKING:
    from swe_rl.protocols import Sandbox
    from swe_rl.types import ExecResult

INLINE_BYTES = 8 << 10  # a diff up to this size comes back with the command itself
CLEAN_ENV = (
    'env -i PATH="/usr/local/bin:/usr/bin:/bin:$PATH" LC_ALL=C HOME=/nonexistent '
    "GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1"
)

# Untracked paths that are by-products of running code; tracked ones are diffed whatever their name.
_JUNK = (
    "__pycache__/ *.pyc *.pyo .pytest_cache/ .mypy_cache/ .ruff_cache/ .hypothesis/ "
    ".tox/ .nox/ .venv/ node_modules/ *.egg-info/"
)

_EXIT_NO_BASE, _EXIT_NO_WORKDIR, _EXIT_ADD, _EXIT_DIFF, _EXIT_TOO_LARGE, _EXIT_TMP = 64, 65, 66, 67, 68, 69
_NO_GIT = 127  # also "no shell": nothing of the agent's had a say
_CANNOT_START = 126
_AGENTS_LIMITS = (b"sandbox: process limit", b"sandbox: too many commands")  # its background jobs are in the way
_REASONS = {
    _EXIT_NO_BASE: "no_base",
    _EXIT_NO_WORKDIR: "no_workdir",
    _EXIT_ADD: "unreadable",
    _EXIT_DIFF: "diff_failed",
    _EXIT_TOO_LARGE: "too_large",
    _EXIT_TMP: "no_space",
}

# Runs in the root directory. Every path is relative to it, since a sandbox without isolation has its root elsewhere.
# Arguments: workdir, base commit ("": the root commit of HEAD), byte limit, inline limit, mode (fast, nested, import).
_SCRIPT = r"""
command -v git >/dev/null || exit 127
R=${PWD%/}
W=$R/$1 BASE=$2 MAX=$3 INLINE=$4 MODE=$5
umask 077
N=$(mktemp -d tmp/.diff.XXXXXX) || exit 69
T=$R/$N
mkdir -p "$T/g/objects/info" "$T/g/refs" "$T/g/info" || exit 69
echo 'ref: refs/heads/none' >"$T/g/HEAD"
echo '[core]' >"$T/g/config"
printf '%s\n' repositoryformatversion=0 filemode=true symlinks=true autocrlf=false compression=0 \
  >>"$T/g/config" || exit 69
echo '* -text -eol -ident -filter -working-tree-encoding !diff' >"$T/g/info/attributes"
printf '%s\n' $JUNK >"$T/g/info/exclude"
cd "$W" 2>/dev/null || exit 65
if [ "$MODE" != import ]; then
  printf '%s\n' "$W/.git/objects" >"$T/g/objects/info/alternates"
  [ -n "$BASE" ] || BASE=$(git --git-dir="$W/.git" rev-list --max-parents=0 HEAD 2>/dev/null | tail -n 1)
fi
export GIT_DIR="$T/g" GIT_WORK_TREE="$W" GIT_INDEX_FILE="$T/i"
if [ "$MODE" = import ]; then
  git version >/dev/null 2>&1 || exit 127
  git fast-import --quiet >/dev/null 2>&1 || exit 69
  BASE=refs/heads/base
fi
[ -n "$BASE" ] && git read-tree "$BASE" 2>/dev/null || exit 64
git add -A --ignore-errors . >/dev/null 2>"$T/err"; ADDED=$?
if [ "$MODE" != fast ]; then
  chmod -R u+rwX . 2>/dev/null
  find . -mindepth 2 -name .git -prune -print0 | while IFS= read -r -d '' G; do
    D=${G%/.git}; D=${D#./}
    git update-index --force-remove -- "$D" 2>/dev/null
    find "$D" -name .git -prune -o \( -type f -o -type l \) -print0 | git update-index --add -z --stdin 2>/dev/null
  done
  git add -A --ignore-errors . >/dev/null 2>&1
  ADDED=0
fi
if [ $ADDED -ne 0 ]; then head -c 300 "$T/err" >&2; exit 66; fi
git diff-index --cached --patch --binary --full-index --no-ext-diff --no-textconv --no-renames --no-color \
  --ignore-submodules=dirty --src-prefix=a/ --dst-prefix=b/ "$BASE" -- >"$T/patch" 2>"$T/err" \
  || { head -c 300 "$T/err" >&2; exit 67; }
SIZE=$(stat -c %s "$T/patch")
if [ "$SIZE" -gt "$MAX" ]; then rm -rf "$T"; echo "$SIZE" >&2; exit 68; fi
mv "$T/patch" "$T.patch" && rm -rf "$T"
echo "$SIZE /$N.patch" >&2
[ "$SIZE" -gt "$INLINE" ] || exec cat "$T.patch"
"""


async def extract_patch(
    sandbox: Sandbox,
    *,
    workdir: str = "/testbed",
    max_bytes: int = 1 << 20,
    base_commit: str = "",
    base_tree: Mapping[str, bytes] | None = None,
) -> bytes:
    """Diff of the working tree against the base commit, b"" when nothing changed. One command in the usual case.

    New, staged, committed, deleted, mode-changed, symlinked, binary, CRLF and oddly named files are all in it; caches
    of test runs are not, nor is what the repository's own .gitignore names. `base_commit` "" takes the root commit of
    HEAD; `base_tree` (Task.tree) lets the diff survive an agent that destroyed `.git`.

    Raises PatchError (the agent's doing; `reason` is too_large, no_base, no_workdir, unreadable, ...) and SandboxError
    (the machine's: no git, or no time to finish).
    """
    result = await _run(sandbox, workdir, base_commit, max_bytes, mode="fast")
    if result.exit_code == _EXIT_NO_BASE and base_tree:
        result = await _run(sandbox, workdir, "", max_bytes, mode="import", stdin=_import_stream(base_tree))
    elif result.exit_code == _EXIT_ADD:  # unreadable files, or a repository without commits inside the workspace
        result = await _run(sandbox, workdir, base_commit, max_bytes, mode="nested")
    patch = await _collect(sandbox, result)
    if b"\nnew file mode 160000\n" in patch:  # a repository inside the workspace would be lost as a bare link
        patch = await _collect(sandbox, await _run(sandbox, workdir, base_commit, max_bytes, mode="nested"))
    return patch


async def _run(
    sandbox: Sandbox, workdir: str, base: str, max_bytes: int, *, mode: str, stdin: bytes | None = None
) -> ExecResult:
    script = _SCRIPT.replace("$JUNK", " ".join(shlex.quote(name) for name in _JUNK.split()))
    args = shlex.join([workdir.lstrip("/"), base, str(max_bytes), str(INLINE_BYTES), mode])
    shell = "bash" if mode != "fast" else "sh"  # NUL-separated reads need bash; plain sh starts faster
    return await sandbox.exec(f"exec {CLEAN_ENV} {shell} -c {shlex.quote(script)} diff {args}", cwd="/", stdin=stdin)


async def _collect(sandbox: Sandbox, result: ExecResult) -> bytes:
    if result.outcome == "lost":
        raise SandboxLost("the sandbox ended while the patch was read")
    if result.outcome == "timeout":  # a busy machine as likely as a huge tree
        raise SandboxError(f"the diff was not made within {result.duration_s:.0f} s")
    if _cannot_run(result):
        raise SandboxError(f"the diff cannot be made here, is git installed? {result.stderr[-200:]!r}")
    if result.outcome not in ("ok", "nonzero"):
        raise PatchError(f"the diff could not be made: {result.outcome}", reason=result.outcome)
    detail = result.stderr.decode("utf-8", "replace").strip()
    if result.exit_code != 0:
        reason = _REASONS.get(result.exit_code, "diff_failed")
        raise PatchError(f"the diff could not be made: {reason} {detail}".strip(), reason=reason)
    size, _, path = detail.partition(" ")
    inline = size == str(len(result.stdout))
    try:
        patch = result.stdout if inline else await sandbox.read_file(path)
    except OSError as err:  # something of the agent's still runs and took the file away
        raise PatchError(f"the diff could not be read: {err}", reason="unreadable") from err
    if not size.isdigit() or len(patch) != int(size):
        raise SandboxError(f"the diff arrived incomplete: {len(patch)} bytes, announced {size!r}")
    return patch


def _cannot_run(result: ExecResult) -> bool:
    if result.exit_code == _CANNOT_START:
        return not result.stderr.startswith(_AGENTS_LIMITS)
    return result.exit_code == _NO_GIT


def _import_stream(tree: Mapping[str, bytes]) -> bytes:
    """`git fast-import` input that recreates the base tree, byte for byte."""
    parts = [b"commit refs/heads/base\ncommitter base <base@localhost> 0 +0000\ndata 0\n"]
    for path, data in sorted(tree.items()):
        name = path.encode("utf-8", "surrogateescape")
        quoted = b'"' + name.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'
        parts.append(b"M 100644 inline " + quoted + b"\ndata %d\n" % len(data) + data + b"\n")
    return b"".join(parts)
