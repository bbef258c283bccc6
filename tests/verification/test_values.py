"""Values that cross the sandbox's border: plain ones, and nothing callable."""

import abc
import collections
import contextlib
import dataclasses
import datetime
import decimal
import fractions
import io
import json
import os
import struct
import sys
import zoneinfo

import numpy as np
import pytest

from rlhf_jax.verification.code import values, wire
from rlhf_jax.verification.code.link import Link, Over
from rlhf_jax.verification.code.objects import Function


class Side:
    """A side of the border that refers only to `Refers` objects."""

    def __init__(self):
        self.classes, self.tuples = {}, {}

    def reference(self, value):
        return value.parts if isinstance(value, Refers) else None

    def known(self, *parts):
        return ("known", *parts)

    def shell(self, name):
        return object.__new__(self.classes[name])


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int


class Refers:
    parts = ("o", 3)


Shape = abc.ABCMeta("Shape", (), {})  # of a class whose type is another


class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next


def passed(value, side=None):
    side = side or Side()
    writer = wire.Writer(side)
    line = wire.WRITE(writer.table([value]))  # as a message has it
    (read,) = wire.Reader(side, wire.READ_LINE(line), writer.packed).items
    return read


PLAIN = [
    *(None, True, 0, -(2**70), 2**63, 1.5, float("inf"), -0.0, 2j, ...),
    *("é\ud83d\ude00", b"\x00\xff"),
    *(float("nan"), 1 - 2j, {}, (), [[], (), {}, set()]),
    *([1, "a", 0.5, True, None, (), b"", 1], [(0,), [0]], {(1, 2): [3]}, [{1}, {2: 3}]),
    *([1, [2]], (1, (2,)), {"a": {1: 2}}, {1, 2}, frozenset({(1, 2)}), bytearray(b"a")),
    *(range(1, 9, 2), slice(1, None), int, KeyError, collections.OrderedDict(a=1)),
    *(collections.deque([1, 2], 5), collections.Counter("aab")),
    *(decimal.Decimal("1.10"), fractions.Fraction(1, 3), datetime.date(2024, 2, 29)),
    *(datetime.datetime(2024, 1, 1, 2), datetime.timedelta(1, 2, 3)),
    *(datetime.UTC, datetime.timezone(datetime.timedelta(hours=-1), "X")),
    datetime.datetime(2024, 1, 1, 2, fold=1, tzinfo=datetime.UTC),
    *(datetime.time(2, fold=1), datetime.time(2, tzinfo=datetime.UTC)),
]


@pytest.mark.parametrize("value", PLAIN, ids=map(repr, PLAIN))
def test_plain_values_are_as_they_were(value):
    read = passed(value)
    assert read == value or value != value
    assert type(read) is type(value)
    assert repr(read) == repr(value)  # -0.0, the order and the rest


def test_a_time_in_another_zone_is_no_plain_value():
    """It is refused, as a reader would take its zone's reference for a forgery."""
    time = datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("Etc/UTC"))
    for value in (time, time.timetz()):
        with pytest.raises(ValueError, match="with a ZoneInfo cannot be copied"):
            passed([value])


def test_integers_may_be_long():
    """Longer than the decimals that Python parses; alone and among other values."""
    for long in (10**4000 - 1, 10**4000, -(10**4000), 10**9999, -(10**9999)):
        assert passed(long) == long
        assert passed([1, long, "a"]) == [1, long, "a"]


def test_aliases_and_cycles_keep_their_shape():
    row = [0]
    rows = passed([row, row, {"row": row}])
    assert rows[0] is rows[1] is rows[2]["row"]
    row.append(row)
    cycle = passed(row)
    assert cycle[1] is cycle
    array, plain = np.zeros(2), Liar([1])
    read = passed([array, [array, plain], (plain,)])  # at several depths
    assert read[0] is read[1][0]
    assert read[1][1] is read[2][0]
    pair = ([],)
    pair[0].append(pair)
    (inner,) = passed(pair)
    assert inner[0][0] is inner
    shared = passed([pair, pair])
    assert shared[0] is shared[1]


