"""The options that SFT, reward model and DPO share, by their effects."""

import jax
import numpy as np
import pytest
import toy_files
from test_trainers import ANSWERS, OTHER, PAIR, play

from rlhf_jax import frozen, hf
from rlhf_jax.checkpoints import peft
from rlhf_jax.models.lora import merge
from rlhf_jax.planning import memory_check
from rlhf_jax.runs import metrics
from rlhf_jax.train.supervised import dpo, reward_model, sft

pytestmark = pytest.mark.usefixtures("quick_compilation")
SLOW = pytest.mark.slow
RUNS = {
    "sft": (sft, "answers.jsonl", ()),
    "dpo": (dpo, "pairs.jsonl", ()),
    "reward-model": (reward_model, "pairs.jsonl", ("--normalise=None",)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model")
    toy_files.jsonl(folder / "answers.jsonl", *ANSWERS * 4)
    toy_files.jsonl(folder / "pairs.jsonl", *[PAIR, PAIR | OTHER] * 4)
    (folder / "book.txt").write_text("the dog sat by the cat . " * 10)
    return folder


def train(name, files, out, *argv):
    command, data, options = RUNS[name]
    how = ("--model", files / "model", "--data", files / data, *options)
    return play(command, out, *how, "--batch-size=4", *argv)


def written(name, out):
    """The parameters of OUT/model; a reward model's are its trunk and score."""
    load = hf.load_reward if name == "reward-model" else hf.load
    return load(out / "model")[1]


def trunk_of(params):
    return params.get("trunk", params)


# --- LoRA ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "reward-model"])
def test_adapters_alone_are_trained(name, files, tmp_path):
    """OUT/model is the base with OUT/adapter merged in, and otherwise the base."""
    argv = ("--lora=2,modules=attention/*", "--learning-rate=1e-2", "--num-steps=3")
    train(name, files, tmp_path / "run", *argv)
    model, start = hf.load(files / "model")
    base = frozen.freeze(start)
    lora, adapters = peft.load(tmp_path / "run" / "adapter", model=model, base=base)
    assert lora.rank == 2
    assert {module.split("/")[0] for module in lora.modules} == {"attention"}
    params = written(name, tmp_path / "run")
    merged = merge(start, adapters, lora=lora)
    for made, expected in ((params, merged), (trunk_of(params), trunk_of(merged))):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
            made,
            {key: expected[key] for key in made},
        )
    moved = jax.tree.map(
        lambda x, y: bool((x != y).any()),
        trunk_of(params)["layers"],
        start["layers"],
    )
    kernels = [
        moved["attention"][projection]["kernel"] for projection in ("query", "value")
    ]
    assert all(kernels)
    assert not any(jax.tree.leaves(moved["mlp"]))
    np.testing.assert_array_equal(
        trunk_of(params)["embed"]["tokens"], start["embed"]["tokens"]
    )


@pytest.mark.slow
def test_the_base_is_stored_as_asked(files, tmp_path, capsys):
    argv = ("--lora=2", "--num-steps=1", "--reference-storage.dtype=bfloat16")
    train("sft", files, tmp_path / "run", *argv)
    (row,) = [x for x in capsys.readouterr().out.splitlines() if "│ base" in x]
    assert "bfloat16" in row
    assert "frozen" in row


# --- the optimizer ------------------------------------------------------------

SUMS = """
import jax
import jax.numpy as jnp
import optax

def rates(rate):
    \"\"\"Adds the learning rate of each update to every parameter.\"\"\"
    def update(grads, count, params=None):
        return jax.tree.map(lambda g: jnp.full_like(g, rate(count)), grads), count + 1
    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
"""
SCHEDULES = {  # sums over four updates of a peak of 1/64
    "linear": 1 + 0.75 + 0.5 + 0.25,  # the default
    "constant": 4.0,
    "constant,warmup=0.5": 0 + 0.5 + 1 + 1,
    "wsd,decay=0.5": 1 + 1 + 1 + 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("sft", "linear"),
        *(pytest.param("sft", schedule, marks=SLOW) for schedule in [*SCHEDULES][1:]),
        ("dpo", "constant,warmup=0.5"),
        pytest.param("dpo", "linear", marks=SLOW),
        ("reward-model", "wsd,decay=0.5"),
        pytest.param("reward-model", "linear", marks=SLOW),
    ],
)
def test_rule_and_schedule_reach_the_update(
    name, schedule, files, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_sums.py").write_text(SUMS)
    options = () if schedule == "linear" else (f"--schedule={schedule}",)
    train(
        *(name, files, tmp_path / "run", "--optimizer=my_sums:rates", *options),
        *("--learning-rate=0.015625", "--num-steps=4", "--held-out=0"),
    )
    start = hf.load(files / "model")[1]
    params = trunk_of(written(name, tmp_path / "run"))
    for made, before in zip(
        jax.tree.leaves(params["layers"]), jax.tree.leaves(start["layers"]), strict=True
    ):
        moved = np.asarray(made) - np.asarray(before)
        np.testing.assert_allclose(moved, SCHEDULES[schedule] / 64, atol=1e-6)


def test_defaults_are_those_of_policy_gradients_but_for_the_rate():
    rates = {"sft": 1e-4, "reward-model": 1e-5, "dpo": 1e-6}
    for name, (command, *_) in RUNS.items():
        options = command.Config.__dataclass_fields__["optimizer"].default
        assert options == type(options)(learning_rate=rates[name])


# --- memory -------------------------------------------------------------------

ONE_STEP = ("--num-steps=1", "--held-out=0")


def most(name):
    """Bytes of parameters, two moments and gradients; DPO adds the reference."""
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(toy_files.params()))
    return {"sft": 4, "dpo": 5, "reward-model": 4}[name] * size


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_cannot_fit_is_refused(name, files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory_check, "limit", lambda place: int(0.95 * most(name)))
    with pytest.raises(SystemExit) as stopped:
        train(name, files, tmp_path / "run", *ONE_STEP)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    role = "reward model" if name == "reward-model" else "policy"
    parts = [role, f"{role}'s optimizer", "gradients"]
    for part in [*parts, *(["reference"] if name == "dpo" else [])]:
        assert f"\n  {part}: " in message
    assert "--lora" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_can_fit_is_not(name, files, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_check, "limit", lambda place: int(0.95 * most(name)))
    train(name, files, tmp_path / "adapters", *ONE_STEP, "--lora=1")
    monkeypatch.setattr(memory_check, "limit", lambda place: int(1.05 * most(name)))
    train(name, files, tmp_path / "fits", *ONE_STEP)


