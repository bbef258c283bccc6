"""The stored notebooks: their outputs are of their code, and render anywhere.

`pytest --nbmake experiments/notebooks` runs them.
"""

import json
import re

import pytest
import record_notebooks
from places import EXPERIMENTS, ROOT
from test_readmes import broken_links

FILES = sorted((EXPERIMENTS / "notebooks").glob("*.ipynb"))
# An absolute path, but not that of an address or of a closing tag.
PATH = re.compile(r"(?<![\w:/<.+])/(?:[\w.-]+/)+[\w.-]*")
TIME = re.compile(r"\b\d+ s\b|\d+:\d\d")
ADVICE = "run tests/programs/record_notebooks.py"


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request):
    return request.param


@pytest.fixture
def notebook(file):
    return json.loads(file.read_text(encoding="utf-8"))


def cells(notebook, kind):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def texts(notebook):
    """The text outputs of the cells."""
    for cell in cells(notebook, "code"):
        for output in cell["outputs"]:
            shown = {"stream": output.get("text", "")} | output.get("data", {})
            for kind, content in shown.items():
                if not kind.startswith("image/"):
                    yield "".join(content)


def test_the_readmes_name_each():
    assert len(FILES) == 2
    for readme in (ROOT / "README.md", EXPERIMENTS / "README.md"):
        text = readme.read_text(encoding="utf-8")
        for file in FILES:
            assert f"notebooks/{file.name})" in text


def test_the_cells_ran_from_top_to_bottom(notebook):
    counts = [cell["execution_count"] for cell in cells(notebook, "code")]
    assert counts == [*range(1, len(counts) + 1)], ADVICE


def test_the_code_is_what_ran(notebook):
    sources = [source(cell) for cell in cells(notebook, "code")]
    assert notebook["metadata"]["code"] == record_notebooks.digest(sources), ADVICE


def test_nothing_failed_or_warned(notebook):
    outputs = [one for cell in cells(notebook, "code") for one in cell["outputs"]]
    assert outputs
    assert not [one for one in outputs if one["output_type"] == "error"]
    assert not ["".join(one["text"]) for one in outputs if one.get("name") == "stderr"]


def test_there_are_pictures_and_the_file_is_light(file, notebook):
    pictures = [
        output
        for cell in cells(notebook, "code")
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    assert pictures
    assert file.stat().st_size < 1_000_000


def test_nothing_is_of_one_machine_or_hour(notebook):
    assert not [path for text in texts(notebook) for path in PATH.findall(text)]
    assert not [time for text in texts(notebook) for time in TIME.findall(text)]
    shape = {name: notebook["metadata"][name] for name in record_notebooks.METADATA}
    assert shape == record_notebooks.METADATA
    assert not [cell["metadata"] for cell in notebook["cells"] if cell["metadata"]]


def test_a_path_of_a_machine_is_found():
    assert PATH.findall("in /home/me/x.py: no") == ["/home/me/x.py"]
    assert not PATH.findall("https://a.b/c/d runs/sft/model <b>a</b> p/q 3 / 4")


def test_numbers_of_the_prose_stand_in_an_output_or_in_the_code(notebook):
    """Checks numbers with a decimal point, which only a run can give."""
    known = " ".join([*texts(notebook), *map(source, cells(notebook, "code"))])
    for cell in cells(notebook, "markdown"):
        for number in re.findall(r"\d+\.\d+", source(cell)):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", known), number


CLAIMS = {  # of the prose, and what must stand in the outputs
    "reference_and_kl": (
        r"shared: lost\nfrozen: still there\n",
        r"got others in embed/tokens\.",
        r"β = 1: score [1-9].*, sentences (0\.[89]|1)",
        r"β = 0: score 2[34]\..*, sentences 0\.00",
        r"k1 in the loss +0\.0000 .* zero\n",
        r"k2 in the loss +0\.[1-9]\d+ +0\.0000 .* fixed-state reverse\n",
        r"k3 in the loss +0\.[1-9]\d+ +0\.\d+ +0\.0000 +fixed-state forward\n",
        r"k1 in the reward +0\.[1-9]\d+ +0\.0000 .* full reverse\n",
    ),
    "your_checkpoint_and_reward": (
        r"reference verified, fingerprint \w{32}\n",
        r"│ score +│ [1-9]\.\d+ .*│ 0\.\d+ .*│\n",
        r"│ KL to the reference \[nats\] +│ .* │ +[12]\.\d+ │\n",
        r"GPT2LMHeadModel",
    ),
}


def test_what_the_prose_says_is_in_the_outputs(file, notebook):
    known = "\n".join(texts(notebook))
    for claim in CLAIMS[file.stem]:
        assert re.search(claim, known), claim


def test_links_lead_somewhere(notebook):
    for cell in cells(notebook, "markdown"):
        assert not broken_links(source(cell), EXPERIMENTS / "notebooks")


@pytest.mark.slow  # starts a kernel
def test_what_is_recorded_has_no_clock(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="extra notebooks")
    new_file = tmp_path / "a.ipynb"
    code = ["import sys", "print(1, flush=True)\nprint(2)\n"]
    new = [nbformat.v4.new_code_cell(text, metadata={"a": 1}) for text in code]
    nbformat.write(nbformat.v4.new_notebook(cells=new), new_file)
    record_notebooks.record(new_file)
    recorded = json.loads(new_file.read_text(encoding="utf-8"))
    first, second = recorded["cells"]
    assert first["outputs"] == []
    (stream,) = second["outputs"]
    assert stream == {"name": "stdout", "output_type": "stream", "text": ["1\n", "2\n"]}
    assert (first["execution_count"], second["execution_count"]) == (1, 2)
    assert [first["metadata"], second["metadata"]] == [{}, {}]
    assert recorded["metadata"]["code"] == record_notebooks.digest(code)
