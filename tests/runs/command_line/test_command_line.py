"""Command lines become configs; user errors and signals end a run with one message."""

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import jax
import places
import pytest

from rlhf_jax.devices import precision, processes
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, folder, progress, run_config


@dataclasses.dataclass(frozen=True)
class Group:
    rank: int = 8
    """Of the adapters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    lora: Group = Group()
    num_steps: int = 10
    """PPO steps."""
    kl_coef: float | None = 0.05
    """KL coefficient, reward units per nat; None is off."""
    buckets: tuple[int, ...] = (8, 16)
    """Prompt lengths, tokens."""
    estimator: Literal["k1", "k3"] = "k1"
    """KL in the reward."""


def parse(*argv: object) -> Config:
    return command_line.parse(
        Config, description="A test.", argv=[str(word) for word in argv]
    )


def test_every_field_is_an_option():
    config = parse(
        *("--out", "run", "--seed", 3, "--kl-coef", "1e-3", "--buckets", 4, 5, 6),
        *("--resume", "--no-progress", "--estimator", "k3", "--lora.rank", 2),
    )
    assert config == Config(
        out=Path("run"),
        seed=3,
        kl_coef=1e-3,
        buckets=(4, 5, 6),
        resume=True,
        progress=False,
        estimator="k3",
        lora=Group(rank=2),
    )
    assert parse("--out", "run", "--kl-coef", "None").kl_coef is None


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for words in ("A test.", "--config", "--kl-coef", "reward units per nat"):
        assert words in text
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "Seed of every random number" in text


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (
            ("--out", "run", "--kl-cof", "1"),
            "got '--kl-cof 1'; did you mean --kl-coef? ",
        ),
        (
            ("--out", "run", "--kl-coef", "much"),
            "--kl-coef: expected a number or None, got 'much'; ",
        ),
        (
            ("--out", "run", "--estimator", "k4"),
            "got 'k4'; choose one",
        ),
        ((), "error: expected --out, got none; "),
        (("--config",), "error: --config: expected a value, got none; correct it"),
    ],
)
def test_a_wrong_option_exits_2_before_anything(
    argv, complaint, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        command_line.main(pytest.fail, Config, description="A test.", argv=argv)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_recorded_config_gives_the_defaults(tmp_path):
    first = parse("--out", tmp_path, "--kl-coef", "None", "--buckets", 3, "--resume")
    recorded = folder.open_run(first) / "config.json"
    assert parse("--config", recorded) == dataclasses.replace(first, resume=False)
    again = parse("--seed", 5, f"--config={recorded}", "--out", "else", "--resume")
    assert again == dataclasses.replace(first, seed=5, out=Path("else"))


def test_a_moved_run_folder_stays_its_own(tmp_path):
    folder.open_run(parse("--out", tmp_path / "old"))
    (tmp_path / "old").rename(tmp_path / "new")
    moved = parse("--config", tmp_path / "new" / "config.json", "--resume")
    assert moved.out == tmp_path / "new"


def test_a_recorded_config_that_does_not_fit_is_refused(tmp_path, capsys):
    recorded = folder.open_run(parse("--out", tmp_path)) / "config.json"
    content = json.loads(recorded.read_text())
    content["config"]["kl_koef"] = 1
    recorded.write_text(json.dumps(content))
    with pytest.raises(InputError, match="kl_koef: unknown"):
        parse("--config", recorded)
    with pytest.raises(SystemExit) as exit_:
        command_line.main(
            pytest.fail, Config, description="", argv=["--config", os.fspath(recorded)]
        )
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {recorded} does not fit")


def ending(run, tmp_path, capsys) -> tuple[object, str]:
    """(status, stderr) of a run by `runs.command_line.main`."""
    argv = ["--out", os.fspath(tmp_path / "run")]
    with pytest.raises(SystemExit) as exit_:
        command_line.main(run, Config, description="A test.", argv=argv)
    return exit_.value.code, capsys.readouterr().err


def test_a_finished_run_returns(tmp_path):
    configs = []
    argv = ["--out", os.fspath(tmp_path), "--seed", "4"]
    command_line.main(configs.append, Config, description="A test.", argv=argv)
    assert configs == [Config(out=tmp_path, seed=4)]


@pytest.mark.parametrize("shows", [True, False])
def test_no_progress_hides_that_of_reading_too(tmp_path, monkeypatch, shows, capsys):
    monkeypatch.setattr(progress, "SECONDS_BEFORE_A_BAR", -1.0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    argv = ["--out", os.fspath(tmp_path), *([] if shows else ["--no-progress"])]

    def run(config):
        assert [*progress.track("ab", "letters", total=2)] == ["a", "b"]

    command_line.main(run, Config, description="A test.", argv=argv)
    assert ("letters: 2 of 2" in capsys.readouterr().err) == shows


def test_a_user_error_is_a_message_and_status_2(tmp_path, capsys):
    def run(config):
        raise InputError("--reward nope:nope cannot be imported")

    assert ending(run, tmp_path, capsys) == (
        2,
        "error: --reward nope:nope cannot be imported\n",
    )


def test_an_existing_run_is_refused_before_the_run_is_called(tmp_path, capsys):
    folder.open_run(parse("--out", tmp_path / "run"))
    status, message = ending(pytest.fail, tmp_path, capsys)
    assert status == 2
    assert "--resume" in message


def test_a_run_in_float32_multiplies_in_float32_and_leaves_jax_as_it_was(tmp_path):
    seen = []
    before = precision.name()
    command_line.main(
        lambda config: seen.append((precision.name(), folder.versions())),
        Config,
        description="",
        argv=["--out", os.fspath(tmp_path)],
    )
    [(name, versions)] = seen
    assert (before, name, precision.name()) == ("default", "highest", "default")
    assert versions["matmul_precision"] == "highest"


def test_a_defect_keeps_its_traceback(tmp_path):
    def run(config):
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        command_line.main(
            run, Config, description="", argv=["--out", os.fspath(tmp_path)]
        )


@pytest.mark.parametrize(
    "said",
    [
        "Out of memory while trying to allocate 31.21GiB with allocator GPU_0_bfc",
        ": CUDA_ERROR_OUT_OF_MEMORY: out of memory [executable_name='jit_measure']",
        "Error allocating device buffer: Attempting to allocate 9.81G.",
    ],
)
def test_a_device_without_memory_is_one_line(tmp_path, capsys, said):
    """The error of an H200 whose memory other programs had filled."""

    def run(config):
        folder.open_run(config)
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {said}\nmore")

    status, message = ending(run, tmp_path, capsys)
    assert status == 1
    expected = f"stopped: RESOURCE_EXHAUSTED: {said}; fewer rows at a time"
    assert message.startswith(expected)
    assert "--resume" in message
    assert "more" not in message


def test_another_resource_that_is_exhausted_keeps_its_traceback(tmp_path):
    def run(config):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too many streams")

    with pytest.raises(jax.errors.JaxRuntimeError, match="streams"):
        command_line.main(
            run, Config, description="", argv=["--out", os.fspath(tmp_path)]
        )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_finish_and_says_how_to_go_on(tmp_path, capsys, signum):
    steps = []

    def run(config):
        folder.open_run(config)
        with command_line.Interrupt() as interrupt:
            for step in range(5):
                if step == 2:
                    signal.raise_signal(signum)
                    assert interrupt.requested
                steps.append(step)
                interrupt.check()

    status, message = ending(run, tmp_path, capsys)
    assert steps == [0, 1, 2]
    assert status == 128 + signum
    assert "saved" in message
    assert f"--config {tmp_path / 'run' / 'config.json'} --resume" in message
    assert "Traceback" not in message


def test_a_second_ctrl_c_stops_at_once(tmp_path, capsys):
    steps = []

    def run(config):
        with command_line.Interrupt():
            signal.raise_signal(signal.SIGINT)
            steps.append("step goes on")
            signal.raise_signal(signal.SIGINT)
            steps.append("never")

    status, message = ending(run, tmp_path, capsys)
    assert steps == ["step goes on"]
    assert status == 130
    assert "without saving" in message
    assert "nothing was written" in message


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_python_drops_comes_again(tmp_path, capsys, signum):
    """Python drops what a handler raises in a callback of the garbage collector."""
    steps = []

    def callback(phase, info):
        gc.callbacks.remove(callback)
        signal.raise_signal(signum)

    def run(config):
        gc.callbacks.append(callback)
        gc.collect()
        steps.append("goes on")
        time.sleep(10)
        steps.append("never")

    before = sys.unraisablehook
    # A shell has what it starts in the background ignore Ctrl-C, pytest too.
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status, message = ending(run, tmp_path, capsys)
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
    assert sys.unraisablehook is before
    assert steps == ["goes on"]
    assert status == 128 + signum
    assert message.startswith("stopped without saving")


def test_a_repeated_sigterm_still_waits_for_the_save():
    with command_line.Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(command_line.Interrupted, match="SIGTERM"):
            interrupt.check()


def test_handlers_are_put_back():
    signums = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(signum) for signum in signums]
    with command_line.Interrupt():
        assert all(map(lambda s, b: signal.getsignal(s) != b, signums, before))
    assert [signal.getsignal(signum) for signum in signums] == before


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, 1), (None, 1), (False, 1), (256, 1), ("done", 1), (1, 1), (2, 2), (7, 7)],
)
def test_a_run_that_exits_before_its_end_never_has_status_0(
    tmp_path, capsys, code, status
):
    """Nor status 256, of which the system keeps the lowest byte."""

    def run(config):
        sys.exit(code)

    got, message = ending(run, tmp_path, capsys)
    assert got == status
    assert message.startswith(
        f"stopped: expected the run to finish, got sys.exit({code!r})"
    )


def test_a_module_that_exits_when_it_is_imported(tmp_path, monkeypatch, capsys):
    (tmp_path / "users_script.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    status, message = ending(
        lambda config: command_line.load_function("users_script:f"), tmp_path, capsys
    )
    assert status == 1
    assert message.startswith(
        "stopped: users_script:f: expected a module users_script that can be imported, "
        "got one that calls sys.exit(0); put"
    )


def test_a_function_by_name(tmp_path, monkeypatch):
    (tmp_path / "users_module.py").write_text("number = 3\ndef f(x): return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command_line.load_function("users_module:f")(4) == 8
    for spec, complaint in {
        "users_module": "expected module:function, got 'users_module'",
        "users_module:": "expected module:function",
        "users_module:g": r"expected a function g in .*users_module.py, got no such na",
        "users_module:number": "got int; define it there, or name another",
        "sys:path": "expected a function path in the module sys, got list",
        "no_such_module:f": "ModuleNotFoundError: No module named 'no_such_module'",
    }.items():
        with pytest.raises(InputError, match=complaint):
            command_line.load_function(spec)
    with pytest.raises(InputError, match=r"^--reward: .* as my_module:my_function$"):
        command_line.load_function("users_module", called="--reward")


class Callable:
    def __call__(self, row): ...


@pytest.mark.parametrize(
    "function",
    [
        lambda row: row,
        lambda row, more=3, *, by=4: row,
        lambda *rows: rows,
        Callable(),
        Callable().__call__,
        len,
        max,  # of C code, which says nothing of its arguments
    ],
)
def test_a_function_of_these_arguments(function):
    command_line.expect_arguments(function, takes=["row"], where="--reward m:f")


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda: 0, r"\(\) \(too many positional arguments\)"),
        (lambda row, more: 0, r"\(row, more\) \(missing a required argument: 'more'\)"),
        (lambda row, *, by: 0, r"\(row, \*, by\) \(missing a required.* 'by'\)"),
        (lambda *, row: 0, r"\(\*, row\) \(too many positional arguments\)"),
        (Callable.__call__, r"\(self, row\) \(missing a required argument: 'row'\)"),
    ],
)
def test_a_function_of_other_arguments(function, got):
    message = rf"--reward m:f: expected a function of \(row\), got {got}; give it"
    with pytest.raises(InputError, match=message):
        command_line.expect_arguments(function, takes=["row"], where="--reward m:f")


@pytest.mark.parametrize("function", [Callable, dict])
def test_a_class_in_place_of_an_object(function):
    name = function.__name__
    with pytest.raises(InputError, match=f"got the class {name}; name an object of it"):
        command_line.expect_arguments(function, takes=["row"], where="--reward m:f")


@pytest.mark.parametrize("out", ["a" * 300, "a\0b"])
def test_an_out_that_no_system_takes_is_one_short_line(
    tmp_path, capsys, monkeypatch, out
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        command_line.main(
            lambda config: None, Config, description="", argv=["--out", out]
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert line.startswith("error: --out")
    assert len(line) < 400
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["-h", "--help", "--help-all"])
def test_help_starts_no_accelerator(option, monkeypatch, capsys):
    """Help would wait for the accelerator, and take a TPU from a run."""

    def started():
        raise AssertionError("JAX was started")

    monkeypatch.setattr(processes, "check_platform", started)
    with pytest.raises(SystemExit) as ended:
        command_line.main(
            print, run_config.RunConfig, description="A run.", argv=[option]
        )
    assert ended.value.code == 0
    assert "A run." in capsys.readouterr().out


@pytest.mark.slow
def test_an_unknown_platform_is_one_line(tmp_path):
    words = ["plan", "ppo", "--model=gpt2", "--reward=a:b"]
    console = f"from rlhf_jax.train import main; main.main({words})"
    trainer = (
        "-m",
        "rlhf_jax.train.main",
        "sft",
        "--data=a",
        "--out",
        str(tmp_path / "run"),
    )
    for argv in (("-c", console), trainer):
        ended = subprocess.run(
            [sys.executable, *argv],
            cwd=places.ROOT,
            env={**os.environ, "JAX_PLATFORMS": "abacus"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 2
        assert "error: JAX_PLATFORMS: expected platforms that" in ended.stderr
        assert "'abacus'" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not any(tmp_path.iterdir())
