"""`rlhf-jax sweep`: runs that end, are killed, fail and are resumed."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import places
import pytest
import toy_experiment

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import lock
from rlhf_jax.runs.command_line import Interrupted
from rlhf_jax.sweeps import declaration, execution, launchers, planned, worker
from rlhf_jax.train import sweep

PROGRAM = f"program = [{toy_experiment.__file__!r}]"
TOML = f"""
question = "Is a slope of 2 more than one of 1?"
{PROGRAM}
seeds = [0, 1, 2]

[options]
steps = 3

[grid]
slope = [1.0, 2.0]

[measures]
end = "value"
told = {{ summary = "at.end" }}

[claims]
"steeper" = "end(slope=2) > end(slope=1)"
"""


def swept(tmp_path, text, *, name="out", **options):
    file = tmp_path / "sweep.toml"
    file.write_text(text)
    sweep.main(sweep.Config(file=file, out=tmp_path / name, **options))
    return json.loads((tmp_path / name / "results.json").read_text())


def rows_of(out):
    """Every file of every run, and the results without the checksums of logs."""
    files = sorted(path for path in out.rglob("*.json*") if path.name != "sweep.json")
    rows = {str(path.relative_to(out)): path.read_text() for path in files}
    return rows | {"results.json": without_proof(out / "results.json")}


def without_proof(path):
    return {k: v for k, v in json.loads(path.read_text()).items() if k != "proof"}


def test_a_sweep_from_file_to_answer(tmp_path, capsys):
    results = swept(tmp_path, TOML, jobs=3)
    cells = results["cells"]
    assert list(cells) == ["slope=1", "slope=2"]
    # The noise of a seed's last step is the same in both cells.
    noise = [random.Random(1000 * seed + 2).random() for seed in range(3)]
    expected = {str(seed): 6.0 + one for seed, one in enumerate(noise)}
    assert cells["slope=2"]["end"]["seeds"] == pytest.approx(expected)
    assert cells["slope=2"]["told"] == cells["slope=2"]["end"]
    less = cells["slope=2"]["end"]["less_first_cell"]
    assert (less["seeds"], less["mean"]) == (3, pytest.approx(3.0))
    assert results["claims"]["steeper"]["answer"] == "yes"
    assert results["claims"]["steeper"]["difference"] == pytest.approx(3.0)
    printed = capsys.readouterr().out
    assert "6 runs of 2 cells, 0 done already" in printed
    assert "[6/6]" in printed
    assert "Is a slope of 2 more than one of 1?" in printed
    out = tmp_path / "out"
    assert printed.endswith(
        f"results are in {out / 'results.json'}; tables and figures for a paper: "
        f"rlhf-jax paper {out} --out paper\n"
    )
    # Nothing is run again, and a new claim is answered from what is there.
    log = tmp_path / "out" / "logs" / "slope=1" / "seed_0.log"
    before = log.stat().st_mtime_ns
    more = swept(tmp_path, TOML + '"flat" = "end(slope=1) > end(slope=2)"\n')
    assert log.stat().st_mtime_ns == before
    assert more["claims"]["flat"]["answer"] == "no"
    assert "6 done already" in capsys.readouterr().out


def test_commands_are_printed_and_nothing_is_run(tmp_path, capsys):
    file = tmp_path / "sweep.toml"
    file.write_text(TOML)
    sweep.main(sweep.Config(file=file, out=tmp_path / "out", print_=True))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[1] == (
        f"python {toy_experiment.__file__} --steps=3 --slope=2 --seed=0 "
        f"--out={tmp_path}/out/runs/slope=2/seed_0"
    )
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_leaves_the_others_alone(tmp_path):
    failing = TOML.replace("[1.0, 2.0]", "[1.0, 13.0, 2.0]")
    with pytest.raises(StopError) as error:
        swept(tmp_path, failing, jobs=3)
    assert "3 of 9 runs failed, the others are complete" in str(error.value)
    assert "slope=13 seed 1 (status 1): error: a slope of 13 brings" in str(error.value)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["cells"]["slope=13"]["end"]["seeds"] == {}
    assert results["cells"]["slope=2"]["end"]["estimate"]["seeds"] == 3
    assert results["claims"]["steeper"]["answer"] == "yes"


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [[], ["--map"]])
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_is_ended_takes_its_runs_with_it_and_goes_on(
    tmp_path, kind, mapped
):
    slow = TOML.replace("steps = 3", "steps = 4\nseconds = 0.15")
    swept(tmp_path, slow, name="whole", jobs=3)
    command = [sys.executable, "-m", "rlhf_jax.train.main", "sweep"]
    command += [str(tmp_path / "sweep.toml"), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": places.PYTHONPATH}
    process = subprocess.Popen(
        [*command, "--jobs=2", *mapped],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    rows = tmp_path / "out" / "runs" / "slope=1" / "seed_0" / "metrics.jsonl"
    while not (rows.exists() and rows.stat().st_size):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(kind)
    _, errors = process.communicate(timeout=60)
    if kind == signal.SIGTERM:
        assert process.returncode == 128 + kind
        assert "stopped and saved; the same command goes on" in errors
    cut = rows.read_text()
    assert 1 <= cut.count("\n") < 4
    time.sleep(0.6)
    assert rows.read_text() == cut  # nobody writes any more
    swept(tmp_path, slow, jobs=3)
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")


KEEPS = """
import functools, os, sys
from pathlib import Path

