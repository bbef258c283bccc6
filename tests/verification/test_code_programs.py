"""Programs of many kinds, and what each earns: right ones 1, all others 0.

What a right program is, is said by hand: each is run by nothing but the verifier here.
"""

import os
import time

import pytest

from rlhf_jax.verification.code import trial, verifier
from rlhf_jax.verification.code.trial import run_tests

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert add(0, 0) == 0"]

RIGHT = {
    "a function": (ADD, TESTS),
    "a lambda": ("add = lambda a, b: a + b", TESTS),
    "a callable object": (
        "class Add:\n    def __call__(self, a, b):\n        return a + b\nadd = Add()",
        TESTS,
    ),
    "a partial": (
        "import functools, operator\nadd = functools.partial(operator.add)",
        TESTS,
    ),
    "prints and comments": (f"print('# hello')\n{ADD}print(add(1, 2))", TESTS),
    "recursion": (
        "def fact(n):\n    return 1 if n < 2 else n * fact(n - 1)",
        ["assert fact(30) == 265252859812191058636308480000000", "assert fact(0) == 1"],
    ),
    "large numbers": (
        "def power(a, b):\n    return a ** b",
        ["assert power(7, 5000) == 7 ** 5000", "assert power(-3, 333) == (-3) ** 333"],
    ),
    "named arguments": (
        "def f(a, *, b=1, **more):\n    return a + b + sum(more.values())",
        ["assert f(1) == 2", "assert f(1, b=2, c=3) == 6"],
    ),
    "types are checked": (
        "def f():\n    return 1, 1.0, True, None, 'a', b'b', 2j, [1], {1}, {1: 2}, ...",
        [
            "assert f() == (1, 1.0, True, None, 'a', b'b', 2j, [1], {1}, {1: 2}, ...)",
            "kinds = int, float, bool, type(None), str, bytes, complex, list, "
            "set, dict",
            "assert all(type(a) is b for a, b in zip(f(), kinds))",
        ],
    ),
    "floats to the bit": (
        "def f():\n    return [0.1 + 0.2, -0.0, 1e-320, float('inf'), float('nan')]",
        [
            "import math\nx = f()\nassert x[:2] == [0.30000000000000004, 0]",
            "assert math.copysign(1, x[1]) == -1 and x[2] == 1e-320",
            "assert x[3] == math.inf and x[4] != x[4]",
        ],
    ),
    "strange strings": (
        "def f(s):\n    return s[::-1]",
        [
            "assert f('a\\x00\\n\\ud800é\U0001f600') == '\U0001f600é\\ud800\\n\\x00a'",
        ],
    ),
    "nested containers": (
        "def f(x):\n    return {'k': [(1, {2: {3}}), frozenset({4})], (1, 2): x}",
        ["assert f([[]]) == {'k': [(1, {2: {3}}), frozenset({4})], (1, 2): [[]]}"],
    ),
    "counters and their like": (
        "from collections import *\nimport decimal, fractions, datetime, array\n"
        "def f(s):\n"
        "    d = defaultdict(list)\n    d[s].append(1)\n"
        "    return [Counter(s), OrderedDict(a=1), d, deque([1, 2], 5),\n"
        "            decimal.Decimal('1.10'), fractions.Fraction(2, 6),\n"
        "            datetime.date(2020, 2, 29), datetime.timedelta(1, 2, 3),\n"
        "            datetime.datetime(2020, 1, 1, 2), array.array('i', [1])]",
        [
            "from collections import *\nfrom fractions import Fraction\n"
            "import decimal, array, datetime as d\n"
            "assert f('aab') == [{'a': 2, 'b': 1}, OrderedDict(a=1), {'aab': [1]},\n"
            " deque([1, 2]), decimal.Decimal('1.1'), Fraction(1, 3),\n"
            " d.date(2020, 2, 29), d.timedelta(1, 2, 3), d.datetime(2020, 1, 1, 2),\n"
            " array.array('i', [1])]"
        ],
    ),
    "a named tuple": (
        "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')\n"
        "def f():\n    return Point(1, 2)",
        [
            "assert f() == (1, 2) and f().x == 1 and isinstance(f(), tuple)",
            "assert f() < (1, 3) and f() + (3,) == (1, 2, 3)",
        ],
    ),
    "an enumeration of numbers": (
        "import enum\nclass Level(enum.IntEnum):\n    LOW = 1\n"
        "def f():\n    return Level.LOW",
        ["assert f() == 1 and f() <= 1 and f() + 1 == 2 and Level.LOW.name == 'LOW'"],
    ),
    "a generator": (
        "def f(n):\n    for i in range(n):\n        yield i * i",
        [
            "assert list(f(4)) == [0, 1, 4, 9]",
            "assert 9 in f(4)",
            "assert sum(f(3)) == 5",
        ],
    ),
    "an endless generator": (
        "import itertools\ndef f():\n    return itertools.count(3)",
        ["import itertools\nassert list(itertools.islice(f(), 2)) == [3, 4]"],
    ),
    "map, zip and views": (
        "def f(d):\n    return map(str, d), zip(d, d), d.values()",
        [
            "a, b, c = f({1: 2})",
            "assert list(a) == ['1'] and list(b) == [(1, 1)] and sorted(c) == [2]",
        ],
    ),
    "a stack": (
        "class Stack:\n"
        "    def __init__(self):\n        self.items = []\n"
        "    def push(self, x):\n        self.items.append(x)\n        return self\n"
        "    def pop(self):\n        return self.items.pop()\n"
        "    def __len__(self):\n        return len(self.items)\n",
        [
            "s = Stack()\nassert len(s) == 0 and not s",
            "s.push(1).push('a')\nassert len(s) == 2 and s.items == [1, 'a']",
            "assert s.pop() == 'a' and s.pop() == 1",
            "try:\n    s.pop()\nexcept IndexError:\n    pass\nelse:\n    assert False",
            "assert isinstance(s, Stack) and not isinstance(3, Stack)",
        ],
    ),
    "objects as arguments": (
        "class Pair:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n"
        "def total(pairs):\n    return sum(p.a * p.b for p in pairs)",
        ["assert total([Pair(1, 2), Pair(a=3, b=4)]) == 14"],
    ),
    "a linked list": (
        "class Node:\n    def __init__(self, x, next=None):\n"
        "        self.x, self.next = x, next\n"
        "def turn(head):\n    last = None\n    while head:\n"
        "        head.next, last, head = last, head, head.next\n    return last",
        [
            "node, out = turn(Node(1, Node(2, Node(3)))), []\n"
            "while node:\n    out.append(node.x)\n    node = node.next\n"
            "assert out == [3, 2, 1] and node is None"
        ],
    ),
    "arithmetic of its own": (
        "class V:\n    def __init__(self, x):\n        self.x = x\n"
        "    def __add__(self, o):\n        return V(self.x + o.x)\n"
        "    def __getitem__(self, n):\n        return self.x * n\n"
        "    def __repr__(self):\n        return f'V({self.x})'\n",
        ["assert (V(1) + V(2)).x == 3", "assert V(2)[4] == 8 and repr(V(1)) == 'V(1)'"],
    ),
    "items and attributes set": (
        "class Box(dict):\n    size = 3\n",
        [
            "b = Box(a=1)\nb['c'] = 2\nb.size = 5\ndel b['a']",
            "assert b == {'c': 2} and b.size == 5 and b['c'] == 2 and len(b) == 1",
            "assert 'c' in b and 'a' not in b",
        ],
    ),
    "errors of Python": (
        "def f(x):\n    if x < 0:\n        raise ValueError('negative', x)\n"
        "    return x",
        [
            "try:\n    f(-1)\nexcept ValueError as e:\n"
            "    assert e.args == ('negative', -1)\n"
            "else:\n    assert False"
        ],
    ),
    "errors of its own": (
        "class Broke(KeyError):\n"
        "    def __init__(self, left):\n"
        "        super().__init__(f'only {left}')\n        self.left = left\n"
        "class Bank:\n    def take(self, n):\n        raise Broke(n - 1)\n",
        [
            "try:\n    Bank().take(3)\nexcept Broke as e:\n    assert e.left == 2\n"
            "else:\n    assert False",
            "try:\n    Bank().take(3)\nexcept LookupError as e:\n"
            "    assert 'only' in str(e)\n"
            "else:\n    assert False",
        ],
    ),
    "in place": (
        "def sort(xs):\n    xs.sort()\ndef put(d, s):\n    d['k'] = s.pop()",
        [
            "xs = [3, 1, 2]\nother = xs\n"
            "assert sort(xs) is None and other == [1, 2, 3]",
            "d, s = {}, {4}\nput(d, s)\nassert d == {'k': 4} and s == set()",
        ],
    ),
    "functions of the tests": (
        "def bisect(f, a, b):\n    for _ in range(60):\n        m = (a + b) / 2\n"
        "        a, b = (m, b) if f(a) * f(m) > 0 else (a, m)\n    return a",
        ["assert abs(bisect(lambda x: x * x - 2, 0, 2) - 2 ** 0.5) < 1e-9"],
    ),
    "functions of the library": (
        "def apply(f, xs):\n    return [f(x) for x in xs]",
        [
            "import math, operator\nassert apply(math.sqrt, [4, 9]) == [2, 3]",
            "assert apply(len, ['ab', '']) == [2, 0] and apply(int, ['7']) == [7]",
            "assert apply(str.upper, ['a']) == ['A']",
        ],
    ),
    "a decorator": (
        "def memoize(f):\n    kept = {}\n    def inner(n):\n"
        "        if n not in kept:\n            kept[n] = f(n)\n"
        "        return kept[n]\n"
        "    return inner",
        [
            "calls = []\n@memoize\ndef square(n):\n    calls.append(n)\n"
            "    return n * n",
            "assert [square(3), square(3), square(4)] == [9, 9, 16] and calls == "
            "[3, 4]",
        ],
    ),
    "a decorator that tries again": (
        "def again(f):\n    def inner():\n        for n in range(5):\n"
        "            try:\n"
        "                return f(), n\n            except KeyError:\n"
        "                pass\n    return inner",
        [
            "left = [1, 2]\ndef f():\n    if left:\n"
            "        raise KeyError(left.pop())\n"
            "    return 'done'",
            "assert again(f)() == ('done', 2)",
        ],
    ),
    "iterators of the tests": (
        "def take(n, xs):\n    return [x for _, x in zip(range(n), xs)]",
        ["import itertools\nassert take(3, itertools.count(5)) == [5, 6, 7]"],
    ),
    "a mock": (
        "def f(call):\n    return call(2, k=3)",
        [
            "from unittest.mock import Mock\nm = Mock(return_value=7)\n"
            "assert f(m) == 7",
            "m.assert_called_once_with(2, k=3)",
        ],
    ),
    "printed": (
        "def greet(name):\n    print('Hello,', name)",
        [
            "import contextlib, io\nout = io.StringIO()\n"
            "with contextlib.redirect_stdout(out):\n    greet('é')\n"
            "assert out.getvalue() == 'Hello, é\\n'"
        ],
    ),
    "read": (
        "def solve():\n    n = int(input())\n"
        "    print(sum(int(input()) for _ in range(n)))",
        [
            "import contextlib, io, sys\nsys.stdin = io.StringIO('2\\n3\\n4\\nrest')\n"
            "out = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    solve()\n"
            "assert out.getvalue() == '7\\n' and sys.stdin.read() == 'rest'"
        ],
    ),
    "a coroutine": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
        [
            "import asyncio\nassert asyncio.run(f(1)) == 2",
            "async def both():\n    return await f(1), await asyncio.gather(f(2), "
            "f(3))\n"
            "assert asyncio.run(both()) == (2, [3, 4])",
        ],
    ),
    "a name of Python's": (
        "def sum(a, b):\n    return a + b",
        ["assert sum(10, 15) == 25", "assert sum(1, 2) == 3"],
    ),
    "names of modules": (
        "import math\ndef select(x):\n    return math.floor(x)\nqueue = [1]",
        ["assert select(2.5) == 2 and queue == [1] and math.floor(2.5) == 2"],
    ),
    "checked as HumanEval does": (
        "from typing import List\nimport math\n"
        "def poly(xs: list, x: float):\n"
        "    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n"
        "def mean(xs: List[float]) -> float:\n    return sum(xs) / len(xs)\n",
        [
            "METADATA = {}\ndef check(candidate):\n    import random, copy\n"
            "    rng = random.Random(1)\n    for _ in range(50):\n"
            "        xs = [rng.random() for _ in range(5)]\n"
            "        assert math.fabs(candidate(copy.deepcopy(xs)) - sum(xs) / 5) "
            "< 1e-9\n"
            "    assert abs(poly([1, 2], 3) - 7) < 1e-6\ncheck(mean)"
        ],
    ),
    "imported from": (
        ADD + "two = 2",
        [
            "from solution import add, two\nimport solution\n"
            "assert add(two, 3) == solution.add(3, 2) == 5",
            "from solution import *\nassert add(1, 1) == two",
        ],
    ),
    "a class of tests": (
        ADD,
        [
            "import unittest\nclass T(unittest.TestCase):\n"
            "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
            "        with self.assertRaises(TypeError):\n            add(1, 'a')\n"
            "found = unittest.defaultTestLoader.loadTestsFromTestCase(T)\n"
            "result = unittest.TestResult()\nfound.run(result)\n"
            "assert result.testsRun == 1 and result.wasSuccessful()"
        ],
    ),
    "a class as LeetCode's": (
        "class Solution:\n    def twoSum(self, nums, target):\n        seen = {}\n"
        "        for i, n in enumerate(nums):\n            if target - n in seen:\n"
        "                return [seen[target - n], i]\n            seen[n] = i",
        ["assert Solution().twoSum([2, 7, 11, 15], 9) == [0, 1]"],
    ),
    "none": ("def f():\n    pass\n", ["assert f() is None", "assert f() == None"]),
    "many calls": (
        "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
        ["for i in range(3000):\n    assert f() == i + 1", "assert n == 3000"],
    ),
    "a long list": (
        "def f(n):\n    return list(range(n))",
        ["assert f(200000) == list(range(200000))"],
    ),
    "json replaced": (f"import json\njson.dumps = json.loads = None\n{ADD}", TESTS),
    "a class with own errors when compared": (
        "class E:\n    def __eq__(self, o):\n        raise ValueError\n"
        "def f(x):\n    return None if x else E()",
        ["assert f(1) is None and f(0) is not None and f(0) != None"],
    ),
}


