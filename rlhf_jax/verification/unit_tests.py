"""Static analysis of unit tests: where a name is defined, and what is compared.

Names that tests use but do not define are looked up in the code. If a test compares a
result with an argument of its own call, as in `f(xs) == sorted(xs)`, it sees the
argument as it was before the call: otherwise code that empties both would pass.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys

from rlhf_jax.verification.code.objects import Function

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, TypeGuard

    from rlhf_jax.verification.code.link import Link

BUILT_IN = frozenset(vars(builtins))
RESULT, ARGUMENT = "a result", "an argument"
APPLYING = ("map", "starmap", "filter", "reduce")  # call their first argument


class Names(dict[str, object]):
    """The globals of the tests, which look missing names up in the code.

    Built-in names mean Python's own, so that code cannot replace the `abs` or
    `isinstance` of a test. The exception: if the tests use built-in names only, and the
    code defines exactly one of them, that one is the function under test.
    """

    def __init__(self, link: Link | None, tests: Sequence[str]) -> None:
        super().__init__(__builtins__=builtins, __name__="solution")
        self.link = link
        self.trees = [ast.parse(test) for test in tests]
        nodes = [node for tree in self.trees for node in ast.walk(tree)]

        def of(kind: Any, name: str = "name") -> set[Any]:
            return {vars(node)[name] for node in nodes if isinstance(node, kind)}

        used = [node for node in nodes if isinstance(node, ast.Name)]
        loaded = {node.id for node in used if isinstance(node.ctx, ast.Load)}
        bound = of(ast.arg, "arg")
        bound |= {node.id for node in used if not isinstance(node.ctx, ast.Load)}
        bound |= of(ast.FunctionDef) | of(ast.AsyncFunctionDef) | of(ast.ClassDef)
        bound |= of(ast.ExceptHandler)
        imported = [node for node in nodes if isinstance(node, ast.alias)]
        bound |= {one.asname or one.name.partition(".")[0] for one in imported}
        self.imported = {  # of the code
            one.asname or one.name
            for node in nodes
            if isinstance(node, ast.ImportFrom | ast.Import)
            for one in node.names
            if "solution" in (vars(node).get("module"), one.name)
        }
        called = {one.id for one in of(ast.Call, "func") if isinstance(one, ast.Name)}
        owning = of(ast.Attribute, "value")
        owners = {one.id for one in owning if isinstance(one, ast.Name)}
        free = loaded - bound
        # `math.isclose` means the library's, even if the code defines a `math`.
        self.modules = (free & owners & sys.stdlib_module_names) - called
        self.free, self.bound = free - self.modules, bound
        self.replaced: set[str] = set()

    def defined(self, names: list[str]) -> None:
        """Decides which built-in name is under test, from the names of the code."""
        if self.free <= BUILT_IN and not self.imported:
            own = self.free & set(names)
            self.replaced = own if len(own) == 1 else set()

    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            return importlib.import_module(name)
        own = name.startswith("__") or name in BUILT_IN - self.replaced
        if own or self.link is None:
            raise KeyError(name)
        value = self.link.named(name)
        if isinstance(value, Function):
            self[name] = value  # a function is likely to be called often
        return value


class Flow:
    """Which names hold results of the code, and which its arguments, in the tests.

    Later tests see the names of earlier ones, so it follows them through all tests.
    """

    def __init__(self, names: Names) -> None:
        plain = BUILT_IN - names.replaced
        nodes = [node for tree in names.trees for node in ast.walk(tree)]
        # An argument may be a function of the code, as `candidate` in check(candidate).
        arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
        codes = (names.free - plain) | names.imported | arguments | {"solution"}
        self.of = {name: {RESULT} for name in codes}
        unused = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for _ in range(2):  # in a loop, a name may be used above its binding
            for node in nodes:
                if isinstance(node, ast.Call) and self._is_codes(node):
                    if id(node) not in unused:
                        self._add(ARGUMENT, *node.args, *node.keywords)
                    continue
                if isinstance(node, ast.Call) and self._applies(node):
                    self._add(ARGUMENT, *node.args[1:])
                for target, source in _bindings(node):
                    for name in self._names(target):
                        self.of.setdefault(name, set()).update(self.flows(source))
                        if ARGUMENT in self.of[name] and _is_same(source):
                            self._add(ARGUMENT, source)
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        self.called = any(  # in functions, which any test may call
            self.compares(node) for node in nodes if isinstance(node, kinds)
        )

    def compares(self, tree: ast.AST) -> bool:
        """Whether a test compares a result with an argument of its call."""
        return any(map(self._compares, ast.walk(tree)))

    def flows(self, node: ast.AST | None) -> set[str]:
        """Returns which of `RESULT` and `ARGUMENT` an expression's value depends on."""
        match node:
            case None:
                return set()
            case ast.Name(id=name):
                return self.of.get(name, set())
            case ast.Subscript(value=value):
                return self.flows(value)
            case ast.Call() if self._is_codes(node):
                return {RESULT}
        return set().union(*map(self.flows, ast.iter_child_nodes(node)))

    def _is_codes(self, call: ast.Call) -> bool:
        owner = call.func
        while isinstance(owner, ast.Attribute | ast.Subscript):
            if isinstance(owner, ast.Attribute) and owner.attr.startswith("assert"):
                return False
            owner = owner.value
        return RESULT in self.flows(owner)

    def _applies(self, call: ast.Call) -> bool:
        """Whether a built-in function calls one of the code's, as map(f, [xs])."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func
        name = name.id if isinstance(name, ast.Name) else name
        return name in APPLYING and RESULT in self.flows(*call.args[:1])

    def _add(self, flow: str, *nodes: ast.AST) -> None:
        for name in self._names(*nodes):
            self.of.setdefault(name, set()).add(flow)

    def _compares(self, node: ast.AST) -> bool:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                same = all(isinstance(op, ast.Is | ast.IsNot) for op in ops)
                sides = [] if same else [left, *others]
            case ast.BinOp(left=left, right=right):
                sides = [left, right]
            case ast.Call(args=args) if not self._is_codes(node):
                sides = args
            case _:
                return False
        flows = list(map(self.flows, sides))
        return any(
            RESULT in one and ARGUMENT in other
            for place, one in enumerate(flows)
            for other in flows[:place] + flows[place + 1 :]
        )

    @staticmethod
    def _names(*nodes: ast.AST) -> Iterator[str]:
        for node in nodes:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name):
                    yield inner.id


def _is_same(source: ast.AST | None) -> TypeGuard[ast.AST]:
    """Whether a name bound to an expression shares all of its objects."""
    return source is not None and not any(
        isinstance(node, ast.Call | ast.BinOp | ast.Compare)
        for node in ast.walk(source)
    )


def _bindings(node: ast.AST) -> list[tuple[ast.AST, ast.AST | None]]:
    """Returns (target, source) pairs of an assignment, a loop, a `with` or a function.

    A function is bound to what it returns under a name, as a function of the code.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returned = [one for one in ast.walk(node) if isinstance(one, ast.Return)]
        values = [one.value for one in returned if isinstance(one.value, ast.Name)]
        return [(ast.Name(node.name), value) for value in values]
    has = vars(node).get
    source = has("value") or has("iter") or has("context_expr")
    targets = has("targets") or [has("target") or has("optional_vars")]
    return [(target, source) for target in targets if isinstance(target, ast.AST)]
