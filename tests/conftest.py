"""Settings of all tests: eight CPU devices, tiers, shares, limits and fixtures."""

import argparse
import collections
import ctypes
import functools
import gc
import os
import signal
import sys
import zlib
from importlib.metadata import version
from pathlib import Path

import pytest

# Compilation dominates the time of these tests, so kernels are neither optimised, nor
# split for parallel compilation, nor sent through MLIR (half of the time; jaxlib 0.11
# has no such flag). The HLO programs are still those of a real run.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    + " --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10.")
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Else `runs.command_line.main` would cache programs of tests in the user's home.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

# Else each worker compiles all files of the package and the tests in every run (a third
# of its start), and so does each process that a test starts.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config):
    """Imports JAX, except in the process that only distributes tests to workers."""
    option = config.option
    shares_out = getattr(option, "dist", "no") != "no" and not option.collectonly
    if not shares_out or hasattr(config, "workerinput"):
        import library_settings  # noqa: F401


def resident() -> int:
    """Resident bytes of this process; 0 without /proc."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return 0
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    into_tiers(items)
    result = yield  # `-m` deselects the other tiers
    if config.option.share is not None:
        only_a_share(config, items)
    return result


def into_tiers(items):
    """Keeps n evenly spread cases of a test with `cases(quick=n)` quick.

    Its other cases become slow. With `cases(slow=n)` the others become long.
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
    """Parses "I/N" as (I, N)."""
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
    """Deselects the tests of other shares, by a digest of their names."""
    number, count = config.option.share
    shares = [zlib.crc32(item.nodeid.encode()) % count for item in items]
    others = [item for item, of in zip(items, shares, strict=True) if of != number]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item, of in zip(items, shares, strict=True) if of == number]


@pytest.fixture(scope="module", autouse=True)
def programs_let_go():
    """Frees compiled programs, which would fill 4 GB in a worker otherwise."""
    yield
    if resident() > 3.0e9:
        import jax

        jax.clear_caches()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # returns freed memory to the system
            trim(0)


@functools.cache
def start_of(rng) -> dict:
    return rng.bit_generator.state


@pytest.fixture(autouse=True)
def draws_of_its_own(request):
    """Resets a module's RNG, so that draws do not depend on earlier tests."""
    rng = getattr(request.module, "RNG", None)
    if rng is not None:
        rng.bit_generator.state = start_of(rng)


QUICK_SECONDS = 300  # ten times the duration of the slowest quick test


@pytest.fixture(autouse=True)
def time_limit(request):
    """Fails a quick test that takes too long, at the line where it is."""
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
    """The folder of real inputs; without it the test is skipped."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real inputs are not at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture
def rendered(monkeypatch):
    """Draws the figures of a run instead of creating empty files."""
    import library_settings

    monkeypatch.setattr(library_settings.Figure, "savefig", library_settings.SAVEFIG)


@pytest.fixture
def strict_dtypes():
    """Makes implicit dtype promotion raise; used by the tests of functional/."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def quick_compilation(tmp_path_factory):
    """A compilation cache for tests that compile the same programs repeatedly.

    Processes that a test starts share it.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    # JAX 0.12.0 sometimes crashes when it writes a program to its cache.
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
        compilation_cache.reset_cache()  # the first program decides whether it is used
        yield
    for name, (_, default) in here.items():
        jax.config.update(name, default)
    compilation_cache.reset_cache()
