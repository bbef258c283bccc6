"""The run folder: made once, checked on resume, never changed by a refused run."""

import dataclasses
import hashlib
import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest
import reread
import toy_packages

import rlhf_jax
from rlhf_jax.devices.mesh_shape import MeshOption, MeshShape
from rlhf_jax.devices.placement import WITH_POLICY, Place, PlaceOption
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder
from rlhf_jax.runs.command_line.options import read_file
from rlhf_jax.runs.folder import (
    check_run,
    open_run,
    read_config,
    read_summary,
    write_summary,
)
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.run_config import RunConfig, to_json


@dataclasses.dataclass(frozen=True)
class Lifecycle:
    kl_every: int = 1
    rate: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    lifecycle: Lifecycle = Lifecycle()  # a group of options
    num_steps: int = 10
    kl_coef: float | None = 0.05
    buckets: tuple[int, ...] = (8, 16)
    betas: tuple[float, float] = (0.9, 0.999)
    prompts: Path | None = None
    estimator: Literal["k1", "k2", "k3"] = "k1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(RunConfig):
    rewards: tuple[str, ...] = ()


def tree(folder: Path) -> dict[str, bytes | None]:
    """{path: bytes} of everything in a folder; None for folders."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def refused(config: Config, folder: Path) -> str:
    """The error message of a refused run, both before opening and at opening."""
    before = tree(folder)
    with pytest.raises(InputError) as error:
        open_run(config)
    with pytest.raises(InputError) as early:
        check_run(config)
    assert tree(folder) == before
    assert str(early.value) == str(error.value)
    return str(error.value)


def test_a_new_run_records_its_config_and_versions(tmp_path):
    config = Config(out=tmp_path / "a" / "b", seed=7, kl_coef=None)
    folder = open_run(config)
    recorded = json.loads((folder / "config.json").read_text())
    assert recorded["config"]["kl_coef"] is None
    assert recorded["config"]["seed"] == 7
    assert recorded["config"]["buckets"] == [8, 16]
    assert recorded["versions"]["jax"]
    assert recorded["versions"]["orbax-checkpoint"]
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_packages_that_add_parts_are_recorded(tmp_path, monkeypatch):
    """Only packages that add a part to some group are recorded."""
    verifiers = {"rlhf_jax.verifiers": {"short": "no_such_module:verify"}}
    toy_packages.install(tmp_path / "site", verifiers, {})
    other = '[project]\nname = "other"\nversion = "9"\nentry-points = {others = {}}\n'
    toy_packages.install(tmp_path / "site", other, {})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = open_run(Config(out=tmp_path / "run"))
    versions = json.loads((folder / "config.json").read_text())["versions"]
    assert versions["mine"] == "0.1"
    assert "other" not in versions


def test_a_config_survives_json(tmp_path):
    config = Config(
        out=tmp_path,
        kl_coef=0.1 + 0.2,
        buckets=(),
        betas=(0, 1e-30),
        prompts=Path("a b.jsonl"),
        estimator="k3",
        lifecycle=Lifecycle(kl_every=3, rate=0.5),
    )
    fields = json.loads(json.dumps(to_json(config)))
    again = reread.config(Config, fields, source=Path("config.json"))
    assert again == config
    assert isinstance(again.prompts, Path)
    assert isinstance(again.buckets, tuple)


def test_a_config_must_be_finite(tmp_path):
    with pytest.raises(InputError, match="finite"):
        to_json(Config(out=tmp_path, kl_coef=float("inf")))


def test_misfit_fields_are_named_together():
    fields = to_json(Config(out=Path("runs/a")))
    fields |= {
        "kl_koef": 0.1,
        "num_steps": 1.5,
        "resume": 0,
        "betas": [0.9],
        "estimator": "k4",
        "lifecycle": {"kl_every": "3", "rat": 0.1},
    }
    with pytest.raises(InputError) as error:
        reread.config(Config, fields, source=Path("c.json"))
    message = str(error.value)
    assert message.startswith("c.json does not fit")
    for line in (
        "kl_koef: unknown",
        "num_steps: expected a whole number, got 1.5",
        "resume: expected true or false, got 0",
        'lifecycle.kl_every: expected a whole number, got "3"',
        "lifecycle.rat: unknown",
        "betas: expected 2 numbers, got [0.9]",
        'estimator: expected one of k1, k2, k3, got "k4"',
    ):
        assert f"\n  {line}\n" in message
    assert "kl_coef" not in message


def test_an_integer_beyond_float64_is_a_misfit():
    fields = to_json(Config(out=Path("runs/a"))) | {"kl_coef": 10**400}
    with pytest.raises(InputError, match="kl_coef: expected a number or None") as error:
        reread.config(Config, fields, source=Path("c.json"))
    assert len(str(error.value)) < 300


def test_an_integer_beyond_float64_is_no_number_of_an_option():
    with pytest.raises(InputError, match="count: expected a whole number of at most"):
        checks.finite(count=10**400)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "Expecting property name"),
        ("[1]", "expected the config.json of a run"),
        ('{"config": 3, "versions": {}}', "expected the config.json of a run"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused(tmp_path, text, expected):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=expected):
        read_config(tmp_path / "config.json")
    assert expected in refused(Config(out=tmp_path, resume=True), tmp_path)


def test_a_missing_config_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_config(tmp_path / "config.json")


def test_a_recorded_config_under_another_name_is_refused(tmp_path):
    copy = tmp_path / "mine.json"
    copy.write_text('{"config": {"num_steps": 3}, "versions": {}}')
    with pytest.raises(InputError, match=r"mine.json: .* got the config.json of a run"):
        read_file(copy)


def test_an_existing_run_needs_resume(tmp_path):
    config = Config(out=tmp_path / "run")
    open_run(config)
    message = refused(config, tmp_path)
    assert str(config.out) in message
    assert "config.json" in message
    assert "--resume" in message
    assert "--out" in message


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    assert "got: a file" in refused(Config(out=tmp_path / "run"), tmp_path)


def test_a_folder_in_which_orbax_finds_no_snapshot_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"got: a name with \[, in which no snapshot"):
        folder.check_run(Config(out=tmp_path / "run[1]" / "x"))


def test_a_run_goes_back_only_without_its_model(tmp_path):
    """An existing model stays, and would be that of the steps that are set aside."""
    config = Config(out=tmp_path)
    open_run(config)
    (tmp_path / "model").mkdir()
    check_run(dataclasses.replace(config, resume=True))
    back = dataclasses.replace(config, resume_from=0)
    assert "written again, got model in" in refused(back, tmp_path)
    (tmp_path / "model").rmdir()
    check_run(back)


def test_a_home_that_no_shell_has_expanded_is_refused(tmp_path, monkeypatch):
    """Nobody wants a folder named ~, which `rm -r ~` would not remove alone."""
    monkeypatch.chdir(tmp_path)
    assert "write $HOME" in refused(Config(out=Path("~/runs/a")), tmp_path)
    with pytest.raises(InputError, match=r"--out: .* got ~/runs; the shell replaces ~"):
        urls.refuse(Path("~/runs"), option="--out")
    open_run(Config(out=tmp_path / "~" / "a"))
    urls.refuse(Path("a~"), option="--out")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        open_run(Config(out=tmp_path / "file" / "run"))


def test_resume_does_not_adopt_a_folder_that_is_not_a_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    message = refused(Config(out=tmp_path, resume=True), tmp_path)
    assert "thesis.tex" in message
    assert "expected a run folder, with config.json, in --out" in message


def test_resume_of_nothing_starts_over(tmp_path):
    config = Config(out=tmp_path / "run", resume=True)
    assert (open_run(config) / "config.json").exists()
    # Killed while it wrote its config: nothing of the run is there yet.
    config.out.joinpath("config.json").rename(config.out / "config.json.tmp")
    assert (open_run(config) / "config.json").exists()


def test_resume_with_another_config_lists_the_differences(tmp_path):
    config = Config(out=tmp_path)
    open_run(config)
    message = refused(
        dataclasses.replace(
            config,
            resume=True,
            seed=1,
            kl_coef=None,
            lifecycle=Lifecycle(kl_every=2),
        ),
        tmp_path,
    )
    assert "\n  lifecycle.kl_every: recorded 1, given 2\n" in message
    assert "lifecycle.rate" not in message
    assert "\n  kl_coef: recorded 0.05, given null\n" in message
    assert "\n  seed: recorded 0, given 1\n" in message
    assert "\n  num_steps" not in message


def test_resume_with_a_field_the_run_never_had(tmp_path):
    open_run(RunConfig(out=tmp_path))
    message = refused(Config(out=tmp_path, resume=True), tmp_path)
    assert "\n  kl_coef: recorded (no such field), given 0.05\n" in message


def test_resume_may_differ_in_what_does_not_change_the_result(tmp_path, capsys):
    config = Config(out=tmp_path)
    open_run(config)
    before = tree(tmp_path)
    again = dataclasses.replace(
        config, resume=True, snapshot_every=3, keep_snapshots=9, progress=False
    )
    assert open_run(again) == tmp_path
    assert tree(tmp_path) == before
    assert capsys.readouterr().err == ""


def test_resume_with_other_versions_warns(tmp_path, capsys):
    config = Config(out=tmp_path)
    path = open_run(config) / "config.json"
    recorded = json.loads(path.read_text())
    recorded["versions"]["optax"] = "0.0.1"
    path.write_text(json.dumps(recorded))
    open_run(dataclasses.replace(config, resume=True))
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "optax 0.0.1" in warning
    assert "last bits" in warning
    folder.record_versions(tmp_path, folder.versions())
    versions = json.loads(path.read_text())["versions"]
    assert versions["optax"] == f"0.0.1 then {metadata.version('optax')}"
    open_run(dataclasses.replace(config, resume=True))
    assert capsys.readouterr().err == ""
    folder.record_versions(tmp_path, folder.versions())
    assert json.loads(path.read_text())["versions"] == versions


def test_resume_with_another_reward_warns(tmp_path, capsys, monkeypatch):
    """Code that an option names counts as a version; the module is not imported."""
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/__init__.py").write_text("raise SystemExit")
    score = Path("mine/score.py")
    score.write_text("one = 1")
    before = hashlib.sha256(b"one = 1").hexdigest()[:12]
    rewards = ("short=function:mine.score:one", "right=verifier:none.such:two")
    config = RewardConfig(out=tmp_path / "run", rewards=rewards)
    path = open_run(config) / "config.json"
    versions = json.loads(path.read_text())["versions"]
    assert versions["mine.score.py"] == f"sha256 {before}"
    assert not [name for name in versions if name.startswith(("none", "short"))]
    own = dataclasses.replace(config, rewards=("rlhf_jax.kl:k1", "math:inf", "mine:x"))
    assert list(folder.code_of(own)) == ["mine.py"]
    score.write_text("one = 2")
    again = dataclasses.replace(config, resume=True)
    open_run(again)
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"began with mine.score.py sha256 {before} and goes on with" in warning
    assert warning.endswith("its numbers may differ")
    folder.record_versions(again.out, folder.code_of(again))
    after = hashlib.sha256(b"one = 2").hexdigest()[:12]
    versions = json.loads(path.read_text())["versions"]
    assert versions["mine.score.py"] == f"sha256 {before} then sha256 {after}"


def test_a_version_that_the_start_did_not_record(tmp_path):
    """A run of an older version has no hash of its reward, and gains it on a resume."""
    path = open_run(Config(out=tmp_path)) / "config.json"
    used = json.loads(path.read_text())["versions"]
    for _ in range(2):
        folder.record_versions(tmp_path, {**used, "mine.py": "sha256 1234"})
        versions = json.loads(path.read_text())["versions"]
        assert versions == {**used, "mine.py": "not recorded then sha256 1234"}


def test_a_kind_of_reward_is_no_module(tmp_path, monkeypatch):
    """A user's model.py has no part in x=model:PATH, nor a NAME.py in hf:NAME:SPLIT."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "verifier", "function", "hf", "gsm8k", "nmine", "mine"):
        Path(f"{name}.py").touch()
    sources = ("a=model:runs/reward", "b=model:policy", "c=verifier:exact")
    files = ("hf:openai/gsm8k:test", "hf:gsm8k:test", "hf:gsm8k", "Task:\nmine:x")
    config = RewardConfig(out=tmp_path / "run", rewards=(*sources, *files))
    assert folder.code_of(config) == {}
    named = ("a=function:mine:f,weight=2", "b=verifier:model:f", "verifier:f")
    config = dataclasses.replace(config, rewards=named)
    assert [*folder.code_of(config)] == ["mine.py", "model.py", "verifier.py"]


