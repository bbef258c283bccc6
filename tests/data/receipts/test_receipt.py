"""Receipts count rows: read, left out, cut, trained on, shared."""

import itertools
import types

import pytest
import toy_files
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.checkpoints import pretrained
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding, files, splits, unpaired
from rlhf_jax.data.examples import Episode, Example
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.receipts import Receipts, items
from rlhf_jax.data.text import TextContract
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.environments.protocol import Started
from rlhf_jax.train.rows import read_begun

EOS = 1
TOKENIZER = toy_files.tokenizer()
START = Pretrained(
    model=toy_files.MODEL, params=None, tokenizer=TOKENIZER, stop_ids=(EOS,)
)


def decode(tokens):
    return TOKENIZER.decode(tokens)


def json_of(receipts):
    return receipts.to_json(decode=decode)


def one_source(path, *rows, name="--data", **options):
    receipts = Receipts()
    file = toy_files.jsonl(path / "rows.jsonl", *rows)
    return receipts, receipts.source(name, str(file), **options), file


def first(file, line):
    return f"{file}:{line}"


def test_demonstrations(tmp_path):
    receipts, data, file = one_source(
        tmp_path,
        {"prompt": "the cat", "response": "sat .", "id": 1},
        {"prompt": "a dog", "response": " ".join(["very"] * 9), "id": 2, "by": None},
        {"prompt": "it", "response": "was very good"},
        {"messages": [], "prompt": "it was", "response": "so", "id": 3},
        {"prompt": "so", "response": " ".join(["very"] * 11)},
    )
    rows = files.read_demonstrations(file, receipt=data)
    examples = encoding.encode_demonstrations(
        TextContract(TOKENIZER, receipt=data), rows, limits=Limits(10, overlong="drop")
    )
    data.use("training", items.of_texts(examples[:2]))
    data.use("held out", items.of_texts(examples[2:]))
    (source,) = json_of(receipts)["sources"]
    example = source.pop("example")
    assert source == {
        "name": "--data",
        "source": str(file),
        "called": "rows",
        "read": 5,
        "used": 3,
        "left_out": {"longer than 10 tokens": {"count": 2, "first": first(file, 2)}},
        "fields": {
            "read": ["prompt", "response"],
            "whole_rows_given_to": [],
            "unread": {
                "id": {"count": 3, "first": first(file, 1)},
                "messages": {"count": 1, "first": first(file, 4)},
            },
        },
        "cut": {},
        "notes": {},
        "uses": {
            "training": {
                "rows": 2,
                "texts": {"text": 2},
                "turns_learned": 2,
                "tokens_learned": 7,  # sat . <eos>, was very good <eos>
                "tokens": 10,
                "lengths": {
                    "prompt": {"median": 1.5, "longest": 2},
                    "response": {"median": 3.5, "longest": 4},
                    "text": {"median": 5.0, "longest": 5},
                },
            },
            "held out": {
                "rows": 1,
                "texts": {"text": 1},
                "turns_learned": 1,
                "tokens_learned": 2,
                "tokens": 4,
                "lengths": {
                    "prompt": {"median": 2.0, "longest": 2},
                    "response": {"median": 2.0, "longest": 2},
                    "text": {"median": 4.0, "longest": 4},
                },
            },
        },
    }
    assert example == [
        {
            "title": "text",
            "tokens": 5,
            "not_shown": {"before": 0, "after": 0},
            "pieces": [
                {"text": "the cat", "learned": False},
                {"text": " sat . <eos>", "learned": True},
            ],
        }
    ]


def test_a_whole_conversation_is_read_from_messages(tmp_path):
    spoken = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat"},
    ]
    _, data, file = one_source(tmp_path, {"messages": spoken, "prompt": "unread"})
    files.read_demonstrations(file, receipt=data)
    data.drop("is not encoded here", where=first(file, 1))
    fields = data.to_json()["fields"]
    assert fields["read"] == ["messages"]
    assert list(fields["unread"]) == ["prompt"]


NOTES = {
    "tools": [{"name": "add"}],
    "documents": [{"title": "a"}],
    "chat_template_kwargs": {"enable_thinking": False},
    "control_tokens": ["<eos>"],
    "id": 7,
}
SPOKEN = [{"role": "user", "content": "the cat"}]


