"""The recipe for Slurm, run by a Slurm controller and node on this machine.

It needs Debian's `slurm-wlm` and `munge`. The cluster belongs to this test alone:
it has its own ports, keys and folders, and reads nothing of an installed Slurm.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import places
import pytest
import toy_files

RECIPE = places.EXPERIMENTS / "launch" / "slurm.sbatch"
REWARD = """
import pathlib, time

def score(prompts, responses, rows):
    if pathlib.Path("slow").exists():  # there is time to preempt the run between steps
        time.sleep(3)
    return [float(len(set(response.split()))) for response in responses]
"""
GRPO = (
    *(
        "grpo",
        "--model=model",
        "--prompts=prompts.jsonl",
        "--reward=their_rewards:score",
    ),
    *("--batch-size=8", "--group-size=4", "--max-new-tokens=4", "--num-steps=12"),
    *("--learning-rate=1e-2", "--snapshot-every=3", "--placement.policy=data=2"),
    "--no-progress",
)
# Without cgroups. A job that is queued again waits until its credential has ended.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in ("slurmctld", "slurmd", "munged")),
        reason="Slurm is not installed",
    ),
]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until(holds, *, seconds=400):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment variables for Slurm's commands to find the cluster of one node."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=socket.gethostname(),
            controller_port=free_port(),
            node_port=free_port(),
            folder=folder,
            user=getpass.getuser(),
        )
    )
    munge = [
        f"--{one}-file={folder}/munge.{one}" for one in ("key", "pid", "log", "seed")
    ]
    environment = os.environ | {
        "SLURM_CONF": str(config),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": places.PYTHONPATH,
        "XLA_FLAGS": os.environ["XLA_FLAGS"]
        + " --xla_force_host_platform_device_count=1",
    }
    daemons = (
        # By force, as pytest's folders are closed to other users.
        [
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            *munge,
        ],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "localhost"],
    )
    with contextlib.ExitStack() as stack:
        for command in daemons:
            log = stack.enter_context((folder / f"{command[0]}.log").open("w"))
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(daemon.wait, timeout=60)
            stack.callback(daemon.terminate)
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)

        def idle():
            told = subprocess.run(
                ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True
            )
            return told.stdout.split()[:1] == [b"idle"]

        wait_until(idle, seconds=60)
        yield environment


@pytest.fixture
def files(tmp_path):
    (tmp_path / "their_rewards.py").write_text(REWARD)
    toy_files.checkpoint(tmp_path / "model")
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was", "it is so")]
    toy_files.jsonl(tmp_path / "prompts.jsonl", *rows)
    return tmp_path


def slurm(cluster, *command, cwd=None):
    done = subprocess.run(
        command, env=cluster, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(cluster, files, out):
    """Submits a job of two processes on the one node; returns its number."""
    node = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0")
    number = slurm(
        cluster, "sbatch", "--parsable", *node, RECIPE, out, *GRPO, cwd=files
    )
    return number.strip()


def state(cluster, job):
    told = slurm(cluster, "scontrol", "--oneliner", "show", "job", job).split()
    fields = dict(one.split("=", 1) for one in told if "=" in one)
    return fields["JobState"], int(fields["Restarts"])


def num_steps(out):
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_steps(cluster, job, out, *, count):
    """Waits until the run has this many steps; fails if its job fails."""

    def reached():
        assert state(cluster, job)[0] in ("PENDING", "RUNNING", "COMPLETING")
        return num_steps(out) >= count

    wait_until(reached)


def wait_for_end(cluster, job):
    """Waits until the job ends; returns how often it was requeued."""
    wait_until(lambda: state(cluster, job)[0] not in ("PENDING", "RUNNING"))
    ended, restarts = state(cluster, job)
    assert ended in ("COMPLETED", "COMPLETING")
    return restarts


def test_a_run_that_is_preempted_goes_on_to_the_bit(cluster, files):
    """Preempted by a job of higher priority, and by hand."""
    (files / "slow").touch()
    job, run = submit(cluster, files, "run"), files / "run"
    wait_for_steps(cluster, job, run, count=2)
    slurm(cluster, "srun", "--partition=high", "--exclusive", "-n1", "true")
    stopped_at = num_steps(run)
    assert stopped_at < 9
    log = files / f"rlhf-jax-{job}.out"
    assert log.read_text().count("stopped and saved") == 2  # by both processes
    wait_for_steps(cluster, job, run, count=stopped_at + 1)
    slurm(cluster, "scontrol", "requeue", job)
    (files / "slow").unlink()
    wait_until(lambda: state(cluster, job)[0] == "RUNNING")
    assert wait_for_end(cluster, job) == 2

    whole = submit(cluster, files, "whole")
    assert wait_for_end(cluster, whole) == 0
    for name in ("metrics.jsonl", "samples.jsonl", "model/model.safetensors"):
        ours, theirs = (files / out / name for out in ("run", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_run_that_is_cancelled_is_not_queued_again(cluster, files):
    (files / "slow").touch()
    job = submit(cluster, files, "cancelled")
    wait_for_steps(cluster, job, files / "cancelled", count=1)
    slurm(cluster, "scancel", job)
    wait_until(lambda: state(cluster, job)[0] not in ("RUNNING", "COMPLETING"))
    assert state(cluster, job) == ("CANCELLED", 0)