def test_what_values_share_is_written_once():
    """Otherwise the size would double with each level."""
    value = ()
    for _ in range(60):
        value = (value, value)
    read = passed([value])[0]
    for _ in range(60):
        assert read[0] is read[1]
        read = read[0]
    chain = [()]
    for number in range(300):
        chain.append((number, chain[-1]))
    for links in (chain, chain[::-1]):
        assert len(passed(links)) == 301


class Liar(list):
    def __iter__(self):
        return iter([9])

    def __len__(self):
        return 9

    def __eq__(self, other):
        return True


class Deceitful(dict):
    def items(self):
        return [("b", 2)]


def test_a_subclass_is_read_by_the_methods_of_its_base():
    for value, plain in (
        (Liar([1, 2]), [1, 2]),
        (Deceitful(a=1), {"a": 1}),
        (type("N", (int,), {"__int__": lambda s: 7})(3), 3),
        (type("S", (str,), {"__str__": lambda s: "lie"})("a"), "a"),
        (type("T", (tuple,), {"__iter__": lambda s: iter(())})((1,)), (1,)),
    ):
        read = passed(value)
        assert type(read) is type(plain)
        assert read == plain


def test_named_tuples_have_a_name_and_fields():
    read = passed(collections.namedtuple("P", "x y")(1, [2]))
    assert (type(read).__name__, read._fields, tuple(read)) == (
        "P",
        ("x", "y"),
        (1, [2]),
    )
    side = Side()
    pair = collections.namedtuple("P", "x y")
    lying = {"__iter__": lambda self: iter([9, 9]), "_fields": ("x", "y")}
    assert passed(type("P", (pair,), lying)(1, 2)) == (1, 2)
    assert type(passed(pair(1, 2), side)) is type(passed(pair(3, 4), side))


def test_arrays_are_values():
    for array in (np.arange(6.0).reshape(2, 3), np.array([1, 2], np.int8), np.ones(())):
        read = passed(array)
        np.testing.assert_array_equal(read, array)
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert passed(np.array([1, "a"], object)).tolist() == [1, "a"]
    number = passed(np.float32(1.5))
    assert number == 1.5
    assert type(number) is np.float32
    with pytest.raises(ValueError, match=r"an array of \|V8 cannot be copied"):
        passed(np.zeros(1, [("a", "i4"), ("b", "i4")]))


def test_objects_of_a_known_class_are_their_fields():
    side = Side()
    side.classes["Node"] = Node
    first = Node(1)
    first.next = Node([2], first)
    read = passed(first, side)
    assert (read.value, read.next.value) == (1, [2])
    assert read.next.next is read
    assert passed([Refers()]) == [("known", "o", 3)]
    side.classes["Shape"] = Shape
    shape = Shape()
    read = passed([shape, [shape]], side)
    assert type(read[0]) is Shape
    assert read[0] is read[1][0]


def test_hashes_of_objects_are_taken_when_their_fields_are_there():
    side = Side()
    side.classes["Point"] = Point
    read = passed({Point(1, 2): 3, (Point(1, 2), 4): {Point(5, 6)}}, side)
    assert read == {Point(1, 2): 3, (Point(1, 2), 4): {Point(5, 6)}}
    assert passed(frozenset({Point(7, 8)}), side) == {Point(7, 8)}
    shared = Point(1, 2)
    for value in (
        [shared, [{shared: 1}]],
        [{shared}, {shared: 1}, shared],
        [frozenset({shared}), shared, (shared,)],
    ):
        assert passed(value, side) == value


def test_values_may_be_deep():
    """Deeper than Python's recursion limit."""
    deep = listed = ()
    for _ in range(5000):
        deep, listed = (deep,), [listed]
    for value in (deep, listed):
        read, depth = passed(value), 0
        while read:
            (read,) = read
            depth += 1
        assert depth == 5000


