"""Programs of every review of the verifier, and their rewards.

Cheats earn 0. Correct programs earn 1 or are refused, with the reason stated here. The
files are in the package, as `rlhf-jax audit-verifier` runs them too.
"""

import contextlib
import os
import time

import pytest

from rlhf_jax.functional.errors import InputError
from rlhf_jax.verification.audit import audit
from rlhf_jax.verification.code import trial, verifier
from rlhf_jax.verification.code.trial import Verdict, run_tests
from rlhf_jax.verification.isolation import processes, ways

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert add(0, 0) == 0"]
RIGHT = {one.name: one for one in audit.programs(audit.RIGHT)}
CHEATS = {one.name: one for one in audit.programs(audit.CHEATS) if one.tests}
# Right programs that are not judged, and what is said of them.
REFUSED = {
    "an enumeration of numbers": "'int' object has no attribute 'name'",
    "a stack": "a Stack object of the code is used as a plain value",
    "fluent, and its length": "a Stack object of the code is used as a plain value",
    "own class compared by its own method": "a V object of the code is compared",
    "a class of the tests with methods": "a Shape object of the test lost its methods",
    "a package that is not there": "No module named 'pandas'",
    "processes": "Error: [Errno ",  # the number is another for each way
    "an asynchronous context manager": "does not support the asynchronous context",
}
QUICK = (
    *("an object equal to all", "of int, equal to all", "frames: the results"),
    *("frames: constants of the tests", "json replaced", "palindrome str"),
    *("the codec patched", "the argument emptied, then compared"),
    *(name for name in CHEATS if name.startswith("the argument emptied, by a")),
)
isolated = pytest.mark.skipif(
    trial.isolation().way == "none",
    reason="nothing sets code apart here; install py-landlock and pyseccomp",
)


def by_tier(names, quick):
    slow = pytest.mark.slow
    return [pytest.param(n, id=n, marks=() if n in quick else slow) for n in names]


def test_the_corpus_is_as_large_as_the_reviews_were():
    assert len(CHEATS) >= 260
    assert len(RIGHT) >= 130
    assert RIGHT.keys() > REFUSED.keys()


@isolated
@pytest.mark.parametrize("name", by_tier(RIGHT, ["a function", "aliased rows"]))
def test_right_programs_earn_one_or_are_refused(name):
    code, tests = RIGHT[name][1:]
    verdict = run_tests(code, tests, seconds=20.0)
    if name in REFUSED:
        assert verdict.refused
        assert not verdict.right
        assert REFUSED[name] in verdict.why
    else:
        assert verdict == Verdict(len(tests), len(tests), "")


