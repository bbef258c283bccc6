"""Runs and sweeps with one value of a file replaced give a page or a one-line error."""

import json
import random

import pytest
import test_paper
import toy_runs

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports import document, reading
from rlhf_jax.reports.contents import contents
from rlhf_jax.reports.paper import methods, provenance
from rlhf_jax.sweeps import planned, results

VALUES = (
    *(None, True, 3, -1, 0, 1.5, 1e308, 10**30, 10**400, "x", "", "NaN", "\ud800"),
    *([], {}, [3], ["a"], [None], [[]], [{}], {"a": 1}, {"kind": "x"}),
)


def places_of(value, place=()):
    """The path of every value inside, beginning with the whole."""
    yield place
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places_of(value[key], (*place, key))


def changed(text, *, rng):
    """The JSON with one value replaced, or without one field."""
    value = json.loads(text)
    *above, last = rng.choice([*places_of(value)]) or (None,)
    if last is None:
        return json.dumps(rng.choice(VALUES))
    inner = value
    for key in above:
        inner = inner[key]
    if isinstance(inner, dict) and rng.random() < 0.2:
        del inner[last]
    else:
        inner[last] = rng.choice(VALUES)
    return json.dumps(value)


def shown(folder):
    runs, waiting = reading.read_all([folder])
    title = reading.title([folder])
    document.as_script(contents(runs, title=title, waiting=waiting).data)


def written(folder):
    """The texts written of a sweep."""
    sweep = planned.begun(folder)
    runs = planned.runs_of(sweep, out=folder)
    of_runs = results.collected(sweep, runs)
    results.tell(sweep, of_runs)
    json.dumps(results.as_json(sweep, of_runs), allow_nan=False)
    records = [provenance.read(run) for run in runs if run.done]
    if records:
        methods.paragraph(sweep, runs, records, of_runs, cited=[])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    toy_runs.run(folder / "run", steps=4, shown=2, hacked=True)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    alarm = {"stage": "ppo", "step": 1, "name": "kl", "message": "it is large"}
    (folder / "run" / "summary.json").write_text(
        json.dumps(summary | {"alarms": [alarm]})
    )
    small = {"kl_coef": [0.0, 0.2], "penalty.value_estimator": ["k1"]}
    claims = {"less": "kl_end(kl_coef=0.2) < kl_end(kl_coef=0.0)"}
    test_paper.swept(folder / "sweep", seeds=[0, 1], grid=small, claims=claims)
    return folder


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "use"), [("run", shown), ("sweep", written)])
def test_any_value_in_a_file(folders, name, use, seed):
    rng = random.Random(seed)
    use(folders / name)
    files = sorted(path for path in (folders / name).rglob("*") if path.is_file())
    for _ in range(40 if seed == 0 else 300):
        file = rng.choice(files)
        before = file.read_text()
        lines = before.splitlines() if file.suffix == ".jsonl" else [before]
        number = rng.randrange(len(lines))
        lines[number] = changed(lines[number], rng=rng)
        file.write_text("\n".join(lines) + "\n")
        message = ""
        try:
            use(folders / name)
        except InputError as error:
            message = str(error)
        file.write_text(before)
        # Damage is told file by file, and anything else in one line.
        assert "\n" not in message or "rlhf-jax verify" in message
        assert len(message) < 600
