"""A run whose folder is in a bucket resumes from the bucket alone, to the bit.

The bucket is fsspec's in memory; `test_bucket.py` has one served by HTTP.
"""

import json
import shutil

import pytest
import toy_storage

from rlhf_jax.runs.folder import read_config
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.proof import run_files
from rlhf_jax.runs.snapshots import integrity

URL = "memory://bucket/run"
LOCK = f"{URL}/run.lock"
STEPS = ("--num-steps", 6, "--snapshot-every", 2)


@pytest.fixture(autouse=True)
def spool(tmp_path, monkeypatch):
    """The spool's folder; failed uploads are not retried."""
    monkeypatch.setenv(urls.SPOOL, str(tmp_path / "spool"))
    monkeypatch.setattr(urls, "PATIENCE", 0.0)
    monkeypatch.setattr(urls, "_AT_ONCE", 1)
    system = urls.system(URL)
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield tmp_path / "spool"
    system.store.clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of an unbroken run in a local folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    toy_storage.main("--out", folder, *STEPS)
    return folder


def in_bucket() -> dict[str, bytes]:
    system = urls.system(URL)
    root = "/bucket/run/"
    return {p.removeprefix(root): system.cat_file(p) for p in system.find(root)}


def stopped(*argv: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        toy_storage.main(*argv)
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def stopped_at(step: int, monkeypatch) -> None:
    """Ends the run without another call to the bucket."""
    with monkeypatch.context() as early:
        early.setenv("STOP_AT", str(step))
        assert stopped("--out", URL, *STEPS) == 130


def run(*argv: object) -> None:
    toy_storage.main("--out", URL, *STEPS, *argv)


def test_a_whole_run_is_in_the_bucket(whole):
    run()
    there = urls.fetched(URL)
    assert toy_storage.results(there) == toy_storage.results(whole)
    checked = run_files.check(there)
    assert checked[1:] == ([], [], [], [])
    assert read_config(there / "config.json")["out"] == URL
    # All of it, and who wrote it.
    local = next(urls.spool().glob("runs/*/run"))
    names = {p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file()}
    assert in_bucket().keys() == names | {"run.lock"}


def test_a_killed_run_goes_on_from_the_bucket_alone(whole, spool, monkeypatch):
    stopped_at(3, monkeypatch)
    shutil.rmtree(spool)
    before = in_bucket()
    assert "snapshots/ppo/2/files.json" in before
    toy_storage.main("--config", f"{URL}/config.json", "--resume")
    assert toy_storage.results(urls.fetched(URL)) == toy_storage.results(whole)
    # It went on, and did not begin again.
    assert (
        in_bucket()["snapshots/sft/6/files.json"]
        == before["snapshots/sft/6/files.json"]
    )


def test_what_the_bucket_holds_is_whole_after_every_single_write(
    whole, monkeypatch, tmp_path
):
    system = urls.system(URL)
    states = []

    def told(method):
        def call(*arguments, **options):
            result = method(*arguments, **options)
            states.append(in_bucket())
            return result

        return call

    for name in ("pipe_file", "put_file", "rm_file"):
        monkeypatch.setattr(system, name, told(getattr(system, name)))
    run()
    assert len(states) > 50
    newest = []
    for number, state in enumerate(states):
        folder = tmp_path / str(number)
        for name in urls.whole({*state} - {"run.lock"}):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(state[name])
        assert run_files.check(folder).faults == []
        snapshots = [p.parent for p in folder.glob("snapshots/*/*/files.json")]
        for snapshot in snapshots:
            assert integrity.faults_of_files(snapshot) == []
            assert integrity.added(snapshot) == []
        of_stage = [int(p.name) for p in snapshots if p.parent.name == "ppo"]
        newest.append(max(of_stage, default=0))
        assert (folder / "config.json").exists() or not folder.exists()
    # None is missing once it was there.
    assert newest == sorted(newest)
    assert {*newest} == {0, 2, 4, 6}
    assert toy_storage.results(urls.fetched(URL)) == toy_storage.results(whole)


def failing(monkeypatch, *, after: int, times: int = 10**9) -> list[str]:
    """Lets the bucket fail `times` times after `after` files; returns asked paths."""
    system = urls.system(URL)
    put, asked = system.put_file, []

    def call(path, at, **options):
        asked.append(at)
        if after < len(asked) <= after + times:
            raise ConnectionError("the network is down")
        return put(path, at, **options)

    monkeypatch.setattr(system, "put_file", call)
    return asked


@pytest.mark.slow
def test_a_lost_connection_stops_the_run_which_loses_nothing(
    whole, spool, monkeypatch, capsys
):
    with monkeypatch.context() as lost:
        failing(lost, after=40)
        assert stopped("--out", URL, *STEPS) == 1
    message = capsys.readouterr().err
    expected = f"stopped: {URL} could not be written: ConnectionError: the network"
    assert message.startswith(expected), message
    assert "safe: snapshot" in message
    assert f"keep {spool}" in message
    assert f"--config {URL}/config.json --resume" in message
    # The spool is ahead of the bucket, and the run goes on from there.
    ahead = "snapshots/sft/6/files.json"
    assert "snapshots/sft/4/files.json" in in_bucket()
    assert ahead not in in_bucket()
    saved = (next(spool.glob("runs/*/run")) / ahead).read_bytes()
    run("--resume")
    assert in_bucket()[ahead] == saved  # names of files of arrays are random
    assert toy_storage.results(urls.fetched(URL)) == toy_storage.results(whole)


@pytest.mark.slow
def test_a_snapshot_killed_before_its_list_gets_one_in_the_bucket(
    whole, spool, monkeypatch
):
    stopped_at(3, monkeypatch)
    (next(spool.glob("runs/*/run")) / "snapshots/sft/6/files.json").unlink()
    run("--resume")
    assert run_files.check(urls.fetched(URL)).faults == []
    assert toy_storage.results(urls.fetched(URL)) == toy_storage.results(whole)


def test_a_short_failure_is_tried_again(whole, monkeypatch):
    monkeypatch.setattr(urls, "PATIENCE", 100.0)
    pauses = []
    monkeypatch.setattr(urls, "_paused", lambda seconds, _: pauses.append(seconds))
    failing(monkeypatch, after=5, times=3)
    run()
    assert pauses == [1.0, 2.0, 4.0]
    assert toy_storage.results(urls.fetched(URL)) == toy_storage.results(whole)


@pytest.mark.slow
def test_the_spool_of_an_older_process_is_filled_anew(whole, spool, monkeypatch):
    other = spool.parent / "other"
    stopped_at(1, monkeypatch)
    monkeypatch.setenv(urls.SPOOL, str(other))
    run("--resume")
    monkeypatch.setenv(urls.SPOOL, str(spool))
    local = next(spool.glob("runs/*/run"))
    (local / "stray.txt").write_text("of before")
    run("--resume")
    assert not (local / "stray.txt").exists()
    assert toy_storage.results(local) == toy_storage.results(whole)


def test_a_run_that_another_process_goes_on_with_stops(monkeypatch, capsys):
    system = urls.system(URL)
    put = system.put_file

    def call(path, at, **options):
        owner = {"process": 7, "host": "elsewhere", "since": "now", "token": "other"}
        if at.endswith("sft/4/files.json"):
            system.pipe_file(LOCK, json.dumps(owner).encode())
        return put(path, at, **options)

    monkeypatch.setattr(system, "put_file", call)
    assert stopped("--out", URL, *STEPS) == 1
    message = capsys.readouterr().err
    assert "got process 7 on elsewhere in its run.lock" in message
    assert "snapshots/sft/6/files.json" not in in_bucket()


def test_a_run_that_is_there_is_refused_before_it_is_copied(spool, capsys):
    run()
    shutil.rmtree(spool)
    before = in_bucket()
    assert stopped("--out", URL, *STEPS) == 2
    assert f"--out {URL} already holds config.json" in capsys.readouterr().err
    assert in_bucket() == before
    assert not spool.exists()


def test_a_resume_of_what_is_no_run_copies_nothing(spool, capsys):
    urls.system(URL).pipe_file(f"{URL}/large/model", b"of another run")
    assert stopped("--out", URL, *STEPS, "--resume") == 2
    message = capsys.readouterr().err
    assert f"in --out, got {URL}, which holds large/model; give the" in message
    assert not spool.exists()


def test_a_name_that_leads_out_of_the_spool_is_refused(spool, capsys):
    run()
    shutil.rmtree(spool)
    store = urls.system(URL).store
    store["/bucket/run/../../../../evil"] = store["/bucket/run/config.json"]
    assert stopped("--out", URL, *STEPS, "--resume") == 2
    assert "got '../../../../evil'; remove that object" in capsys.readouterr().err
    assert not any(path.is_file() for path in spool.parent.rglob("*"))


@pytest.mark.slow
def test_what_a_killed_process_left_of_a_snapshot_goes(whole, monkeypatch):
    stopped_at(3, monkeypatch)
    system = urls.system(URL)
    stray = f"{URL}/snapshots/ppo/4/arrays/d/stray"
    system.pipe_file(stray, b"half")
    run("--resume")
    assert not system.exists(stray)
    there = urls.fetched(URL)
    assert run_files.check(there).faults == []
    assert run_files.check(there).added == []
    assert toy_storage.results(there) == toy_storage.results(whole)


@pytest.mark.slow
def test_snapshots_that_are_set_aside_are_so_in_the_bucket(whole, spool):
    run()
    system = urls.system(URL)
    for name in ("summary.json", "model.sha256", "model/x.npy"):
        system.rm_file(f"{URL}/{name}")  # as the user moves results away
    toy_storage.main("--out", URL, *STEPS, "--resume-from", 4)
    there = in_bucket()
    assert "snapshots/ppo/6.set-aside/files.json" in there
    assert "snapshots/ppo/6/files.json" in there
    assert (
        toy_storage.results(urls.fetched(URL))["metrics.jsonl"]
        == toy_storage.results(whole)["metrics.jsonl"]
    )


def test_a_bucket_that_cannot_be_written_to_is_refused_before_any_work(
    monkeypatch, capsys
):
    system = urls.system(URL)

    def refuse(*arguments, **options):
        raise PermissionError("not yours")

    monkeypatch.setattr(system, "pipe_file", refuse)
    assert stopped("--out", URL, *STEPS) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        f"error: --out {URL}: expected a bucket that this user can read and write, "
        f"got PermissionError: not yours"
    ), message
    assert in_bucket() == {}
