"""Takes processes or hosts from a run at random moments, and compares its files.

    PYTHONPATH=tests python tests/programs/kill_hosts.py --kills 20 --out FOLDER

Two network namespaces of this machine are hosts, with a cable between them and two of
the four processes of a run of GRPO on each: as root, on Linux. Each time one process,
or both of a host, is killed by SIGKILL, or the cable is cut. The others must end by
themselves, each with one line that says why, and the same command goes on. A run that
has ended must have left the same bytes as an undisturbed one.
Prints a line for each kill, and writes them all to FOLDER/record.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_runs
import places
import toy_files

HEARTBEAT = 10  # seconds
# Beside the heartbeat: two of its calls, the barrier of processes that end, and the
# start of what says why on a machine that is busy.
SLACK = 30
EARLY = 0.25  # of kills come before the first step of a start
NAMES = ("rlhf_a", "rlhf_b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
REWARD = """
def score(prompts, responses, rows):
    return [float(len(set(response.split()))) for response in responses]
"""
GRPO = (
    *("grpo", "--model=model", "--prompts=prompts.jsonl"),
    *("--reward=their_rewards:score", "--batch-size=8", "--group-size=4"),
    *("--max-new-tokens=4", "--num-steps=30", "--learning-rate=1e-2"),
    *("--snapshot-every=3", "--placement.policy=data=4", "--no-progress", "--resume"),
    *("--num-processes=4", f"--heartbeat={HEARTBEAT}"),
)


def ip(*words: str) -> None:
    """Runs `ip`, which makes and connects namespaces.

    Raises:
      CalledProcessError: it fails, with the reason in `stderr`.
    """
    subprocess.run(["ip", *words], check=True, timeout=60, capture_output=True)


def refusal() -> str | None:
    """The reason why this machine cannot make hosts; None if it can."""
    try:
        with hosts():
            return None
    except FileNotFoundError:
        return "needs the program ip, of iproute2"
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode().strip() or error
        return f"network namespaces are not allowed here: {reason}"


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Makes two network namespaces with their own addresses, joined by a cable."""
    with contextlib.ExitStack() as stack:
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
            # Gloo finds its own address by the name of the machine.
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(folder.rmdir)
            lines = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            (folder / "hosts").write_text(lines)
            stack.callback((folder / "hosts").unlink)
        a, b = NAMES
        ends = ("type", "veth", "peer", "cable", "netns", b)
        ip("link", "add", "cable", "netns", a, *ends)
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
        plug("up")
        yield


def plug(state: str) -> None:
    """Connects the cable ("up") or cuts it ("down")."""
    for name in NAMES:
        ip("-n", name, "link", "set", "cable", state)


