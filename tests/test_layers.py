"""The layers of the package: permitted imports, and access to the outside world."""

import ast
import functools
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_jax

PACKAGE = Path(rlhf_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Dotted names below rlhf_jax: "functional.kl.penalty", and "functional.kl" its package.
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(
        ".__init__"
    ): file
    for file in FILES
    # Neither the front door, `python -m rlhf_jax`, nor what `rlhf-jax new` copies.
    if file.parent != PACKAGE and "templates" not in file.parts
}
PURE = [
    module
    for module in MODULES
    if module.split(".")[0] in ("functional", "models", "roles", "algorithms")
]
MAX_FILES = 16  # in a folder, without its __init__.py
MAX_ENTERED = 45  # by a PPO iteration
# What a pure module may import: nothing here opens a file or reads a clock.
PURE_IMPORTS = {
    *("__future__", "abc", "collections", "contextlib", "copy", "dataclasses"),
    *("decimal", "fnmatch", "functools", "hashlib", "itertools", "math", "re"),
    *("typing", "warnings", "chex", "flax", "jax", "jaxtyping", "numpy", "optax"),
    "rlhf_jax",
}
IMPURE_CALLS = {
    *("open", "print", "input", "exec", "eval"),
    *("jax.jit", "jax.pjit", "jax.pmap", "jax.debug.print", "jax.debug.callback"),
    *("np.load", "np.save", "np.savez", "np.fromfile", "jnp.load", "jnp.save"),
}
# Calls that a module has all the same, and says why there.
EXCEPTIONS = {"models.layers": {"jax.jit"}}  # a layer is traced once


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"), module)


@functools.cache
def imports_of(tree: ast.Module, *, run: bool = False) -> set[str]:
    """Dotted names of all imports anywhere in the file.

    Args:
      run: leave out what stands under `if TYPE_CHECKING`, for type checkers alone.
    """
    imports = set()
    unread = {
        node
        for test in ast.walk(tree)
        if run
        and isinstance(test, ast.If)
        and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the folder"
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imports


def names_of(tree: ast.Module) -> set[str]:
    """Names and dotted names that the file reads."""
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    }


def modules_of(tree: ast.Module, *, run: bool = False) -> set[str]:
    """Our imported modules: `checks.InputError` also gives "functional.checks"."""
    modules = set()
    for name in imports_of(tree, run=run):
        if name.startswith("rlhf_jax."):
            ours = name.removeprefix("rlhf_jax.")
            module = ours if ours in MODULES else ours.rpartition(".")[0]
            assert module in MODULES, name
            modules.add(module)
    return modules


def undocumented(body: list[ast.stmt], prefix: str = "") -> list[str]:
    """Public functions, classes and methods without a docstring."""
    bare = []
    for node in body:
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not node.name.startswith("_"):
            bare += [] if ast.get_docstring(node) else [prefix + node.name]
            if isinstance(node, ast.ClassDef):
                bare += undocumented(node.body, f"{prefix}{node.name}.")
    return bare


def test_the_table_lists_every_package_and_no_other():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(rlhf_jax.PACKAGES)
    assert len(rlhf_jax.PACKAGES) == len(set(rlhf_jax.PACKAGES))


def test_a_module_imports_only_packages_that_stand_before_its_own():
    for module in MODULES:
        package = module.split(".")[0]
        allowed = rlhf_jax.PACKAGES[: rlhf_jax.PACKAGES.index(package) + 1]
        tree = tree_of(module)
        for imported in modules_of(tree):
            assert imported.split(".")[0] in allowed, f"{module} imports {imported}"
        # The package itself is the version, which runs write down.
        assert "rlhf_jax" not in imports_of(tree) or module not in PURE, module


def test_no_modules_import_each_other_in_a_circle():
    """A package's `__init__` imports its modules; they do not import it."""
    graph = {}
    for module in MODULES:
        imported = modules_of(tree_of(module), run=True)
        # To import a.b.c is to import a and a.b first, if they are not under way.
        parents = {
            ".".join(parts[:depth])
            for parts in (name.split(".") for name in imported)
            for depth in range(1, len(parts))
        }
        graph[module] = imported | {
            parent for parent in parents if not f"{module}.".startswith(f"{parent}.")
        }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(MODULES)


def test_a_pure_module_touches_neither_disk_nor_clock_nor_terminal():
    for module in PURE:
        tree = tree_of(module)
        imported = imports_of(tree)
        assert {name.split(".")[0] for name in imported} <= PURE_IMPORTS, module
        impure = IMPURE_CALLS & (names_of(tree) | imported)
        assert impure == EXCEPTIONS.get(module, set()), module


def test_the_walls_would_stop_what_they_are_for():
    tree = ast.parse(
        "from jax import jit\nimport time\n"
        "def f():\n    from rlhf_jax.checkpoints import hf\n    return jax.jit(open)\n"
    )
    assert imports_of(tree) == {"jax.jit", "time", "rlhf_jax.checkpoints.hf"}
    assert {"jax.jit", "open"} <= names_of(tree)
    assert modules_of(tree) == {"checkpoints.hf"}


def test_a_folder_has_few_files():
    for folder in {file.parent for file in FILES}:
        files = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(files) <= MAX_FILES, folder


def test_every_public_function_class_and_method_has_a_docstring():
    for module in MODULES:
        tree = tree_of(module)
        assert ast.get_docstring(tree), module
        assert not undocumented(tree.body), module