@pytest.mark.parametrize(
    ("prompt", "unread"),
    [(SPOKEN, ["id"]), ("the cat", [*list(NOTES)[:3], "id"])],
    ids=["messages", "text"],
)
def test_fields_beside_the_texts_are_read_where_a_template_is(tmp_path, prompt, unread):
    """A plain text is encoded without a template."""
    row = {"prompt": prompt, **NOTES, "response": "sat", "chosen": "sat"}
    row |= {"rejected": "ran", "completion": "sat", "label": True}
    file = toy_files.jsonl(tmp_path / "rows.jsonl", row, row | {"label": False})
    pairs = toy_files.jsonl(
        tmp_path / "pairs.jsonl",
        {name: value for name, value in row.items() if name != "completion"},
    )
    for read, source in (
        (files.read_prompts, file),
        (files.read_demonstrations, file),
        (files.read_preferences, file),
        (unpaired.read_labelled, file),
        (unpaired.read_labelled, pairs),
    ):
        data = Receipts().source("--data", str(source))
        rows = read(source, receipt=data)
        assert all(row[name] == NOTES[name] for row in rows for name in NOTES)
        for where in data.places:
            data.drop("is not encoded here", where=where)
        fields = data.to_json()["fields"]
        assert [name for name in fields["unread"] if name in NOTES] == unread


def test_episodes(tmp_path):
    receipts, data, file = one_source(
        tmp_path,
        {"prompt": "the cat", "turns": ["sat", "so", "ran very", "and", "is"]},
        {"prompt": "a dog", "turns": ["sat"], "response": None},
    )
    rows = files.read_demonstrations(file, turns=True, receipt=data)
    episodes = encoding.encode_episodes(
        TextContract(TOKENIZER, receipt=data), rows, limits=Limits(16)
    )
    data.use("training", items.of_texts(episodes))
    (source,) = json_of(receipts)["sources"]
    assert source["fields"] == {
        "read": ["prompt", "turns"],
        "whole_rows_given_to": [],
        "unread": {},
    }
    used = source["uses"]["training"]
    assert (used["turns_learned"], used["tokens_learned"]) == (4, 9)
    assert used["tokens"] == 2 + 9 + 2 + 2
    assert [piece["learned"] for piece in source["example"][0]["pieces"]] == [
        *(False, True, False, True, False, True)
    ]
    assert source["example"][0]["pieces"][3]["text"] == " ran very <eos>"


def test_pairs(tmp_path):
    pair = {"prompt": "the cat", "chosen": "sat very", "rejected": "ran", "by": "me"}
    receipts, data, file = one_source(
        tmp_path,
        pair | {"rejected": "  "},
        pair,
        {"chosen": "\n\nAssistant: it was", "rejected": "\n\nAssistant: it is"},
        pair | {"chosen": "so " * 20},
        called="pairs",
    )
    rows = files.read_preferences(file, blank="drop", receipt=data)
    pairs = encoding.encode_preferences(
        TextContract(TOKENIZER, receipt=data), rows, limits=Limits(12, overlong="drop")
    )
    data.use("training", items.of_pairs(pairs))
    (source,) = json_of(receipts)["sources"]
    assert (source["called"], source["read"], source["used"]) == ("pairs", 4, 2)
    assert source["left_out"] == {
        files.BLANK: {"count": 1, "first": first(file, 1)},
        "longer than 12 tokens": {"count": 1, "first": first(file, 4)},
    }
    assert source["fields"]["unread"] == {"by": {"count": 3, "first": first(file, 1)}}
    used = source["uses"]["training"]
    assert used["texts"] == {"chosen": 2, "rejected": 2}
    assert used["turns_learned"] == 4
    assert used["tokens_learned"] == 3 + 2 + 3 + 3
    assert [text["title"] for text in source["example"]] == ["chosen", "rejected"]
    assert source["example"][1]["pieces"] == [
        {"text": "the cat", "learned": False},
        {"text": " ran <eos>", "learned": True},
    ]


def test_a_margin_is_read(tmp_path):
    pair = {"prompt": "the cat", "chosen": "sat", "rejected": "ran", "lead": 1.5}
    _, data, file = one_source(tmp_path, pair)
    pairs = encoding.encode_preferences(
        TextContract(TOKENIZER, receipt=data),
        files.read_preferences(file, receipt=data),
        limits=Limits(12),
        margin="lead",
    )
    data.use("training", items.of_pairs(pairs))
    fields = data.to_json()["fields"]
    assert fields["unread"] == {}
    assert fields["read"] == ["prompt", "chosen", "rejected", "lead"]