class Running:
    """The four joined processes of one start of a run, two per host."""

    def __init__(self, files: Path, out: Path, *, port: int) -> None:
        environment = os.environ | {
            "PYTHONPATH": places.PYTHONPATH,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        }
        self.logs = [out.parent / f"{out.name}.{number}" for number in range(4)]
        self.processes = []
        for number, log in enumerate(self.logs):
            command = (
                *("ip", "netns", "exec", NAMES[number // 2]),
                *(sys.executable, "-m", "rlhf_jax.train.main", *GRPO),
                *(f"--out={out}", f"--compilation-cache={files / 'compiled'}"),
                f"--coordinator={ADDRESSES[0]}:{port}",
                f"--process-id={number}",
            )
            with log.open("w") as stream:
                process = subprocess.Popen(
                    command,
                    cwd=files,
                    env=environment,
                    stdout=stream,  # where Gloo says that it has joined
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)
        until = time.monotonic() + 300
        while not all("[Gloo]" in log.read_text() for log in self.logs):
            assert time.monotonic() < until, self.said()
            time.sleep(0.1)

    def said(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in self.logs)

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def wait(self, within: float) -> list[int]:
        """Waits for all processes; returns their statuses.

        Raises:
          AssertionError: a process did not end by itself, and is killed.
        """
        until = time.monotonic() + within
        try:
            for process in self.processes:
                process.wait(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"still there, {within} s: {self.said()}") from error
        finally:
            for process in self.processes:
                process.kill()
        return [process.returncode for process in self.processes]

    def finish(self) -> None:
        statuses = self.wait(600)
        assert statuses == [0] * 4, f"ended with {statuses}: {self.said()}"

    def lose(self, rng: random.Random) -> dict[str, Any]:
        """Takes something from the run; returns it and the seconds until the rest end.

        Raises:
          AssertionError: a process did not end, or not with one line.
        """
        host = rng.randrange(2)
        what, numbers = rng.choice(
            (
                ("a process", [rng.randrange(4)]),
                ("a host", [2 * host, 2 * host + 1]),
                ("the cable", []),
            )
        )
        since = time.monotonic()
        if not numbers:
            plug("down")
        for number in numbers:
            self.processes[number].send_signal(signal.SIGKILL)
        try:
            statuses = self.wait(HEARTBEAT + SLACK)
        finally:
            plug("up")
        seconds = time.monotonic() - since
        for number in {0, 1, 2, 3} - set(numbers):
            lines = self.logs[number].read_text().splitlines()
            ours = [line for line in lines if line.startswith("stopped: ")]
            assert statuses[number] != 0, self.said()
            assert len(ours) == 1, self.said()
        return {"lost": what, "processes": numbers, "seconds": round(seconds, 1)}


def play(
    files: Path,
    out: Path,
    *,
    kills: int,
    rng: random.Random,
    ports: Iterator[int],
) -> list[dict[str, Any]]:
    """Plays one run to its end, with at most the given number of losses.

    Returns:
      An object for each time: what was lost, after how many steps, and in how many
      seconds the others ended.

    Raises:
      AssertionError: they did not, or a start refused to go on.
    """
    done = []
    while True:
        running = Running(files, out, port=next(ports))
        before = kill_runs.rows(out)
        limit = before + (0 if rng.random() < EARLY else rng.randrange(1, 9))
        while len(done) < kills and not running.ended():
            if kill_runs.rows(out) >= limit:
                break
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 8) if limit == before else rng.uniform(0, 0.3))
        if len(done) == kills or any(
            one.poll() is not None for one in running.processes
        ):
            running.finish()
            return done
        steps = kill_runs.rows(out)
        done.append({"steps": steps, **running.lose(rng)})
        print(f"{len(done)}: {done[-1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = options.out.resolve()
    with hosts():
        for done in compare(folder, kills=options.kills, seed=options.seed):
            seconds = [kill["seconds"] for kill in done]
            record = {
                "kills": len(done),
                "seed": options.seed,
                "heartbeat": HEARTBEAT,
                "seconds": {"median": statistics.median(seconds), "most": max(seconds)},
                "each": done,
            }
            text = json.dumps(record, indent=1) + "\n"
            (folder / "record.json").write_text(text)
            print(f"{len(done)} kills, no refusal, no bit lost", flush=True)


def compare(folder: Path, *, kills: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Plays an unbroken run, and others until the given number of kills.

    Yields:
      The results of `play` of all runs so far, after each run with equal bytes.

    Raises:
      AssertionError: as `play`; or a run's bytes differ from the unbroken run's.
    """
    files, rng, ports = folder / "files", random.Random(seed), iter(range(20000, 30000))
    files.mkdir(parents=True)
    toy_files.checkpoint(files / "model")
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was", "it is so")]
    toy_files.jsonl(files / "prompts.jsonl", *rows)
    (files / "their_rewards.py").write_text(REWARD)
    play(files, folder / "whole", kills=0, rng=rng, ports=ports)
    expected = kill_runs.contents(folder / "whole")
    done: list[dict[str, Any]] = []
    runs = 0
    while len(done) < kills:
        out, runs = folder / f"killed_{runs}", runs + 1
        done += play(files, out, kills=kills - len(done), rng=rng, ports=ports)
        actual = kill_runs.contents(out)
        paths = sorted(expected.keys() | actual.keys())
        others = [path for path in paths if expected.get(path) != actual.get(path)]
        assert not others, f"after {len(done)} kills others: {others}"
        yield done


if __name__ == "__main__":
    main()
