"""Files of sweeps: their declarations, and refused input."""

import json
import shlex
import sys

import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.sweeps import declaration, planned
from rlhf_jax.sweeps.declaration import Measure

TOML = """
question = "What does the penalty buy?"
trainer = "ppo"
seeds = [3, 5]

[options]
model = "a model"
whiten_rewards = true
"scores.clip" = [1.0, 2.5]

[options.penalty]
placement = "reward"

[grid]
kl_coef = [0.0, 0.05]
how = [
    { label = "k1", "penalty.value_estimator" = "k1" },
    { label = "k3, raw", "penalty.value_estimator" = "k3", whiten_advantages = false },
]

[measures]
score = "objective/scores"
late = { metric = "objective/kl", last = 5 }
gold = { summary = "policy.gold" }

[claims]
"more is more" = "score(kl_coef=0.05) > score(kl_coef=0.0)"
"""
PYTHON = """
trainer = "ppo"
options = {"model": "m"}
grid = {"kl_coef": [n / 10 for n in range(3)]}
helper = 3
"""
FIELDS = {"trainer": "ppo", "grid": {"kl_coef": [0.0, 0.1]}}


def test_a_toml_file_declares_runs(tmp_path):
    file = tmp_path / "sweep.toml"
    file.write_text(TOML)
    sweep = declaration.read(file)
    assert sweep.question == "What does the penalty buy?"
    assert sweep.seeds == (3, 5)
    assert [cell.name for cell in sweep.cells] == [
        *("kl_coef=0,how=k1", "kl_coef=0,how=k3,-raw"),
        *("kl_coef=0.05,how=k1", "kl_coef=0.05,how=k3,-raw"),
    ]
    assert sweep.measures == {
        "score": Measure(metric="objective/scores"),
        "late": Measure(metric="objective/kl", last=5),
        "gold": Measure(summary="policy.gold"),
    }
    runs = planned.runs_of(sweep, out=tmp_path / "out")
    assert [(run.cell.name, run.seed) for run in runs[3:5]] == [
        ("kl_coef=0.05,how=k3,-raw", 3),
        ("kl_coef=0,how=k1", 5),
    ]
    folder = tmp_path / "out" / "runs" / "kl_coef=0.05,how=k3,-raw" / "seed_3"
    assert runs[3].line() == shlex.join(
        [
            *("rlhf-jax", "ppo", "--model=a model", "--whiten-rewards"),
            *("--scores.clip", "1", "2.5", "--penalty.placement=reward"),
            *("--kl-coef=0.05", "--penalty.value-estimator=k3"),
            *("--no-whiten-advantages", "--seed=3", f"--out={folder}"),
        ]
    )


def test_the_seed_of_a_run_may_stand_in_an_option(tmp_path):
    fields = {
        "trainer": "ppo",
        "seeds": [3, 5],
        "options": {"model": "sft/seed_{seed}/model"},
        "grid": {"prompts": ["a", "{seed}/b"]},
    }
    runs = planned.runs_of(declaration.declared(fields, source="file"), out=tmp_path)
    assert [run.options[:2] for run in runs] == [
        ("--model=sft/seed_3/model", "--prompts=a"),
        ("--model=sft/seed_3/model", "--prompts=3/b"),
        ("--model=sft/seed_5/model", "--prompts=a"),
        ("--model=sft/seed_5/model", "--prompts=5/b"),
    ]


def test_a_python_file_computes_its_grid(tmp_path):
    file = tmp_path / "sweep.py"
    file.write_text(PYTHON)
    sweep = declaration.read(file)
    assert [cell.options for cell in sweep.cells] == [
        (("kl_coef", n / 10),) for n in range(3)
    ]


def test_a_python_file_imports_what_is_beside_it(tmp_path):
    (tmp_path / "my_grid.py").write_text("KL = [0.5]")
    file = tmp_path / "sweep.py"
    file.write_text("import my_grid\ntrainer = 'ppo'\ngrid = {'kl_coef': my_grid.KL}")
    assert declaration.read(file).cells[0].options == (("kl_coef", 0.5),)
    assert str(tmp_path) not in sys.path


def test_options_with_the_same_last_part_keep_their_whole_names():
    grid = {
        "policy.rank": [1, 2],
        "critic.rank": [3],
        "penalty.value_estimator": ["k1"],
    }
    sweep = declaration.declared({"trainer": "ppo", "grid": grid}, source="file")
    assert sweep.cells[0].name == "policy.rank=1,critic.rank=3,value_estimator=k1"


