"""Checksums of files, and JSON in a canonical form."""

import hashlib
import json

import pytest

from rlhf_jax.runs import folder
from rlhf_jax.runs.proof import sums

ROWS = [
    b'{"stage": "sft", "step": 0, "a": 1}\n',
    b'{"stage": "ppo", "step": 0, "a": "\xc3\xbc"}\n',
    b'{"stage": "sft", "step": 1, "a": 2}\n',
]


def sha256(*parts):
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_a_rolling_sum_is_that_of_the_whole(tmp_path):
    rolling = sums.Rolling()
    assert rolling.now() == [0, sha256()]
    for number, row in enumerate(ROWS):
        rolling.add(row)
        assert rolling.now() == [
            sum(map(len, ROWS[: number + 1])),
            sha256(*ROWS[: number + 1]),
        ]
    (tmp_path / "a").write_bytes(b"".join(ROWS))
    assert sums.of_file(tmp_path / "a") == rolling.now()
    assert sums.of_files(tmp_path, ["a", "b"]) == {"a": rolling.now()}


def test_the_rows_of_a_stage_are_summed_wherever_they_stand(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(ROWS) + ROWS[0][:-1])  # the last one was cut off
    of_sft = [ROWS[0], ROWS[2]]
    expected = [len(ROWS[0]) + len(ROWS[2]), sha256(*of_sft)]
    assert sums.of_rows(path, stage="sft").now() == expected
    first = sums.of_rows(path, stage="sft", size=len(ROWS[0]))
    assert first.now() == [len(ROWS[0]), sha256(ROWS[0])]
    path.write_bytes(ROWS[1] + ROWS[0] + ROWS[2])
    assert sums.of_rows(path, stage="sft").now() == expected
    assert sums.of_rows(tmp_path / "none", stage="sft").now() == [0, sha256()]


def test_differences_name_what_is_wrong():
    expected = {"a": [3, "0" * 64], "b": [3, "1" * 64], "c": [1, "2" * 64]}
    actual = {"a": [4, "3" * 64], "b": [3, "4" * 64], "d": [1, ""]}
    assert [*sums.differences(expected, actual)] == [
        "a: 4 bytes, expected 3",
        "b: SHA-256 444444444444, expected 111111111111",
        "c: missing",
    ]
    assert not [*sums.differences(expected, expected | actual | expected)]


def test_a_sealed_document_opens_and_one_without_a_proof_has_none(tmp_path):
    path = tmp_path / "a.json"
    document = {"score": 1.5, "names": ["ü", None], "deep": {"a": {}}}
    files = {"b": [1, "0" * 64]}
    folder.write_json(path, sums.sealed(document, files=files, doubts=["lost rows"]))
    assert sums.opened(path) == {"files": files, "doubts": ["lost rows"]}
    read = json.loads(path.read_text())
    assert {k: v for k, v in read.items() if k != sums.PROOF} == document
    folder.write_json(path, document)
    assert sums.opened(path) is None
    with pytest.raises(ValueError, match="Out of range float"):
        sums.sealed({"score": float("nan")}, files={})


def test_every_flipped_bit_and_every_cut_of_a_sealed_document_is_seen(tmp_path):
    path = tmp_path / "a.json"
    folder.write_json(path, sums.sealed({"score": 1.5}, files={"b": [1, "0" * 64]}))
    whole = path.read_bytes()
    proof = sums.opened(path)
    for bit in range(0, 8 * len(whole), 7):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            # A flip in the key itself leaves a document without a proof.
            assert sums.opened(path) is None, bit
        except ValueError:
            continue
        assert b'"proof"' not in content
    for size in range(0, len(whole), 5):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"JSON|written"):
            sums.opened(path)
    path.write_bytes(whole)
    assert sums.opened(path) == proof