def test_a_bare_method_is_found():
    tree = ast.parse(
        'class A:\n    """A."""\n    def f(self): ...\n    def _g(self): ...\n'
        "def h(): ...\n"
    )
    assert undocumented(tree.body) == ["A.f", "h"]


def test_the_arithmetic_loads_neither_transformers_nor_orbax():
    """A fresh interpreter also loads no other package without a part in it."""
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


UNUSED = (  # by a run of PPO that chooses none of what they are for
    *("functional.kl.hidden_states", "functional.off_policy", "algorithms.sft"),
    *("functional.preference_losses", "algorithms.flow.selection"),
    *("models.attention.blockwise", "models.attention.splash", "models.families.llama"),
    *("models.generation.continuous_batching", "models.generation.page_table"),
    *("data.layouts", "data.tables", "data.text.chat", "data.text.templates"),
    *("devices.critic_devices", "checkpoints.peft", "verification.pool"),
    *(
        "planning.decoding",
        "planning.measured",
        "planning.profiled",
        "roles.rewards.verifiers",
    ),
    *("environments", "samplers.connection", "samplers.server", "sweeps", "reports"),
    *("train.packed_rollouts", "train.watch.held_out"),
    *(f"train.rollouts.{name}" for name in ("fastest", "outside", "queue", "waits")),
    *(
        "data.splits",
        "roles.rewards.ensembles",
        "runs.loggers",
        "runs.profile.profiler",
    ),
    *(
        "train.plan.auto",
        "samplers.protocol",
        "train.config.supervised",
        "verification.user_objects",
    ),
)


@pytest.mark.slow
def test_a_trainer_loads_no_module_of_what_few_runs_choose():
    """These modules are imported at their first use."""
    code = "import sys, rlhf_jax.train.methods.ppo, rlhf_jax.train.trainer"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    loaded = set(done.stdout.split())
    assert "rlhf_jax.train.loop" in loaded
    assert set(UNUSED) <= {*MODULES}
    assert not loaded & {"matplotlib", *(f"rlhf_jax.{module}" for module in UNUSED)}


@pytest.mark.parametrize("name", rlhf_jax.__all__)
def test_a_name_of_the_front_door_is_the_module_that_type_checkers_see(name):
    """The names under TYPE_CHECKING and the table of lazy imports agree."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert getattr(rlhf_jax, name).__name__ == modules[name]


def test_a_name_the_package_does_not_have():
    with pytest.raises(AttributeError, match=r"no name 'klr'; it has masked"):
        _ = rlhf_jax.klr


TEXT = ("data.tokenization", "data.text")  # where text becomes tokens, and back
BY_TOKENIZERS = {
    *("apply_chat_template", "batch_decode", "batch_encode_plus", "encode_plus"),
    *("convert_tokens_to_ids", "convert_ids_to_tokens", "convert_tokens_to_string"),
    "build_inputs_with_special_tokens",
}


def test_one_module_turns_text_into_tokens_and_back():
    """A module that calls a tokenizer directly would follow its own rules."""
    calls = [
        (module, node, ast.unparse(node.func))
        for module in MODULES
        if not module.startswith(TEXT)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call)
    ]
    for module, node, called in calls:
        where = f"{module} calls {called}"
        owner, _, name = called.rpartition(".")
        of_tokenizer = owner.endswith(("tokenizer", "reader"))
        assert not (of_tokenizer and name in ("encode", "decode", "tokenize")), where
        assert name not in ("tokenizer", *BY_TOKENIZERS) or "load" in called, where
        keywords = {keyword.arg for keyword in node.keywords}
        assert not keywords & {"skip_special_tokens", "add_special_tokens"}, where


READERS = {
    *("json.load", "json.loads", "json.JSONDecoder", "tomllib.load", "tomllib.loads"),
    *("yaml.load", "yaml.safe_load", "ast.parse", "eval"),
}
WIRES = {  # what our own processes say to each other, and what Python has parsed
    "checkpoints.shards": "the header that safetensors has just written",
    "data.text.template_worker": "a request of `templates`",
    "data.text.templates": "an answer of `template_worker`",
    "devices.processes": "what the first of several has computed",
    "evaluation.harness.model": "options that were written a line before",
    "runs.command_line.help_screen": "the source of a config's class",
    "sweeps.worker": "a request of `launchers`",
    "verification.audit.audit": "the programs that this package brings",
    "verification.code.judge": "a task of `trial`, and tests, which it runs",
    "verification.code.runner": "the limits that `verifier` starts it with",
    "verification.code.trial": "what `judge` reports",
    "verification.code.wire": "a wire with a format and limits of its own",
    "verification.unit_tests": "tests, which are run",
}


@pytest.mark.slow
def test_a_ppo_iteration_enters_few_files():
    """In a process of its own: a program that was traced before is not entered."""
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, tests / "programs" / "entered_files.py"],
        env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1].removesuffix(" files")) <= MAX_ENTERED


def test_one_module_reads_what_users_write():
    """A module that parses directly would have its own limits, or none."""
    for module in MODULES:
        tree = tree_of(module)
        parsed = {
            ast.unparse(node.func)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            # Of `json.loads(json.dumps(value))`, which makes lists of tuples.
            and not ast.unparse(node).startswith("json.loads(json.dumps(")
        } & READERS
        allowed = module == "runs.parsing" or module in WIRES
        assert not parsed or allowed, f"{module} calls {parsed}"
        assert parsed or module not in WIRES, f"{module} parses nothing any more"