def test_a_sweep_without_a_grid_is_one_cell():
    sweep = declaration.declared({"trainer": "sft", "seeds": [0, 1]}, source="file")
    assert [cell.name for cell in sweep.cells] == ["run"]


def test_trainers_are_an_axis_with_options_of_their_own(tmp_path):
    axis = ["ppo", {"label": "groups", "trainer": "grpo", "group_size": 8}]
    fields = {"trainer": axis, "grid": {"kl_coef": [0.1]}, "options": {"model": "m"}}
    sweep = declaration.declared(fields, source="file")
    assert sweep.trainer is None
    lines = {run.cell.name: run.line() for run in planned.runs_of(sweep, out=tmp_path)}
    assert [line.partition(" --seed")[0] for line in lines.values()] == [
        "rlhf-jax ppo --model=m --kl-coef=0.1",
        "rlhf-jax grpo --model=m --group-size=8 --kl-coef=0.1",
    ]
    assert list(lines) == ["trainer=ppo,kl_coef=0.1", "trainer=groups,kl_coef=0.1"]


def test_a_cell_whose_trainer_changes_is_another_sweep(tmp_path):
    def declared(trainer):
        axis = ["ppo", {"label": "other", "trainer": trainer}]
        return declaration.declared({"trainer": axis}, source="file")

    planned.begin(declared("grpo"), out=tmp_path)
    planned.begin(declared("grpo"), out=tmp_path)
    with pytest.raises(InputError, match=r"other\.trainer was grpo, got rein"):
        planned.begin(declared("reinforce"), out=tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trainr": "ppo"}, "got trainr; did you mean trainer?"),
        ({"trainer": []}, "expected a list of values for trainer of the grid"),
        ({"trainer": ["ppo", 3]}, "expected each trainer as a name"),
        ({"trainer": ["ppo", "ppo"]}, "expected each cell to have a name of its own"),
        (
            {"trainer": [{"label": "a", "lam": 1}]},
            "got None of the cell trainer=a,kl_coef=0; name one",
        ),
        ({"trainer": None}, "expected either trainer"),
        ({"program": ["a.py"]}, "got both"),
        ({"seeds": []}, "expected seeds as a list of different integers, got []"),
        ({"seeds": [1, 1]}, "different integers, got [1, 1]"),
        ({"seeds": 3}, "different integers, got 3"),
        ({"options": 3}, "expected a table [options], got 3"),
        ({"options": {"out": "x"}}, "got out, which a sweep gives to its runs"),
        ({"grid": {"seed": [1]}}, "got seed, which a sweep gives to its runs"),
        ({"options": {"kl_coef": 1}}, "got kl_coef in both"),
        ({"options": {"kl-coef": 1}}, "got kl_coef in both"),
        ({"options": {"resume-from": 1}}, "got resume_from, which a sweep gives"),
        ({"options": {"seeds": [0]}}, "got seeds, which is a field of the sweep"),
        (
            {"grid": {"how": [{"label": "a", "out": "x"}]}},
            "got out, which a sweep gives to its runs",
        ),
        (
            {"options": {"lam": 1}, "grid": {"how": [{"label": "a", "lam": 1}]}},
            "got lam in both",
        ),
        ({"program": 3}, "or program, a list of words as"),
        ({"program": "x.py"}, "got program = 'x.py'"),
        ({"grid": {"how": [{"label": "\u4e00" * 100, "lam": 1}]}}, "at most 200 bytes"),
        ({"grid": {"kl_coef": []}}, "a list of values for kl_coef of the grid, got []"),
        ({"grid": {"kl_coef": 0.5}}, "a list of values for kl_coef of the grid, got 0"),
        ({"grid": {"kl_coef": [1, 1.0]}}, "each cell to have a name of its own"),
        ({"grid": {"how": [{"kl_coef": 1}]}}, "expected label = TEXT in each value of"),
        (
            {"grid": {"kl_coef": [1], "how": [{"label": "a", "kl_coef": 1}]}},
            "or in one list of the grid, got kl_coef in two",
        ),
        ({"measures": {"score": 3}}, "got 'score' = 3; correct it"),
        ({"measures": {"score": {"metric": "a", "summary": "b"}}}, "got 'score' = {"),
        ({"measures": {"score": {"metric": "a", "last": 0}}}, "got 'score' = {"),
        (
            {"measures": {"a b": "c"}},
            "with a NAME of letters, digits and _, got 'a b'",
        ),
    ],
)
def test_what_is_no_sweep(fields, message):
    with pytest.raises(InputError) as error:
        declaration.declared(FIELDS | fields, source="file")
    assert message in str(error.value)
    assert str(error.value).startswith("file: ")