def test_what_changed_comes_back_in_place():
    side = Side()
    inner, mapping = [1], {"a": 1}
    writer = wire.Writer(side)
    table = writer.table([(inner, [inner], mapping)])
    there = wire.Reader(side, table, writer.packed)  # copies
    place = writer.values.index(inner)
    copy = there.values[place]
    assert copy == inner
    assert copy is not inner
    copy[:] = [5, there.values[writer.values.index(mapping)]]
    answer = wire.Writer(side, there.values)
    table = answer.table([copy, values.content(copy)])
    here = wire.Reader(side, table, answer.packed, writer.values)
    result, content = here.items
    here.change([place], [content])
    assert result is inner  # a reference, not a copy
    assert inner == [5, {"a": 1}]
    assert inner[1] is mapping


def test_copies_hold_one_another_as_those_that_they_are_of_do():
    side = Side()
    side.classes["Node"] = Node
    node, array, text = Node(1), np.arange(2), "text"
    held = [node, array, text]
    node.next = held
    kept = [held, node, text, array]
    made = values.copies(kept, side)
    assert made[0][0] is made[1]
    assert made[1].next is made[0]
    assert made[2] is text
    made[0][1][0] = 5
    made[1].value = 6
    assert (array[0], node.value) == (0, 1)
    assert (made[3][0], made[3] is made[0][1]) == (5, True)
    short, counts = collections.deque([1, 2], maxlen=2), collections.defaultdict(int)
    others = values.copies([short, counts], side)
    others[0].append(3)
    others[1]["a"] += 1
    assert others == [collections.deque([2, 3]), {"a": 1}]
    assert (list(short), counts) == ([1, 2], {})


UNREADABLE = (wire.Unreadable, TypeError, ValueError, LookupError, MemoryError)
UNREADABLE += (AttributeError, struct.error)


NUMBERS = struct.pack("<qd", 7, 0.5)


def column(*items):
    """A column of plain items, and of groups, which are lists."""
    plain = [item for item in items if type(item) is not list]
    groups = [item for item in items if type(item) is list]
    places = iter(range(1, len(groups) + 1))
    order = [next(places) if type(item) is list else 0 for item in items]
    return [order, ["plain", plain], *groups]


def of(name, size, place, *, which=None, own=None):
    """A group of one value, whose content is in the column `place`."""
    return [name, which, own, [size], place]


def made(*parts, place=1):
    return [column(of("Parts", len(parts), place)), column(*parts)]


