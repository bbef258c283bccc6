"""Eight CPU devices, warnings as errors (pyproject), no silent rank promotion."""

import argparse
import collections
import ctypes
import functools
import gc
import os
import signal
import zlib
from importlib.metadata import version
from pathlib import Path

import pytest

# The time of these tests is the compiler's: kernels are neither optimised, nor split
# for parallel compilation, nor sent through MLIR (half of the time; jaxlib 0.11 has no
# such flag), while the programs that XLA makes of ours stay those of a real run.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    + " --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10.")
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# `runs.command_line.main` would keep the programs of tests in the user's home.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config):
    """Imports JAX, but for the process that only hands tests out to xdist's workers."""
    option = config.option
    shares_out = getattr(option, "dist", "no") != "no" and not option.collectonly
    if not shares_out or hasattr(config, "workerinput"):
        import library_settings  # noqa: F401


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not say it so."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return 0
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    into_tiers(items)
    result = yield  # `-m` leaves out the other tiers
    if config.option.share is not None:
        only_a_share(config, items)
    return result


def into_tiers(items):
    """Of a test with `cases(quick=n)`, n quick cases, evenly spread, stay quick.

    The others go down a tier: they are slow, and with `cases(slow=n)` long.
    """
    tests = collections.defaultdict(list)
    for item in items:
        cases = item.get_closest_marker("cases")
        if cases is None:
            continue
        if cases.args or cases.kwargs.keys() - {"quick", "slow"}:
            raise pytest.UsageError(f"{item.nodeid}: expected cases(quick=, slow=)")
        slow, long = (item.get_closest_marker(name) for name in ("slow", "long"))
        tier = "quick" if slow is None else "slow"
        if long is None and tier in cases.kwargs:
            name = item.nodeid.partition("[")[0]
            tests[name, tier, cases.kwargs[tier]].append(item)
    for (_, tier, count), group in tests.items():
        numbers = {number * len(group) // count for number in range(count)}
        for number, item in enumerate(group):
            if number not in numbers:
                item.add_marker({"quick": "slow", "slow": "long"}[tier])


def share_of(text):
    """(I, N) of "I/N"."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(
            f"expected I/N with I from 0 to N - 1, got {text}"
        )
    return int(number), int(count)


def pytest_addoption(parser):
    parser.addoption(
        "--share",
        metavar="I/N",
        type=share_of,
        help="of the tests that are chosen, those of share I (from 0) of N alone",
    )


def only_a_share(config, items):
    """Leaves out the tests of the other shares, by a digest of their names."""
    number, count = config.option.share
    shares = [zlib.crc32(item.nodeid.encode()) % count for item in items]
    others = [item for item, of in zip(items, shares, strict=True) if of != number]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item, of in zip(items, shares, strict=True) if of == number]


@pytest.fixture(scope="module", autouse=True)
def programs_let_go():
    """Programs pile up to 4 GB in a worker that keeps those of every module."""
    yield
    if resident() > 2.0e9:
        import jax

        jax.clear_caches()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # else what is free would stay the process's own
            trim(0)


@functools.cache
def start_of(rng) -> dict:
    return rng.bit_generator.state


@pytest.fixture(autouse=True)
def draws_of_its_own(request):
    """Draws from a module's RNG do not depend on which tests ran before."""
    rng = getattr(request.module, "RNG", None)
    if rng is not None:
        rng.bit_generator.state = start_of(rng)


QUICK_SECONDS = 300  # ten times what the slowest quick test takes


@pytest.fixture(autouse=True)
def time_limit(request):
    """A quick test that would not end fails, with the line where it was."""
    if any(request.node.get_closest_marker(name) for name in ("slow", "long")):
        yield
        return

    def fail(signum, frame):
        pytest.fail(f"expected a quick test to end within {QUICK_SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, QUICK_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real inputs; a test that needs it is skipped without it."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real inputs are not at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture
def rendered(monkeypatch):
    """The figures of a run are drawn, and not only their files made."""
    import library_settings

    monkeypatch.setattr(library_settings.Figure, "savefig", library_settings.SAVEFIG)


@pytest.fixture
def strict_dtypes():
    """Implicit dtype promotion raises (the tests of functional/ ask for this)."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def quick_compilation(tmp_path_factory):
    """For tests that compile the same programs again and again.

    Processes that a test starts take part.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    # JAX 0.12.0 crashes now and then as it writes a program to its cache.
    if jax.__version_info__ >= (0, 11):
        yield
        return
    here = {
        "jax_compilation_cache_dir": (str(tmp_path_factory.mktemp("cache")), None),
        "jax_persistent_cache_min_compile_time_secs": (0.0, 1.0),
        "jax_enable_compilation_cache": (True, False),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, (value, _) in here.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # it is on or off from the first program on
        yield
    for name, (_, default) in here.items():
        jax.config.update(name, default)
    compilation_cache.reset_cache()
