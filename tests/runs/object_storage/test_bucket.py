"""A run in a bucket served by HTTP is killed, and resumed from the bucket alone."""

import os
import random
import signal
import time
from importlib.util import find_spec

import pytest
import toy_storage

from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.proof import run_files
from rlhf_jax.runs.snapshots import files, resume

MISSING = [n for n in ("gcsfs", "gcp_storage_emulator") if find_spec(n) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}")
STEPS = {3: "12", 20: "40"}  # of each stage, by the number of kills


@pytest.fixture(scope="module")
def endpoint():
    with toy_storage.emulator() as address:
        before = os.environ.get("STORAGE_EMULATOR_HOST")
        os.environ["STORAGE_EMULATOR_HOST"] = address
        yield address
        del os.environ["STORAGE_EMULATOR_HOST"]
        if before is not None:
            os.environ["STORAGE_EMULATOR_HOST"] = before


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_killed_at_random_goes_on_from_the_bucket_alone(
    kills, endpoint, tmp_path, monkeypatch
):
    """SIGKILL within steps, uploads and starts; each start has its own spool."""
    monkeypatch.setenv(urls.SPOOL, str(tmp_path / "reader"))
    monkeypatch.setenv("SECONDS_A_STEP", "0.05")
    url, rng, killed, started = f"gs://bucket/killed_{kills}", random.Random(0), 0, 0
    steps = ("--num-steps", STEPS[kills], "--snapshot-every", "2")
    while True:
        spool, started = tmp_path / str(started), started + 1
        options = (*steps, "--resume")
        process = toy_storage.start(url, *options, spool=spool, endpoint=endpoint)
        began, early = time.monotonic(), rng.random() < 0.2
        wait = rng.uniform(0, 8) if early else rng.uniform(0, 1)
        more, before = rng.randrange(1, 5), None
        while killed < kills and process.poll() is None:
            there = spool.glob("runs/*/*/metrics.jsonl")
            rows = [path.read_bytes().count(b"\n") for path in there]
            if before is None and rows:
                before = rows[0]
            if early and time.monotonic() - began > wait:
                break
            if not early and rows and rows[0] - (before or 0) >= more:
                time.sleep(wait)
                break
            time.sleep(0.01)
        if killed < kills:
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=600)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        killed += 1
        if urls.names(url).keys() - {"run.lock"}:
            assert_whole(url)
    assert killed == kills
    whole = tmp_path / "whole"
    toy_storage.main("--out", whole, *steps)
    assert_whole(url)
    assert toy_storage.results(urls.fetched(url)) == toy_storage.results(whole)


def assert_whole(url: str) -> None:
    folder = urls.fetched(url)
    assert run_files.check(folder).faults == []
    for stage in folder.glob("snapshots/*"):
        for step in resume.steps(stage):
            assert files.check(stage, step).verdict == "whole"


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_refused(endpoint, tmp_path):
    process = toy_storage.start("gs://none/run", spool=tmp_path, endpoint=endpoint)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 2
    assert "--out gs://none/run: expected a bucket that this user can" in errors
    assert "got no such bucket or file; make it" in errors
