"""The mutations of `mutants.py`, and the tests that reach a line.

Docstrings, annotations, imports, texts of errors and the arguments of a `raise`
are not mutated.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
PAIRS = ("min max", "minimum maximum", "any all", "zeros ones", "argmin argmax")
PAIRS += ("zeros_like ones_like", "sum mean", "isnan isfinite", "exp expm1")
OTHER_NAME = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}
# f(x, ...) becomes x.
LEFT_OUT = {"stop_gradient", "abs", "clip", "logical_not", "sqrt"}
LIBRARIES = {"jnp", "jax", "lax", "np"}


class Mutant(NamedTuple):
    """One change: bytes `start` to `end` of a file become `text`."""

    file: str
    line: int
    column: int
    before: str
    after: str
    start: int
    end: int
    text: str
    statement: int | None  # line of the statement of a function; None outside of them

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.before} -> {self.after}"


def defaults(sources: list[str]) -> set[tuple[str, str]]:
    """(function or record, parameter) of every parameter that has a default."""
    pairs = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.FunctionDef):
            positional = [*node.args.posonlyargs, *node.args.args]
            named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            optional = positional[len(positional) - len(node.args.defaults) :]
            optional += [argument for argument, value in named if value is not None]
            pairs |= {(node.name, argument.arg) for argument in optional}
        elif isinstance(node, ast.ClassDef):
            pairs |= {
                (node.name, field.target.id)
                for field in node.body
                if isinstance(field, ast.AnnAssign) and field.value is not None
                if isinstance(field.target, ast.Name)
            }
    return pairs


def last_name(function: ast.expr) -> str:
    """`c` of a.b.c."""
    return getattr(function, "attr", getattr(function, "id", ""))


def root_name(function: ast.expr) -> str:
    """`a` of a.b.c."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return getattr(function, "id", "")


def of_call(call: ast.Call, optional: set[tuple[str, str]]) -> Iterator[ast.expr]:
    name = last_name(call.func)
    if name in OTHER_NAME:
        changed = copy.deepcopy(call)
        setattr(
            changed.func,
            "attr" if isinstance(call.func, ast.Attribute) else "id",
            OTHER_NAME[name],
        )
        yield changed
    if name == "where" and len(call.args) == 3:
        condition, chosen, other = call.args
        yield ast.Call(call.func, [condition, other, chosen], call.keywords)
    if name in LEFT_OUT and call.args:
        yield call.args[0]
    for keyword in call.keywords:
        rest = [other for other in call.keywords if other is not keyword]
        library = root_name(call.func) in LIBRARIES
        if keyword.arg and (library or (name, keyword.arg) in optional):
            yield ast.Call(call.func, call.args, rest)
        if keyword.arg == "axis" and ast.unparse(keyword.value) == "-1":
            first = ast.keyword("axis", ast.Constant(0))
            yield ast.Call(call.func, call.args, [*rest, first])


def changes(
    node: ast.AST, optional: set[tuple[str, str]]
) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(old, new) for each mutation of this node itself."""
    match node:
        case ast.Compare(left, operators, others):
            for index, operator in enumerate(operators):
                for other in COMPARISONS[type(operator)]:
                    flipped = [*operators[:index], other(), *operators[index + 1 :]]
                    yield node, ast.Compare(left, flipped, others)
        case ast.BinOp(left, ast.BitOr(), right) if "None" in map(
            ast.unparse, (left, right)
        ):
            return  # a type
        case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC:
            yield node, ast.BinOp(left, ARITHMETIC[type(operator)](), right)
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield node, operand
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield node, ast.BoolOp(other, values)
        case ast.Constant(bool() as value):
            yield node, ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield node, ast.Constant(value + 1)
            if value == 1:
                yield node, ast.Constant(value - 1)
        case ast.Call():
            yield from ((node, changed) for changed in of_call(node, optional))
        case ast.IfExp(test, chosen, other):
            yield node, ast.IfExp(test, other, chosen)
        case ast.Expr(ast.Call()):
            yield node, ast.Pass()
        case ast.Return(ast.Tuple([first, second])):
            yield node, ast.Return(ast.Tuple([second, first], ast.Load()))
        case ast.AugAssign(target, ast.Add(), value):
            yield node, ast.AugAssign(target, ast.Sub(), value)
    if isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
        if isinstance(node.body[-1], ast.Raise):
            yield node.test, ast.Constant(False)
        elif isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)


def children(node: ast.AST) -> list[ast.AST]:
    """The children of a node that may be mutated."""
    match node:
        case ast.If(test=ast.Name("TYPE_CHECKING")):
            return []
        case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return []
        case ast.FunctionDef(args=arguments, decorator_list=decorators, body=body):
            values = [*arguments.defaults, *arguments.kw_defaults]
            return [*decorators, *filter(None, values), *body]
        case ast.ClassDef(body=body):
            return [*body]
        case ast.AnnAssign(value=value):
            return [] if value is None else [value]
    return list(ast.iter_child_nodes(node))


def mutants(file: str, source: str, optional: set[tuple[str, str]]) -> list[Mutant]:
    """Every mutant of a file, from its top to its end."""
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:index])) for index in range(len(lines) + 1)]
    listed: dict[tuple[int, int, str], Mutant] = {}

    def visit(node: ast.AST, function: bool, statement: int | None) -> None:
        if function and isinstance(node, ast.stmt):
            statement = node.lineno
        union = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
        for old, new in [] if union and statement is None else changes(node, optional):
            assert isinstance(old, ast.expr | ast.stmt)
            assert old.end_lineno
            assert old.end_col_offset
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            before = ast.unparse(old)
            after = ast.unparse(ast.fix_missing_locations(new))
            if after == before:
                continue
            text = f"({after})" if isinstance(new, ast.expr) else after
            listed[start, end, text] = Mutant(
                *(file, old.lineno, old.col_offset + 1, before, after),
                *(start, end, text, statement),
            )
        for child in children(node):
            # Defaults and decorators of a function are evaluated outside of it.
            inside = isinstance(node, ast.FunctionDef) and child in node.body
            visit(child, function or inside, statement)

    visit(ast.parse(source), False, None)
    return sorted(listed.values(), key=lambda mutant: (mutant.start, mutant.text))


def traced(file: str, source: str) -> str:
    """The source, whose every statement of a function first says that it is reached."""
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in [inner for inner in ast.walk(function) if inner is not function]:
            if isinstance(node, ast.stmt):
                node.__dict__["reached_in"] = file
    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                setattr(node, field, [new for old in body for new in with_trace(old)])
    start = 0  # after the docstring and the imports from __future__
    for node in tree.body:
        if not isinstance(node, ast.Expr) and "__future__" not in ast.unparse(node):
            break
        start += 1
    trace = "import builtins\n_reached = getattr(builtins, 'reached', id)"
    tree.body[start:start] = ast.parse(trace).body
    return ast.unparse(ast.fix_missing_locations(tree))


def with_trace(node: ast.AST) -> list[ast.AST]:
    file = getattr(node, "reached_in", None)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if file is None or is_text:
        return [node]
    call = f"_reached(({file!r}, {getattr(node, 'lineno', 0)}))"
    return [*ast.parse(call).body, node]
