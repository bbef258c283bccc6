"""Compiled programs are cached for the next start, which computes equal bits."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import places
import pytest
from places import EXPERIMENTS

from rlhf_jax.devices import program_cache
from rlhf_jax.functional.checks import InputError

VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")


@pytest.fixture
def unset():
    """Resets JAX's cache options to a user's defaults, and restores them afterwards."""
    names = {
        "jax_compilation_cache_dir": None,
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 1.0,
    }
    before = {name: jax.config.values[name] for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in folder.glob("*-cache")
    }


def start(out: Path, *argv: object, home: Path) -> subprocess.CompletedProcess:
    """Runs a few steps as a user would, each time in a new process."""
    environment = {
        name: value for name, value in os.environ.items() if name not in VARIABLES
    }
    return subprocess.run(
        [
            *(sys.executable, EXPERIMENTS / "new_algorithm.py", f"--out={out}"),
            *("--num-steps=3", "--batch-size=4", "--no-progress", *map(str, argv)),
        ],
        env=environment
        | {
            "PYTHONPATH": places.PYTHONPATH,
            "XDG_CACHE_HOME": str(home),
        },
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.long
@pytest.mark.slow
def test_a_run_from_kept_programs_is_the_run_that_compiled_them(tmp_path):
    home = tmp_path / "home"
    programs = home / "rlhf_jax" / "compiled"
    start(tmp_path / "none", "--compilation-cache", None, home=home)
    assert not programs.exists()
    start(tmp_path / "cold", home=home)
    written = files(programs)
    assert sum(name.startswith("jit_learn-") for name in written) == 1
    assert len(written) > 10  # the small ones too
    start(tmp_path / "warm", home=home)
    assert files(programs) == written
    elsewhere = tmp_path / "elsewhere"
    start(tmp_path / "moved", f"--compilation-cache={elsewhere}", home=home)
    assert len(files(elsewhere)) == len(written)
    # A program that was cut off, as by a full disk, is compiled again.
    for path in programs.glob("jit_learn-*"):
        os.truncate(path, path.stat().st_size // 2)
    broken = start(tmp_path / "broken", home=home)
    assert "jit_learn" in broken.stderr
    rows = (tmp_path / "none" / "metrics.jsonl").read_bytes()
    assert rows.count(b"\n") == 3
    for name in ("cold", "warm", "moved", "broken"):
        assert (tmp_path / name / "metrics.jsonl").read_bytes() == rows


@pytest.mark.slow
def test_what_the_disk_did_not_have_is_counted(tmp_path):
    code = (
        "import sys, pathlib, jax, jax.numpy as jnp\n"
        "from rlhf_jax.devices import program_cache\n"
        "program_cache.use(pathlib.Path(sys.argv[1]))\n"
        "before = program_cache.compiled_so_far()\n"
        "for scale in map(float, sys.argv[2:]):\n"
        "    jax.jit(lambda x, scale=scale: jnp.sin(scale * x))(1.0)\n"
        "since = program_cache.compiled_since(before)\n"
        "print(sum(since.values()), program_cache.missed_since(before))\n"
    )

    def counts(*scales: str) -> list[int]:
        command = [sys.executable, "-c", code, str(tmp_path), *scales]
        environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
        done = subprocess.run(
            command,
            env=environment | {"PYTHONPATH": places.PYTHONPATH},
            capture_output=True,
            text=True,
            check=True,
        )
        return [int(word) for word in done.stdout.split()]

    assert counts("2", "3") == [2, 2]
    assert counts("2", "5") == [2, 1]


def test_the_default_is_in_the_users_cache(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somewhere")
    expected = Path("/somewhere/.cache/rlhf_jax/compiled")
    assert program_cache.default_folder() == expected
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program_cache.use_default()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "rlhf_jax/compiled")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    program_cache.use(None)
    assert jax.config.jax_compilation_cache_dir is None


def test_what_jax_was_told_stays(unset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    jax.config.update("jax_compilation_cache_dir", "theirs")
    program_cache.use_default()
    assert jax.config.jax_compilation_cache_dir == "theirs"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    program_cache.use_default()
    assert jax.config.jax_compilation_cache_dir is None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1
    assert not (tmp_path / "home").exists()


def test_a_folder_that_cannot_be_made(unset, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--compilation-cache: expected a folder, or"):
        program_cache.use(tmp_path / "file" / "programs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    program_cache.use_default()  # nobody asked for it
    assert jax.config.jax_compilation_cache_dir is None


def test_the_oldest_programs_go_first(tmp_path):
    for age, name in enumerate(("c", "a", "d", "b")):
        path = tmp_path / f"jit_{name}-cache"
        path.write_bytes(bytes(10))
        os.utime(path, (100 - age, 100 - age))
    (tmp_path / "theirs").write_bytes(bytes(1000))

    def left():
        return sorted(path.name for path in tmp_path.iterdir())

    program_cache.prune(tmp_path, max_bytes=40)
    assert len(left()) == 5
    program_cache.prune(tmp_path, max_bytes=25)
    assert left() == ["jit_a-cache", "jit_c-cache", "theirs"]
    program_cache.prune(tmp_path, max_bytes=0)
    assert left() == ["theirs"]
