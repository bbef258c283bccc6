"""Addresses of object storage, and copies of its files."""

import os
import signal
import threading
import time
from pathlib import Path

import fsspec
import pytest
import toy_files

from rlhf_jax.checkpoints import hf
from rlhf_jax.data import files, json_lines
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.proof import exported
from rlhf_jax.train.main import main


@pytest.fixture(autouse=True)
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv(urls.SPOOL, str(tmp_path / "spool"))
    monkeypatch.setattr(urls, "PATIENCE", 0.0)
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.mark.parametrize(
    ("place", "url"),
    [
        ("gs://bucket/run", "gs://bucket/run"),
        (Path("gs://"), "gs://"),
        ("GS://bucket/run/", "gs://bucket/run"),
        (Path("gs://bucket/run"), "gs://bucket/run"),
        (Path("s3://bucket/a/b"), "s3://bucket/a/b"),
        ("C:/runs/ppo", None),
        ("C:\\runs\\ppo", None),
        ("hf:openai/gsm8k", None),
        ("runs/ppo", None),
        ("/runs/gs:/b", None),
        ("module:function", None),
    ],
)
def test_an_address_is_told_from_a_path(place, url):
    assert urls.of(place) == url


@pytest.mark.parametrize("place", ["gs:bucket", Path("S3:bucket/run")])
def test_an_address_without_slashes_makes_no_folder_of_its_name(place, capsys):
    scheme, rest = str(place).lower().split(":")
    advice = f"got an address without slashes; write {scheme}://{rest}, or give a fold"
    with pytest.raises(InputError, match=f"^{place}: expected .*{advice}"):
        urls.of(place)
    with pytest.raises(SystemExit):
        main(["sft", "--model=m", "--data=d", f"--out={place}"])
    assert f"write {scheme}://{rest}" in capsys.readouterr().err.replace("\n", " ")
    assert not Path(place).exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://bucket/run", "got the scheme foo://; copy it"),
        ("gs://", "got no bucket; copy it"),
        ("memory://bucket/..", r"without . and .. between its slashes, got one"),
        ("memory://bucket/../other/./x", "without . and .. between"),
    ],
)
def test_what_is_no_address_of_a_bucket_is_refused(url, message):
    with pytest.raises(InputError, match=message):
        urls.fetched(url)
    with pytest.raises(InputError, match=message):
        json_lines.read_jsonl(url)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(urls.SCHEMES, "gs", "not_installed_here")
    with pytest.raises(InputError, match=r"needs the package .* 'rlhf-jax\[cloud\]'"):
        urls.fetched("gs://bucket/data.jsonl")


@pytest.mark.parametrize("name", ["copies.json", "place.copies"])
def test_a_file_of_any_name_is_copied_as_it_is(name, bucket):
    bucket.pipe_file(f"memory://bucket/{name}", b"[]")
    for _ in range(2):
        assert urls.fetched(f"memory://bucket/{name}").read_bytes() == b"[]"


def test_data_is_read_and_read_again_once_it_has_changed(bucket):
    url = "memory://bucket/prompts.jsonl"
    bucket.pipe_file(url, b'{"prompt": "a cat"}\n')
    assert [row["prompt"] for row in files.read_prompts(url)] == ["a cat"]
    bucket.pipe_file(url, b'{"prompt": "a dog"}\n')
    assert [row["prompt"] for row in files.read_prompts(url)] == ["a dog"]
    bucket.pipe_file("memory://bucket/text.txt", b"the cat sat")
    assert json_lines.read_text("memory://bucket/text.txt") == "the cat sat"


def test_what_is_not_there_is_told(bucket):
    with pytest.raises(InputError, match="got no such bucket or file; check its name"):
        files.read_prompts("memory://bucket/none.jsonl")


def test_a_copy_loses_what_the_address_has_lost(bucket):
    for name in ("a/1", "a/2", "b"):
        bucket.pipe_file(f"memory://bucket/place/{name}", name.encode())
    place = urls.fetched("memory://bucket/place", but=("b",))
    assert sorted(p.name for p in place.rglob("*")) == ["1", "2", "a"]
    bucket.rm("memory://bucket/place/a", recursive=True)
    place = urls.fetched("memory://bucket/place")
    assert [p.name for p in place.rglob("*")] == ["b"]


@pytest.mark.parametrize("name", ["../../evil", "a/../../evil", "..\\evil", "C:evil"])
def test_no_name_in_a_bucket_chooses_a_place_on_this_machine(name, bucket, tmp_path):
    bucket.pipe_file("memory://bucket/place/a", b"")
    entry = type(bucket.store["/bucket/place/a"])(bucket, "", b"of somebody else")
    bucket.store[f"/bucket/place/{name}"] = entry
    with pytest.raises(InputError, match="expected names of files that are below it"):
        urls.fetched("memory://bucket/place")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_copy_that_was_half_made_keeps_nothing_old(bucket, monkeypatch):
    for name in ("old", "new"):
        bucket.pipe_file(f"memory://bucket/place/{name}", name.encode())
    with monkeypatch.context() as killed:
        killed.setattr(urls, "write", lambda *_: None)  # it comes last
        urls.fetched("memory://bucket/place")
    bucket.rm_file("memory://bucket/place/old")
    place = urls.fetched("memory://bucket/place")
    assert [path.name for path in place.iterdir()] == ["new"]


def test_a_model_comes_with_its_manifest_and_is_checked(bucket, tmp_path):
    model = tmp_path / "model"
    toy_files.checkpoint(model)
    exported.write(model, anew=True)
    bucket.put(str(model), "memory://bucket/run/model", recursive=True)
    manifest = tmp_path / "model.sha256"
    bucket.put_file(str(manifest), "memory://bucket/run/model.sha256")
    url = "memory://bucket/run/model"
    expected, _ = hf.load(model)
    assert hf.load(url)[0] == expected
    main(["verify", url])
    name = "memory://bucket/run/model/config.json"
    bucket.pipe_file(name, bucket.cat_file(name) + b" ")
    with pytest.raises(InputError, match=r"config\.json: another SHA-256"):
        hf.load(url)
    # As that message advises where the change is the user's own.
    bucket.rm_file(f"{url}.sha256")
    assert hf.load(url)[0] == expected


def test_ctrl_c_waits_for_no_network(monkeypatch):
    monkeypatch.setattr(urls, "PATIENCE", 100.0)
    began = time.monotonic()

    def call(name):
        if name == "first":
            raise FileNotFoundError  # stands for Ctrl-C: the one error that is raised
        raise ConnectionError

    with pytest.raises(FileNotFoundError):
        urls.each(call, ["first", "second"])
    monkeypatch.setattr(urls, "_AT_ONCE", 1)
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    # Python's own, whatever tests before this one left.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            urls.each(call, ["second", "third"])
        interrupt.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "argv",
    [
        ["quickstart", "--out", "gs://bucket/q"],
        ["paper", "gs://bucket/sweep", "--out", "paper"],
        ["sweep", "sweep.toml", "--out", "gs://bucket/sweep"],
    ],
)
def test_what_takes_paths_alone_refuses_an_address(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "expected a folder on this machine, got gs://bucket/" in message