# --- what is watched ----------------------------------------------------------


@pytest.mark.slow
def test_sft_watches_texts_what_is_held_out_and_the_drift(files, tmp_path):
    summary = train(
        *("sft", files, tmp_path / "run", "--num-steps=5", "--learning-rate=1e-2"),
        *("--lora=2", "--held-out=0.5", "--held-out-by=row", "--held-out-every=2"),
        "--eval-every=3",
        *(f"--texts=book={files / 'book.txt'}", "--alarms.drift=1e-6"),
    )
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    measured = {
        name: [row["step"] for row in rows if name in row]
        for name in ("held_out/loss_language_model", "eval/book_nll", "drift/relative")
    }
    assert list(measured.values()) == [[0, 2, 4], [0, 3], [0, 1, 2, 3, 4]]
    assert summary["book_nll_before"] == rows[0]["eval/book_nll"]
    assert summary["book_nll_after"] not in (
        rows[0]["eval/book_nll"],
        rows[3]["eval/book_nll"],
    )
    first, last = (rows[i]["held_out/loss_language_model"] for i in (0, 4))
    assert first == pytest.approx(summary["held_out_loss_before"], abs=1e-6)
    assert first > last > summary["held_out_loss"]
    assert 0 < rows[0]["drift/relative"] < rows[-1]["drift/relative"]
    assert [alarm["name"] for alarm in summary["alarms"]] == ["weight_drift"]


@pytest.mark.slow
def test_a_reward_model_watches_its_accuracy(files, tmp_path):
    summary = train(
        *("reward-model", files, tmp_path / "run", "--num-steps=3", "--lora=2"),
        *("--held-out=0.5", "--held-out-every=2", "--learning-rate=1e-2"),
    )
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "held_out/accuracy" in row] == [0, 2]
    assert rows[0]["held_out/accuracy"] == summary["held_out_accuracy_before"]
    assert summary["held_out_accuracy"] == 1
    assert not any("drift/relative" in row for row in rows)  # nothing of its shape
