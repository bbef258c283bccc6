"""`rlhf-jax new`: each package passes its own test, and the library finds it."""

import re
import shlex
import shutil
import subprocess
import sys
import venv

import pytest
import toy_files
import toy_packages
from places import ROOT

from rlhf_jax import hf
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import metrics
from rlhf_jax.train import main, new, sweep, trainer
from rlhf_jax.train.config.rewards import Verifier
from rlhf_jax.train.plan import command as plan_command
from rlhf_jax.train.rewards import make_verifier
from rlhf_jax.train.rollouts.environment import make_environment

NAMES = {"method": "signs", "reward": "short", "environment": "words", "family": "tall"}
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a package of a kind and installs it as pip would."""

    def write(kind):
        name = NAMES[kind]
        monkeypatch.chdir(tmp_path)
        main.main(["new", kind, name])
        folder, site = tmp_path / name, tmp_path / "site"
        project = (folder / "pyproject.toml").read_text()
        code = (folder / f"{name}.py").read_text()
        toy_packages.install(site, project, {name: code})
        monkeypatch.syspath_prepend(str(site))
        return folder

    yield write
    for name in NAMES.values():
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "kind",
    [
        "reward",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in NAMES
            if kind != "reward"
        ),
    ],
)
def test_a_package_of_four_files_passes_its_own_test(kind, written, capsys):
    name = NAMES[kind]
    folder = written(kind)
    files = ["README.md", f"{name}.py", "pyproject.toml", f"test_{name}.py"]
    assert sorted(file.name for file in folder.iterdir()) == sorted(files)
    for file in folder.iterdir():
        text = file.read_text()
        assert f"my_{kind}" not in text
        assert "MyFamily" not in text
    # The last plugin would look for garbage among all that this process has: 3 s.
    without = ("cacheprovider", "xdist", "unraisableexception")
    options = ("-q", *(f"-pno:{plugin}" for plugin in without))
    assert pytest.main([*options, str(folder)]) == 0
    sys.modules.pop(f"test_{name}", None)
    printed = capsys.readouterr().out
    assert f"{name}/ has README.md, " in printed
    assert f"pip install -e {name} && pytest {name}\n" in printed


def test_a_method_is_a_command(written, capsys):
    written("method")
    capsys.readouterr()
    main.main([])
    assert (
        "  signs          REINFORCE++ on the signs of its advantages.\n"
        in capsys.readouterr().out
    )
    with pytest.raises(SystemExit) as exit_:
        main.main(["signs", "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: rlhf-jax signs --model" in shown
    assert "REINFORCE++ on the signs of its advantages" in shown


def test_a_method_has_plans_and_sweeps(written, tmp_path, capsys):
    """Both read its `Config`, like those of the library's methods."""
    written("method")
    config, _ = plan_command.parse(
        ["signs", "--model", "gpt2", "--verifier", "exact", "--kl-coef", "0.3"]
    )
    assert type(config).__module__ == "signs"
    assert config.kl.kl_coef == 0.3
    with pytest.raises(InputError, match=r"reward-model, .*, signs, got sign;"):
        plan_command.parse(["sign"])
    file, printed = (
        tmp_path / "sweep.toml",
        sweep.Config(file=tmp_path / "sweep.toml", out=tmp_path / "swept", print_=True),
    )
    options = 'model = "m"\nprompts = "p"\nverifier = "exact"\n'
    grid = '[grid]\nkl_coef = [0.0, 0.1]\n[measures]\nscore = "score"\n'
    file.write_text(f'trainer = "signs"\n[options]\n{options}{grid}')
    capsys.readouterr()
    sweep.main(printed)
    assert capsys.readouterr().out.count("rlhf-jax signs --model=m") == 2
    file.write_text(f'trainer = "signs"\n[options]\nkl_coff = 1\n{options}{grid}')
    with pytest.raises(InputError, match=r"options of rlhf-jax signs, got"):
        sweep.main(printed)


def test_a_reward_is_a_verifier_by_name(written):
    written("reward")
    choice = Verifier("short")
    assert choice.is_function  # it reads the row itself
    verify = make_verifier(choice)
    assert [verify("?", text, {"answer": "7"}) for text in ("7", "8")] == [1.0, 0.0]
    with pytest.raises(
        InputError, match=r"answer_field= cannot be combined with --ver"
    ):
        Verifier("short", answer_field="right")


