"""The walls of the house: who may import whom, and who may touch the world."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_jax

PACKAGE = Path(rlhf_jax.__file__).parent
MODULES = [f"{folder}.{name}" for folder, names in rlhf_jax.ORDER for name in names]
PURE = [
    module
    for module in MODULES
    if module.split(".")[0] in ("functional", "models", "roles", "stages")
]
# What a pure module may import: nothing here opens a file or reads a clock.
PURE_IMPORTS = {
    *("__future__", "collections", "copy", "dataclasses", "decimal", "fnmatch"),
    *("functools", "hashlib", "itertools", "math", "re"),
    *("typing", "warnings", "chex", "flax", "jax", "numpy", "optax", "rlhf_jax"),
}
IMPURE_CALLS = {
    *("open", "print", "input", "exec", "eval"),
    *("jax.jit", "jax.pjit", "jax.pmap", "jax.debug.print", "jax.debug.callback"),
    *("np.load", "np.save", "np.savez", "np.fromfile", "jnp.load", "jnp.save"),
}


def tree_of(module: str) -> ast.Module:
    file = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports_of(tree: ast.Module) -> set[str]:
    """Dotted names of everything imported, wherever in the file the import stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the folder"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def names_of(tree: ast.Module) -> set[str]:
    """Names and dotted names that are read anywhere in the file."""
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    }


def ours(imported: str) -> str:
    """ "functional.checks" of "rlhf_jax.functional.checks.InputError"."""
    return ".".join(imported.split(".")[1:3])


def test_the_table_lists_every_file_and_no_other():
    files = {
        ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for file in PACKAGE.rglob("*.py")
        if file.name != "__init__.py"
    }
    assert files == set(MODULES)
    assert len(MODULES) == len(set(MODULES))
    names = [module.split(".")[1] for module in MODULES]
    assert len(names) == len(set(names)), "`from rlhf_jax import name` is ambiguous"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_modules_that_stand_before_it(module):
    before = MODULES[: MODULES.index(module)]
    for imported in imports_of(tree_of(module)):
        if imported.startswith("rlhf_jax."):
            assert ours(imported) in before, f"{module} imports {imported}"
        # The package itself is the version, which only runtime writes down.
        assert imported != "rlhf_jax" or module not in PURE


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_touches_neither_disk_nor_clock_nor_terminal(module):
    tree = tree_of(module)
    imported = imports_of(tree)
    assert {name.split(".")[0] for name in imported} <= PURE_IMPORTS
    assert not IMPURE_CALLS & (names_of(tree) | imported)


def test_the_walls_would_stop_what_they_are_for():
    tree = ast.parse(
        "from jax import jit\nimport time\n"
        "def f():\n    from rlhf_jax.runtime import hf\n    return jax.jit(open)\n"
    )
    assert imports_of(tree) == {"jax.jit", "time", "rlhf_jax.runtime.hf"}
    assert {"jax.jit", "open"} <= names_of(tree)
    assert ours("rlhf_jax.runtime.hf") == "runtime.hf"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_and_class_has_a_docstring(module):
    tree = tree_of(module)
    assert ast.get_docstring(tree), "the module"
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]
    bare = [node.name for node in public if not ast.get_docstring(node)]
    assert not bare


def test_the_arithmetic_loads_neither_transformers_nor_orbax():
    """Nor anything else that has no part in it: in a fresh interpreter."""
    code = (
        "import sys; from rlhf_jax import kl, losses, advantages; kl.k1; "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    loaded = set(done.stdout.split())
    heavy = {"transformers", "orbax", "grain", "tyro", "rich", "matplotlib", "optax"}
    assert not loaded & heavy
    assert {"jax", "rlhf_jax"} <= loaded


def test_a_name_the_package_does_not_have():
    with pytest.raises(AttributeError, match=r"no module 'klr'; it has checks, masked"):
        _ = rlhf_jax.klr