@pytest.mark.parametrize(
    ("rows", "others", "refused"),
    [
        (4, (), True),  # of snapshots every 2 steps one may be lost, but not two
        (3, (), False),
        (1, ("summary.json",), True),
        (4, ("snapshots/ppo/2/meta",), False),
    ],
)
def test_a_resume_without_its_snapshots_keeps_the_rows(tmp_path, rows, others, refused):
    config = Config(out=tmp_path, snapshot_every=2)
    open_run(config)
    text = "".join(f'{{"stage": "ppo", "step": {n}}}\n' for n in range(rows))
    (tmp_path / "metrics.jsonl").write_text(text)
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    again = dataclasses.replace(config, resume=True)
    if not refused:
        check_run(again)
        return
    with pytest.raises(InputError, match=rf"of ppo, .* has {rows} rows?, got none"):
        check_run(again)
    check_run(dataclasses.replace(config, resume_from=0))


def test_a_summary_is_strict_json_or_nothing(tmp_path):
    write_summary(tmp_path, {"kl": 1.5})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_summary(tmp_path, {"kl": float("nan")})
    assert read_summary(tmp_path) == {"kl": 1.5}


@pytest.mark.parametrize("field", ["snapshot_every", "keep_snapshots"])
def test_counts_are_at_least_one(field):
    with pytest.raises(InputError, match="1 or more, got 0"):
        Config(out=Path("x"), **{field: 0})


