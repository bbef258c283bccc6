import json
import os
import subprocess
import sys

import places
import pytest

from rlhf_jax import verifiers
from rlhf_jax.data import json_lines
from rlhf_jax.functional.checks import InputError
from rlhf_jax.verification.code import trial, verifier
from rlhf_jax.verification.code.trial import Verdict, run_tests
from rlhf_jax.verification.code.verifier import PythonTests
from rlhf_jax.verification.isolation import processes

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert add(0, 0) == 0"]


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("so\n```python\nx = 1\n```\nor\n```python\nx = 2\n```\nbye", "x = 2\n"),
        ("```py\nx = 1\n```\n```\nnot this\n```", "x = 1\n"),
        ("```Python3 title\nif x:\n    y\n```", "if x:\n    y\n"),
        ("1. So\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("```python\nx = 1\ny = '```'\n```", "x = 1\ny = '```'\n"),
        ("```python\nx = 1", "x = 1"),  # cut off
        ("```python\n```", ""),
        ("x = 1", None),
        ("```pythonic\nx\n```", None),
        ("```\nx = 1\n```", None),
    ],
)
def test_the_last_block_of_python(response, code):
    assert verifier.last_block(response) == code


def test_right_code_wrong_code_and_none():
    row = {"tests": TESTS}
    verify = PythonTests()
    assert verify("p", f"Sure!\n```python\n{ADD}```\nDone.", row) == 1
    assert verify("p", f"```python\n{ADD.replace('+', '-')}```", row) == 0
    assert verify("p", ADD, row) == 0
    assert PythonTests(extract="whole")("p", ADD, row) == 1


def test_tests_of_one_text_and_a_field_of_another_name():
    row = {"check": "def check(f):\n    assert f(2, 3) == 5\ncheck(add)"}
    assert PythonTests("check", extract="whole")("p", ADD, row) == 1


def test_every_test_must_have_run():
    """The second test ends the process; the third would pass."""
    ending = [TESTS[0], "import os; os._exit(0)", TESTS[2]]
    assert run_tests(ADD, ending)[:2] == (0, 3)
    assert run_tests(ADD, ending).suspicious
    failing = [TESTS[0], "assert add(1, 1) == 3, 'no'", TESTS[2]]
    assert run_tests(ADD, failing) == Verdict(1, 3, "AssertionError: no")


KEPT_AWAY = {
    "a socket": ("import socket\nsocket.socket()", "not permitted"),
    "an address": (
        "import urllib.request\nurllib.request.urlopen('http://example.com')",
        "URLError",
    ),
    "a file to read": ("open('/etc/hostname')", "Permission denied"),
    "its environment": ("open('/proc/self/environ')", "Permission denied"),
    "a file above": ("open('../x', 'w')", "Permission denied"),
    "a file by descriptor": (
        "import os\nfd = os.open('.', os.O_RDONLY)\n"
        "os.open('../..', os.O_RDONLY, dir_fd=fd)",
        "Permission denied",
    ),
    "a pipe by name": ("import os\nos.mkfifo('../x')", "not permitted"),
    "a process by handle": ("import os\nos.pidfd_open(os.getppid())", "not permitted"),
    "a link out": (
        "import os\nos.symlink('/etc/hostname', 'x')\nopen('x')",
        "Permission denied",
    ),
    "a folder": ("import os\nos.listdir('/home')", "Permission denied"),
    "a folder to make": ("import os\nos.mkdir('/tmp/made')", "Permission denied"),
    "a database": (
        "import sqlite3\nsqlite3.connect('/tmp/base').execute('create table t (a)')",
        "unable to open database file",
    ),
    "a program": (
        "import os\nif os.system('true'):\n    raise PermissionError",
        "PermissionError",
    ),
    "a process": ("import subprocess\nsubprocess.run(['true'])", "not permitted"),
    "a fork": ("import os\nos.fork()", "not permitted"),
    "another program": ("import os\nos.execv('/bin/true', ['t'])", "not permitted"),
    "a signal": ("import os\nos.kill(os.getppid(), 9)", "not permitted"),
    "rights of a file": ("import os\nos.chmod('.', 0)", "not permitted"),
    "limits": (
        "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))",
        "not allowed to raise maximum limit",
    ),
    "memory": ("x = b'x' * 2**34", "MemoryError"),
    "a large file": (
        "with open('x', 'wb') as f:\n    f.write(b'x' * 2**25)\n",
        "File too large",
    ),
    "a package": ("import scipy", "No module named 'scipy'"),
    "a mistake": ("def add(:", "SyntaxError: invalid syntax"),
    "an error of its own": (
        "class E(Exception):\n    def __str__(self):\n        raise self\nraise E",
        "an error that cannot be shown",
    ),
    "depth": ("def f():\n    f()\nf()", "RecursionError: maximum recursion depth"),
}


@pytest.mark.slow
@pytest.mark.skipif(trial.isolation().way != "landlock", reason="these are its words")
@pytest.mark.parametrize(("code", "why"), KEPT_AWAY.values(), ids=KEPT_AWAY)
def test_what_the_code_may_not_do(code, why):
    """The operating system refuses, as Python's own checks can be bypassed."""
    verdict = run_tests(f"{code}\n{ADD}", TESTS)
    assert verdict[:2] == (0, 3)
    assert why in verdict.why