import kept  # beside this file

options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
out = Path(options["--out"])
out.mkdir(parents=True)
(out / "config.json").write_text("{}")
kept.runs += 1
print("word", options["--word"])
if options["--word"] == "dies":
    os._exit(7)
if options["--word"] == "fails":
    raise ValueError("no luck")
values = {"process": os.getpid(), "runs": kept.runs}
(out / "summary.json").write_text(str(values).replace("'", '"'))
"""


@pytest.mark.slow
def test_runs_that_are_mapped_share_processes(tmp_path):
    """Modules stay imported between runs, and a dead process is replaced."""
    (tmp_path / "keeps.py").write_text(KEEPS)
    (tmp_path / "kept.py").write_text("runs = 0")
    cells = ["a", "fails", "b", "dies", "c", "d"]
    text = f"""
program = [{str(tmp_path / "keeps.py")!r}]
[grid]
word = {cells}
[measures]
process = {{ summary = "process" }}
runs = {{ summary = "runs" }}
"""
    with pytest.raises(StopError, match="2 of 6 runs failed") as raised:
        swept(tmp_path, text, map=True)
    assert "word=fails seed 0 (status 1): ValueError: no luck" in str(raised.value)
    assert "word=dies seed 0 (status 7): word dies" in str(raised.value)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    of_cells = [
        {name: one["seeds"].get("0") for name, one in of.items()}
        for of in results["cells"].values()
    ]
    assert [of["runs"] for of in of_cells] == [1, None, 3, None, 1, 2]
    processes = [of["process"] for of in of_cells]
    assert processes[0] == processes[2] != processes[4] == processes[5]
    assert os.getpid() not in processes


MAPS = """
import mmap, os, sys, threading, time
from pathlib import Path

