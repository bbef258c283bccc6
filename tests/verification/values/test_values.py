"""What crosses the border: plain values, as they are, and nothing that is called."""

import collections
import datetime
import decimal
import fractions
import io
import pickle

import numpy as np
import pytest

from rlhf_jax.verification.values import codec, strict


class Side:
    """A side that refers to nothing but objects that say so."""

    def __init__(self):
        self.classes, self.tuples = {}, {}

    def reference(self, value):
        return value.parts if isinstance(value, Refers) else None

    def known(self, *parts):
        return ("known", *parts)

    def shell(self, name):
        return object.__new__(self.classes[name])


class Refers:
    parts = ("o", 3)


class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next


def passed(value, side=None):
    side = side or Side()
    writer = codec.Writer(side)
    writer.dump(value)
    return strict.Strict(io.BytesIO(writer.buffer.getvalue()), side, []).load()


PLAIN = [
    *(None, True, 0, -(2**70), 1.5, float("inf"), -0.0, "é\ud800", b"\x00", 2j, ...),
    *([1, [2]], (1, (2,)), {"a": {1: 2}}, {1, 2}, frozenset({(1, 2)}), bytearray(b"a")),
    *(range(1, 9, 2), slice(1, None), int, KeyError, collections.OrderedDict(a=1)),
    *(collections.deque([1, 2], 5), collections.Counter("aab")),
    *(decimal.Decimal("1.10"), fractions.Fraction(1, 3), datetime.date(2024, 2, 29)),
    *(datetime.datetime(2024, 1, 1, 2), datetime.timedelta(1, 2, 3)),
]


@pytest.mark.parametrize("value", PLAIN, ids=map(repr, PLAIN))
def test_plain_values_are_as_they_were(value):
    read = passed(value)
    assert read == value
    assert type(read) is type(value)
    assert repr(read) == repr(value)  # -0.0, the order and the rest


def test_aliases_and_cycles_keep_their_shape():
    row = [0]
    rows = passed([row, row, {"row": row}])
    assert rows[0] is rows[1] is rows[2]["row"]
    row.append(row)
    cycle = passed(row)
    assert cycle[1] is cycle


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
    with pytest.raises(ValueError, match=r"an array of \|V8 is no plain value"):
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


def test_what_changed_comes_back_in_place():
    side, side.classes = Side(), {}
    inner, mapping = [1], {"a": 1}
    writer = codec.Writer(side)
    writer.dump((inner, [inner], mapping))
    kept = writer.kept()
    changed = {n: codec.content(v) for n, v in enumerate(kept) if v is inner}
    (place,) = changed
    answer = codec.Writer(side, kept)
    answer.dump((inner, {place: [5, mapping]}))
    read = strict.Strict(io.BytesIO(answer.buffer.getvalue()), side, kept).load()
    assert read[0] is inner  # a reference, not a copy
    codec.change(kept, read[1], before=[], side=side)
    assert inner == [5, {"a": 1}]
    assert inner[1] is mapping


class Exit:
    def __reduce__(self):
        return exit, (3,)


class State:
    def __reduce__(self):
        return collections.Counter, (), {"most_common": 1}


FORGED = {
    "a call of eval": b"\x80\x05\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "a call by the old name": b"cbuiltins\neval\n(V1\ntR.",
    "a call by an instance": b"(ibuiltins\nexit\n.",
    "a function of ours": b"\x80\x05\x8c\x02os\x8c\x06system\x93.",
    "a private name": b"\x80\x05\x8c\x06codecs\x8c\x06encode\x93.",
    "a dotted name": b"\x80\x05\x8c\x08builtins\x8c\x0elist.__class__\x93.",
    "a call of a value": b"\x80\x05K\x01K\x02\x85R.",
    "a persistent name": b"\x80\x05K\x01Q.",
    "an extension": b"\x80\x05\x82\x01.",
    "an exit": pickle.dumps(Exit(), 5),
    "a state": pickle.dumps(State(), 5),
    "nothing": b"",
    "an end too soon": b"\x80\x05]K\x01",
    "an empty stack": b"\x80\x05.",
    "a wrong place": b"\x80\x05h\x63.",
}


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
def test_a_forged_message_is_refused(text):
    with pytest.raises(codec.Unreadable):  # and nothing was called
        strict.Strict(io.BytesIO(text), Side(), []).load()


@pytest.mark.parametrize(
    "instructions",
    [b"K\x05a", b"(K\x05e", b"K\x05K\x06s", b"(K\x05K\x06u", b"(K\x05\x90"],
)
@pytest.mark.parametrize("kept", [[1], {1: 2}, {1}])
def test_what_was_there_before_cannot_be_filled(instructions, kept):
    before = repr(kept)
    text = b"\x80\x05h\x00" + instructions + b"."
    with pytest.raises(codec.Unreadable, match="not to be filled"):
        strict.Strict(io.BytesIO(text), Side(), [kept]).load()
    assert repr(kept) == before
    own = {list: b"]", dict: b"}", set: b"\x8f"}[type(kept)]
    if instructions[-1:] in {list: b"ae", dict: b"su", set: b"\x90"}[type(kept)]:
        text = b"\x80\x05" + own + instructions + b"."
        assert len(strict.Strict(io.BytesIO(text), Side(), []).load()) == 1


def test_what_a_message_refers_to_is_not_called():
    """A function of the tests, say, which the code may call by `runner` alone."""
    called = []
    side = Side()
    side.known = lambda *parts: called.append
    name = codec.__name__.encode()
    make = b"\x8c" + bytes([len(name)]) + name + b"\x8c\x04make\x93"
    refer = make + b"\x8c\x05refer\x8c\x01fK\x00\x87R"
    read = strict.Strict(io.BytesIO(b"\x80\x05" + refer + b"."), side, []).load()
    assert read == called.append
    with pytest.raises(codec.Unreadable, match="not to be called"):
        strict.Strict(io.BytesIO(b"\x80\x05" + refer + b"K\x05\x85R."), side, []).load()
    assert called == []


def test_the_commonest_results_are_json():
    for value in (None, True, -3, 0.1, float("inf"), "\ud800\n"):
        assert codec.plain_body(codec.body(Side(), [], value, {})) == [value, {}]
    for value, changed in ((2**70, {}), ([1], {}), (1, {0: [2]})):
        assert codec.plain_body(codec.body(Side(), [], value, changed)) is None


@pytest.mark.parametrize("text", [b"[", b"[[1], {}]", b"[1]", b'[1, {"0": []}]'])
def test_json_that_is_no_result_is_refused(text):
    with pytest.raises(codec.Unreadable):
        codec.plain_body(io.BytesIO(text))