@isolated
@pytest.mark.cases(slow=60)
@pytest.mark.parametrize("name", by_tier(CHEATS, QUICK))
def test_cheats_earn_nothing(name, tmp_path, monkeypatch):
    """They also leave nothing behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    verdict = run_tests(*CHEATS[name][1:], seconds=2.0)
    assert not verdict.right
    assert verdict.why
    assert list(tmp_path.iterdir()) == []


def test_a_cheat_for_any_tests_is_all_of_a_row_s_names():
    (cheat,) = (
        one for one in audit.programs(audit.CHEATS) if one.name.endswith(": true")
    )
    made = audit.for_row(
        cheat, where="a:1", tests=["assert is_odd(3) and len([is_odd])"]
    )
    assert (made.name, made.tests[1:]) == ("a:1: for any tests: true", [])
    assert made.code.endswith("\nis_odd = answer")
    # What a test leaves open, the cheat for any tests earns.
    tally = audit.tally([made], run=lambda *one: run_tests(*one, unsafe=True))
    assert tally == (1, [made.name], [], 0, 0, 0)


def available():
    """The sandboxes of this system; `bwrap` and Landlock are not everywhere."""
    tried = []
    for way in ways.WAYS:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ways, "WAYS", (way,))
            processes.isolation.cache_clear()
            with contextlib.suppress(processes.NotStarted):
                tried.append(trial.isolation().way)
    processes.isolation.cache_clear()
    return tried


@pytest.fixture
def only(monkeypatch):
    """Restricts the sandboxes to one."""

    def choose(way):
        if way not in available():
            pytest.skip(f"there is no way {way} here")
        monkeypatch.setattr(ways, "WAYS", (way,))
        processes.isolation.cache_clear()

    yield choose
    monkeypatch.undo()
    processes.isolation.cache_clear()


@pytest.mark.slow
def test_the_first_way_that_there_is_is_taken_and_said(capfd):
    tried = available()
    assert tried[-1] == "none"
    assert trial.isolation().way == tried[0]
    verifier.say_isolation.cache_clear()
    verifier.PythonTests().isolated(unsafe=True)
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    expected = f"by {tried[0]}" if len(tried) > 1 else "without isolation"
    assert errors.startswith("code verifier: generated code runs ")
    assert expected in errors


BOMBS = ("files nested for ever", "files without end", "the disk")
BOMBS += ("its folder without permissions",)


@pytest.mark.slow
@pytest.mark.parametrize("way", ways.WAYS)
def test_every_way_holds(way, only, tmp_path, monkeypatch):
    """Nothing is left behind, and disk space and files are limited."""
    only(way)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_tests(ADD, TESTS, unsafe=True) == Verdict(3, 3, "")
    bombs = BOMBS if way == "none" else (*BOMBS, "forks", "kills its parent")
    for name in bombs:
        started = time.monotonic()
        verdict = run_tests(CHEATS[name].code, TESTS, seconds=2.0, unsafe=True)
        assert verdict.passed == 0, name
        assert time.monotonic() - started < 120, name  # it ends
        assert list(tmp_path.iterdir()) == [], name
    whole = (
        "n = 0\nwhile n < 6:\n    n += 1\n    open(str(n), 'wb').write(b'x' * 2**23)\n"
    )
    assert run_tests(whole + ADD, TESTS, unsafe=True).right
    late = whole + ADD + "import time\ntime.sleep(1)"
    assert "more than 32 MiB" in run_tests(late, TESTS, disk=32, unsafe=True).why


LOOKS_AROUND = """
import os
def add(a, b):
    found = []
    for path in ('/proc', '/home', '/boot', '/etc/passwd', '/tmp', '/bin', __FILE__):
        try:
            found.append(os.listdir(path) if os.path.isdir(path) else open(path).read())
        except OSError:
            pass
    for path in ('/usr/lib/x', '/x', '../x', os.__file__):
        try:
            found.append(open(path, 'a'))
        except OSError:
            pass
    return len(found)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["bubblewrap", "landlock"])
def test_what_can_be_read_and_written(way, only):
    only(way)
    code = LOOKS_AROUND.replace("__FILE__", repr(os.path.abspath(__file__)))
    assert run_tests(code, ["assert add(1, 2) == 0, add(1, 2)"]).why == ""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["landlock"])
def test_calls_that_python_makes_by_the_library_fail_too(way, only):
    """These bypass Python's own checks, so the operating system must refuse."""
    only(way)
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def fails(name, *args):
    return getattr(libc, name)(*args) == -1 and ctypes.get_errno()
"""
    tests = [
        "assert fails('fork') == 1",
        "assert fails('socket', 2, 1, 0) == 1",
        "assert fails('kill', 1, 0) == 1",
        "assert fails('ptrace', 16, 1, 0, 0) == 1",
        "assert fails('chmod', b'.', 0o777) == 1",
        "assert fails('open', b'/etc/passwd', 0) == 13",
        "assert fails('execve', b'/bin/true', None, None) == 1",
        "assert fails('unshare', 0x10000000) == 1",
    ]
    assert run_tests(code, tests).why == ""


def test_without_isolation_nothing_runs_unless_asked_for(only):
    only("none")
    with pytest.raises(InputError, match="install bubblewrap, or run on Linux"):
        run_tests(ADD, TESTS)
    with pytest.raises(ValueError, match="expected a system that can isolate"):
        verifier.PythonTests().isolated(unsafe=False)
    assert run_tests(ADD, TESTS, unsafe=True).right
    assert verifier.PythonTests().isolated(unsafe=True).unsafe
