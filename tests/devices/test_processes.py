"""Two processes with two devices each, on this machine, form one run.

Their files are compared with the run of one process on one device.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import places
import pytest
import toy_episodes
import toy_files
import toy_server
from test_mesh_runs import assert_same

from rlhf_jax.devices import processes, row_sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.processes import Group
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import compiled
from rlhf_jax.runs import metrics
from rlhf_jax.runs.snapshots import resume

REWARD = """
import os, signal
import jax
calls = 0

def score(prompts, responses, rows):
    global calls
    calls += 1  # the rehearsal's call is step 0's, but of a resumed run
    call, process, number = map(int, os.environ.get("SIGNAL_AT", "0,0,0").split(","))
    if (calls, jax.process_index()) == (call, process):
        signal.raise_signal(number)
    return [float(len(set(response.split()))) for response in responses]

def judge(prompts, responses, others, rows):
    assert jax.process_index() == 0
    return [0.25 if a < b else 0.5 for a, b in zip(responses, others)]

def fails(prompts, responses, rows):
    if jax.process_index() == int(os.environ["FAILS_IN"]):
        raise ValueError("no such score")
    return [0.0] * len(responses)
"""
ENVIRONMENT = """
from rlhf_jax.environments.protocol import Started, Turn


class Hall:
    def reset(self, row):
        return Started(row["prompt"], 0)

    def step(self, turn, response):
        return Turn("the dog", 0.25 * len(set(response.split())), turn == 2, turn + 1)
"""
LONG = pytest.mark.long
MESH = "--placement.policy=data=2,fsdp=2"
SFT = (
    *("--model=model", "--data=answers.jsonl", "--batch-size=8", "--num-steps=4"),
    *("--held-out=0.25", "--learning-rate=1e-2", "--snapshot-every=2"),
)
PPO = (
    *("--model=model", "--prompts=prompts.jsonl", "--batch-size=8"),
    *("--max-new-tokens=4", "--num-minibatches=2", "--num-epochs=1", "--num-steps=6"),
    *("--sample-every=1", "--snapshot-every=2", "--kl-coef=0.1"),
    *("--learning-rate=1e-2", "--critic.learning-rate=1e-2"),
    "--reward=their_rewards:score",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "their_rewards.py").write_text(REWARD)
    (folder / "their_hall.py").write_text(ENVIRONMENT)
    toy_files.checkpoint(folder / "model")
    toy_files.checkpoint(folder / "other", seed=1)
    toy_files.checkpoint(folder / "mixture", model=toy_files.MIXTURE)
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was", "it is so")]
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    answers = [
        {"prompt": f"a {word}", "response": f"ran by the {word} ."}
        for word in ("cat", "dog", "good", "bad", "very", "so", "and", "to")
    ]
    toy_files.jsonl(folder / "answers.jsonl", *answers * 3)
    pair = {"prompt": "the cat", "chosen": "sat very good .", "rejected": "ran bad ."}
    toy_files.jsonl(folder / "pairs.jsonl", *[pair, pair | {"prompt": "a dog"}] * 12)
    row = {"question": "the cat", "answer": "so it is #### 4"}
    toy_files.jsonl(folder / "questions.jsonl", *[row] * 24)
    return folder


def start(
    trainer,
    files,
    out,
    *argv,
    count=2,
    devices=2,
    cwds=None,
    signal_at=None,
    cache=None,
):
    """Starts a run's processes; `signal_at`: (call of the reward, process, signal)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = ()
    if count > 1:
        group = (f"--coordinator=localhost:{port}", f"--num-processes={count}")
    environment = os.environ | {
        "PYTHONPATH": places.PYTHONPATH,
        # The last of two flags of one name counts.
        "XLA_FLAGS": os.environ["XLA_FLAGS"]
        + f" --xla_force_host_platform_device_count={devices}",
    }
    if cache is not None:
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "true"
        argv = (*argv, f"--compilation-cache={cache}")
    if signal_at is not None:
        environment["SIGNAL_AT"] = ",".join(str(int(part)) for part in signal_at)
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "rlhf_jax.train.main", trainer, f"--out={out}"),
                *("--no-progress", *argv, *group),
                *([f"--process-id={number}"] if group else []),
            ],
            cwd=files if cwds is None else cwds[number],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]