def test_an_environment_is_one_by_name(written):
    written("environment")
    environment = make_environment("words")
    prompt, state = environment.reset({"word": "cat"})
    assert prompt.startswith("A word of 3 letters.")
    assert environment.step(state, "2").observation == "a\n"


def test_a_family_is_one_of_all(written):
    written("family")
    assert [*hf.FAMILIES][-2:] == ["gpt_oss", "tall"]
    assert len(hf.FAMILIES) == len([*hf.FAMILIES])
    assert hf.FAMILIES["tall"].causal == "TallForCausalLM"
    assert "tall" in hf.FAMILIES


@pytest.mark.parametrize("kind", ["method", "reward", "environment"])
def test_the_command_of_its_readme_parses(kind, written, monkeypatch):
    folder = written(kind)
    ran = []
    monkeypatch.setattr(trainer, "main", ran.append)
    text = (folder / "README.md").read_text()
    lines = re.findall(r"^rlhf-jax (.*)$", text, re.MULTILINE)
    for line in lines:
        if "--help" not in line:
            main.main(shlex.split(line))
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["methd", "x"], "error: expected one of method, reward, environment, family,"),
        (["method", "my-method"], "got 'my-method'; write letters, digits and _"),
        (["method", "class"], "expected a name for a Python module, got 'class'"),
        (["method", "../x"], "expected a name for a Python module, got '../x'"),
        (["method", "json"], "expected a name that is free, got 'json'"),
        (["method", "ppo"], "expected a name that is free, got 'ppo'"),
        (["reward", "gsm8k"], "expected a name that is free, got 'gsm8k'"),
        (["environment", "rooms"], "expected a name that is free, got 'rooms'"),
        (["family", "llama"], "expected a name that is free, got 'llama'"),
        (["reward", "there"], "to make the folder there, got File exists; choose an"),
    ],
)
def test_what_is_refused_leaves_no_file(argv, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main.main(["new", *argv])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]


def test_a_wrong_kind_and_a_wrong_name_are_named_together(capsys):
    with pytest.raises(SystemExit):
        main.main(["new", "methd", "my-method"])
    kind, name = capsys.readouterr().err.splitlines()
    assert "expected one of method, reward" in kind
    assert "expected a name for a Python module, got 'my-method'" in name


def test_names_of_two_words_have_a_class_of_theirs(tmp_path):
    files = new.write("family", "grand_llama", folder=tmp_path)
    code = next(file for file in files if file.name == "grand_llama.py").read_text()
    assert '"GrandLlama", config_from_hf' in code
    assert 'NAME = "grand_llama"' in code


def test_an_unknown_command_is_not_found():
    assert "signs" not in main.usage()


@pytest.mark.slow
def test_the_command_trains(written, tmp_path):
    written("method")
    toy_files.checkpoint(tmp_path / "model")
    toy_files.jsonl(tmp_path / "prompts.jsonl", {"prompt": "the cat"})
    out = tmp_path / "run"
    words = (
        *("signs", "--model", tmp_path / "model", "--prompts"),
        *(tmp_path / "prompts.jsonl", "--rewards", "short=length,weight=-1"),
        *("--batch-size=4", "--max-new-tokens=4", "--num-steps=2", "--no-progress"),
        *("--out", out),
    )
    main.main([str(word) for word in words])
    rows = metrics.read(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["objective/scores"] == pytest.approx(-row["response/length"])
    assert (out / "model" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_it_installs_and_passes_its_test(kind, tmp_path):
    """Installed by pip in a new environment with access to this one's packages."""
    pytest.importorskip("setuptools", minversion="70.1", reason="of the extra test")
    name = NAMES[kind]
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    here = [ROOT, *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "here.pth").write_text("\n".join(map(str, here)))

    def run(*words):
        done = subprocess.run(
            [python, *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "rlhf_jax", "new", kind, name)
    options = ("--no-build-isolation", "--no-deps", "--no-index", "-q")
    run("-m", "pip", "install", *options, "-e", name)
    assert " passed" in run("-m", "pytest", "-q", name)
    if kind == "method":  # the folder of that name here is not the module
        assert "usage: rlhf-jax signs" in run("-m", "rlhf_jax", name, "--help")
    run("-m", "pip", "uninstall", "-q", "-y", name)
    shutil.rmtree(tmp_path / name)
