"""Every reader of users' files and texts, on arbitrary input: it reads or refuses."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from rlhf_jax.checkpoints import mapping, precomputed, shards
from rlhf_jax.data import files, json_lines
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import histogram
from rlhf_jax.reports.paper import provenance
from rlhf_jax.runs import folder, metrics, receipt
from rlhf_jax.runs.command_line import options
from rlhf_jax.runs.snapshots import resume
from rlhf_jax.sweeps import claims, declaration, planned
from rlhf_jax.train.plan import plan


def answered(text):
    return claims.answer(text, lookup=lambda measure, settings: {0: 1.0, 1: 3.0})


FILES = {  # by reader: the file's name, and what reads it in a folder
    "a recorded config": (
        "config.json",
        lambda at: folder.recorded(at / "config.json"),
    ),
    "a summary": ("summary.json", folder.read_summary),
    "metrics": ("a.jsonl", lambda at: metrics.read(at / "a.jsonl")),
    "a snapshot": ("snapshots/ppo/3/meta/metadata", resume.newest_metas),
    "a receipt": ("data.json", lambda at: receipt.write(at, {"sources": []})),
    "a TOML config": ("a.toml", lambda at: options.read_file(at / "a.toml")),
    "a YAML config": ("a.yaml", lambda at: options.read_file(at / "a.yaml")),
    "a JSON config": ("a.json", lambda at: options.read_file(at / "a.json")),
    "a sweep": ("a.toml", lambda at: declaration.read(at / "a.toml")),
    "a sweep's folder": ("sweep.json", planned.begun),
    "lengths": ("a.txt", lambda at: histogram.read(at / "a.txt")),
    "rows": ("a.jsonl", lambda at: json_lines.read_jsonl(at / "a.jsonl")),
    "an array of rows": ("a.json", lambda at: json_lines.read_jsonl(at / "a.json")),
    "a text": ("a.txt", lambda at: json_lines.read_text(at / "a.txt")),
    "pairs": ("a.jsonl", lambda at: files.read_preferences(at / "a.jsonl")),
    "a checkpoint": ("config.json", lambda at: shards.read_json(at / "config.json")),
    "an adapter": (mapping.ADAPTER, mapping.refuse_adapter),
    "a cache": ("a.json", lambda at: precomputed._check_whole(at / "a", at / "a.json")),
    "a plan": ("a.json", lambda at: plan._is_plan(at / "a.json")),
    "a record": ("a.json", lambda at: provenance._read(at / "a.json", receipt.SHAPE)),
}
TEXTS = {"a claim": answered, "a mesh": MeshShape.parse}
NAMES = (
    *("config", "versions", "stage", "step", "alarms", "sources", "length", "prompt"),
    *("trainer", "grid", "options", "measures", "claims", "seeds", "asked", "cells"),
)
any_text = st.text(st.characters(codec=None), max_size=12)
signs = st.sampled_from([*'{}[]":,=.-+*<>()#&!\n 19eax', *NAMES])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | any_text
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | any_text, inner, max_size=4)
    ),
    max_leaves=10,
)
objects = st.dictionaries(st.sampled_from(NAMES), values, max_size=5)
json_texts = (values | objects).map(json.dumps)
texts = st.lists(signs, max_size=30).map("".join) | any_text | json_texts
encoded = texts.map(lambda text: text.encode(errors="replace"))
contents = st.binary(max_size=40) | encoded
TIERS = [8, pytest.param(200, marks=pytest.mark.slow)]


def on_any(examples, what, use):
    """Calls `use` with examples; each must return or raise InputError."""

    @hypothesis.settings(
        deadline=None, derandomize=True, database=None, max_examples=examples
    )
    @hypothesis.given(what)
    def check(one):
        try:
            use(one)
        except InputError as error:
            told.append(str(error))

    told: list[str] = []
    check()
    assert all("\0" not in line and len(line) < 1500 for line in told)


@pytest.mark.parametrize("examples", TIERS)
@pytest.mark.parametrize("reader", FILES)
def test_any_file_is_read_or_refused(tmp_path, reader, examples):
    name, read = FILES[reader]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)

    def use(content):
        (tmp_path / name).write_bytes(content)
        read(tmp_path)

    on_any(examples, contents, use)


@pytest.mark.parametrize("examples", TIERS)
@pytest.mark.parametrize("reader", TEXTS)
def test_any_text_is_read_or_refused(reader, examples):
    on_any(examples, texts, TEXTS[reader])
