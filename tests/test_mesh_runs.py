"""PPO from a checkpoint on a mesh of eight devices, and from one mesh to another."""

import json

import numpy as np
import ppo_from_checkpoint
import pytest
import toy_files

from rlhf_jax.runtime import cli, metrics

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]
WIDE = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2")
OTHER = ("--mesh.fsdp=4", "--mesh.tensor=2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model")
    (folder / "lengths.py").write_text(
        "def score(prompts, responses, rows):\n"
        "    return [float(len(response.split())) for response in responses]\n"
    )
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was")]
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


def play(files, out, *argv):
    words = [
        *("--out", out, "--no-progress", "--model", files / "model"),
        *("--prompts", files / "prompts.jsonl", "--reward", "lengths:score"),
        *("--batch-size=8", "--max-new-tokens=4", "--num-minibatches=1"),
        *("--num-epochs=1", "--num-steps=4", "--snapshot-every=2", "--sample-every=1"),
        *("--policy-learning-rate=1e-2", "--critic-learning-rate=1e-2"),
        *argv,
    ]
    cli.main(
        ppo_from_checkpoint.main,
        ppo_from_checkpoint.Config,
        description="",
        argv=list(map(str, words)),
    )
    return json.loads((out / "summary.json").read_text())


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    return out, play(files, out)


def check_equal(out, alone):
    """The same responses, and numbers as near as sums in another order are."""
    for found, wanted in zip(
        metrics.read(out / "samples.jsonl"),
        metrics.read(alone / "samples.jsonl"),
        strict=True,
    ):
        assert found == wanted
    rows = metrics.read(out / "metrics.jsonl"), metrics.read(alone / "metrics.jsonl")
    assert len(rows[0]) == len(rows[1])
    for found, wanted in zip(*rows, strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if name != "stage":
                np.testing.assert_allclose(
                    found[name], value, rtol=1e-4, atol=1e-5, err_msg=name
                )


@pytest.mark.long  # half of it is in the next
def test_a_run_on_eight_devices_is_that_of_one(files, alone, tmp_path):
    summary = play(files, tmp_path / "run", *WIDE)
    check_equal(tmp_path / "run", alone[0])
    fingerprint = "reference_fingerprint"
    assert summary[fingerprint] == alone[1][fingerprint]


def test_a_snapshot_goes_on_on_another_mesh(files, alone, tmp_path, monkeypatch):
    out, end_step = tmp_path / "run", ppo_from_checkpoint.run.Stage.end_step

    def dying(stage, step, *args, **kwargs):
        end_step(stage, step, *args, **kwargs)
        if step == 1 and len(metrics.read(out / "metrics.jsonl")) == 2:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(ppo_from_checkpoint.run.Stage, "end_step", dying)
        with pytest.raises(RuntimeError, match="power cut"):
            play(files, out, *WIDE)
    play(files, out, "--resume", *OTHER)
    check_equal(out, alone[0])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--mesh.data=3",), "axes that multiply to the 8 devices, got data=3"),
        (("--mesh.tensor=8", "--batch-size=9"), "num_minibatches"),
        (
            ("--mesh.data=8", "--batch-size=12"),
            "rows that the 8 devices of axes data and fsdp divide, got 12",
        ),
    ],
)
def test_meshes_that_do_not_fit_leave_no_folder(files, tmp_path, capsys, argv, message):
    if "--batch-size=9" in argv:
        argv = (*argv, "--num-minibatches=2")
    with pytest.raises(SystemExit):
        play(files, tmp_path / "run", *argv)
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
