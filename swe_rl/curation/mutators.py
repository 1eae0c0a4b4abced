"""Bug operators over Python source. libcst finds the sites; the edit itself is a span of bytes, so that formatting and
comments stay as they are and the repairing diff is as small as the bug.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, CodeSpan, MetadataWrapper, PositionProvider

Edit = tuple[int, int, bytes]  # start, end, replacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One injected bug: bytes [start, end) of a file become `replacement`."""

    operator: str
    function: str  # qualified name inside the module, "Class.method"
    function_line: int  # of its `def`, 1-based, decorators excluded
    line: int  # first line changed, 1-based
    start: int
    end: int
    replacement: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement + source[self.end :]


OPERATORS = (
    "compare_swap",
    "off_by_one",
    "negate_condition",
    "and_or",
    "arithmetic",
    "return_none",
    "drop_assignment",
    "bool_flip",
    "swap_args",
    "drop_raise",
    "break_continue",
)

_COMPARE = {
    cst.LessThan: (b"<", b"<="),
    cst.LessThanEqual: (b"<=", b"<"),
    cst.GreaterThan: (b">", b">="),
    cst.GreaterThanEqual: (b">=", b">"),
    cst.Equal: (b"==", b"!="),
    cst.NotEqual: (b"!=", b"=="),
    cst.In: (b"in", b"not in"),
    cst.NotIn: (b"not in", b"in"),
    cst.Is: (b"is", b"is not"),
    cst.IsNot: (b"is not", b"is"),
}
_BINARY = {
    cst.Add: (b"+", b"-"),
    cst.Subtract: (b"-", b"+"),
    cst.Multiply: (b"*", b"//"),
    cst.Divide: (b"/", b"*"),
    cst.FloorDivide: (b"//", b"*"),
    cst.Modulo: (b"%", b"//"),
    cst.BitAnd: (b"&", b"|"),
    cst.BitOr: (b"|", b"&"),
}
_BOOLEAN = {cst.And: (b"and", b"or"), cst.Or: (b"or", b"and")}
_BOUND_BEFORE = (cst.Attribute, cst.Subscript)


def find_mutations(source: bytes, *, operators: Sequence[str] = OPERATORS) -> list[Mutation]:
    """All single-site bugs inside functions of one module, in order of position. Raises SyntaxError.

    Each result parses and differs from the original as a syntax tree; whether it changes behaviour, tests decide.
    """
    try:
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    except cst.ParserSyntaxError as err:
        raise SyntaxError(str(err)) from err
    finder = _Finder(source, frozenset(operators))
    wrapper.visit(finder)
    return sorted(finder.found, key=lambda m: (m.start, m.operator, m.replacement))


