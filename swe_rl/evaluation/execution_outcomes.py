"""What one reproduction test says about a program, read exactly.

A written test has one of three outcomes: the issue is still there (reproduced), it is gone (resolved), or the test
itself came to nothing (other). Plain test functions say so by failing, passing, or neither. Scripts in the published
form (R2E-Gym) print one line per test; only whole lines count, so that "Issue unresolved" is no resolved issue.
"""

from __future__ import annotations

import re

from swe_rl.tasks.test_runner import Verdict

RESOLVED, REPRODUCED, OTHER = "resolved", "reproduced", "other"
_PRINTED = {"issue resolved": RESOLVED, "issue reproduced": REPRODUCED, "other issues": OTHER}
_LINE = re.compile(
    r"^[ \t]*(issue resolved|issue reproduced|other issues)[ \t]*[.!]?[ \t\r]*$", re.IGNORECASE | re.MULTILINE
)
# What pytest and the function runner call a test that ran and did not hold; everything else says nothing of the issue.
_BY_VERDICT = {"passed": RESOLVED, "failed": REPRODUCED}


def printed_outcomes(output: str) -> list[str]:
    """Outcomes in the order of their lines; a line with anything else on it is none."""
    return [_PRINTED[match.group(1).lower()] for match in _LINE.finditer(output)]


def outcome_of(verdict: Verdict | None) -> str:
    """Of a plain test function; None, error, missing and forged results are `other`."""
    return OTHER if verdict is None else _BY_VERDICT.get(verdict.status, OTHER)
