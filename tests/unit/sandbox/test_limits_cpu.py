"""A bound on processor time: by a quota of either cgroup version, or not at all and said so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.errors import SandboxUnavailable
from swe_rl.sandbox import cgroup, open_sandbox
from swe_rl.sandbox.owner import owner_label
from swe_rl.sandbox.reap import reap
from swe_rl.types import Limits, SandboxSpec

_BUSY = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time())"


async def test_quota_bounds_processor_time() -> None:
    found = cgroup.parent()
    require(found is not None and cgroup.cpu_parent() is not None, "a writable cpu cgroup")
    spec = SandboxSpec(limits=Limits(cpus=0.2, command_s=60.0))
    try:
        async with open_sandbox(spec) as sandbox:
            await sandbox.exec("sleep 0.2")  # the launcher joins the groups beside the start
            one = await sandbox.exec(f"python3 -I -S -c '{_BUSY}'")
            two = await sandbox.exec(f"for i in 1 2; do python3 -I -S -c '{_BUSY}' & done; wait")
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")
    assert 0.0 < float(one.stdout) < 0.8  # 0.2 * 2 s, and what a period lets through; without a bound up to 2
    assert sum(map(float, two.stdout.split())) < 1.0
    place = Path(cgroup.cpu_parent() or "")
    assert list(place.glob(f"{cgroup.PREFIX}{owner_label()}-*")) == []


def test_limit_for_either_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, expected in [
        ("/v2", ("/v2/swe-rl-1-2-3", "cpu.max 150000 100000")),
        ("/v1/cpu", ("/v1/cpu/swe-rl-1-2-3", "cpu.cfs_quota_us 150000")),
    ]:
        monkeypatch.setattr(cgroup, "cpu_parent", lambda place=place: place)
        assert cgroup.cpu_limit("/v2/swe-rl-1-2-3", 1.5) == expected
        assert cgroup.cpu_limit("/v2/swe-rl-1-2-3", 0.0) is None
        assert (cgroup.cpu_limit("/v2/swe-rl-1-2-3", 1e-9) or ("", ""))[1].split()[1] == "1000"  # the kernel's least
    monkeypatch.setattr(cgroup, "cpu_parent", lambda: None)
    assert cgroup.cpu_limit("/v2/swe-rl-1-2-3", 1.0) is None


@pytest.mark.parametrize(("text", "control", "expected"), [
    ("0::/job\n", "cpu memory", "v2"),
    ("0::/job\n", "memory", None),
    ("4:memory:/\n3:cpu,cpuacct:/x\n0::/\n", "", "v1"),
])  # fmt: skip
def test_group_that_may_bound_it(
    text: str, control: str, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder in ("v2/job", "memory", "cpu/x"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("v2", "v2/job", "memory", "cpu/x"):
        (tmp_path / folder / "cgroup.procs").write_text("")
    (tmp_path / "v2" / "cgroup.subtree_control").write_text(control)
    (tmp_path / "self").write_text(text)
    real = cgroup._read
    monkeypatch.setattr(
        cgroup, "_read", lambda path: real(str(tmp_path / "self") if path.startswith("/proc") else path)
    )
    for name, folder in (("_V1", "memory"), ("_V1_CPU", "cpu"), ("_V2", "v2")):
        monkeypatch.setattr(cgroup, name, str(tmp_path / folder))
    cgroup.parent.cache_clear()
    cgroup.cpu_parent.cache_clear()
    try:
        found = cgroup.cpu_parent()
        assert found == {"v2": str(tmp_path / "v2"), "v1": str(tmp_path / "cpu/x"), None: None}[expected]
        assert os.path.isabs(found or "/")
    finally:
        cgroup.parent.cache_clear()
        cgroup.cpu_parent.cache_clear()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has cgroups to reap")
def test_groups_of_the_dead_are_reaped() -> None:
    place = cgroup.cpu_parent()
    require(place is not None, "a writable cpu cgroup")
    group = Path(place or "", f"{cgroup.PREFIX}{os.getpid()}-1-0")  # a recycled pid: that owner has ended
    group.mkdir()
    assert reap().cgroups >= 1
    assert not group.exists()