@pytest.mark.parametrize("extra", ["tensorboard", "wandb", "trackio"])
def test_an_extra_that_is_not_installed_is_named(monkeypatch, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf"pip install 'rlhf-jax\[{extra}\]'"):
        Config(out=Path("x"), **{extra: True})


def test_a_group_that_may_be_none_is_read_back(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(RunConfig):
        mesh: MeshOption | None = None
        place: PlaceOption = WITH_POLICY

    hints = {"mesh": MeshShape(fsdp=2), "place": Place("last", MeshShape(tensor=4))}
    for options in ({}, hints):
        config = Config(out=tmp_path, **options)
        fields = to_json(config)
        assert reread.config(Config, fields, source=tmp_path) == config


def test_a_checkout_names_its_commit_and_whether_files_differ(tmp_path, monkeypatch):
    package = tmp_path / "rlhf_jax"
    package.mkdir()
    module = package / "__init__.py"
    module.write_text("")
    monkeypatch.setattr(rlhf_jax, "__file__", str(module))
    source = folder._source.__wrapped__
    version = rlhf_jax.__version__
    assert source() == version  # installed

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ("git", *identity, *arguments), cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    git("init", "--quiet")
    assert source() == version  # no commit yet
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert source() == f"{version} ({commit})"
    (tmp_path / "notes.txt").write_text("beside the package")
    assert source() == f"{version} ({commit})"
    module.write_text("changed = True\n")
    assert source() == f"{version} ({commit}, changed)"