FORGED = {
    "a call of eval": made("call", "builtins.eval", "1"),
    "a call of a method": made("call", "builtins.list.__class__", "1"),
    "a call of a module's function": made("call", "os.system", "true"),
    "a call of a value": [
        *made("call", of("Parts", 2, 2), "1"),
        column("class", "builtins.int"),
    ],
    "a class of no name": made("class", "collections.abc.Callable"),
    "parts of no name": made("pickle", "1"),
    "no parts": made(),
    "a group of no name": [column(of("pickle", 1, 1)), column(1)],
    "a name that is a list": [[None, [["list"], None, None, [1], 1]], column(1)],
    "a column that is no list": [5],
    "a column that is a dictionary": [{"list": 1}],
    "a table that is a number": 5,
    "an empty table": [],
    "two groups without an order": [[None, ["plain", [1]], ["plain", [2]]]],
    "an order without its group": [[[0, 1], ["plain", [1, 2]]]],
    "an order of texts": [[["0"], ["plain", [1]]]],
    "an object of an unknown class": [
        column(of("object", 2, 1, own="Node")),
        column("value", 1),
    ],
    "fields without values": [column(of("dict", 1, 1)), column("a")],
    "a key that cannot be one": [
        *(column(of("dict", 2, 1)), column(of("list", 0, 2), 1), column()),
    ],
    "a wrong place": [column(of("list", 0, 1, which=[2])), column()],
    "a place before the first": [column(of("list", 0, 1, which=[-1])), column()],
    "a place that is a text": [column(of("list", 0, 1, which=["0"])), column()],
    "a column after the last": [column(of("list", 1, 2)), column(1)],
    "a column above": [column(of("list", 1, 1)), column(of("list", 1, 0))],
    "a column of two groups": [
        *(column(of("list", 1, 1), of("list", 1, 1)), column(1)),
    ],
    "a size below 0": [column(of("list", -1, 1)), column(1)],
    "a size that is a text": [column(of("list", "1", 1)), column(1)],
    "a dictionary of JSON": [column({"a": 1})],
    "a list of JSON": [[None, ["plain", [[1]]]]],
    "a float among plain values": [column(0.5)],
    "a text as plain values": [[None, ["plain", "abc"]]],
    "more numbers than there are": [[None, ["float", 3]]],
    "numbers that are read twice": [[[0, 1], ["int", 2], ["float", 1]]],
    "fewer than no numbers": [[None, ["int", -1]]],
    "numbers of a type of their own": [[None, ["int", "8s"]]],
    "numbers of no type": [[None, ["complex", 1]]],
    "a value that is its own part": [
        *(column(of("tuple", 1, 1)), [None, ["tuple", [0], None, [], 2]], column()),
    ],
    "an array of objects from bytes": [
        column(of("array", 3, 1, own=["|O", [1]])),
        column("|O", of("tuple", 1, 2), ["bytes", [8]]),
        column(1),
    ],
    "an array that is too large": [
        *(column(["array", None, [["<f8", [2**50]]], [0], 1]), column()),
    ],
    "an array of another shape": [
        *made("array", "<f8", of("tuple", 1, 2), ["bytes", [8]]),
        column(2),
    ],
    "a named tuple that is a program": [
        *(*made("named", "P", of("tuple", 1, 2), 1), column("a=print()")),
    ],
    "a bytearray of text": [column(of("bytearray", 1, 1)), column("abc")],
    "a deque of no length": [
        column(["deque", None, ["abc"], [0], 1]),
        column(),
    ],
    "a maker of items that cannot be called": [
        *(column(of("defaultdict", 3, 1)), column(5, "a", 1)),
    ],
}


@pytest.mark.parametrize("table", FORGED.values(), ids=FORGED)
def test_a_forged_table_is_refused(table):
    with pytest.raises(UNREADABLE):  # and nothing was called
        wire.Reader(Side(), table, NUMBERS)


def test_tables_are_read_as_they_are_written_here():
    """This ensures that forged tables are refused for the forgery."""
    for table, value in (
        (made("call", "builtins.range", 3), range(3)),
        (made("class", "builtins.int"), int),
        ([[[0, 1], ["int", 1], ["float", 1]]], 7),
        ([[[1, 0], ["bytes", [1, 7]], ["float", 1]]], 0.5),
        ([[[1, 0], ["bytes", [8, 9]], ["bytes", [1]]]], b""),  # which are read once
        ([column(of("dict", 2, 1)), column("a", 1)], {"a": 1}),
        ([column(1, of("list", 1, 1)), column(of("tuple", 0, 2)), column()], 1),
    ):
        assert wire.Reader(Side(), table, NUMBERS).items[0] == value


def test_only_a_change_changes_what_was_there_before():
    kept = [[1], {1: 2}, {1}, (1,), "text"]
    lists = ["list", [0], None, [], 1]
    contents = [[*of("list", 1, 1)[:3], [1, 1, 1], 1]]
    reader = wire.Reader(Side(), [[None, lists], [None]], b"", kept)
    assert reader.items[0] is kept[0]
    reader.change([3, 4], [[5], [5]])  # no containers
    assert kept == [[1], {1: 2}, {1}, (1,), "text"]
    reader.change([0, 1, 2], [[5], [5, 6], [7, (1,)]])
    assert kept == [[5], {5: 6}, {7, (1,)}, (1,), "text"]
    reader = wire.Reader(Side(), [[None, *contents], column(1, 2, 3)], b"", kept)
    reader.change([5], [[8]])  # not from before
    assert reader.items == [[1], [2], [3]]
    with pytest.raises(UNREADABLE):
        reader.change([0], [])


