"""Looks for given blocks of lines, and for copies of given modules, in everything that a sandbox can read.

    python3 -I -S scan.py <request >answer        both JSON

request   {"blocks": [[name, [line, ...]], ...], "copies": [path below a package root, ...], "roots": [directory, ...],
           "except": [directory, ...]}
answer    {"hits": [[name of block, where], ...], "copies": [path, ...], "history": [text, ...],
           "files": number read, "unread": number}

Read: plain files, members of zip and tar archives (also inside the cache files of pip), and every object of every Git
repository, reachable or not. Lines are compared without trailing blanks. A block may be cut by what is no line: only a
file that has all its lines, one after the other, is a hit.
"""
# mypy: ignore-errors

from __future__ import annotations

import bz2
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
import zlib

NOT_READ = ("/proc", "/sys", "/dev")
MAX_BYTES = 32 << 20  # of one file or member
MAX_DEPTH = 2  # of archives in archives
GIT = ("git", "--no-replace-objects")
ELF = b"\x7fELF"
FEW = 30
# Files without lines of a program, most of a system's bytes; of compiled modules the name says enough.
NO_LINES = tuple(".a .o .so .pyc .mo .jar .jmod .jsa .bc .png .jpg .gif .ico .ttf .woff .woff2 .otf .hwdb .bin".split())
HEAD = 1 << 20  # enough for the first block of any compression


class Scan:
    def __init__(self, request):
        self.blocks = [
            (name, [line.encode("utf-8", "surrogateescape") for line in lines]) for name, lines in request["blocks"]
        ]
        self.keys = {}  # the longest line of a block -> blocks
        for name, lines in self.blocks:
            self.keys.setdefault(max(lines, key=len), []).append((name, lines))
        self.copies_of = tuple("/" + path for path in request["copies"])
        self.excepted = tuple(request["except"])
        self.answer = {"hits": [], "copies": [], "history": [], "files": 0, "unread": 0}

    def walk(self, root):
        for folder, folders, files in os.walk(root):
            inside = [name for name in folders if not self.is_excepted(os.path.join(folder, name))]
            folders[:] = inside
            if "objects" in folders and "refs" in folders and "HEAD" in files:
                self.repository(folder)
            for name in files:
                self.file(os.path.join(folder, name))

    def is_excepted(self, path):
        return path in NOT_READ or path in self.excepted

    def file(self, path):
        self.look_at_name(path)
        try:
            if path.endswith(NO_LINES) or os.path.islink(path) or not os.path.isfile(path):
                return
            if os.path.getsize(path) > MAX_BYTES:
                return
            with open(path, "rb") as file:
                data = file.read(4)
                if data == ELF:
                    return
                data += file.read()
        except OSError:
            self.answer["unread"] += 1
            return
        self.answer["files"] += 1
        self.content(data, path, 0)

    def look_at_name(self, path):
        """A module of the same place in a package, as source or compiled."""
        folder, name = os.path.split(path)
        plain = path
        if name.endswith(".pyc"):
            above = os.path.dirname(folder) if os.path.basename(folder) == "__pycache__" else folder
            plain = os.path.join(above, name.split(".")[0] + ".py")
        if plain.endswith(self.copies_of or ("\0",)):
            self.answer["copies"].append(path)

    def content(self, data, where, depth):
        if data[:4] == ELF:
            return
        for member, body in members(data) if depth < MAX_DEPTH else ():
            self.look_at_name(where + "!/" + member)
            self.content(body, where + "!/" + member, depth + 1)
        keys = self.keys_in(data)
        lines = [line.rstrip() for line in data.split(b"\n")] if keys else []
        for key in keys:
            for name, block in self.keys[key]:
                if holds(lines, block):
                    self.answer["hits"].append([name, where])

    def keys_in(self, data):
        """The longest lines of blocks that may be among those of `data`; searching is quicker for few of them."""
        if len(self.keys) <= FEW:
            return [key for key in self.keys if key in data]
        return self.keys.keys() & set(data.replace(b"\r\n", b"\n").split(b"\n"))

    def repository(self, folder):
        """All objects, and whatever else than one commit is there."""

        def git(*args):
            command = [*GIT, "--git-dir", folder, *args]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
            return done.stdout

        self.content(git("cat-file", "--batch-all-objects", "--batch"), folder + " objects", MAX_DEPTH)
        commits = git("rev-list", "--all", "--reflog").split()
        names = git("for-each-ref", "--format=%(refname)").decode("utf-8", "replace").split()
        unreachable = git("fsck", "--unreachable", "--no-reflogs", "--no-progress").split(b"\n")[:-1]
        found = [
            (len(commits) > 1, f"{len(commits)} commits"),
            (any(not name.startswith("refs/heads/") for name in names), "refs " + " ".join(names[:5])),
            (len(names) > 1, f"{len(names)} branches"),
            (bool(git("remote")), "remotes"),
            (bool(unreachable), f"{len(unreachable)} unreachable objects"),
            (os.path.exists(os.path.join(folder, "logs", "HEAD")), "a reflog"),
        ]
        self.answer["history"] += [folder + ": " + text for is_there, text in found if is_there]


def holds(lines, block):
    """Whether the lines of `block` stand in `lines`, one after the other."""
    start = 0
    while True:
        try:
            start = lines.index(block[0], start)
        except ValueError:
            return False
        if lines[start : start + len(block)] == block:
            return True
        start += 1


def members(data):
    """(name, content) of the files in an archive, one after the other; of a cache file the archive may start later."""
    start = archive_start(data)
    if start is None:
        return
    body = io.BytesIO(data[start:] if start else data)
    try:
        if data[start : start + 2] == b"PK":
            with zipfile.ZipFile(body) as bundle:
                for entry in bundle.infolist():
                    if 0 < entry.file_size <= MAX_BYTES:
                        yield entry.filename, bundle.read(entry)
            return
        with tarfile.open(fileobj=body) as tar:
            for entry in tar:
                if entry.isreg() and entry.size <= MAX_BYTES:
                    yield entry.name, tar.extractfile(entry).read()
    except Exception:  # damaged, encrypted, or no archive after all: it is read as it is
        return


def archive_start(data):
    """Where a zip or tar archive begins in `data`, None when nowhere."""
    if data[257:262] == b"ustar":
        return 0
    head = data[:4096]
    for sign in (b"PK\x03\x04", b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\0"):
        start = head.find(sign)
        if start == 0 or (start > 0 and sign[:1] in (b"P", b"\x1f")):
            return start if sign[:1] == b"P" or holds_tar(data[start : start + HEAD]) else None
    return None


def holds_tar(head):
    """Whether what is compressed begins like a tar archive: most compressed files are no archives."""
    for decompressor in (zlib.decompressobj(31), bz2.BZ2Decompressor(), lzma.LZMADecompressor()):
        try:
            return decompressor.decompress(head, 512)[257:262] == b"ustar"
        except (zlib.error, OSError, ValueError, EOFError, lzma.LZMAError):
            continue
    return False


def main():
    request = json.load(sys.stdin)
    scan = Scan(request)
    for root in request["roots"]:
        scan.walk(root)
    json.dump(scan.answer, sys.stdout)


if __name__ == "__main__":
    main()
