"""Recipes that start a run on a cluster, with stand-in tools that record their calls.

`tests/devices/test_slurm.py` runs the one for Slurm by Slurm.
"""

import os
import shlex
import subprocess

import places
import pytest
import yaml

from rlhf_jax.devices import processes
from rlhf_jax.train import main, trainer

LAUNCH = places.EXPERIMENTS / "launch"
GRPO = (
    *("grpo", "--model", "m", "--prompts", "my prompts.jsonl", "--verifier", "gsm8k"),
    *("--placement.policy", "fsdp=1"),
)


@pytest.fixture
def run(tmp_path):
    """Runs a recipe; returns its status and the calls of each tool."""

    def run(recipe, *argv, statuses=None, outputs=None, **variables):
        folder = tmp_path / "tools"
        folder.mkdir(exist_ok=True)
        for tool in ("srun", "squeue", "scontrol", "xpk", "gcloud"):
            file = folder / tool
            status = (statuses or {}).get(tool, 0)
            output = (outputs or {}).get(tool, "")
            file.write_text(
                f"#!/bin/bash\nprintf '%s\\0' {tool} \"$@\" >> {tmp_path}/calls\n"
                f"printf '\\n\\0' >> {tmp_path}/calls\n"
                f"printf '%s' '{output}'\nexit {status}\n"
            )
            file.chmod(0o700)
        (tmp_path / "calls").write_text("")
        done = subprocess.run(
            ["bash", str(LAUNCH / recipe), *argv],
            env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables,
            cwd=tmp_path,
        )
        calls = (tmp_path / "calls").read_text().split("\n\0")
        return done.returncode, [call.split("\0")[:-1] for call in calls[:-1]]

    return run


def config_of(words, monkeypatch):
    """The config of a command line of rlhf-jax that first joins its processes."""
    configs, joined = [], []
    monkeypatch.setattr(trainer, "main", configs.append)
    monkeypatch.setattr(processes.Group, "join", lambda self: joined.append(self))
    assert words[0].rpartition("/")[2] == "rlhf-jax"
    main.main(words[1:])
    (config,) = configs
    assert config.resume
    assert [group.coordinator for group in joined] in ([], ["auto"])
    return config, bool(joined)


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("status", "state", "restarts", "requeued"),
    [
        (0, "RUNNING", None, False),
        (1, "RUNNING", None, False),
        (2, "RUNNING", "1", False),
        (143, "RUNNING", None, True),
        (143, "RUNNING", "70", True),
        (134, "RUNNING", None, True),
        (137, "RUNNING", "4", True),
        (137, "RUNNING", "5", False),
        (143, "COMPLETING", None, False),  # cancelled, or preempted
        (143, "", None, False),
    ],
)
def test_slurm_queues_again_what_a_signal_ended(
    run, monkeypatch, status, state, restarts, requeued
):
    variables = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    ended, (srun, squeue, *others) = run(
        *("slurm.sbatch", "runs/grpo", *GRPO),
        statuses={"srun": status},
        outputs={"squeue": state},
        SLURM_JOB_ID="7",
        **variables,
    )
    assert ended == status
    assert "--jobs=7" in squeue
    assert others == ([["scontrol", "requeue", "7"]] if requeued else [])
    config, joins = config_of(srun[2:], monkeypatch)
    assert (str(config.out), joins) == ("runs/grpo", True)


def test_xpk_has_the_command_as_one_word(run, monkeypatch):
    variables = {"CLUSTER": "c", "ZONE": "z", "PROJECT": "p", "IMAGE": "i"}
    ended, ((*words, flag, command),) = run(
        "xpk.sh", "/runs/grpo", *GRPO, XPK_FLAGS="--dry-run", **variables
    )
    assert (ended, flag) == (0, "--command")
    assert words[:3] == ["xpk", "workload", "create"]
    assert "--dry-run" in words
    config, joins = config_of(shlex.split(command), monkeypatch)
    assert (str(config.out), joins) == ("/runs/grpo", True)
    assert "my prompts.jsonl" in str(config.data)


VERBS = {"create", "describe", "delete", "ssh"}


def test_a_pod_of_tpus_is_made_and_used(run, monkeypatch):
    """A preempted pod is deleted first."""
    variables = {"ZONE": "z", "CHIPS": "v5litepod-16", "RUNTIME": "r", "CODE": "c"}
    for step, verbs in {
        "disk": ["create"],
        "pod": ["describe", "delete", "create"],
        "install": ["describe", "ssh", "ssh"],
    }.items():
        ended, calls = run("tpu_pod.sh", step, **variables)
        assert ended == 0
        assert [[word for word in call if word in VERBS] for call in calls] == [
            [verb] for verb in verbs
        ]
        assert all("--zone=z" in call for call in calls)
    ended, (call,) = run("tpu_pod.sh", "run", *GRPO, "--out", "grpo", **variables)
    assert (ended, call[-2]) == (0, "--worker=all")
    command = call[-1].partition("nohup ")[2].partition(" > ")[0]
    config, joins = config_of(shlex.split(command), monkeypatch)
    assert (str(config.out), joins) == ("grpo", True)


def test_an_installation_that_was_stopped_halfway_is_made_anew(run, tmp_path):
    """Runs the first host's command here, with another folder as its disk."""
    _, calls = run("tpu_pod.sh", "install", ZONE="z", CODE="c")
    command = calls[-1][-1].removeprefix("--command=").replace("/runs", str(tmp_path))
    tools = tmp_path / "tools"
    (tools / "git").write_text("#!/bin/bash\nmkdir $3\n")
    (tools / "pip").write_text("#!/bin/bash\n")
    fails = tmp_path / "fails"
    (tools / "uv").write_text(
        f"#!/bin/bash\necho $1 >> {tmp_path}/uv\n"
        f"if [ $1 = venv ]; then mkdir $4; else ! test -e {fails}; fi\n"
    )
    for tool in ("git", "pip", "uv"):
        (tools / tool).chmod(0o700)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}

    def install():
        done = subprocess.run(["bash", "-c", command], env=environment)
        return done.returncode, (tmp_path / "uv").read_text().split()

    fails.touch()
    assert install() == (1, ["venv", "pip"])
    fails.unlink()
    assert install() == (0, ["venv", "pip"] * 2)
    assert install() == (0, ["venv", "pip"] * 2)  # nothing is left to do


@pytest.mark.parametrize(
    ("recipe", "argv", "message"),
    [
        ("tpu_pod.sh", ("instal",), "expected disk, pod, install or run, got 'instal'"),
        ("tpu_pod.sh", (), "1: expected disk, pod, install or run"),
        ("xpk.sh", (), "1: expected the folder of the run, the method and its options"),
        ("slurm.sbatch", (), "1: expected the folder of the run, the method and its"),
    ],
)
def test_a_forgotten_or_misspelt_word_is_told(run, capfd, recipe, argv, message):
    ended, calls = run(recipe, *argv)
    assert ended != 0
    assert calls == []
    assert message in capfd.readouterr().err


def test_skypilot_runs_one_process_on_all_gpus_of_a_machine(monkeypatch):
    recipe = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert recipe["resources"]["accelerators"] == "H100:8"
    command = recipe["run"].replace("\\\n", "").replace("$BUCKET", "runs/grpo")
    program, *words = shlex.split(command, comments=True)
    assert program == "exec"  # so that it has the signals
    config, joins = config_of(words, monkeypatch)
    assert not joins
    assert config.placement.policy.fsdp == 8