def is_valid(source: bytes, mutation: Mutation) -> bool:
    """Whether the mutant parses and means something else syntactically."""
    try:
        return ast.dump(ast.parse(mutation.apply(source))) != ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return False


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (ByteSpanPositionProvider, PositionProvider)

    def __init__(self, source: bytes, operators: frozenset[str]) -> None:
        super().__init__()
        self.source = source
        self.operators = operators
        self.found: list[Mutation] = []
        self.scopes: list[str] = []
        self.functions: list[tuple[str, int, set[str]]] = []  # qualified name, line of def, names bound so far

    # Scopes -----------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.scopes.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self.scopes.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        self.scopes.append(node.name.value)
        line = self.get_metadata(PositionProvider, node.name).start.line
        params = {p.name.value for p in (*node.params.params, *node.params.kwonly_params, *node.params.posonly_params)}
        self.functions.append((".".join(self.scopes), line, params))
        node.body.visit(self)  # the body only: defaults, annotations and decorators run at import
        self.functions.pop()
        self.scopes.pop()
        return False

    def visit_Annotation(self, node: cst.Annotation) -> bool:
        return False

    # Expressions ------------------------------------------------------------------------------------------------

    def visit_Comparison(self, node: cst.Comparison) -> None:
        left: cst.BaseExpression = node.left
        for target in node.comparisons:
            if type(target.operator) in _COMPARE:
                old, new = _COMPARE[type(target.operator)]
                self._swap_token("compare_swap", left, target.comparator, old, new)
            left = target.comparator

    def visit_BinaryOperation(self, node: cst.BinaryOperation) -> None:
        text = isinstance(node.left, (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString))
        if type(node.operator) in _BINARY and not text:
            self._swap_token("arithmetic", node.left, node.right, *_BINARY[type(node.operator)])

    def visit_BooleanOperation(self, node: cst.BooleanOperation) -> None:
        self._swap_token("and_or", node.left, node.right, *_BOOLEAN[type(node.operator)])

    def visit_Integer(self, node: cst.Integer) -> None:
        value = ast.literal_eval(node.value)
        if abs(value) <= 1 << 16:
            span = self._span(node)
            self._add("off_by_one", node, (span.start, span.start + span.length, str(value + 1).encode()))

    def visit_Name(self, node: cst.Name) -> None:
        if node.value in ("True", "False"):
            start, end = self._bounds(node)
            self._add("bool_flip", node, (start, end, b"False" if node.value == "True" else b"True"))

    def visit_Call(self, node: cst.Call) -> None:
        plain = [
            arg for arg in node.args if arg.keyword is None and not arg.star and not getattr(arg.value, "lpar", ())
        ]
        if len(plain) >= 2 and len(plain) == len(node.args):
            (a, b), (c, d) = self._bounds(plain[0].value), self._bounds(plain[1].value)
            first, middle, second = self.source[a:b], self.source[b:c], self.source[c:d]
            if first != second:
                self._add("swap_args", plain[0].value, (a, d, second + middle + first))

    def visit_If(self, node: cst.If) -> None:
        self._negate(node.test)

    def visit_IfExp(self, node: cst.IfExp) -> None:
        self._negate(node.test)

    # Statements -------------------------------------------------------------------------------------------------

    def visit_Return(self, node: cst.Return) -> None:
        if node.value is not None and not (isinstance(node.value, cst.Name) and node.value.value == "None"):
            self._add("return_none", node, (*self._bounds(node.value), b"None"))

    def visit_Break(self, node: cst.Break) -> None:
        self._add("break_continue", node, (*self._bounds(node), b"continue"))

    def visit_Continue(self, node: cst.Continue) -> None:
        self._add("break_continue", node, (*self._bounds(node), b"break"))

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        for line in node.body:
            if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
                continue
            statement = line.body[0]
            if isinstance(statement, cst.Raise) and statement.exc is not None:
                self._drop("drop_raise", line, node)
            elif isinstance(statement, cst.AugAssign) or (
                isinstance(statement, cst.Assign) and self._rebinds(statement)
            ):
                self._drop("drop_assignment", line, node)
            if isinstance(statement, cst.Assign) and self.functions:
                self.functions[-1][2].update(
                    t.target.value for t in statement.targets if isinstance(t.target, cst.Name)
                )

    # Helpers ----------------------------------------------------------------------------------------------------

    def _rebinds(self, statement: cst.Assign) -> bool:
        """Without it the code still runs: the target existed before, or is an attribute or an item."""
        known = self.functions[-1][2] if self.functions else set()
        targets = [t.target for t in statement.targets]
        return all(isinstance(t, _BOUND_BEFORE) or (isinstance(t, cst.Name) and t.value in known) for t in targets)

    def _negate(self, test: cst.BaseExpression) -> None:
        start, end = self._bounds(test)
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            inner = self._bounds(test.expression)
            self._add("negate_condition", test, (start, end, self.source[slice(*inner)]))
            return
        text = self.source[start:end]
        simple = isinstance(test, (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
        self._add("negate_condition", test, (start, end, b"not " + text if simple else b"not (" + text + b")"))

    def _drop(self, operator: str, line: cst.SimpleStatementLine, block: cst.IndentedBlock) -> None:
        start, end = self._bounds(line.body[0])
        if len(block.body) == 1:
            self._add(operator, line, (start, end, b"pass"))
            return
        line_start = self.source.rfind(b"\n", 0, start) + 1
        newline = self.source.find(b"\n", end)
        self._add(operator, line, (line_start, len(self.source) if newline < 0 else newline + 1, b""))

    def _swap_token(self, operator: str, left: cst.CSTNode, right: cst.CSTNode, old: bytes, new: bytes) -> None:
        start, end = self._bounds(left)[1], self._bounds(right)[0]
        between = self.source[start:end]
        if between.count(old) == 1 and b"#" not in between:
            at = start + between.index(old)
            self._add(operator, left, (at, at + len(old), new))

    def _span(self, node: cst.CSTNode) -> CodeSpan:
        return self.get_metadata(ByteSpanPositionProvider, node)

    def _bounds(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self._span(node)
        return span.start, span.start + span.length

    def _add(self, operator: str, node: cst.CSTNode, edit: Edit) -> None:
        if not self.functions or operator not in self.operators:
            return
        start, end, replacement = edit
        name, function_line, _ = self.functions[-1]
        self.found.append(
            Mutation(
                operator=operator,
                function=name,
                function_line=function_line,
                line=self.get_metadata(PositionProvider, node).start.line,
                start=start,
                end=end,
                replacement=replacement,
            )
        )