def test_labelled_texts(tmp_path):
    """A pair gives two labelled texts; a mismatched response is cut to fit."""
    receipts, data, file = one_source(
        tmp_path,
        {"prompt": "the cat", "completion": "sat very good", "label": True},
        {"prompt": "a", "chosen": "dog", "rejected": "cat", "id": 7},
        {"prompt": "it was", "chosen": " ", "rejected": "cat"},
        {"prompt": "it was", "chosen": "so " * 9, "rejected": "very"},
        {"prompt": "it was", "completion": "", "label": False},
        called="texts",
    )
    rows = unpaired.read_labelled(file, blank="drop", receipt=data)
    texts = unpaired.encode_labelled(
        TextContract(TOKENIZER, receipt=data),
        rows,
        limits=Limits(7, overlong="drop", widest=9),
        seed=0,
    )
    data.use("training", items.of_labelled(texts))
    (source,) = json_of(receipts)["sources"]
    assert (source["read"], source["used"]) == (8, 4)
    assert source["left_out"] == {
        files.BLANK: {"count": 3, "first": first(file, 3)},
        "longer than 7 tokens": {"count": 1, "first": first(file, 4)},
    }
    assert source["fields"]["unread"] == {"id": {"count": 1, "first": first(file, 2)}}
    shorter = sum(len(t.mismatched) and t.mismatched[-1] != EOS for t in texts)
    assert shorter  # the first text has room for one token of another
    assert source["cut"] == {unpaired.MISMATCHED: {"count": shorter, "first": None}}
    used = source["uses"]["training"]
    assert used["texts"] == {"desirable": 2, "undesirable": 2}
    assert used["tokens_learned"] == 4 + 2 + 2 + 2
    assert source["example"][0]["title"] == "desirable"


def test_prompts_of_which_nothing_is_learned(tmp_path):
    receipts, data, file = one_source(
        tmp_path,
        {"question": "the cat", "answer": "1", "level": 2},
        {"question": "very " * 20, "answer": "2", "level": 2},
    )
    rows = files.read_prompts(file, field="question", receipt=data)
    _, prompts = encoding.encode_prompts(
        TextContract(TOKENIZER, receipt=data),
        rows,
        limits=Limits(8, overlong="drop"),
        field="question",
    )
    data.reads("answer", "colour")
    data.use("training", items.of_prompts(prompts))
    (source,) = json_of(receipts)["sources"]
    assert source["fields"]["read"] == ["question", "answer"]
    assert list(source["fields"]["unread"]) == ["level"]
    used = source["uses"]["training"]
    assert (used["turns_learned"], used["tokens_learned"], used["tokens"]) == (0, 0, 2)
    assert source["example"][0]["pieces"] == [{"text": "the cat", "learned": False}]
    data.gives("--reward lengths:shortness")  # a user's own code may read any field
    fields = data.to_json()["fields"]
    assert fields["whole_rows_given_to"] == ["--reward lengths:shortness"]
    assert fields["unread"] == {}


