"""Each operator on a source where its effect is known, and properties over a larger source."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from swe_rl.curation import mutators
from swe_rl.curation.mutators import OPERATORS, find_mutations, is_valid

CASES = [
    ("compare_swap", "return a < b", ["return a <= b"]),
    ("compare_swap", "return a not in b", ["return a in b"]),
    ("compare_swap", "return a  is  None", ["return a  is not  None"]),
    ("compare_swap", "return 1 < a <= 3", ["return 1 <= a <= 3", "return 1 < a < 3"]),
    ("off_by_one", "return a[0]", ["return a[1]"]),
    ("negate_condition", "if not a:\n        return b\n    return a", ["if a:\n        return b\n    return a"]),
    ("negate_condition", "if a or b:\n        pass", ["if not (a or b):\n        pass"]),
    ("negate_condition", "return a if a.x else b", ["return a if not a.x else b"]),
    ("and_or", "return (a and  b)", ["return (a or  b)"]),
    ("arithmetic", "return a + b  # keep", ["return a - b  # keep"]),
    ("arithmetic", "return 'x' % a", []),
    ("return_none", "return [a,\n        b]", ["return None"]),
    ("return_none", "return None", []),
    ("drop_assignment", "a += 1\n    return a", ["return a"]),
    ("drop_assignment", "c = 1\n    c = 2\n    return c", ["c = 1\n    return c"]),
    ("drop_assignment", "if a:\n        b.x = 1", ["if a:\n        pass"]),
    ("bool_flip", "return g(a, flag=True)", ["return g(a, flag=False)"]),
    ("swap_args", "return g(a, b)", ["return g(b, a)"]),
    ("swap_args", "return g(a, a) + g(*a, b) + g(a, k=b)", []),
    ("drop_raise", "if a:\n        raise ValueError(a)\n    return b", ["if a:\n        pass\n    return b"]),
    ("break_continue", "for i in a:\n        break", ["for i in a:\n        continue"]),
]


def module(body: str) -> bytes:
    return f"x = 1 < 2\n\n\ndef f(a, b=1 + 1):\n    {body}\n".encode()


@pytest.mark.parametrize(("operator", "body", "mutants"), CASES)
def test_operator(operator: str, body: str, mutants: list[str]) -> None:
    source = module(body)
    found = find_mutations(source, operators=[operator])
    assert [m.apply(source).decode() for m in found] == [module(mutant).decode() for mutant in mutants]
    assert all((m.operator, m.function, m.function_line) == (operator, "f", 4) for m in found)


def test_every_operator_has_a_case() -> None:
    assert {operator for operator, _, mutants in CASES if mutants} == set(OPERATORS)


def test_nested_names_and_lines() -> None:
    source = textwrap.dedent("""\
        class C:
            @property
            def p(self):
                def inner(n):
                    return n + 1
                return inner
        """).encode()
    found = {(m.operator, m.function, m.function_line, m.line) for m in find_mutations(source)}
    assert ("arithmetic", "C.p.inner", 4, 5) in found
    assert ("return_none", "C.p", 3, 6) in found


def test_bytes_outside_the_edit_are_untouched() -> None:
    source = "def f(a):\r\n    s = 'äöü'  # ü\r\n\treturn a < 1\r\n".replace("\t", "    ").encode()
    (mutation,) = find_mutations(source, operators=["compare_swap"])
    assert mutation.apply(source) == source.replace(b"<", b"<=")


def test_on_a_real_module_all_valid_and_deterministic() -> None:
    source = Path(mutators.__file__).read_bytes()
    found = find_mutations(source)
    assert found == find_mutations(source)
    assert len(found) > 60
    for mutation in found[::7]:
        if is_valid(source, mutation):
            assert ast.dump(ast.parse(mutation.apply(source))) != ast.dump(ast.parse(source))
    assert sum(is_valid(source, mutation) for mutation in found[::7]) >= 0.9 * len(found[::7])


def test_broken_source_is_a_syntax_error() -> None:
    with pytest.raises(SyntaxError):
        find_mutations(b"def f(:\n")