ALLOWED = """
import asyncio, collections, dataclasses, datetime, decimal, json, os, pickle, random
import re, sqlite3, statistics, sys, tempfile, typing, unittest

@dataclasses.dataclass
class Pair:
    a: int

assert pickle.loads(pickle.dumps(Pair(3))).a == 3
Point = collections.namedtuple("Point", "x y")
os.makedirs("made/here")
with open("made/here/x", "w") as file:
    print("written", file=file)
os.rename("made/here/x", "x")
assert os.listdir(".") == ["made", "x"] or os.listdir(".") == ["x", "made"]
assert open("x").read() == "written\\n"
with tempfile.NamedTemporaryFile() as file:
    assert file.name.startswith(os.getcwd())
assert sqlite3.connect("base").execute("select 1").fetchall() == [(1,)]

async def later():
    await asyncio.sleep(0)
    return 0

assert not [name for name in os.environ if name != "LC_CTYPE"]
assert sys.stdin.read() == "" and sys.argv[1:] == []
assert __name__ != "__main__"
random.seed(0)

def add(a, b):
    return a + b + asyncio.run(later())
"""


@pytest.mark.slow
def test_what_the_code_may_do(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert run_tests(ALLOWED, TESTS) == Verdict(3, 3, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True:\n    pass", "took longer than 1 s"),
        ("import time\ntime.sleep(1000)", "took longer than 1 s"),
        ("x = 9**9**9", "took longer than 1 s"),  # which never lets go
    ],
)
def test_time_ends(code, why):
    verdict = run_tests(code, TESTS, seconds=1.0)
    assert verdict == Verdict(0, 3, why)
    assert verdict.timed_out


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path, monkeypatch):
    """Neither its folder nor its process, even if it hangs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda *a, **k: started.append(popen(*a, **k)) or started[-1],
    )
    code = "import time\nopen('x', 'w').close()\ntime.sleep(1000)"
    assert not run_tests(code, TESTS, seconds=0.5).right
    assert list(tmp_path.iterdir()) == []
    assert len(started) == 2  # for the code, and for its judge
    assert not any(os.path.exists(f"/proc/{one.pid}") for one in started)


def test_a_process_that_does_not_start_is_no_verdict(monkeypatch):
    trial.isolation()  # which starts them, too
    monkeypatch.setattr(processes, "START", "raise SystemExit('no such limit')")
    with pytest.raises(RuntimeError, match="did not start: no such limit"):
        run_tests(ADD, TESTS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "expected a field 'tests', got 'prompt'; add it"),
        ({"tests": 3}, "expected a text or a list of texts in 'tests', got 3"),
        ({"tests": ["a", 3]}, "expected a text or a list of texts in 'tests'"),
        ({"tests": []}, r"expected a test in 'tests', got \[\]"),
        ({"tests": " "}, "expected a test in 'tests', got ' '"),
        ({"tests": ["assert ("]}, r"expected Python in 'tests', got 'assert \('"),
    ],
)
def test_tests_that_cannot_be_run_are_named_with_file_and_line(tmp_path, row, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps(row_written) + "\n" for row_written in ({"tests": "1"}, row))
    )
    located = [(row.where, row) for row in json_lines.read_jsonl(file)]
    with pytest.raises(InputError, match=f"rows.jsonl:2: {message}"):
        verifiers.check_answers(located, verifier=PythonTests())


@pytest.mark.parametrize("option", ["seconds", "memory", "file_size", "disk"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_that_are_none(option, value):
    with pytest.raises(InputError, match=f"{option}: expected a finite number above 0"):
        PythonTests(**{option: value})


def test_its_processes_load_no_jax():
    made = "import sys; from rlhf_jax.verification.code.verifier import PythonTests; "
    code = made + "PythonTests(); sys.exit('jax' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": places.PYTHONPATH}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_a_limit_that_is_none_is_refused():
    with pytest.raises(InputError, match="seconds: expected a finite number above 0"):
        verifier.PythonTests(seconds=0)


def test_descriptors_of_the_caller_do_not_pass_on(tmp_path):
    """Also with high numbers."""
    opened = os.open(tmp_path, os.O_RDONLY)
    high = os.dup2(opened, 700)
    os.set_inheritable(high, True)
    code = (
        "import os\ndef add(a, b):\n    found = []\n    for n in range(1024):\n"
        "        try:\n            os.fstat(n)\n            found.append(n)\n"
        "        except OSError:\n            pass\n    return found"
    )
    try:
        why = run_tests(code, ["assert len(add(1, 2)) == 5, add(1, 2)"]).why
    finally:
        os.close(opened)
        os.close(high)
    assert why == ""  # three standard ones, requests and replies


@pytest.mark.parametrize(
    ("code", "counted"),
    [
        (ADD, {}),
        (ADD.replace("+", "-"), {}),
        (f"import pandas\n{ADD}", {"refused": 1.0}),
        pytest.param(
            "def add(a, b):\n    while True: pass",
            {"code_timed_out": 1.0},
            marks=pytest.mark.slow,  # two seconds
        ),
        ("import os\nos._exit(0)", {"suspicious": 1.0}),
    ],
)
def test_what_is_counted_beside_the_score(code, counted):
    verify = PythonTests(extract="whole", seconds=2.0, unsafe=True)
    score, counts = verify.judge("p", code, {"tests": TESTS})
    assert score == float(code == ADD)
    assert counts == dict.fromkeys(verify.counts, 0.0) | counted
    assert verify.judge("p", "", {"tests": TESTS}).counts["refused"] == 0


def test_a_response_without_code_counts_nothing():
    score, counts = PythonTests().judge("p", "no block", {"tests": TESTS})
    assert (score, {*counts.values()}) == (0.0, {0.0})