def returning(expression, before=""):
    """A program whose `add` returns that."""
    return f"{before}\ndef add(a, b):\n    return {expression}\n"


EQUAL = "class E{base}:\n" + "".join(
    f"    def __{name}__(self, *a): return True\n"
    for name in ("eq", "le", "ge", "lt", "gt", "contains", "bool")
)
EVERYTHING = (
    "class E:\n    def __getattr__(self, n): return E()\n"
    + "".join(
        f"    def __{name}__(self, *a): return E()\n"
        for name in ("sub", "rsub", "add", "abs", "round", "getitem", "call", "mul")
    )
    + "".join(
        f"    def __{name}__(self, *a): return True\n"
        for name in ("eq", "lt", "le", "gt", "ge", "contains")
    )
    + "    def __float__(self): return 0.0\n    def __hash__(self): return 0\n"
)
WALK = """
import sys
def frames():
    f = sys._getframe()
    while f:
        yield f
        f = f.f_back
"""
CONSTANTS = (
    WALK
    + """
def add(a, b):
    for f in frames():
        for c in f.f_code.co_consts:
            if isinstance(c, int) and f.f_code.co_filename.startswith('<test'):
                last = c
    return last
"""
)
WRONG = {
    "wrong": returning("a - b"),
    "right but once": returning("5"),
    "nothing": "",
    "no result": "def add(a, b):\n    a + b",
    "an object equal to all": returning("E()", EQUAL.format(base="")),
    **{
        f"of {base}, equal to all": returning("E()", EQUAL.format(base=f"({base})"))
        for base in ("int", "float", "str", "list", "tuple", "dict", "set", "bytes")
    },
    "its result is what it is compared with": returning("E()", EVERYTHING),
    "a class equal to all": returning(
        "E",
        "class M(type):\n    def __eq__(s, o): return True\n"
        "    __hash__ = None\nclass E(metaclass=M): pass",
    ),
    "a class that says it is another": returning(
        "E()",
        "class E:\n    __class__ = int\n    def __eq__(s, o): return True\n"
        "    def __instancecheck__(s, o): return True\n",
    ),
    "a mock of anything": returning("ANY", "from unittest.mock import ANY"),
    "a type by a false name": returning(
        "E()",
        "class E:\n    def __eq__(s, o): return True\n"
        "E.__module__, E.__qualname__ = 'collections', 'Counter'\n",
    ),
    "true for one": "def add(a, b):\n    return a + b == 5 or a + b",  # True, 0, 0
    "frames: the results": WALK
    + "for f in frames():\n    for v in list(f.f_locals.values()):\n"
    "        if type(v) is list: v[:1] = [3]\n        if type(v) is dict: v.clear()\n",
    "frames: the count of tests": (
        WALK + "for f in frames():\n    if 'outcome' in f.f_locals:\n"
        "        f.f_locals['outcome'][0] = 3\nraise SystemExit\n"
    ),
    "frames: the tests cleared, the count set": (
        WALK + "for f in frames():\n    if 'outcome' in f.f_locals:\n"
        "        f.f_locals['tests'].clear()\n        f.f_locals['outcome'][0] = 3\n"
    ),
    "frames: the tests cleared": WALK
    + "for f in frames():\n    for n in ('tests', 'task', 'compiled'):\n"
    "        if n in f.f_locals: f.f_locals[n].clear()\n",
    "frames: constants of the tests": CONSTANTS,
    "frames: a traceback": WALK
    + "def add(a, b):\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n"
    "        f = e.__traceback__.tb_frame.f_back\n"
    "        return [c for c in f.f_code.co_consts if type(c) is int][-1]\n",
    "frames: its caller's code": "import inspect\ndef add(a, b):\n"
    "    return eval(inspect.stack()[1].code_context[0].split('==')[1])\n",
    "objects: all there are": "import gc\ndef add(a, b):\n"
    "    return [o for o in gc.get_objects() if isinstance(o, str) and '==' in o]\n",
    "modules: all there are": (
        "import sys\nfor m in list(sys.modules.values()):\n"
        "    for n in ('judge', 'describe', 'decode', 'receive'):\n"
        "        if hasattr(m, n): setattr(m, n, lambda *a, **k: True)\n"
    ),
    "memory of its parent": "import os\n"
    "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)\n" + ADD,
    "its parent's files": "import os\nos.listdir(f'/proc/{os.getppid()}/fd')\n" + ADD,
    "its parent's environment": "open('/proc/self/environ').read()\n" + ADD,
    "what it was started with": "import sys\n"
    "def add(a, b):\n    return eval(sys.argv[1].split('==')[1])\n",
    "the temporary folder": "import os\nos.listdir('/tmp')\n" + ADD,
    "the tests' file": f"open({__file__!r})\n" + ADD,
    "written to all that is open": (
        "import os\nreply = b'\\x00\\x00\\x00\\x0b[\"ok\",5,[]]'\n"
        "for n in range(3, 64):\n    try:\n        os.write(n, reply)\n"
        "    except OSError:\n        pass\n"
    ),
    "replies for all calls to come": (
        "import os, json\nfor n in range(3, 64):\n    try:\n"
        "        for v in ([], ['o', 1, 'c', None, 'f'], 5, ['o', 1, 'c', None, "
        "'f'], 0,"
        " ['o', 1, 'c', None, 'f'], 9):\n"
        "            t = json.dumps(['ok', v, [], 0, '']).encode()\n"
        "            os.write(n, len(t).to_bytes(4, 'big') + t)\n"
        "    except OSError:\n        pass\nimport time\ntime.sleep(60)\n"
    ),
    "a reply that is nothing": (
        "import os\nfor n in range(3, 64):\n    try:\n"
        "        os.write(n, b'\\xff' * 99)\n    except OSError:\n        pass\n"
    ),
    "a call of what it was not handed": (
        "import os, json\ndef add(a, b):\n    for n in range(3, 64):\n        try:\n"
        "            t = json.dumps(['back', 0, 'call', ['l'], ['d'], '']).encode()\n"
        "            os.write(n, len(t).to_bytes(4, 'big') + t)\n"
        "        except OSError:\n            pass\n    return 5\n"
    ),
    "all files closed": f"{ADD}import os\nos.closerange(0, 64)\n",
    "the sender replaced": (
        "from rlhf_jax.verification.code import values\n"
        "values.send = lambda *a: None\n" + ADD
    ),
    "json replaced": "import json\njson.dumps = lambda *a, **k: 'true'\n"
    + returning("9"),
    "builtins replaced": (
        "import builtins\nbuiltins.isinstance = builtins.all = lambda *a: True\n"
        "builtins.abs = builtins.len = lambda *a: 0\n"
        "builtins.AssertionError = KeyError\n" + returning("9")
    ),
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit when called": "import os\ndef add(a, b):\n    os._exit(0)",
    "exit by an error": "def add(a, b):\n    raise SystemExit(0)",
    "exit by a generator": "def add(a, b):\n    raise StopIteration",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
    "a signal that exits": (
        "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01)\nwhile True: pass"
    ),
    "an error without a text": (
        "class E(Exception):\n    def __str__(self):\n        raise self\n"
        "def add(a, b):\n    raise E"
    ),
    "an error with arguments of its own": (
        EQUAL.format(base="") + "def add(a, b):\n    raise ValueError(E(), [E()])\n"
    ),
    "a thread that goes on": "import threading\n"
    "threading.Thread(target=lambda: None).start()\n" + ADD,
    "forks": "import os\nwhile True:\n    os.fork()\n",
    "kills all": "import os\nos.kill(-1, 9)\n" + ADD,
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\n" + ADD,
    "a socket": "import socket\nsocket.create_connection(('127.0.0.1', 80))\n" + ADD,
    "traces": "import sys\nsys.settrace(lambda *a: None)\n" + ADD,
    "reads memory": "import ctypes\nctypes.string_at(0)\n" + ADD,
    "for ever": "while True:\n    pass",
    "for ever when called": "def add(a, b):\n    while True:\n        pass",
    "without end": "def add(a, b):\n    return add(a, b)",
    "an iterator without end": "def add(a, b):\n    while True:\n        yield 5",
    "memory": "x = [0] * 10**10",
    "memory, a little at a time": "x = []\nwhile True:\n    x.append('x' * 10**6)",
    "a flood": "while True:\n    print('x' * 10**6)",
    "a huge result": returning("'x' * 10**8"),
    "a result that is itself": returning("x", "x = []\nx.append(x)\n"),
    "a deep result": returning("x", "x = []\nfor _ in range(10**5): x = [x]\n"),
    "a wide result": returning("x", "x = []\nfor _ in range(60): x = [x, x]\n"),
    "a number without end": returning("10 ** 10 ** 8"),
    "no number": returning("float('nan')"),
    "files nested for ever": "import os\nwhile True:\n    os.mkdir('a')\n"
    "    os.chdir('a')\n",
    "files without end": "n = 0\nwhile True:\n    open(str(n), 'w').close()\n"
    "    n += 1\n",
    "the disk": "n = 0\nwhile True:\n    n += 1\n    with open(str(n), 'wb') as f:\n"
    "        f.write(b'x' * 2**23)\n",
    "a link to the root": "import os\nos.symlink('/', 'x')\nos.listdir('x/etc')\n"
    + ADD,
    "its folder without permissions": "import os\nos.makedirs('a/b')\n"
    "open('a/b/c', 'w').close()\nos.chmod('a/b', 0)\nos.chmod('a', 0)\n"
    "os.chmod('.', 0)\n" + returning("a - b"),
}
# Tests that leave much to what they call, and programs that make use of it.
WEAK = {
    "a number that is another when asked again": (
        "class E(int):\n    asked = 0\n    def __int__(s):\n"
        "        E.asked += 1\n        return 0 if E.asked < 3 else 100\n"
        "def isqrt(n):\n    return E(7)",
        ["x = isqrt(17)\nassert x * x <= 17 < (x + 1) * (x + 1)"],
    ),
    "a number above and below": (
        "class E(float):\n    asked = 0\n    def __float__(s):\n"
        "        E.asked += 1\n        return 5.0 * (E.asked % 2)\n"
        "def half(x):\n    return E(1)",
        ["x = half(6)\nassert x > 2.9\nassert x < 3.1"],
    ),
    "near enough": (
        returning("E()", EVERYTHING),
        ["assert abs(add(2, 3) - 5.0) < 1e-6", "assert round(add(1, 1), 2) == 2"],
    ),
    "near enough, by their own abs": (
        "def add(a, b):\n    return 0\ndef abs(x):\n    return 0",
        ["assert abs(add(2, 3) - 5) < 1e-6"],
    ),
    "near enough, by their own math": (
        "class math:\n    isclose = lambda *a: True\nadd = lambda a, b: 0",
        ["assert math.isclose(add(2, 3), 5)"],
    ),
    "near enough, by a module of theirs": (
        "import sys, math\nmath.isclose = lambda *a, **k: True\nadd = lambda a, b: 0",
        ["import math\nassert math.isclose(add(2, 3), 5)"],
    ),
    "one is true": ("def even(n):\n    return 1", ["assert even(2) is True"]),
    "true is one": ("def one():\n    return True", ["assert type(one()) is int"]),
    "contained in": (
        "class E:\n    def __contains__(s, x): return True\nf = lambda: E()",
        ["assert 3 in f()"],
    ),
    "a loop that ends early": (
        "def f(x):\n    raise StopIteration",
        ["assert all(map(lambda c: f(c[0]) == c[1], [(1, 2), (3, 4)]))"],
    ),
    "the argument emptied": (
        "def f(xs):\n    xs.clear()\n    return []",
        ["xs = [3, 1]\nassert f(xs) == sorted(xs)"],
    ),
    "the argument emptied by a forged reply": (
        "import json, os, time\ndef f(xs):\n"
        "    t = json.dumps(['ok', ['l'], [[0, ['l']]], 0, '']).encode()\n"
        "    for n in range(3, 64):\n        try:\n"
        "            os.write(n, len(t).to_bytes(4, 'big') + t)\n"
        "        except OSError:\n            pass\n    time.sleep(60)\n",
        ["xs = [3, 1]\nassert f(xs) == sorted(xs)"],
    ),
    "their own abs, all imported": (
        "add = lambda a, b: 0\nabs = lambda x: 0",
        ["from solution import *\nassert abs(add(2, 3) - 5) < 1e-6"],
    ),
    "their own abs, one imported": (
        "add = lambda a, b: 0\nabs = lambda x: 0",
        ["import solution\nassert abs(solution.add(2, 3) - 5) < 1e-6"],
    ),
    "an argument equal to all": (
        "class E(int):\n    def __eq__(s, o): return True\n"
        "def f(xs):\n    xs[:] = [E()]\n",
        ["xs = [3, 1]\nf(xs)\nassert xs == [1, 3]"],
    ),
    "sorted": (
        "def f(x):\n    return E()\nclass E(list):\n"
        "    def __iter__(s): return iter([E()])\n    def __eq__(s, o): return True\n"
        "    def __lt__(s, o): return True\n",
        ["assert sorted(f(1)) == [1, 2]"],
    ),
    "caught": (
        returning("E()", EQUAL.format(base="")),
        ["try:\n    assert add(2, 3) == 5\nexcept BaseException:\n    pass"],
    ),
    "equal to one another": (
        "class E:\n    def __eq__(s, o): return True\nf = g = lambda x: E()",
        ["assert f(1) == g(2)"],
    ),
    "skipped": (
        "import unittest\ndef add(a, b):\n    raise unittest.SkipTest",
        [
            "import unittest\nclass T(unittest.TestCase):\n"
            "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n"
            "result = unittest.TestResult()\nT('test_add').run(result)\n"
            "assert result.wasSuccessful()"
        ],
    ),
}
QUICK = (
    *("an object equal to all", "of int, equal to all", "frames: the results"),
    *("frames: constants of the tests", "json replaced"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "tests"), RIGHT.values(), ids=RIGHT)