def test_lines_of_text_of_which_some_are_blank(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\n\n \na dog\n")
    data = Receipts().source("--prompts", str(file))
    rows = files.read_prompts(file, receipt=data)
    assert data.read == len(rows) == 2
    data.use("training", items.of_prompts([[2], [3]]))
    blank = {"count": 2, "first": first(file, 2)}
    assert data.to_json()["notes"] == {"a blank line, which is no row": blank}


def test_blocks_of_which_the_first_are_watched(tmp_path):
    """31 tokens in blocks of 16, which share one token; then in blocks of 4."""
    file = tmp_path / "book.txt"
    file.write_text("the cat sat . " * 7 + "a dog ran")
    receipts = Receipts()
    watched = receipts.source("--held-out", str(file))
    pretrained.read_texts(START, str(file), batch_size=1, max_rows=1, receipt=watched)
    mixed_in = receipts.source("--ptx", str(file))
    examples = pretrained.read_examples(
        START, str(file), max_length=4, receipt=mixed_in
    )
    mixed_in.use("training", items.of_texts(examples))
    trained, cut = json_of(receipts)["sources"]
    assert (trained["called"], trained["read"], trained["used"]) == (
        "blocks of text",
        2,
        1,
    )
    assert trained["left_out"] == {
        "after the first 1 asked for": {"count": 1, "first": f"{file}, block 2"}
    }
    assert cut["cut"] == {
        "one text cut into blocks of at most 4 tokens": {"count": 10, "first": None}
    }
    used = cut["uses"]["training"]
    assert used["tokens_learned"] == 31 - 1  # each token but the first, once
    assert used["lengths"]["text"] == {"median": 4.0, "longest": 4}
    assert json_of(receipts)["prompts_shared_with_training"] == {
        "--held-out, watched": {"shared": 0, "rows": 1}  # blocks have no prompts
    }


def test_prompts_on_both_sides_are_counted_over_all_sources():
    receipts = Receipts()
    uses = [
        ("--prompts", "training", [[2, 3], [4]]),
        ("--ptx", "training", [[5]]),
        ("--held-out", "held out", [[4], [3, 2], [5], [4]]),
        ("--texts", "watched", [[2, 3], []]),
        ("--demonstrations", "normalised on", [[4]]),
    ]
    for name, use, prompts in uses:
        source = receipts.source(name, "rows.jsonl")
        for number in range(len(prompts)):
            source.row(str(number), {})
        source.use(use, items.of_prompts(prompts))
    assert json_of(receipts)["prompts_shared_with_training"] == {
        "--held-out, held out": {"shared": 3, "rows": 4},
        "--texts, watched": {"shared": 1, "rows": 2},
    }
    json_with_bos = receipts.to_json(decode=decode, unprompted=[4])
    assert json_with_bos["prompts_shared_with_training"] == {
        "--held-out, held out": {"shared": 1, "rows": 4},
        "--texts, watched": {"shared": 1, "rows": 2},
    }


def test_rows_that_vanish_or_are_told_twice_are_errors():
    data = Receipts().source("--data", "rows.jsonl")
    for number in range(3):
        data.row(f"rows.jsonl:{number}", {})
    data.use("training", items.of_prompts([[2], [3]]))
    with pytest.raises(AssertionError, match="3 rows were read, 2 are used and 0"):
        data.to_json()
    data.drop("too long", where="rows.jsonl:1")
    assert data.places == ["rows.jsonl:0", "rows.jsonl:2"]
    assert data.to_json()["used"] == 2
    with pytest.raises(AssertionError, match=r"rows.jsonl:1 is left out twice"):
        data.drop("too long", where="rows.jsonl:1")
    with pytest.raises(AssertionError, match="never read"):
        data.drop("too long", where="rows.jsonl:9")


def test_the_first_place_is_that_of_the_file_whatever_was_told_first():
    data = Receipts().source("--data", "rows.jsonl")
    for number in range(1, 4):
        data.row(f"rows.jsonl:{number}", {})
    for number in (3, 1, 2):
        data.drop("too long", where=f"rows.jsonl:{number}")
        data.note("written by hand", where=f"rows.jsonl:{number}")
    of = {"count": 3, "first": "rows.jsonl:1"}
    receipt = data.to_json()
    assert receipt["left_out"] == {"too long": of}
    assert receipt["notes"] == {"written by hand": of}


@pytest.mark.parametrize(
    ("prompt", "response", "before", "after"),
    [
        (1000, 1000, 850, 850),
        (1000, 0, 700, 0),  # a prompt ends where its response begins
        (2, 1000, 0, 702),
        (1000, 5, 705, 0),
        (0, 1000, 0, 700),
        (100, 200, 0, 0),
    ],
)
def test_a_long_example_is_cut_around_the_border(prompt, response, before, after):
    tokens = [2 + at % 20 for at in range(prompt + response)]
    text = Example(tokens[:prompt], tokens[prompt:])
    shown = items.shown(text, decode=decode)
    assert shown["tokens"] == prompt + response
    assert shown["not_shown"] == {"before": before, "after": after}
    words = " ".join(piece["text"].strip() for piece in shown["pieces"])
    assert words == decode(tokens[before : len(tokens) - after])
    if prompt and response:
        assert [piece["learned"] for piece in shown["pieces"]] == [False, True]


def test_a_character_of_several_tokens_and_nothing_at_all():
    """As a byte-level tokenizer decodes part of 🙂 at a border."""
    letters = [b"a", *(bytes([byte]) for byte in "🙂".encode())]

    def of_bytes(tokens):
        return b"".join(letters[token] for token in tokens).decode(errors="replace")

    text = Episode([0, 1, 2, 3], [4, 0], ((1, 2),))
    assert items.shown(text, decode=of_bytes)["pieces"] == [
        {"text": "a�", "learned": False},
        {"text": "🙂", "learned": True},
        {"text": "a", "learned": False},
    ]
    assert items.shown(Example((), ()), decode=of_bytes)["pieces"] == []


WORDS = st.lists(st.sampled_from(toy_files.WORDS[:-1]), min_size=1, max_size=14)
TEXTS = WORDS.map(" ".join)
RESPONSES = TEXTS.map("we {}".format) | st.just(" ")  # which no prompt begins
FIT = [  # in every reader, with two prompts
    {"prompt": word, "chosen": "sat", "rejected": "ran", "turns": ["so", "a", "so"]}
    for word in ("the", "a")
]


def prompts_of(file, receipt):
    rows = files.read_prompts(file, receipt=receipt)
    contract, limits = TextContract(TOKENIZER, receipt=receipt), Limits(8, "drop")
    _, prompts = encoding.encode_prompts(contract, rows, limits=limits)
    receipt.use("training", items.of_prompts(prompts))
    return prompts


def demonstrations_of(file, receipt):
    rows = files.read_demonstrations(file, response="chosen", receipt=receipt)
    contract, limits = TextContract(TOKENIZER, receipt=receipt), Limits(9, "drop")
    examples = encoding.encode_demonstrations(
        contract, rows, limits=limits, response="chosen"
    )
    receipt.use("training", items.of_texts(examples))
    return examples


def episodes_of(file, receipt):
    rows = files.read_demonstrations(file, turns=True, receipt=receipt)
    contract, limits = TextContract(TOKENIZER, receipt=receipt), Limits(16, "drop")
    episodes = encoding.encode_episodes(contract, rows, limits=limits)
    receipt.use("training", items.of_texts(episodes))
    return episodes


def pairs_of(file, receipt):
    rows = files.read_preferences(file, blank="drop", receipt=receipt)
    contract, limits = TextContract(TOKENIZER, receipt=receipt), Limits(12, "drop")
    pairs = encoding.encode_preferences(contract, rows, limits=limits)
    receipt.use("training", items.of_pairs(pairs))
    return pairs


def labelled_of(file, receipt):
    rows = unpaired.read_labelled(file, blank="drop", receipt=receipt)
    contract, limits = TextContract(TOKENIZER, receipt=receipt), Limits(12, "drop")
    texts = unpaired.encode_labelled(contract, rows, limits=limits, seed=0)
    sides = splits.hold_out(splits.by_prompt(texts), share=0.3, seed=0)
    for use, side in zip(("training", "held out"), sides, strict=True):
        receipt.use(use, items.of_labelled(itertools.chain.from_iterable(side)))
    return texts


def watched_of(file, receipt):
    """Rewrites the pairs' chosen sides as demonstrations to watch."""
    text = file.read_text().replace('"chosen"', '"response"')
    file.write_text(text)
    options = {"batch_size": 2, "max_rows": 3, "max_length": 9, "receipt": receipt}
    texts = pretrained.read_texts(START, str(file), **options)
    return [
        row
        for row in texts.response_mask.reshape(-1, texts.mask.shape[-1]).any(1)
        if row
    ]


def begun_of(file, receipt):
    pool = types.SimpleNamespace(
        reset=lambda rows: [Started(row["prompt"], b"") for row in rows]
    )
    begun = read_begun(
        str(file),
        pool=pool,
        encoder=TurnEncoder(TOKENIZER, stop_ids=(EOS,), chat=False),
        limits=Limits(8, overlong="drop"),
        receipt=receipt,
    )
    receipt.use("training", items.of_prompts(begun.prompts))
    return begun.prompts


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    "reader",
    [
        *(prompts_of, demonstrations_of, episodes_of, pairs_of, labelled_of),
        *(watched_of, begun_of),
    ],
)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "prompt": TEXTS.map("to {}".format),
                "chosen": RESPONSES,
                "rejected": RESPONSES,
                "turns": st.tuples(TEXTS, TEXTS, TEXTS).map(list),
            }
        ).filter(lambda row: row["chosen"] != row["rejected"]),
        min_size=1,
        max_size=8,
    )
)
def test_rows_read_are_rows_used_and_rows_left_out(tmp_path_factory, reader, rows):
    """`to_json` checks this too; here counts are compared with the reader's rows."""
    rows = [*FIT, *rows]
    file = toy_files.jsonl(tmp_path_factory.getbasetemp() / "any.jsonl", *rows)
    receipts = Receipts()
    used = reader(file, receipts.source("--data", str(file)))
    (source,) = json_of(receipts)["sources"]
    of_two = 2 if reader is labelled_of else 1
    left_out = sum(of["count"] for of in source["left_out"].values())
    assert source["read"] == of_two * len(rows) == len(used) + left_out
    assert source["used"] == len(used)