def test_what_a_message_refers_to_is_not_called():
    """For example a test's function, which the code may call only through `runner`."""
    called = []
    side = Side()
    side.known = lambda *parts: called.append
    refer = column("refer", "f", 0)
    assert wire.Reader(side, [column(of("Parts", 3, 1)), refer], b"").items == [
        called.append
    ]
    with pytest.raises(UNREADABLE):
        wire.Reader(side, [*made("call", of("Parts", 3, 2), 5), refer], b"")
    assert called == []


def test_messages_are_lines_and_numbers():
    pipe = io.BytesIO()
    wire.send(pipe, [1, "a\n\ud800\u2028"], b"\n{")
    wire.send(pipe, [float("inf")])
    pipe.seek(0)
    assert wire.receive(pipe) == [1, "a\n\ud800\u2028", b"\n{"]
    assert wire.receive(pipe) == [float("inf"), b""]
    with pytest.raises(EOFError):
        wire.receive(pipe)
    for text, packed in (("a" * 2**24, b""), ("a", bytes(2**24))):
        with pytest.raises(ValueError, match="values are larger than 16 MiB"):
            wire.send(pipe, [text], packed)


FORGED_LINES = [b"[", b"{}", b"5", b"\xff", b"[" * 10**5, b"[1] [2]", b"[]", b"[-1]"]
FORGED_LINES += [b'["1"]', b"[0.0]", b"[true]", b"[%d]" % 2**25]


@pytest.mark.parametrize("line", FORGED_LINES)
def test_a_line_that_is_no_message_is_refused(line):
    with pytest.raises(wire.Unreadable):
        wire.receive(io.BytesIO(line + b"\n"))
    assert wire.receive(io.BytesIO(json.dumps([1, 0]).encode())) == [1, b""]


@pytest.fixture
def answered():
    """Makes a link whose first reply is this one."""
    with contextlib.ExitStack() as opened:

        def link(*reply):
            (asked, requests), (replies, answers) = os.pipe(), os.pipe()
            opened.callback(os.close, asked)
            with open(answers, "wb") as pipe:
                wire.send(pipe, [*reply])
            made = Link(requests, replies)
            opened.callback(made.requests.close)
            opened.callback(made.replies.close)
            return made

        yield link


NONE = [[None, ["plain", [None]]]]  # the table of a result


@pytest.mark.parametrize(
    "notes", [None, 5, [5], [["lost"]], [["lost", True, 0]], {"lost": True}]
)
def test_forged_notes_end_the_tests(answered, notes):
    """They raise nothing that a test could take for the code's exception."""
    link = answered("ok", "", notes, 0, [], NONE)
    with pytest.raises(Over):
        link.ask("name", plain=["add"])
    assert link.over.endswith("invalid reply")
    assert link.suspicious


@pytest.mark.parametrize("word", ["raise", "back"])
def test_what_is_no_error_and_no_call_ends_the_tests(answered, word):
    link = answered(word, "", [], 0, [], NONE)
    with pytest.raises(Over):
        link.ask("name", plain=["add"])
    assert link.over.endswith("invalid reply")


@pytest.mark.parametrize(
    ("traits", "base"), [("q", "int"), ("q", "nothing"), (["q"], None), ("q", [1])]
)
def test_an_object_of_forged_traits_is_compared_with_nothing(answered, traits, base):
    fields: list[str] = []
    link = answered("ok", "", [], 0, [], NONE)
    object_ = link.known("o", 1, "Thing", traits, fields, base)
    object_._put("_made", True)
    other = link.known("o", 2, "Thing", "q", fields, None)
    for value in (5, other):
        with pytest.raises(Over):
            print(object_ == value)


@pytest.mark.parametrize("taken", [3, 10**30, -1, True, "3", None])
def test_forged_places_in_standard_input_are_within_it(answered, monkeypatch, taken):
    link = answered("ok", "", [], taken, [], NONE)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    link.call("call", Function(link, 1, "c", [], None), (), {})
    assert sys.stdin.read() == {3: "\n", 10**30: ""}.get(taken, "a\nb\n")
