"""Unreadable texts: each command refuses them in one line that names the place.

A case is a text in a place: the file that a command reads, and the command.
"""

import json
import re
import shutil

import pytest
import toy_files
import toy_runs

from rlhf_jax.sweeps import declaration, planned
from rlhf_jax.train import main

DEEP = "[" * 100_000
# A text, and what is said of it wherever it stands.
TEXTS = {
    "empty": (b"", r"got '' \(Expecting value"),
    "blank": (b" \n", r"got ' .*Expecting value"),
    "cut": (b'{"config": {"out": "ru', "Unterminated string"),
    "cut in an object": (b'{"config": {', "Expecting property name"),
    "two": (b"{}{}", "Extra data"),
    "list": (b"[]", r"got (list \[\]|b?'\[\]')"),
    "number": (b"3", "got (int 3|b'3')"),
    "text": (b'"config"', "got (str 'config'|b?'\"config\"')"),
    "null": (b"null", "got (NoneType None|b?'null')"),
    "NaN": (b'{"config": NaN}', "with nan, which is not a finite number"),
    "Infinity": (b'{"a": [-Infinity]}', "with -inf, which is not a finite number"),
    "twice": (b'{"config": {}, "config": {}}', "the key 'config' twice"),
    "deep lists": (DEEP.encode(), "nested deeper than 100 objects or lists"),
    "deep objects": (b'{"a":' * 9_999, "nested deeper than 100 objects or lists"),
    "deep and whole": (
        b'{"a":' * 300 + b"1" + b"}" * 300,
        "nested deeper than 100 objects or lists",
    ),
    "400 digits": (b'{"a": ' + b"9" * 400 + b"}", "more than 300 digits"),
    "5,000 digits": (b'{"a": ' + b"9" * 5_000 + b"}", r"limit \(4300 digits\)"),
    "Latin-1": (b'{"a": "\xe9"}', "byte 0xe9 at offset 7, which is not UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "byte 0xff at offset 0, which is not"),
    "half a pair": (rb'{"a": "\udc00"}', r"'\\udc00', half a surrogate pair"),
    "NUL": (b"\0", r"got '\\x00' \(Expecting value"),
    "comment": (b"// a\n{}", r"got '// a.*Expecting value"),
    "quotes": (b"{'config': {}}", "Expecting property name"),
    "mark": (b"\xef\xbb\xbf", r"got '' \(Expecting value"),
}
FOREIGN = {"NaN", "Infinity", "400 digits", "half a pair"}  # refused by their fields
OF_LINES = {"blank", "comment", "mark", "empty"}  # no line, or two
JSON_PLACES = {
    "report": ("run/config.json", "report run --html page.html"),
    "report's summary": ("run/summary.json", "report run --html page.html"),
    "paper": ("sweep/sweep.json", "paper sweep --out paper"),
    "sweep": ("swept/sweep.json", "sweep sweep.toml --out swept"),
    "sft's config": ("a.json", "sft --config a.json --out out"),
    "grpo's config": ("run/config.json", "grpo --config run/config.json --out out"),
    "plan's config": ("a.json", "plan ppo --config a.json"),
    "plan's model": ("model/config.json", "plan sft --chip h100 --model model"),
    "kl": ("model/config.json", "kl --policy model --reference model --prompt a"),
    "evaluate": (
        "model/config.json",
        "evaluate --model model --prompts prompts.jsonl --out out",
    ),
}
LINES = {
    "metrics": ("run/metrics.jsonl", "report run --html page.html"),
    "samples": ("run/samples.jsonl", "report run --html page.html"),
    "timings": ("run/timings.jsonl", "report run --html page.html"),
    "lengths": (
        "a.txt",
        "plan ppo --chip h100 --model gpt2 --reward a:b --lengths a.txt",
    ),
}
CASES = [
    *(
        pytest.param(file, command, content, message, id=f"{place}: {name}")
        for place, (file, command) in JSON_PLACES.items()
        for name, (content, message) in TEXTS.items()
        if not (file.startswith("model") and name in FOREIGN)
    ),
    *(
        pytest.param(file, command, content + b"\n", message, id=f"{place}: {name}")
        for place, (file, command) in LINES.items()
        for name, (content, message) in TEXTS.items()
        if name not in OF_LINES
        and (name != "number" if place == "lengths" else name not in FOREIGN)
    ),
]
SWEEP = 'trainer = "sft"\n[options]\nmodel = "m"\ndata = "d"\n[grid]\nlora = [1, 2]\n'
MEASURED = SWEEP + '[measures]\na = "x"\n[claims]\nc = '
CLAIMS = {
    "": "got invalid syntax",
    "a": "got no comparison of two sides",
    "a()": "got no comparison of two sides",
    "a(lora=1) > a(lora=2) > 0": "got no comparison of two sides",
    "1 > 2": "got numbers alone",
    "-" * 20_000 + "a(lora=1) > 0": "got 20013 characters, more than 2000",
    "-" * 1_000 + "a(lora=1) > 0": "got ",
    "(" * 500 + "a(lora=1)" + ")" * 500 + " > 0": "got ",
    "+".join(["a(lora=1)"] * 5_000) + " > 0": "got .* characters, more than 2000",
    "+".join(["1"] * 900) + " > a(lora=1)": "got operations nested deeper than 100",
    "a(lora=1) > " + "9" * 400: "got one with a number of more than 300 digits",
    "a(lora=1) > " + "9" * 1_900: "got one with a number of more than 300 digits",
    "a(lora=1) > 1e999": "got one with inf, which is not a finite number",
    "a(lora=1) > 1e308 * 10 * a(lora=2)": "got 1e\\+308 \\* 10",
    "a(lora=1, lora=2) > 0": "got lora twice",
    "a(lora=3) > 0": "expected settings that a cell of the grid has, got lora=3",
    "a(rank=3) > 0": "expected options of the grid, lora, got rank",
    "b(lora=1) > 0": "expected one of the measures a, got b",
    "a(1) > 0": "got a\\(1\\)",
    "a(**{}) > 0": "got a\\(\\*\\*{}\\)",
    "a(lora=print(1)) > 0": "got print\\(1\\)",
    "a(lora=[]) > 0": "expected settings that a cell",
    "a(lora={[]: 1}) > 0": "got {\\[\\]: 1}",
    "a(lora=1) > True": "got True",
    "a(lora=1) / 2 > 0": "got a\\(lora=1\\) / 2",
    "a(lora=1) ** 9 > 0": "got a\\(lora=1\\) \\*\\* 9",
    "a.b(lora=1) > 0": "expected one of the measures a, got a.b",
    "__import__('os').system('false') > 0": "got ",
    "(x := a(lora=1)) > 0": "got ",
    "lambda: a > 0": "got ",
    "a(lora=1) > 'b'": "got 'b'",
    "a(lora=1) > 0 #\0": "null bytes|NUL",
    "a(lora=1) > \ud7ff": "got ",
}
DECLARED = {
    "trainer = 3": "trainer",
    "trainer = true": "trainer",
    "trainer = [3]": "trainer",
    "trainer = []": "trainer",
    'trainer = ["ppo", "ppo"]': "",
    'trainer = { a = "ppo" }': "trainer",
    'trainer = "no"': "expected one of sft",
    "trainer = 1979-05-27": "trainer",
    "program = 3": "program",
    "program = [3]": "expected a Python file or folder",
    'trainer = "sft"\nprogram = ["a.py"]': "got both",
    "question = 3": "got neither",
    SWEEP + "[seeds]\na = 1": "seeds",
    "seeds = 3\n" + SWEEP: "expected seeds as a list of different integers",
    "seeds = []\n" + SWEEP: "expected seeds as a list of different integers",
    "seeds = [0, 0]\n" + SWEEP: "expected seeds as a list of different integers",
    "seeds = [0.5]\n" + SWEEP: "expected seeds as a list of different integers",
    "seeds = [true]\n" + SWEEP: "expected seeds as a list of different integers",
    f"seeds = [{'9' * 400}]\n" + SWEEP: "more than 300 digits",
    "seeds = [nan]\n" + SWEEP: "not a finite number",
    "options = 3\n" + 'trainer = "sft"': "expected a table",
    "grid = 3\n" + 'trainer = "sft"': "expected a table",
    "measures = 3\n" + SWEEP: "expected a table",
    "claims = 3\n" + SWEEP: "expected a table",
    "slurm = []\n" + SWEEP: "expected a table",
    SWEEP + "[measures]\na = 3": "expected a measure",
    SWEEP + "[measures]\na = []": "expected a measure",
    SWEEP + "[measures]\na = { metric = 3 }": "expected a measure",
    SWEEP + "[measures]\na = { summary = 3 }": "expected a measure",
    SWEEP + "[measures]\na = { last = 0, metric = 'x' }": "expected a measure",
    SWEEP + "[measures]\n'a b' = 'x'": "expected a measure",
    SWEEP + "[claims]\na = 3": "claim '3': expected",
    SWEEP + "[claims]\na = []": "claim",
    SWEEP + "[grid.dtype]\na = 1": "expected a list of values",
    SWEEP + "dtype = []": "expected a list of values",
    SWEEP + "dtype = [{ dtype = 'x' }]": "expected label = TEXT",
    SWEEP + "dtype = [{ label = 3, dtype = 'x' }]": "dtype",
    SWEEP + "dtype = [{ label = {}, dtype = 'x' }]": "dtype|label",
    SWEEP + "dtype = [[[]]]": "dtype",
    SWEEP + "seed = [1]": "a sweep gives to its runs",
    SWEEP + "lora = [1]": "Cannot overwrite a value",
    SWEEP + ".".join("a" * 3_000) + " = [1]": "nested deeper than 100",
    SWEEP + "a = " + "[" * 3_000: "nested deeper than 100",
    SWEEP + "a = [" + "9" * 5_000 + "]": r"limit \(4300 digits\)",
    SWEEP + '"" = [1]': "expected",
    SWEEP + '"a b" = [1]': "expected",
    SWEEP + '"--help" = [true]': "expected",
    SWEEP + "'a' = ['" + "x" * 300 + "']": "of at most 200 bytes",
}
PYTHON = {
    "import sys\nsys.exit(0)": r"got one that calls sys.exit\(0\)",
    "raise SystemExit": r"got one that calls sys.exit\(None\)",
    "import sys\nsys.exit('a\\nb')": r"got one that calls sys.exit\('a",
    "1 / 0": "got ZeroDivisionError",
    "def f(): f()\nf()": "got RecursionError",
    "(": "got SyntaxError",
    "\0": "got (SyntaxError|ValueError)",
    "import no_such_module": "got ModuleNotFoundError",
    "trainer = 'sft'\noptions = {1: 2}": "with the key 1, which is not a string",
    "trainer = 'sft'\noptions = {'a': float('nan')}": "not a finite number",
    "trainer = 'sft'\ngrid = {'a': (n for n in ())}": "expected a list of values",
    "trainer = 'sft'\ngrid = {'a': {1}}": "expected a list of values",
    "trainer = 'sft'\noptions = {}\noptions['a'] = options": "nested deeper than 100",
    "trainer = 'sft'\noptions = {'model': 'm', 'data': 'd'}\n"
    "claims = {'a': object()}": "claim",
    "trainer = 'sft'\noption = {}": "did you mean option",
}


@pytest.fixture(scope="module")
def in_order(tmp_path_factory):
    """A valid run, sweep, checkpoint and data."""
    folder = tmp_path_factory.mktemp("texts")
    toy_runs.run(folder / "run", steps=2, shown=1)
    (folder / "sweep.toml").write_text(SWEEP)
    planned.begin(declaration.read(folder / "sweep.toml"), out=folder / "sweep")
    toy_files.checkpoint(folder / "model")
    toy_files.jsonl(folder / "prompts.jsonl", {"prompt": "the cat"})
    return folder


def refused(capsys, argv, message):
    """Checks for status 2 and one line that contains `message`."""
    with pytest.raises(SystemExit) as exit_:
        main.main(argv)
    errors = capsys.readouterr().err
    assert exit_.value.code == 2, errors
    assert errors.startswith("error: "), errors
    assert errors.count("\n") == 1, errors
    assert len(errors) < 1500, errors
    assert re.search(message, errors), errors
    return errors


def test_there_are_200_cases():
    assert len(CASES) + len(CLAIMS) + len(DECLARED) + len(PYTHON) >= 300


@pytest.mark.cases(quick=24)
@pytest.mark.parametrize(("file", "command", "content", "message"), CASES)
def test_a_file_that_is_refused(
    in_order, tmp_path, monkeypatch, capsys, file, command, content, message
):
    name = file.partition("/")[0]
    for path in in_order.iterdir():
        if path.is_dir() and path.name == name:
            shutil.copytree(path, tmp_path / name)
        elif path.name != name:
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    errors = refused(capsys, command.split(), message)
    assert file.rpartition("/")[2] in errors
    assert not {"out", "page.html", "paper"} & {
        path.name for path in tmp_path.iterdir()
    }


def declared_so(capsys, folder, text, message, *, name="sweep.toml"):
    (folder / name).write_text(text)
    argv = ["sweep", str(folder / name), "--out", str(folder / "out")]
    refused(capsys, argv, message)
    assert not (folder / "out").exists()


@pytest.mark.cases(quick=6)
@pytest.mark.parametrize(("claim", "message"), CLAIMS.items())
def test_a_claim_that_is_refused(tmp_path, capsys, claim, message):
    declared_so(capsys, tmp_path, MEASURED + json.dumps(claim), message)


@pytest.mark.cases(quick=10)
@pytest.mark.parametrize(("text", "message"), DECLARED.items())
def test_a_sweep_that_is_refused(tmp_path, capsys, text, message):
    declared_so(capsys, tmp_path, text, message)


@pytest.mark.cases(quick=6)
@pytest.mark.parametrize(("text", "message"), PYTHON.items())
def test_a_python_sweep_that_is_refused(tmp_path, capsys, text, message):
    declared_so(capsys, tmp_path, text, message, name="sweep.py")