def test_right_programs_earn_one(code, tests):
    assert run_tests(code, tests, seconds=20.0) == (len(tests), len(tests), "")


@pytest.mark.cases(slow=36)
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, code in WRONG.items()
    ],
)
def test_wrong_programs_earn_nothing(code, tmp_path, monkeypatch):
    """And leave nothing behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    verdict = run_tests(code, TESTS, seconds=2.0)
    assert not verdict.right
    assert verdict.why
    assert list(tmp_path.iterdir()) == []


def ways():
    """Those that this system has; namespaces and `bwrap` are not everywhere."""
    ways_tried = []
    for way in ("namespaces", "bubblewrap", "none"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(trial, "WAYS", (way, "none"))
            trial.isolation.cache_clear()
            if trial.isolation().way == way:
                ways_tried.append(way)
    trial.isolation.cache_clear()
    return ways_tried


@pytest.mark.slow
def test_the_first_way_that_there_is_is_taken_and_said(capfd):
    tried = ways()
    assert tried[-1] == "none"
    assert trial.isolation().way == tried[0]
    verifier._say_isolation.cache_clear()
    verifier.PythonTests()
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1
    expected = f"by {tried[0]}" if len(tried) > 1 else "without namespaces"
    assert errors.startswith("code verifier: generated code runs ")
    assert expected in errors


BOMBS = ("files nested for ever", "files without end", "the disk")
BOMBS += ("its folder without permissions", "forks", "kills its parent")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["namespaces", "bubblewrap", "none"])
def test_every_way_holds(way, tmp_path, monkeypatch):
    """Nothing stays behind, and disk and files are bounded."""
    if way not in ways():
        pytest.skip(f"there is no way {way} here")
    monkeypatch.setattr(trial, "WAYS", (way,))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_tests(ADD, TESTS) == (3, 3, "")
    for name in BOMBS:
        started = time.monotonic()
        assert run_tests(WRONG[name], TESTS, seconds=2.0)[0] == 0, name
        assert time.monotonic() - started < 30, name
        assert list(tmp_path.iterdir()) == [], name
    whole = (
        "n = 0\nwhile n < 6:\n    n += 1\n    open(str(n), 'wb').write(b'x' * 2**23)\n"
    )
    assert run_tests(whole + ADD, TESTS) == (3, 3, "")
    why = run_tests(whole + ADD + "import time\ntime.sleep(1)", TESTS, disk=32).why
    assert "No space left" in why if way == "namespaces" else "more than 32 MiB" in why


LOOKS_AROUND = """
import os
def add(a, b):
    hidden = [os.getpid, os.getppid, os.getuid]
    found = [f() for f in hidden]
    for path in ('/proc', '/home', '/boot', '/etc/passwd', '/tmp', '/bin', __FILE__):
        found.append(os.access(path, os.F_OK))
    found.append(os.access('/usr/lib', os.W_OK) or os.access('/', os.W_OK))
    return found
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["namespaces", "bubblewrap"])
def test_what_namespaces_leave_to_be_seen(way, monkeypatch):
    """`os.access` has no audit event: it is the system that answers."""
    if way not in ways():
        pytest.skip(f"there is no way {way} here")
    monkeypatch.setattr(trial, "WAYS", (way,))
    tests = [
        "pid, above, user, *files = add(1, 2)",
        "assert pid < 5 and above < 5 and user != 0",
        "assert files == [False] * 8, files",
    ]
    code = LOOKS_AROUND.replace("__FILE__", repr(os.path.abspath(__file__)))
    assert run_tests(code, tests) == (3, 3, "")


@pytest.mark.slow
@pytest.mark.parametrize(("code", "tests"), WEAK.values(), ids=WEAK)
def test_weak_tests_are_not_passed_by_objects(code, tests):
    assert not run_tests(code, tests).right
