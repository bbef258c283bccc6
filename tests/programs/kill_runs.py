"""Kills every command at random moments, and compares its files.

    PYTHONPATH=tests python tests/programs/kill_runs.py --kills 100 --out FOLDER

Every kind of run in `kill_kinds` is played once without a kill. Then it is started with
--resume, killed by SIGKILL or, one time in three, by SIGTERM, and started again, until
it has been killed its share of times and is left to end. What lies in its folder must
then be the same bytes as in the other, and be proven: no refusal to go on, no bit lost,
no stray file. Prints a line for each kill and exits with status 1 at the first
difference. `test_killed_commands.py` has a few kills of some kinds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import kill_kinds
import places
from kill_kinds import KINDS, Kind

from rlhf_jax.runs.proof import run_files, sums
from rlhf_jax.runs.snapshots import integrity
from rlhf_jax.sweeps import planned, results

WITH_CLOCKS = {"timings.jsonl", "summary.json"}
BY_SIGTERM = 1 / 3  # of kills; groups of processes are all killed


class Running:
    """The processes of one start of a run."""

    def __init__(self, kind: Kind, files: Path, out: Path) -> None:
        group = ()
        if kind.processes > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            group = (
                f"--coordinator=localhost:{port}",
                f"--num-processes={kind.processes}",
            )
        environment = os.environ | {
            "PYTHONPATH": places.PYTHONPATH,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={kind.devices}",
        }
        starts = (f"--out={out}", *kind.options, *group)
        if kind.trainer != "sweep":  # whose runs go on by themselves
            cache = files / "compiled"
            starts += ("--no-progress", "--resume", f"--compilation-cache={cache}")
        self.errors = [out.parent / f"{out.name}.{i}" for i in range(kind.processes)]
        self.processes = []
        for number, errors in enumerate(self.errors):
            with errors.open("wb") as stream:
                self.processes.append(
                    subprocess.Popen(
                        [
                            *(
                                sys.executable,
                                "-m",
                                "rlhf_jax.train.main",
                                kind.trainer,
                            ),
                            *starts,
                            *([f"--process-id={number}"] if group else []),
                        ],
                        cwd=files,
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=stream,
                    )
                )

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def kill(self, kind: signal.Signals, *, pause: float) -> bool:
        """Sends a signal to each process in turn; False if all had already ended.

        Once the first is killed, another of its group may end before its own turn.

        Raises:
          AssertionError: SIGTERM did not stop it, or it failed as it saved.
        """
        for process in self.processes:
            process.send_signal(kind)
            time.sleep(pause if process is not self.processes[-1] else 0)
        codes = [process.wait(timeout=600) for process in self.processes]
        if kind is signal.SIGKILL:
            return -kind in codes
        (code,) = codes  # -15 before its handler is there
        assert code in (0, -kind, 128 + kind), f"{code} by {kind!r}:\n{self.output()}"
        return code != 0

    def output(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.errors)


def rows(out: Path) -> int:
    files = [*out.glob("metrics.jsonl"), *out.glob("runs/*/*/metrics.jsonl")]
    return sum(path.read_bytes().count(b"\n") for path in files)


def play(kind: Kind, files: Path, out: Path, *, kills: int, rng: random.Random) -> int:
    """Plays one run to its end with at most this many kills; returns their number.

    Raises:
      AssertionError: a start refused to go on, or did not end.
    """
    done = 0
    while True:
        running = Running(kind, files, out)
        started = time.monotonic()
        limit = rows(out) + rng.randrange(1, 14)
        early = rng.random() < 0.15  # before or while it goes on
        wait = rng.uniform(0, 12) if early else rng.uniform(0, 0.12)
        while done < kills and not running.ended():
            passed = time.monotonic() - started
            if (early and passed > wait) or (not early and rows(out) >= limit):
                break
            time.sleep(0.002)
        if done < kills and not running.ended():
            if not early:
                time.sleep(wait)
            at, by = rows(out), signal.SIGKILL
            if kind.processes == 1 and rng.random() < BY_SIGTERM:
                by = signal.SIGTERM
            if running.kill(by, pause=rng.uniform(0, 0.2)):
                done += 1
                print(f"  {by.name} {done} with {at} rows written", flush=True)
                continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in running.processes:
                process.wait(timeout=600)
        codes = [process.poll() for process in running.processes]
        assert codes == [0] * len(codes), f"ended with {codes}:\n{running.output()}"
        return done


def contents(out: Path) -> dict[str, bytes]:
    """A run's files; of snapshots only the names, as orbax writes clocks.

    Raises:
      AssertionError: a file is not proven.
    """
    files = {}
    if (out / planned.BEGUN).exists():
        document = json.loads((out / results.NAME).read_text())
        del document[sums.PROOF]  # with the sums of logs
        files[results.NAME] = json.dumps(document).encode()
        checked = results.check(out)
        assert not any(checked[1:]), checked
        for run in sorted(out.glob("runs/*/*")):
            name = run.relative_to(out).as_posix()
            files |= {f"{name}/{file}": of for file, of in contents(run).items()}
        return files
    checked = run_files.check(out)
    assert not any(checked[1:]), checked
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        parts = path.relative_to(out).parts
        if parts[0] == "snapshots":
            if len(parts) <= 3 or parts[3:] == (integrity.LIST,):
                files[name] = b""
        elif path.is_file():
            files[name] = b"" if skipped(path) else path.read_bytes()
            if name == "config.json":
                config = json.loads(path.read_text())
                del config["config"]["out"]
                files[name] = json.dumps(config).encode()
    return files


def skipped(path: Path) -> bool:
    return path.name in WITH_CLOCKS or "plots" in path.parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    rng = random.Random(options.seed)
    files = options.out.resolve() / "files"
    kill_kinds.write_files(files)
    total = 0
    for number, name in enumerate(options.kinds):
        share = (options.kills - total) // (len(options.kinds) - number)
        print(f"{name}: {share} kills", flush=True)
        folder = options.out.resolve() / name.replace(" ", "_")
        folder.mkdir()
        play(KINDS[name], files, folder / "whole", kills=0, rng=rng)
        expected, killed, turn = contents(folder / "whole"), 0, 0
        while killed < share:
            turn += 1
            out = folder / f"killed_{turn}"
            killed += play(KINDS[name], files, out, kills=share - killed, rng=rng)
            actual = contents(out)
            differing = [
                path
                for path in sorted(expected.keys() | actual.keys())
                if expected.get(path) != actual.get(path)
            ]
            if differing:
                raise SystemExit(f"{name}: after {killed} kills others: {differing}")
        total += killed
    print(f"{total} kills, no refusal, no stray file, no bit lost")


if __name__ == "__main__":
    main()