options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
if options["--word"] == "maps":
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    # Neighbours of one kind are one mapping: every second one has another right.
    rights = [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE]
    page = mmap.PAGESIZE
    kept = [mmap.mmap(-1, page, prot=rights[n % 2]) for n in range(most // 2 + 500)]
    sys.modules["kept"] = kept
    # Its process does not end by itself for a while, for which nothing waits.
    threading.Thread(target=time.sleep, args=(60,)).start()
out = Path(options["--out"])
out.mkdir(parents=True)
(out / "config.json").write_text("{}")
(out / "summary.json").write_text('{"process": ' + str(os.getpid()) + "}")
"""


def most_mappings():
    if not worker.MOST_MAPPINGS.exists():
        return 0
    return int(worker.MOST_MAPPINGS.read_text())


@pytest.mark.slow
@pytest.mark.skipif(
    not 0 < most_mappings() < 200_000, reason="needs Linux, and its usual number"
)
def test_a_worker_near_its_last_memory_mappings_is_replaced(tmp_path, monkeypatch):
    """Otherwise a later run would end by SIGSEGV in the compiler."""
    (tmp_path / "maps.py").write_text(MAPS)
    text = f"""
program = [{str(tmp_path / "maps.py")!r}]
[grid]
word = ["a", "maps", "b", "c"]
[measures]
process = {{ summary = "process" }}
"""
    monkeypatch.setattr(launchers, "LEAVING", 0.1)
    began = time.monotonic()
    swept(tmp_path, text, map=True)
    assert time.monotonic() - began < 20
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    first, maps, after, later = (
        of["process"]["seeds"]["0"] for of in results["cells"].values()
    )
    assert first == maps != after == later


LEAVES = """
import os, signal, sys, time
from pathlib import Path

options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
word, out = options["--word"], Path(options["--out"])
if word in ("first", "after"):
    found = [Path.cwd().name, os.environ.get("LEFT"), "left" in sys.path]
    found += [signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]
    out.mkdir(parents=True)
    (out / "config.json").write_text("{}")
    (out / "summary.json").write_text('{"found": 1}')
    (out / "found.txt").write_text(repr(found))
if word == "leaves":
    os.chdir("/")
    os.environ["LEFT"] = "it"
    sys.path.append("left")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(256 + 4)
if word == "forks" and os.fork() == 0:
    time.sleep(30)
if word == "forks":
    os._exit(3)
"""


def test_a_mapped_run_finds_what_the_first_one_found(tmp_path, monkeypatch):
    """A run that leaves a child process behind does not hold up the sweep."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    monkeypatch.chdir(tmp_path)
    text = """
program = ["leaves.py"]
[grid]
word = ["first", "leaves", "after", "forks"]
[measures]
found = { summary = "found" }
"""
    began = time.monotonic()
    with pytest.raises(StopError, match="2 of 4 runs failed") as raised:
        swept(tmp_path, text, map=True)
    assert time.monotonic() - began < 20
    assert "word=leaves seed 0 (status 4)" in str(raised.value)
    assert "word=forks seed 0 (status 3)" in str(raised.value)
    first, after = (
        (
            tmp_path / "out" / "runs" / f"word={word}" / "seed_0" / "found.txt"
        ).read_text()
        for word in ("first", "after")
    )
    assert first == after == repr([tmp_path.name, None, False, True])


def test_a_worker_that_is_gone_or_talks_as_it_starts_is_no_harm(tmp_path, monkeypatch):
    """A sitecustomize prints before a run has a log."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('module loaded')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{places.PYTHONPATH}")
    fields = {"program": [toy_experiment.__file__], "grid": {"slope": [1.0, 2.0]}}
    runs = planned.runs_of(declaration.declared(fields, source="file"), out=tmp_path)
    workers = launchers.Workers()

    def kill(ended):
        for one in workers._workers:
            one._process.kill()
            one._process.wait()

    ended = execution.run_all(runs, launcher=workers, jobs=1, tell=kill)
    assert [run_ended.status for run_ended in ended] == [0, 0]
    assert "module loaded" in runs[0].log.read_text()


@pytest.mark.slow
def test_a_mapped_trainer_is_the_trainer(tmp_path):
    """The trainer receives the options, and refuses them in the worker."""
    empty = tmp_path / "empty"
    empty.mkdir()
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}\n')
    fields = {"trainer": "sft", "options": {"model": str(empty), "data": str(data)}}
    runs = planned.runs_of(declaration.declared(fields, source="file"), out=tmp_path)
    [ended] = execution.run_all(
        runs, launcher=launchers.Workers(), jobs=1, tell=lambda ended: None
    )
    assert ended.status == 2
    assert str(empty) in runs[0].log.read_text()


@pytest.mark.slow
def test_mapped_runs_are_those_of_processes_of_their_own(tmp_path):
    swept(tmp_path, TOML, name="apart", jobs=3)
    swept(tmp_path, TOML, name="mapped", jobs=2, map=True)
    apart, mapped = rows_of(tmp_path / "apart"), rows_of(tmp_path / "mapped")
    assert apart == mapped
    assert len(apart) == 6 * 3 + 1


@pytest.mark.slow
def test_a_job_of_submitit_is_a_run(tmp_path):
    pytest.importorskip("submitit", reason="extra slurm")
    fields = {"program": [toy_experiment.__file__], "grid": {"slope": [2.0, 13.0]}}
    runs = planned.runs_of(declaration.declared(fields, source="file"), out=tmp_path)
    launcher = launchers.Submitit(
        tmp_path / "jobs", parameters={"timeout_min": 1}, cluster="local"
    )
    ended = execution.run_all(runs, launcher=launcher, jobs=2, tell=lambda ended: None)
    statuses = {run_ended.run.cell.name: run_ended.status for run_ended in ended}
    assert statuses == {"slope=2": 0, "slope=13": 1}
    assert runs[0].done
    with pytest.raises(InputError, match="expected the package submitit, a"):
        launchers.Submitit(tmp_path / "jobs", parameters={"gpus": 1}, cluster="local")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'trainer = "sft"\n[options]\nmodel = "m"\ndata = "d"\n'
            "[grid]\nlearning_rat = [1e-3]",
            "learning_rat=0.001: expected options of rlhf-jax sft, got "
            "'--learning-rat=0.001'; did you mean --learning-rate? ",
        ),
        (
            'trainer = "sft"\n[options]\nmodel = "m"\ndata = "d"\nlearning_rate = "x"',
            "run: --learning-rate: expected a number, got 'x'; rlhf-jax sft --help-all",
        ),
        ('trainer = "sftt"', "trainer: expected one of sft, reward-model, ppo"),
        (
            'trainer = ["sft", "sftt"]',
            "trainer: expected one of sft, reward-model, ppo",
        ),
        (
            'trainer = ["ppo"]\n[options]\nmodel = "m"\nadam = "tf"\nprompts = "d"',
            "trainer=ppo: expected an option of this command, got --adam; write "
            "--optimizer adam",
        ),
        (TOML.replace("end(slope=2)", "start(slope=2)"), "got start; correct it"),
        (TOML.replace("end(slope=2)", "end(slope=7)"), "got slope=7; cells are slope"),
        (TOML.replace("slope = [1.0, 2.0]", "slope = []"), "a list of values for slop"),
    ],
)
def test_sweeps_that_are_refused(tmp_path, text, message):
    with pytest.raises(InputError) as error:
        swept(tmp_path, text, jobs=3)
    assert message in str(error.value)


@pytest.mark.slow
def test_a_measure_that_no_run_has_does_not_hide_the_others(tmp_path, capsys):
    text = TOML.replace("[measures]", '[measures]\nbad = "valve"')
    text = text.replace("[1.0, 2.0]", "[1.0, 2.0, 13.0]")
    with pytest.raises(StopError, match=r"3 of 9 runs failed"):
        swept(tmp_path, text, jobs=3)
    printed = capsys.readouterr()
    assert "warning: measure bad: expected a finite number in" in printed.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["cells"]["slope=2"]["bad"]["estimate"] is None
    assert results["cells"]["slope=2"]["end"]["estimate"]["seeds"] == 3
    with pytest.raises(
        InputError, match=r"got valve, which no run has; known are valu"
    ):
        swept(tmp_path, text.replace(", 13.0]", "]"))


@pytest.mark.slow
def test_two_sweeps_do_not_share_a_folder(tmp_path):
    file, out = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text(TOML)
    planned.begin(declaration.read(file), out=out)
    before = (out / "sweep.json").read_bytes()
    file.write_text(TOML.replace("[0, 1, 2]", "[0, 1, 2, 3]"))
    command = [sys.executable, "-m", "rlhf_jax.train.main", "sweep", str(file)]
    with lock.hold(out):  # as this process does while its runs are under way
        process_of_second = subprocess.run(
            [*command, f"--out={out}"],
            env={**os.environ, "PYTHONPATH": places.PYTHONPATH},
            capture_output=True,
            text=True,
        )
    assert process_of_second.returncode == 2
    assert f"{os.getpid()}" in process_of_second.stderr
    assert (out / "sweep.json").read_bytes() == before
    assert not (out / "runs").exists()


def test_why_a_run_is_not_done(tmp_path):
    """The reason is from the last start alone, not from an earlier one's output."""
    fields = {"program": [toy_experiment.__file__], "grid": {"slope": [1.0]}}
    [run] = planned.runs_of(declaration.declared(fields, source="file"), out=tmp_path)
    run.log.parent.mkdir(parents=True)
    run.log.write_text("error: of an earlier start\n")

    class Ends:
        def __init__(self, status, line=""):
            self.status, self.line = status, line

        def start(self, run):
            with run.log.open("a") as log:
                log.write(self.line)
            return self

        def poll(self):
            return self.status

        wait = poll

        def close(self):
            pass

    for launcher, why in (
        (Ends(-9), "ended by SIGKILL"),
        (Ends(0, "all is well\n"), "ended without summary.json, which a run"),
        (Ends(2, "error: now\n\n"), "error: now"),
        (
            Ends(1, "stopped: no room\nmore; go on with\n  rlhf-jax ppo\n"),
            "stopped: no ",
        ),
        (Ends(1, "error: no end\nTraceback ...\nValueError: x\n"), "error: no end"),
        (Ends(1, "Traceback ...\nValueError: x\n"), "ValueError: x"),
        (Ends(1), ""),
    ):
        [ended] = execution.run_all([run], launcher=launcher, jobs=1, tell=str)
        assert ended.failed
        assert ended.why.startswith(why)
        assert why or not ended.why


def test_an_interrupted_sweep_is_told(tmp_path, monkeypatch):
    """A terminal's signal also reaches this process."""
    monkeypatch.setattr(
        time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT)
    )
    with pytest.raises(Interrupted):
        swept(tmp_path, TOML, jobs=3)