def run(*args, expected=0, **options):
    """(stdout, stderr) of each process."""
    running = start(*args, **options)
    outputs = [process.communicate(timeout=400) for process in running]
    for process, (_, error) in zip(running, outputs, strict=True):
        assert process.returncode == expected, error[-2000:]
    return outputs


def alone(*args, **options):
    return run(*args, count=1, devices=1, **options)


@pytest.mark.long
def test_two_processes_train_as_one_does(files, tmp_path):
    outputs = run("sft", files, tmp_path / "two", *SFT, MESH)
    alone("sft", files, tmp_path / "one", *SFT)
    assert_same(tmp_path / "two", tmp_path / "one")
    assert "go on with --model" in outputs[0][0]
    assert "go on" not in outputs[1][0]  # the second does not talk


@pytest.mark.long
def test_two_processes_share_their_compiled_programs(files, tmp_path):
    cache = tmp_path / "programs"
    run("sft", files, tmp_path / "cold", *SFT, MESH, cache=cache)
    written = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert any(name.startswith("jit_update-") for name in written)
    run("sft", files, tmp_path / "warm", *SFT, MESH, cache=cache)
    now = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert now == written
    for name in ("metrics.jsonl", "model/model.safetensors"):
        cold, warm = (tmp_path / out / name for out in ("cold", "warm"))
        assert cold.read_bytes() == warm.read_bytes()


