"""doctor: required and optional parts, and the exit code that follows."""

from __future__ import annotations

import json
from functools import partial

import pytest

from swe_rl.cli import doctor
from swe_rl.cli.dispatch import main
from swe_rl.cli.doctor_checks import CHECKS, Check, package, python, torch_device


def check(*, ok: bool, required: bool) -> Check:
    return Check(name=f"part-{ok}-{required}", ok=ok, found="[1.0]", cure="install [it]", required=required)


@pytest.mark.parametrize(
    ("ok", "required", "status", "code"), [(1, 1, "ok", 0), (0, 1, "missing", 1), (0, 0, "optional", 0)]
)
def test_only_a_missing_required_part_fails(
    ok: int, required: int, status: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", [partial(check, ok=bool(ok), required=bool(required))])
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert status in text
    assert "[1.0]" in text
    assert ("install [it]" in text) == (not ok)
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)[0]["status"] == status


def test_checks_tell_what_is_here() -> None:
    assert python().ok
    assert torch_device().ok
    assert package("json", cure="").found == "present, version unknown"
    missing = package("no_such_package", cure="pip install it")
    assert (missing.ok, missing.status, missing.found) == (False, "optional", "not installed")
    assert package("yaml", distribution="PyYAML", cure="").ok


def test_every_check_answers_with_a_cure_on_this_machine() -> None:
    answers = [one() for one in CHECKS]
    assert len({answer.name for answer in answers}) == len(answers)
    for answer in answers:
        assert answer.found
        assert answer.cure
        assert "\n" not in answer.name