def test_all_mistakes_of_a_sweep_are_named_at_once():
    fields = {"trainr": "ppo", "program": ["a.py"], "trainer": "ppo", "seeds": [1, 1]}
    with pytest.raises(InputError) as error:
        declaration.declared(fields, source="file")
    unknown, both, seeds = str(error.value).splitlines()
    assert "got trainr" in unknown
    assert "got both" in both
    assert "got [1, 1]" in seeds
    grid = {"kl_coef": [], "lam": 0.5}
    with pytest.raises(InputError, match=r"for kl_coef .*\nfile: .* for lam of the"):
        declaration.declared({"trainer": "ppo", "grid": grid}, source="file")
    options = {"out": "x", "seeds": [0]}
    with pytest.raises(InputError, match=r"got out, .*\nfile: .* got seeds, which is"):
        declaration.declared({"trainer": "ppo", "options": options}, source="file")


def test_files_that_cannot_be_read(tmp_path):
    for name, text, message in (
        ("sweep.yaml", "", "ends with .toml or .py"),
        ("absent.toml", None, "that can be read, got"),
        ("bad.toml", "a = ", "that can be read, got .a = . .Invalid value"),
        ("bad.py", "1 / 0", "that can be read, got ZeroDivisionError"),
        ("near.py", "mesures = {}", "got mesures; did you mean measures"),
    ):
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        with pytest.raises(InputError, match=message):
            declaration.read(file)


def test_a_folder_keeps_to_the_sweep_that_it_began_with(tmp_path):
    out = tmp_path / "out"
    options = {"options": {"model": "m"}}
    sweep = declaration.declared(FIELDS | options, source="file")
    planned.begin(sweep, out=out)
    assert json.loads((out / "sweep.json").read_text())["options"] == {"model": "m"}
    more = FIELDS | options | {"seeds": [0, 1], "grid": {"kl_coef": [0.0, 0.1, 0.2]}}
    planned.begin(declaration.declared(more, source="file"), out=out)
    other = declaration.declared(FIELDS | {"options": {"model": "n"}}, source="file")
    with pytest.raises(InputError, match=r"whose options.model was m, got n; give"):
        planned.begin(other, out=out)
    # What a label stands for may not change either, of cells that are there.
    how = {"grid": {"how": [{"label": "a", "lam": 1.0}]}}
    planned.begin(declaration.declared(FIELDS | options | how, source="file"), out=out)
    how = {"grid": {"how": [{"label": "a", "lam": 0.9}]}}
    with pytest.raises(InputError, match=r"whose cell how=a.lam was 1.0, got 0.9; giv"):
        planned.begin(
            declaration.declared(FIELDS | options | how, source="file"), out=out
        )
    planned.begin(sweep, out=out)
    with pytest.raises(InputError, match=r"expected a folder of a sweep, or none, got"):
        planned.begin(sweep, out=out.parent)
    file = out / "sweep.json"
    file.write_text(file.read_text().replace("0.2", "0.3"))  # of an earlier start
    with pytest.raises(InputError, match=r"sweep.json that cannot be read: SHA-256"):
        planned.begin(sweep, out=out)


@pytest.mark.parametrize(
    "trainer", ["ppo", ["ppo", {"label": "x", "trainer": "grpo", "group_size": 4}]]
)
def test_a_folder_has_the_sweep_that_was_asked_last(tmp_path, trainer):
    fields = {
        "trainer": trainer,
        "options": {"lora": [1, 2]},
        "grid": {"how": [{"label": "a", "modules": ["q", ["v"]]}, {"label": "b"}]},
        "measures": {"kl": "objective/kl", "end": {"summary": "a.b"}},
    }
    claims = {"held": "kl(how='a') < kl(how='b')"}
    for more in ({}, {"seeds": [1, 2], "claims": claims, "question": "Why?"}):
        asked = declaration.declared(fields | more, source="file")
        planned.begin(asked, out=tmp_path / "out")
    begun = planned.begun(tmp_path / "out")
    assert begun == asked
    assert (begun.question, begun.seeds, begun.claims) == ("Why?", (1, 2), claims)
    assert planned.runs_of(begun, out=tmp_path) == planned.runs_of(asked, out=tmp_path)


def test_every_mistake_of_a_sweep_names_its_file():
    with pytest.raises(InputError) as error:
        declaration.declared({"command": "ppo", "colour": 1}, source="s.toml")
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("s.toml: expected ") for line in lines)