OTHERS = {
    "reward-model": (
        *("--model=model", "--data=pairs.jsonl", "--batch-size=8", "--num-steps=3"),
        "--held-out=0.25",
        "--normalise=samples,num_samples=8,max_new_tokens=4",
    ),
    "dpo": (
        *("--model=model", "--data=pairs.jsonl", "--batch-size=8", "--num-steps=3"),
        *("--held-out=0.25", "--learning-rate=1e-2", "--lora=2"),
    ),
    "grpo": (
        *("--model=model", "--prompts=questions.jsonl", "--held-out=questions.jsonl"),
        *("--prompt-field=question", "--verifier=gsm8k,unmarked=last_number"),
        *("--batch-size=8", "--num-steps=3", "--num-workers=1", "--group-size=4"),
        "--max-new-tokens=4",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("trainer", OTHERS)
def test_the_other_experiments(files, trainer, tmp_path):
    argv = OTHERS[trainer]
    run(trainer, files, tmp_path / "two", *argv, "--placement.policy=data=2,tensor=2")
    alone(trainer, files, tmp_path / "one", *argv)
    assert_same(tmp_path / "two", tmp_path / "one")
    output, expected = (
        json.loads((tmp_path / name / "summary.json").read_text())
        | {
            "seconds": 0.0,
            "compiled": {},
        }  # arrays go to a mesh by programs of their own
        for name in ("two", "one")
    )
    jax.tree.map(
        lambda a, b: a == b or np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        output,
        expected,
    )


EPISODES = (
    *("--model=model", "--batch-size=8", "--max-new-tokens=12"),
    "--environment=their_hall:Hall,max_turns=3,max_turn_tokens=3",
    *("--num-steps=3", "--num-workers=1", "--snapshot-every=1"),
)
PLAYED = {
    "grpo": (
        *("--prompts=prompts.jsonl", "--held-out=prompts.jsonl", "--group-size=4"),
        *(*EPISODES, "--learning-rate=1e-3"),
    ),
    "ppo": ("--prompts=prompts.jsonl", "--sample-every=1", *EPISODES),
}
# Adam makes steps of the rounding of gradients that are nearly 0.
LORA = (
    *("--lora=2", "--learning-rate=1e-4"),
    "--reference-storage.dtype=int8",
)
SPLIT = "--placement.sampler=data=2,tensor=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "options", "meshes"),
    [
        ("grpo", (), (MESH,)),
        pytest.param("grpo", (), ("--placement.policy=tensor=4", SPLIT), marks=LONG),
        pytest.param("ppo", (), ("--placement.policy=data=2,tensor=2",), marks=LONG),
        pytest.param("ppo", LORA, (MESH, SPLIT), marks=LONG),
    ],
)
def test_each_process_plays_episodes_of_its_own(
    files, trainer, options, meshes, tmp_path
):
    """With tensor=4 both processes have all rows; the first one's episodes count."""
    two, one = tmp_path / "two", tmp_path / "one"
    run(trainer, files, two, *PLAYED[trainer], *options, *meshes)
    alone(trainer, files, one, *PLAYED[trainer], *options)
    toy_episodes.assert_same_run(two, one)
    observed = [row["response/observed"] for row in metrics.read(one / "metrics.jsonl")]
    assert max(observed) > 0
    if trainer == "grpo":
        output, expected = (
            json.loads((out / "summary.json").read_text()) for out in (two, one)
        )
        for name in ("held_out_score_before", "held_out_score_after"):
            assert output[name] == expected[name] > 0


OUTSIDE = (
    *("--model=model", "--prompts=prompts.jsonl", "--batch-size=8", "--group-size=4"),
    *("--max-new-tokens=4", "--num-steps=3", "--snapshot-every=1"),
    *("--reward=their_rewards:score", "--learning-rate=1e-3", "--sampler=process"),
)


BEHIND = ("--max-staleness=2", "--num-steps=5")
REPLAY = ("--model=mixture", "--routing-replay=sampler")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        (BEHIND, MESH),
        pytest.param((), MESH, marks=LONG),
        pytest.param(REPLAY, MESH, marks=LONG),
        pytest.param(("--lora=2",), "--placement.policy=data=2,tensor=2", marks=LONG),
        pytest.param((), "--placement.policy=tensor=4", marks=LONG),
        pytest.param(
            ("--lora=2", *BEHIND), "--placement.policy=data=2,tensor=2", marks=LONG
        ),
    ],
)
def test_the_first_process_has_the_sampler_of_all(files, options, mesh, tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    run("grpo", files, two, *OUTSIDE, *options, mesh)
    alone("grpo", files, one, *OUTSIDE, *options)
    assert_same(two, one)
    rows = metrics.read(two / "metrics.jsonl")
    if options[-2:] == BEHIND:
        assert [row["policy/staleness"] for row in rows] == [0, 1, 2, 2, 2]
    else:
        assert [row["policy/sampler_check"] for row in rows] == [0.0] * 3


@pytest.mark.long
@pytest.mark.parametrize(("staleness", "versions"), [(0, 3), (1, 2)])
def test_two_processes_ask_a_server_as_one_does(files, tmp_path, staleness, versions):
    toy, two, one = toy_server.Toy(), tmp_path / "two", tmp_path / "one"
    with toy_server.serving(toy) as url:
        argv = (*OUTSIDE[:-1], "--max-new-tokens=3", f"--sampler={url}")
        argv += (f"--max-staleness={staleness}",)
        run("grpo", files, two, *argv, MESH)
        loads = len(toy.loads)
        alone("grpo", files, one, *argv)
    assert loads == versions == len(toy.loads) - loads  # of each once, by the first
    assert_same(two, one)


@pytest.mark.long
@pytest.mark.parametrize("behind", [(), BEHIND])
def test_a_sampler_that_fails_ends_all_processes(files, tmp_path, behind):
    """No process can load weights within a hundredth of a second."""
    argv = (*OUTSIDE[:-1], *behind, "--sampler=process,timeout=0.01,tries=1", MESH)
    outputs = run("grpo", files, tmp_path / "out", *argv, expected=1)
    for _, error in outputs:
        assert "the sampler's process: expected a hand-over to return" in error
        assert "Traceback" not in error


@pytest.mark.long
def test_alternatives_are_those_of_the_rows_that_are_shown(files, tmp_path):
    """Weights on devices of both processes: a sum must be of the same rows in both."""
    two, one = tmp_path / "two", tmp_path / "one"
    argv = (*PPO, "--num-steps=1", "--num-alternatives=2")
    run("ppo", files, two, *argv, "--placement.policy=fsdp=4")
    alone("ppo", files, one, *argv)
    ours, theirs = (
        [
            token
            for row in metrics.read(out / "samples.jsonl")
            for token in row["alternatives"]
        ]
        for out in (two, one)
    )
    for likely, expected in zip(ours, theirs, strict=True):
        assert [text for text, *_ in likely] == [text for text, *_ in expected]
        left, right = ([row[1:] for row in rows] for rows in (likely, expected))
        np.testing.assert_allclose(left, right, atol=2e-4)


APART = {
    "roles apart": (
        *("ppo", *PPO, "--placement.policy=data=2,fsdp=2"),
        *("--placement.critic=last:data=4", "--placement.reference=last:fsdp=4"),
        "--placement.sampler=last:data=2",
    ),
    "a sampler behind": (
        *("ppo", *PPO, "--placement.policy=data=4,fsdp=2"),
        *("--placement.sampler=policy", "--max-staleness=2"),
    ),
    "ahead, and a reference that moves": (
        *("grpo", *OUTSIDE[:-1], "--placement.policy=data=4"),
        *(
            "--placement.reference=last:data=2,tensor=2",
            "--lifecycle.move=mix,every=1,rate=0.5",
        ),
        *("--placement.sampler=last:data=2,tensor=2", "--max-staleness=2"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", APART)
def test_roles_on_devices_of_two_processes(files, tmp_path, name):
    """Two of four devices against one of eight; the devices may differ."""
    trainer, *argv = APART[name]
    run(trainer, files, tmp_path / "two", *argv, devices=4)
    run(trainer, files, tmp_path / "one", *argv, count=1, devices=8)
    assert_same(tmp_path / "two", tmp_path / "one", close=2e-5)  # after Adam


ON_HOSTS = {
    "critic, reference and sampler": (
        *("ppo", *PPO, "--placement.policy=data=2"),
        *("--placement.critic={}:data=2", "--placement.reference={}:fsdp=2"),
        "--placement.sampler={}:data=2",
    ),
    "a sampler behind, and a reference that moves": (
        *("grpo", *OUTSIDE[:-1], "--placement.policy=tensor=2"),
        "--placement.reference={}:tensor=2",
        "--lifecycle.move=mix,every=1,rate=0.5",
        *("--placement.sampler={}:data=2", "--max-staleness=2", "--num-steps=6"),
    ),
}


ON_MORE_HOSTS = {
    "two of the policy, one of the others": (
        3,
        *("ppo", *PPO, "--placement.policy=data=2,fsdp=2"),
        *("--placement.critic={}:data=2", "--placement.reference={}:fsdp=2"),
        "--placement.sampler={}:tensor=2",
    ),
    "two of each": (
        4,
        *("grpo", *OUTSIDE[:-1], "--placement.policy=fsdp=2,tensor=2"),
        *("--placement.reference={}:tensor=4", "--placement.sampler={}:data=4"),
        *("--lifecycle.move=mix,every=1,rate=0.5", "--max-staleness=1"),
    ),
    "three of the policy, one of the others": (
        4,
        *("ppo", *PPO, "--batch-size=12", "--placement.policy=data=3,tensor=2"),
        *("--placement.critic={}:fsdp=2", "--placement.reference={}:data=2"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ON_MORE_HOSTS)
def test_roles_on_hosts_of_three_and_four(files, tmp_path, name):
    """Processes of two devices, against the last devices of one process."""
    count, trainer, *argv = ON_MORE_HOSTS[name]
    many = [option.format("hosts") for option in argv]
    one = [option.format("last") for option in argv]
    run(trainer, files, tmp_path / "many", *many, count=count)
    run(trainer, files, tmp_path / "one", *one, count=1, devices=2 * count)
    assert_same(tmp_path / "many", tmp_path / "one")


@pytest.mark.long
@pytest.mark.parametrize("name", ON_HOSTS)
def test_roles_on_a_host_of_their_own(files, tmp_path, name):
    """The second of two processes, against the last two of one's four devices."""
    trainer, *argv = ON_HOSTS[name]
    two = [option.format("hosts") for option in argv]
    one = [option.format("last") for option in argv]
    stopping = {"signal_at": (3, 0, signal.SIGTERM), "expected": 128 + signal.SIGTERM}
    run(trainer, files, tmp_path / "two", *two, **stopping)
    run(trainer, files, tmp_path / "two", *two, "--resume")
    run(trainer, files, tmp_path / "one", *one, count=1, devices=4)
    assert_same(tmp_path / "two", tmp_path / "one", close=2e-5)  # after Adam


REFUSED_ON_HOSTS = {
    "episodes": (
        *("grpo", *PLAYED["grpo"], "--placement.sampler=hosts:data=2"),
        "expected a sampler with devices of every process, as each plays",
    ),
    "episodes of the policy's host": (
        *("grpo", *PLAYED["grpo"], "--placement.reference=hosts:data=2"),
        "got none of process 1; place other roles at last:MESH",
    ),
    "log-probs before the updates": (
        *("dpo", *OTHERS["dpo"][:-1], "--placement.reference=hosts:data=2"),
        *("--precompute", "expected one process to precompute a reference, got 2"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED_ON_HOSTS)
def test_what_hosts_of_their_own_cannot_do_is_refused_before_the_run(
    files, tmp_path, name
):
    trainer, *argv, message = REFUSED_ON_HOSTS[name]
    argv.append("--placement.policy=data=2")
    for _, error in run(trainer, files, tmp_path / "out", *argv, expected=2):
        assert message in error
        assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


EVALUATED = {
    "a reward and a reference": (
        *("--prompts=prompts.jsonl", "--reward=their_rewards:score"),
        *("--reference=other", "--judge=their_rewards:judge", "--num-samples=2"),
        "--batch-size=4",
    ),
    "a verifier": (
        *("--prompts=questions.jsonl", "--prompt-field=question", "--batch-size=8"),
        *("--verifier=gsm8k,unmarked=last_number", "--num-workers=1"),
    ),
    "an environment": (
        *("--prompts=prompts.jsonl", "--environment=their_hall:Hall"),
        *("--num-workers=1", "--batch-size=4", "--num-samples=2"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EVALUATED)
def test_two_processes_evaluate_as_one_does(files, tmp_path, name):
    argv = ("--model=model", "--max-new-tokens=4", *EVALUATED[name])
    two, one = tmp_path / "two", tmp_path / "one"
    outputs = run("evaluate", files, two, *argv, MESH)
    run("evaluate", files, one, *argv, MESH, count=1, devices=4)
    assert "results are in" in outputs[0][0]
    for file in ("samples.jsonl", "metrics.jsonl"):
        assert (two / file).read_bytes() == (one / file).read_bytes()
    ours, theirs = (
        json.loads((folder / "results.json").read_text()) for folder in (two, one)
    )
    assert {**ours, "proof": None} == {**theirs, "proof": None}


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_reward_that_fails_in_one_process_ends_all(
    files, tmp_path, monkeypatch, process
):
    monkeypatch.setenv("FAILS_IN", str(process))
    argv = ("--model=model", "--max-new-tokens=4", "--prompts=prompts.jsonl")
    argv += ("--reward=their_rewards:fails", "--batch-size=4", MESH)
    for _, error in run("evaluate", files, tmp_path / "out", *argv, expected=2):
        assert "no such score" in error
        assert "Traceback" not in error


REFUSING = """
import sys
from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError
coordinator, number = sys.argv[1:]
processes.Group(coordinator, 2, int(number)).join()
processes.on_each(lambda: None)

def check():
    if int(number) == 1:
        raise InputError("memory of the second: expected ü, got less")

try:
    processes.on_each(check)
except InputError as error:
    print(f"refused {number}: {error}", file=sys.stderr, flush=True)
processes.exit_with_others(3)
"""
ENDING = """
import sys, time
from rlhf_jax.devices import processes
coordinator, number = sys.argv[1:]
processes.Group(coordinator, 2, int(number)).join()
time.sleep(2 * int(number))
print("refused", number, file=sys.stderr, flush=True)
processes.exit_with_others(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (ENDING, "refused {}"),
        (REFUSING, "refused {}: memory of the second: expected ü, got less"),
    ],
    ids=["in all", "in the second"],
)
def test_processes_that_end_for_one_reason_all_say_it(script, said):
    # The first, which the others need, comes to its end two seconds before the second.
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": places.PYTHONPATH}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, address, str(number)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for number, process in enumerate(running):
        assert said.format(number) in process.communicate(timeout=100)[1]
        assert process.returncode == 3


LOSING = """
import os, signal, sys, time
from rlhf_jax.devices import processes
coordinator, number = sys.argv[1:]
processes.Group(coordinator, 2, int(number), heartbeat=4).join()
with processes.last_words("stopped: one is lost"):
    print("joined", flush=True)
    if number == "1":
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
"""


@pytest.mark.slow
def test_a_process_that_has_lost_another_ends_within_its_heartbeat_and_says_so():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": places.PYTHONPATH}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", LOSING, address, str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    running[1].communicate(timeout=100)
    lost_at = time.monotonic()
    _, error = running[0].communicate(timeout=60)
    assert time.monotonic() - lost_at < 20  # it waits for nothing else
    assert running[0].returncode == -signal.SIGABRT
    assert error.splitlines()[-1] == "stopped: one is lost"


INTERRUPTED = """
import os, signal, time
import jax
from rlhf_jax.devices import processes
jax.process_count = lambda: 2
with processes.last_words("stopped: one is lost"):
    time.sleep(1)
    try:
        os.killpg(0, signal.SIGINT)
        time.sleep(1)
    except KeyboardInterrupt:
        time.sleep(1)
"""


@pytest.mark.slow
def test_an_interrupt_of_the_terminal_is_no_loss():
    """Ctrl-C also reaches the process that would report the loss."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env=os.environ | {"PYTHONPATH": places.PYTHONPATH},
        start_new_session=True,
        capture_output=True,
        check=True,
        timeout=100,
        text=True,
    )
    assert done.stderr == ""


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """An unbroken PPO run of one process on one device."""
    out = tmp_path_factory.mktemp("whole") / "run"
    alone("ppo", files, out, *PPO)
    return out


@pytest.mark.long
def test_a_killed_run_goes_on_as_one_process_and_back(files, whole, tmp_path):
    ppo = ("ppo", files, tmp_path / "run", *PPO)
    # In step 4: snapshot 2 is there, as snapshot 4 was not begun before.
    killed = start(*ppo, MESH, signal_at=(5, 1, signal.SIGKILL))
    killed[1].communicate(timeout=300)
    assert killed[1].returncode == -signal.SIGKILL
    lost_at = time.monotonic()
    _, error = killed[0].communicate(timeout=120)
    assert time.monotonic() - lost_at < 60
    ours = [line for line in error.splitlines() if line.startswith("stopped: ")]
    (line,) = ours  # whoever notices it first, JAX or what waits for the other
    assert "a process may be lost; earlier snapshots are kept" in line
    stage = tmp_path / "run" / "snapshots" / "ppo"
    assert resume.steps(stage) in ([2], [2, 4])
    # One process goes a step, and two go on with the rest, on another mesh.
    alone(*ppo, "--resume", signal_at=(2, 0, signal.SIGTERM), expected=143)
    run(*ppo, "--placement.policy=fsdp=2,tensor=2", "--resume")
    assert_same(tmp_path / "run", whole)


@pytest.mark.long
def test_a_signal_to_one_process_stops_both(files, whole, tmp_path):
    ppo = ("ppo", files, tmp_path / "run", *PPO)
    outputs = run(*ppo, MESH, signal_at=(3, 1, signal.SIGTERM), expected=143)
    assert all("stopped and saved" in error for _, error in outputs)
    # It came in step 2, was known to both in step 3, and left four steps done.
    assert resume.steps(tmp_path / "run" / "snapshots" / "ppo") == [2, 4]
    run(*ppo, MESH, "--resume")
    assert_same(tmp_path / "run", whole)


@pytest.mark.long
def test_processes_that_disagree(files, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("model", "their_rewards.py", "answers.jsonl"):
        (theirs / name).symlink_to(files / name)
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was", "so it is not")]
    toy_files.jsonl(theirs / "prompts.jsonl", *rows)
    running = start(
        *("ppo", files, tmp_path / "run", *PPO, MESH),
        cwds=(files, theirs),
    )
    for process in running:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 2
        assert "expected the prompts to be the same in every process" in error
        assert "got another in process 1 than in process 0" in error


def outputs_of_two(program, *, devices):
    """What two processes of a program with some devices each print."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": places.PYTHONPATH,
        "XLA_FLAGS": os.environ["XLA_FLAGS"]
        + f" --xla_force_host_platform_device_count={devices}",
    }
    script = places.PROGRAMS / program
    running = [
        subprocess.Popen(
            [sys.executable, script, f"localhost:{port}", str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    outputs = [process.communicate(timeout=100) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    return [output for output, _ in outputs]


@pytest.mark.slow
def test_rows_lie_where_each_process_says():
    outputs = outputs_of_two("rows_of_processes.py", devices=2)
    assert "(0, 2) of 4" in outputs[0]
    assert "(1, 3) of 4" in outputs[1]


@pytest.mark.slow
def test_rewards_and_judges_are_asked_once_for_every_row():
    outputs = outputs_of_two("rewards_of_processes.py", devices=3)
    assert all("scored" in output for output in outputs)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
@pytest.mark.parametrize(
    ("topology", "shape"),
    [
        ("v5e:4x4", MeshShape(fsdp=16)),
        ("v5e:4x4", MeshShape(data=2, fsdp=8)),
        ("v5e:8x8", MeshShape(fsdp=16, tensor=4)),
        ("v5p:2x2x4", MeshShape(data=2, fsdp=8)),
    ],
)
def test_every_row_of_a_tpu_slice_has_a_process(topology, shape):
    """The devices need not be neighbours: axes follow the torus, not the hosts."""
    devices = compiled.slice_of(topology)
    blocks = row_sharding._blocks(shape.make(devices))
    assert len(blocks) == len({device.process_index for device in devices})
    assert len({len(blocks) for blocks in blocks.values()}) == 1
    numbers = {block for blocks in blocks.values() for block in blocks}
    assert numbers == set(range(shape.data * shape.fsdp))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "localhost"}, "expected HOST:PORT of the first process"),
        ({"coordinator": "a:1"}, "expected --num-processes and --process-id"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            "--process-id: expected 0 to 1, got 2",
        ),
        (
            {"coordinator": "auto", "process_id": 0},
            "neither with auto, which finds them out",
        ),
        ({"coordinator": "auto", "heartbeat": 0}, "--heartbeat: expected"),
        ({"coordinator": "auto", "join_timeout": 0}, "--join-timeout: expected"),
    ],
)
def test_groups_that_are_none(options, message):
    with pytest.raises(InputError, match=message):
        Group(**options)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, []),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, []),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, []),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
        ({}, None),
    ],
)
def test_a_process_alone_on_its_host_has_all_gpus(monkeypatch, environment, expected):
    """With None, JAX chooses: under Slurm and Open MPI it takes one GPU."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *args, **_: given.append(args)
    )
    Group("auto").join()
    assert given == [(None, None, None, expected)]


def test_one_process_is_the_first_and_agrees_with_itself():
    assert processes.is_first()
    processes.agree("the config", "anything")
    processes.wait()
    vote = processes.Vote()
    assert [vote(False), vote(True), vote(False)] == [False, True, False]

    def refuse():
        raise InputError("expected another folder")

    with pytest.raises(InputError, match="expected another folder"):
        processes.on_first(refuse)
