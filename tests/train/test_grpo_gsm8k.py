"""GRPO on GSM8K at toy size: it learns, resumes to the bit, and refuses early."""

import contextlib
import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import pytest
import toy_episodes
import toy_files
from test_trainers import contents, play, refused
from tiers import one_in

import rlhf_jax.train.methods.grpo
from rlhf_jax import config, fingerprint, grpo, hf
from rlhf_jax.algorithms.batch import Request
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.self_check import TOLERANCE
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data import tokenization
from rlhf_jax.roles.reference.lifecycle import Mix
from rlhf_jax.runs import command_line, metrics
from rlhf_jax.train import build, loop
from rlhf_jax.train import rows as asked
from rlhf_jax.train.config.prompts import AskedPrompts
from rlhf_jax.train.methods import nash_md, online_dpo, reinforce
from rlhf_jax.train.sampler import make_sampler

pytestmark = pytest.mark.usefixtures("quick_compilation")
WORDS = [*("what", "is", "one", "and", "two", "?", "####"), *map(str, range(10))]
MODEL = config.gpt2(
    vocab_size=len(WORDS) + 2,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    max_positions=16,
)
ROWS = [
    {"question": "what is one and one ?", "answer": "1 + 1 = 2\n#### 2"},
    {"question": "what is two ?", "answer": "#### 2.00"},
]
TOY = (
    *("--batch-size=8", "--group-size=4", "--max-new-tokens=3", "--num-workers=1"),
    *("--prompt-field=question", "--verifier=gsm8k", "--learning-rate=1e-6"),
    *("--kl-coef=0.01", "--overlong=drop"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a valid checkpoint and questions."""
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model", model=MODEL, words=WORDS)
    toy_files.jsonl(folder / "train.jsonl", *ROWS)
    toy_files.jsonl(folder / "many.jsonl", *ROWS * 32)  # two rows are slow to shuffle
    toy_files.jsonl(folder / "test.jsonl", ROWS[0])
    return folder


def gsm8k(out, files, *argv):
    return play(
        *(
            rlhf_jax.train.methods.grpo,
            out,
            "--model",
            files / "model",
            "--prompts",
            files / "train.jsonl",
        ),
        *("--held-out", files / "test.jsonl", *TOY, *argv),
    )


@pytest.mark.slow
def test_reinforce_is_the_same_trainer_with_another_recipe(files, tmp_path):
    summary = play(
        *(reinforce, tmp_path / "run", "--model", files / "model"),
        *("--prompts", files / "many.jsonl", "--held-out", files / "test.jsonl"),
        *("--verifier=gsm8k,unmarked=last_number", "--learning-rate=3e-2"),
        *("--batch-size=64", "--prompt-field=question", "--kl-coef=0.01"),
        *("--max-new-tokens=3", "--num-workers=1", "--surrogate=clip,clip_range=10"),
        "--num-steps=20",
    )
    assert summary["held_out_score_before"] < 1
    assert summary["held_out_score_after"] == 1
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert not any(name.startswith("group/") for name in rows[0])


@pytest.mark.long
@pytest.mark.slow
def test_the_references_are_other_checkpoints(files, tmp_path):
    """One has another width, in int8 on the CPU; the other is the initial policy."""
    wide = dataclasses.replace(MODEL, hidden_size=32, num_heads=4, num_kv_heads=4)
    other = toy_files.checkpoint(tmp_path / "wide", model=wide, words=WORDS)
    options = (
        *(
            "--verifier=gsm8k,unmarked=last_number",
            "--num-steps=2",
            "--learning-rate=1e-2",
        ),
        *("--reference", other, "--reference-storage.dtype=int8"),
        *("--placement.reference=cpu", "--references", f"start={files / 'model'}"),
    )
    gsm8k(tmp_path / "run", files, *options)
    first, last = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert abs(first["objective/kl_start"]) < 1e-5 < abs(first["objective/kl"])
    assert abs(last["objective/kl_start"]) > 1e-5
    before = contents(tmp_path / "run")
    gsm8k(tmp_path / "run", files, *options, "--resume")  # nothing is left to do
    assert contents(tmp_path / "run") == before


@pytest.mark.slow
def test_online_dpo_is_the_same_trainer_with_another_recipe(files, tmp_path):
    summary = play(
        *(online_dpo, tmp_path / "run", "--model", files / "model"),
        *("--prompts", files / "many.jsonl", "--held-out", files / "test.jsonl"),
        *("--verifier=gsm8k,unmarked=last_number", "--learning-rate=1e-2"),
        *("--batch-size=64", "--prompt-field=question"),
        *("--max-new-tokens=3", "--num-workers=1", "--group-size=8"),
        "--num-steps=20",
    )
    assert summary["held_out_score_before"] < 1
    assert summary["held_out_score_after"] == 1
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert rows[0]["loss/dpo"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[0]["objective/kl_coef"] == pytest.approx(0.1)
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert rows[-1]["objective/scores"] > rows[0]["objective/scores"] + 0.3


@pytest.mark.slow
def test_the_mixture_is_sampled_with_the_run_s_reference(files, monkeypatch):
    """Records the sampler's arguments without sampling."""
    recorded_options = {}

    def sample(policy, **options):
        recorded_options.update(options, policy=policy)
        return options["key"]

    monkeypatch.setattr(iteration, "sample", sample)
    words = ("--model", str(files / "model"), "--prompts=x", "--verifier=exact")
    parse = functools.partial(command_line.parse, nash_md.Config, description="")
    config = parse(
        argv=[*words, "--out=x", "--sampler=here,cache=int8,prefill_chunk=2"]
    )
    meshes = build.Meshes.of(config)
    models = build.build(config, pretrained.load(config.start.model), meshes=meshes)
    sampler = make_sampler(config, models, meshes=meshes, stack=contextlib.ExitStack())
    output = sampler(jnp.float32(1), Request(jnp.float32(3), jnp.float32(4)))
    assert output == 4
    stored = jax.tree.leaves(recorded_options["frozen"].reference.stored)
    expected = jax.tree.leaves(models.reference.stored)
    assert [leaf.shape for leaf in stored] == [leaf.shape for leaf in expected]
    model = dataclasses.replace(models.recipe.model, cache="int8", prefill_chunk=2)
    assert recorded_options["recipe"] == dataclasses.replace(models.recipe, model=model)
    # In int8 the reference of the mixture is as far from the policy as int8 is.
    plain = parse(argv=[*words, "--out=x"])
    stored = parse(argv=[*words, "--out=x", "--reference-storage.dtype=int8"])
    assert stored.sampler_tolerance == plain.sampler_tolerance + TOLERANCE["int8"]


@pytest.mark.slow
def test_nash_md_is_the_same_trainer_with_another_recipe(files, tmp_path):
    out = tmp_path / "run"
    argv = (
        *("--model", files / "model", "--prompts", files / "many.jsonl"),
        *("--held-out", files / "test.jsonl", "--verifier=gsm8k,unmarked=last_number"),
        *("--learning-rate=3e-2", "--batch-size=64", "--max-new-tokens=3"),
        *("--num-workers=1", "--num-steps=20", "--mixture=0.25"),
        *("--reference-storage.dtype=int8", "--prompt-field=question"),
        "--kl-coef=0.01",
    )
    summary = play(nash_md, out, *argv)
    assert summary["held_out_score_before"] < 1
    assert summary["held_out_score_after"] == 1
    rows = metrics.read(out / "metrics.jsonl")
    assert rows[0]["pair/win"] == pytest.approx(0.5, abs=0.1)
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=0.01)
    assert rows[-1]["objective/kl"] > 1
    assert rows[-1]["objective/scores"] > 0.9  # of the policy, not of the mixture
    assert rows[-1]["policy/sampler_mismatch"] < 1e-5  # of rows that are trained on
    shown = metrics.read(out / "samples.jsonl")
    assert [row["version"] for row in shown] == [row["step"] for row in shown]
    assert len(shown) == 2 * 4
    for row in shown:  # of the policy and not of the mixture
        assert "".join(row["tokens"]) == row["response"]
        assert len(row["logprobs"]) == len(row["ref_logprobs"]) == len(row["tokens"])
    for row in shown[:4]:
        assert row["ref_logprobs"] == pytest.approx(row["logprobs"], abs=1e-3)
    before = contents(out)
    play(nash_md, out, *argv, "--resume")  # nothing is left to do
    assert contents(out) == before


@pytest.mark.slow
def test_adapters_that_become_the_reference_are_on_the_mesh(files, tmp_path):
    argv = ("--lora=2", "--lifecycle.move=reset,every=1", "--num-steps=3")
    for out, more in {"one": (), "mesh": ("--placement.policy=data=4,fsdp=2",)}.items():
        gsm8k(tmp_path / out, files, *argv, *more)
    toy_episodes.assert_same_run(tmp_path / "mesh", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--lora=2",)], ids=["", "adapters"])
def test_the_mixture_of_nash_md_is_with_the_reference_as_it_moves(
    files, tmp_path, monkeypatch, more
):
    mixed, inner = [], loop.Loop.draw

    def draw(self, policy, *of_step):
        reference = self.sampler._frozen.reference
        same = fingerprint.digests(policy) == reference.source_digests
        mixed.append(bool(same.all()))
        return inner(self, policy, *of_step)

    monkeypatch.setattr(loop.Loop, "draw", draw)
    argv = (
        *("--model", files / "model", "--prompts", files / "many.jsonl"),
        *("--rewards=size=length", "--prompt-field=question", "--kl-coef=0.01"),
        *("--batch-size=16", "--max-new-tokens=6", "--num-steps=4"),
        *("--learning-rate=1e-2", "--lifecycle.move=reset,every=2", *more),
    )
    play(nash_md, tmp_path / "run", *argv)
    # Of steps 0 to 3, the first in the rehearsal; it is reset after every second one.
    assert mixed == [True, False, True, False]


@pytest.mark.slow
def test_the_mixture_of_nash_md_may_have_another_checkpoint(files, tmp_path):
    """The self-check expects samples of the policy, which the mixture is not."""
    toy_files.checkpoint(tmp_path / "other", model=MODEL, words=WORDS, seed=3)
    argv = (
        *("--model", files / "model", "--prompts", files / "many.jsonl"),
        *("--rewards=size=length", "--prompt-field=question", "--kl-coef=0.01"),
        *("--batch-size=16", "--max-new-tokens=6", "--num-steps=1"),
        *("--learning-rate=1e-2", "--reference", tmp_path / "other"),
    )
    play(nash_md, tmp_path / "run", *argv)
    (row,) = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert row["policy/sampler_mismatch"] < 1e-4
    assert row["objective/kl"] != 0


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--reference=none",
            "--reference none cannot be combined with rlhf-jax nash-md",
        ),
        ("--batch-size=7", "--batch-size: expected an even number, for a response of"),
        ("--mixture=1", "--mixture: expected a number above 0 and below 1, got"),
        ("--placement.reference=last", "because its mixture or greedy responses are"),
        ("--placement.sampler=data=1", "because its mixture or greedy responses are"),
        (
            "--fixed-length=3",
            "expected options of rlhf-jax nash-md, got '--fixed-length",
        ),
        (
            "--continuous-batching=4",
            "expected options of rlhf-jax nash-md, got '--continuous-batching",
        ),
    ],
)
def test_options_that_nash_md_refuses(files, tmp_path, capsys, argv, message):
    words = ("--model=x", "--prompts=x", "--verifier=exact", "--batch-size=8")
    with pytest.raises(SystemExit):
        play(nash_md, tmp_path / "run", *words, argv)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--reference=none",
            "--reference none cannot be combined with rlhf-jax online-dpo",
        ),
        ("--kl-coef=0", "--kl-coef: expected a finite number above 0"),
        (
            "--kl-control=linear,end=0",
            "--kl-control linear: end: expected a finite number above 0, got 0.0; "
            "choose end > 0",
        ),
        (
            "--kl-control=lagrangian,target=6,unit=response",
            "--kl-control lagrangian: min_kl_coef: expected a finite number above 0, "
            "got 0.0; choose min_kl_coef > 0",
        ),
        (
            "--packing=auto",
            "with rlhf-jax online-dpo, because its loss reads padded rows",
        ),
        ("--group-size=3", "3"),
        ("--micro-batch-size=8", "expected --micro-batch-size to divide the 4 pairs"),
        (
            "--references=other=x,weight=1",
            "with rlhf-jax online-dpo, because its loss reads one",
        ),
        (
            "--surrogate=sapo",
            "expected options of rlhf-jax online-dpo, got '--surrogate",
        ),
    ],
)
def test_options_that_online_dpo_refuses(files, tmp_path, capsys, argv, message):
    words = ("--model=x", "--prompts=x", "--verifier=exact", "--batch-size=8")
    with pytest.raises(SystemExit):
        play(online_dpo, tmp_path / "run", *words, argv)
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.long  # test_packed_learning.py has the losses
@pytest.mark.parametrize("packing", [(), ("--packing=auto",)])
@pytest.mark.parametrize(
    "preset",
    [
        *("rloo-masked", "gspo", "cispo", "sapo", "dapo", "dr-grpo"),
        *("luspo", "gmpo", "dppo", "vespo", "topr", "opo", "clip-cov", "kl-cov"),
        *("top-entropy", "gdpo", "skywork-or1", "remax"),
        *("ema-pg", "gradient-penalty", "dar", "score-centring"),
        "reinforce++-baseline",
    ],
)
def test_each_preset_runs(files, tmp_path, preset, packing):
    small = (
        "--verifier=gsm8k,unmarked=last_number",
        "--num-steps=2",
        "--num-minibatches=2",
    )
    if preset == "score-centring":  # whose loss reads padded rows
        small, packing = (*small, "--surrogate=centred,top_k=8"), ()
    small += ("--batch-size=32", "--learning-rate=1e-3", *packing)
    of_dapo = preset in ("dapo", "top-entropy")
    if preset == "ema-pg":
        small += ("--batch-size=40", "--penalty.top-k=4")
    if preset == "dar":  # whose β is the surrogate's own
        small += ("--kl-coef=0",)
    if of_dapo:
        small += ("--scores.overlong-after=2", "--scores.overlong-buffer=1")
    rlhf_jax.train.methods.grpo.command(
        [
            *(f"--preset={preset}", f"--out={tmp_path / 'run'}", "--no-progress"),
            *(f"--model={files / 'model'}", f"--prompts={files / 'train.jsonl'}"),
            *(f"--held-out={files / 'test.jsonl'}", *TOY, *small),
            "--reference=start",  # to which TOY has a KL, as some presets have not
        ]
    )
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["update/skipped"] for row in rows] == [0, 0]
    assert rows[0]["policy/grad_norm"] > 0
    gated, masked = "policy/gate" in rows[0], "response/masked" in rows[0]
    assert gated == (preset in ("sapo", "vespo", "dar"))
    left_out = of_dapo or preset in ("rloo-masked", "skywork-or1", "remax")
    assert masked == left_out
    assert ("group/redraws" in rows[0]) == of_dapo
    chooses = preset in ("top-entropy", "clip-cov", "kl-cov")
    assert ("policy/chosen" in rows[0]) == chooses
    assert ("objective/entropy_coef" in rows[0]) == (preset == "skywork-or1")


@pytest.mark.slow
def test_the_update_is_compiled_once_whatever_is_drawn_again(
    files, tmp_path, monkeypatch
):
    """A function returns plain numbers, but redrawn groups have a record of scores."""
    (tmp_path / "remainders.py").write_text(
        "def score(prompts, responses, rows):\n"
        "    return [len(response) % 3 for response in responses]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = (
        *("--model", files / "model", "--prompts", files / "many.jsonl"),
        *("--reward=remainders:score", "--prompt-field=question", "--group-size=4"),
        *("--batch-size=16", "--max-new-tokens=6", "--num-steps=3", "--max-redraws=2"),
    )
    summary = play(rlhf_jax.train.methods.grpo, tmp_path / "run", *argv)
    assert summary["compiled"]["learn"] == 1


@pytest.mark.slow
def test_groups_of_equal_scores_are_drawn_again_up_to_a_limit(files, tmp_path):
    """A small policy is right now and then, so some groups have unequal scores."""
    argv = (
        "--verifier=gsm8k,unmarked=last_number",
        "--num-steps=4",
        "--learning-rate=1e-3",
    )
    argv += ("--equal-groups=leave_out", "--batch-size=32")
    gsm8k(tmp_path / "plain", files, *argv)
    gsm8k(tmp_path / "run", files, *argv, "--max-redraws=3", "--snapshot-every=2")
    plain, rows = (
        metrics.read(tmp_path / name / "metrics.jsonl") for name in ("plain", "run")
    )
    equal = [row["group/equal_fraction"] for row in plain]
    redraws = [row["group/redraws"] for row in rows]
    assert max(equal) > 0
    assert redraws[0] > 0
    assert max(redraws) <= 3
    # Of the first step, before the runs part.
    assert rows[0]["group/equal_fraction"] < equal[0]
    assert rows[0]["response/masked"] == rows[0]["group/equal_fraction"]
    assert rows[0]["group/drawn_equal_fraction"] > rows[0]["group/equal_fraction"]
    # The draws are a function of the seed and the step: a run resumes to the bit.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    for name in (again / "snapshots" / "grpo").iterdir():
        if name.name == "4":
            shutil.rmtree(name)
    gsm8k(again, files, *argv, "--max-redraws=3", "--snapshot-every=2", "--resume")
    assert metrics.read(again / "metrics.jsonl") == rows
    with pytest.raises(SystemExit):
        gsm8k(tmp_path / "never", files, *argv, "--max-redraws=1", "--verifier=exact")


@pytest.mark.long
@pytest.mark.slow
def test_sampling_in_int8_is_weighted_and_says_how_far_it_is(files, tmp_path):
    argv = (
        "--verifier=gsm8k,unmarked=last_number",
        "--num-steps=2",
        "--sampler=here,dtype=int8",
    )
    gsm8k(tmp_path / "ratio", files, *argv)
    gsm8k(tmp_path / "weights", files, *argv, "--sampler-correction=truncate")
    of_ratio, of_weights = (
        metrics.read(tmp_path / name / "metrics.jsonl") for name in ("ratio", "weights")
    )
    for mine, other in zip(of_weights, of_ratio, strict=True):
        assert mine["policy/sampler_mismatch"] > 1e-6
        assert mine["policy/sampler_weight"] == pytest.approx(1, abs=0.05)
        assert mine["policy/sampler_weight_capped"] == 0
        assert 0.99 < mine["policy/sampler_ess"] <= 1
        assert mine["policy/sampler_kl_k3"] > 1e-9
        assert mine["policy/staleness"] == 0  # rounded, but not older
        assert "policy/sampler_weight" not in other
    drawn = metrics.read(tmp_path / "weights" / "samples.jsonl")
    assert {row["version"] for row in drawn} == {0}
    first = "policy/sampler_mismatch"
    assert of_weights[0][first] == pytest.approx(of_ratio[0][first], rel=1e-3)


@pytest.mark.long
@pytest.mark.slow
def test_pages_change_no_run_and_resume(files, tmp_path):
    """Also with packed rows."""
    argv = (
        "--verifier=gsm8k,unmarked=last_number",
        "--num-steps=2",
        "--continuous-batching=4",
    )
    argv += ("--batch-size=16", "--packing=auto", "--snapshot-every=1")
    in_pages = (*argv, "--sampler=here,cache_pages=13,page_size=2")
    gsm8k(tmp_path / "plain", files, *argv)
    gsm8k(tmp_path / "pages", files, *in_pages)
    plain, pages = (
        metrics.read(tmp_path / name / "metrics.jsonl") for name in ("plain", "pages")
    )
    for mine, other in zip(pages, plain, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            if name.startswith("trust/"):  # of rounding
                continue
            if isinstance(value, float):
                assert value == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
            else:
                assert value == other[name]
    shutil.rmtree(tmp_path / "pages" / "snapshots" / "grpo" / "2")
    gsm8k(tmp_path / "pages", files, *in_pages, "--resume")
    assert metrics.read(tmp_path / "pages" / "metrics.jsonl") == pages


@pytest.mark.long
@pytest.mark.slow
def test_packed_rows_learn_what_padded_ones_do(files, tmp_path, capsys):
    argv = (
        "--verifier=gsm8k,unmarked=last_number",
        "--num-steps=4",
        "--learning-rate=1e-3",
    )
    padded = gsm8k(tmp_path / "padded", files, *argv)
    assert "packing" not in padded
    packed = gsm8k(
        *(tmp_path / "packed", files, *argv),
        "--packing=auto,max_tokens_per_device=9,width=9",
    )
    assert sum(packed["packing"]["used"].values()) > 4
    for mine, other in zip(
        metrics.read(tmp_path / "packed" / "metrics.jsonl"),
        metrics.read(tmp_path / "padded" / "metrics.jsonl"),
        strict=True,
    ):
        assert mine.keys() == other.keys()
        for name in mine.keys() - {"stage"}:
            if not name.startswith("trust/"):  # of rounding there
                assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4)
    # A prompt that leaves no room in a packed row is left out, or told.
    with pytest.raises(SystemExit):
        gsm8k(
            *(tmp_path / "narrow", files, *argv),
            *("--packing=auto,width=8", "--overlong=error"),
        )
    errors = " ".join(capsys.readouterr().err.split())
    assert "train.jsonl:1: expected at most 5 tokens" in errors
    assert "raise the width of --packing or lower --max-new-tokens" in errors


@pytest.mark.slow
def test_it_learns_the_answers_and_resumes_to_the_bit(files, tmp_path, monkeypatch):
    traced, learn = [], iteration.learn

    @functools.wraps(learn)
    def counted(*args, **kwargs):
        traced.append(learn)
        return learn(*args, **kwargs)

    monkeypatch.setattr(iteration, "learn", counted)
    argv = (
        *(
            "--verifier=gsm8k,unmarked=last_number",
            "--learning-rate=3e-2",
            "--batch-size=64",
        ),
        *(
            "--snapshot-every=10",
            "--keep-snapshots=9",
            "--surrogate=clip,clip_range=10",
        ),
        "--num-steps=20",
    )
    whole = gsm8k(tmp_path / "whole", files, *argv)
    assert len(traced) == 1  # the rehearsal's program is the run's
    assert whole["held_out_score_before"] < 1
    assert whole["held_out_score_after"] == 1
    assert whole["score_last"] > whole["score_first"] + 0.5
    assert whole["kl_last"] > 0.1
    rows = metrics.read(tmp_path / "whole" / "metrics.jsonl")
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert rows[0]["objective/kl_coef"] == pytest.approx(0.01)
    assert all(row["reward/failed"] == row["reward/timed_out"] == 0 for row in rows)
    for row in metrics.read(tmp_path / "whole" / "samples.jsonl"):
        last = row["response"].split()[-1:]
        assert row["score"] == float(last == ["2"])
    # As a kill after step 10 leaves it, but for rows that a resume cuts off.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "whole", again)
    shutil.rmtree(again / "snapshots" / "grpo" / "20")
    shutil.rmtree(again / "model")
    gsm8k(again, files, *argv, "--resume")
    assert contents(again / "model") == contents(tmp_path / "whole" / "model")
    for name in ("metrics.jsonl", "samples.jsonl"):
        left = (tmp_path / "whole" / name).read_bytes()
        assert (again / name).read_bytes() == left


@pytest.mark.long
def test_the_real_files_without_a_reference(shared_data, tmp_path):
    """With GPT-2's tokenizer; an untrained tiny model solves nothing."""
    tokenizer = tokenization.load_tokenizer(shared_data / "gpt2-tokenizer")
    model = config.gpt2(
        vocab_size=50257, hidden_size=8, num_layers=1, num_heads=1, max_positions=128
    )
    hf.save(tmp_path / "model", model, toy_files.params(model), tokenizer=tokenizer)
    file = shared_data / "gsm8k"
    summary = play(
        *(rlhf_jax.train.methods.grpo, tmp_path / "run", "--model", tmp_path / "model"),
        *("--prompts", file / "train.jsonl", "--held-out", file / "test.jsonl"),
        *(
            "--reference=none",
            "--num-steps=2",
            "--max-new-tokens=8",
            "--held-out-rows=20",
        ),
        *("--batch-size=8", "--group-size=4", "--num-workers=1"),
        *("--prompt-field=question", "--verifier=gsm8k", "--overlong=drop"),
        "--template=Question: {prompt}\nAnswer:",
    )
    assert summary["held_out_score_before"] == summary["held_out_score_after"] == 0
    assert summary["kl_last"] is None
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["group/equal_fraction"] for row in rows] == [1, 1]
    assert all(row["reward/failed"] == 0 for row in rows)
    samples = metrics.read(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 4
    for row in samples:
        assert row["prompt"].startswith("Question: ")
        assert row["prompt"].endswith("\nAnswer:")
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()


def test_a_question_is_put_as_text_or_as_a_message():
    options = AskedPrompts(prompts="", template="Q: {prompt}")
    assert asked._put("Why?", options=options) == "Q: Why?"
    messages = [{"role": "user", "content": "Q: Why?"}]
    chat = dataclasses.replace(options, chat=True)
    assert asked._put("Why?", options=chat) == messages
    system = {"role": "system", "content": "{prompt}"}
    question = [system, {"role": "user", "content": "Why?"}]
    for choice in (options, chat):  # a row's own messages stay, but for the last
        assert asked._put(question, options=choice) == [system, *messages]


UNMARKED = {"question": "what is one ?", "answer": "one"}


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("argv", "message"),
    one_in(
        3,
        [
            (
                ("--reference=none", "--kl-coef=0.1"),
                "--reference none cannot be combined with --kl-coef 0.1, because the "
                "latter",
            ),
            (
                ("--template=question",),
                "--template: expected {prompt} where the prom",
            ),
            (("--chat",), ".jsonl:1: expected a tokenizer with a chat template"),
            (
                ("--batch-size=6",),
                "--group-size: expected to divide the 6 rows of a batch",
            ),
            (("--group-size=1",), "--group-size: expected at least 2, got 1"),
            (
                ("--kl-coef=-1",),
                "--kl-coef: expected a finite number, 0 or more, got -1",
            ),
            (
                ("--held-out-rows=0",),
                "--held-out-rows: expected a finite number above 0, got 0",
            ),
            (
                ("--num-minibatches=3",),
                "expected --num-minibatches to divide the 8 rows",
            ),
            (("--timeout=0",), "timeout: expected a finite number above 0, got 0"),
            (
                ("--prompt-field=q",),
                "train.jsonl:1: expected a field 'q', got",
            ),
            (
                ("--verifier=gsm8k,answer_field=a",),
                "train.jsonl:1: expected a field 'a', got",
            ),
            (
                ("--max-new-tokens=12", "--overlong=error"),
                "train.jsonl:1: expected at most 4 tokens, got 6 of 'what",
            ),
            (
                ("--max-new-tokens=1000000000",),
                "--max-new-tokens: expected a number below 16, got 1000000000; the",
            ),
            (
                ("--sampler=here,dtype=int8", "--sampler-correction=recompute"),
                "a --sampler that rounds cannot be combined with --sampler-correction "
                "recompute, because recompute does not correct",
            ),
            (
                ("--sampler=here,cache_pages=4",),
                "cache_pages of --sampler: expected --continuous-batching with it",
            ),
            (
                (
                    *("--sampler=here,cache_pages=4", "--continuous-batching=4"),
                    "--placement.policy=fsdp=8",
                ),
                "--sampler: expected cache_pages on a mesh without fsdp and context",
            ),
            (
                (
                    *("--sampler=here,cache_pages=5", "--continuous-batching=4"),
                    "--placement.policy=data=8",
                ),
                "cache_pages of --sampler: expected a multiple of 8, as each share of "
                "th",
            ),
            (
                (
                    "--sampler=here,page_size=2,cache_pages=2",
                    *("--continuous-batching=4", "--max-new-tokens=5"),
                ),
                "cache_pages of --sampler: expected a number of at least 3, got 2; a",
            ),
            (
                ("--sampler=here,dtype=float16",),
                "expected dtype to be one of float32, bfloat16, int8, got 'float16'",
            ),
            (
                ("--max-new-tokens=15",),
                "expected a row of at most 1 tokens, got 2 rows",
            ),
        ],
    ),
)
def test_options_that_are_refused(files, tmp_path, capsys, argv, message):
    run = lambda out: gsm8k(out, files, *argv)  # noqa: E731
    assert message in refused(capsys, tmp_path, run)


@pytest.mark.parametrize("option", ["--prompts", "--held-out"])
def test_an_answer_without_a_number_is_named_by_file_and_line(
    files, tmp_path, capsys, option
):
    bad = toy_files.jsonl(tmp_path / "bad.jsonl", *ROWS, UNMARKED)
    run = lambda out: gsm8k(out, files, option, bad)  # noqa: E731
    errors = refused(capsys, tmp_path, run)
    assert "bad.jsonl:3: expected #### and a number at the end of 'answer'" in errors


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("preset", "recipe"),
    [
        ("deepseekmath", grpo.published.DEEPSEEK_MATH),
        ("rloo", grpo.published.RLOO),
        ("rloo-masked", grpo.published.RLOO_MASKED),
        ("gspo", grpo.published.GSPO),
        ("cispo", grpo.published.CISPO),
        ("sapo", grpo.published.SAPO),
        ("dapo", grpo.published.DAPO),
        ("dar", grpo.published.DAR),
        ("score-centring", grpo.published.CENTRED),
        ("dr-grpo", grpo.published.DR_GRPO),
        ("luspo", grpo.published.LUSPO),
        ("gmpo", grpo.published.GMPO),
        ("dppo", grpo.published.DPPO),
        ("vespo", grpo.published.VESPO),
        ("topr", grpo.published.TOPR),
        ("opo", grpo.published.OPO),
        ("gdpo", grpo.published.GDPO),
        ("skywork-or1", grpo.published.SKYWORK_OR1),
        ("remax", grpo.published.REMAX),
        ("clip-cov", grpo.published.CLIP_COV),
        ("kl-cov", grpo.published.KL_COV),
        ("top-entropy", grpo.published.TOP_ENTROPY),
        ("ema-pg", grpo.published.EMA_PG),
        ("gradient-penalty", grpo.published.GRADIENT_PENALTY),
        ("reinforce++-baseline", grpo.published.REINFORCE_BASELINE),
    ],
)
def test_presets_are_those_of_the_library(preset, recipe):
    needed = ("--out=x", "--model=x", "--prompts=x", "--verifier=exact")
    parse = functools.partial(
        command_line.parse,
        rlhf_jax.train.methods.grpo.Config,
        description="",
        presets=rlhf_jax.train.methods.grpo.PRESETS,
    )
    recipe = dataclasses.replace(recipe, temperature=1.0)  # as without a preset
    parsed = parse(argv=[*needed, "--preset", preset])
    assert parsed.method == recipe
    without = {"gspo", "cispo", "sapo", "dapo", "dr-grpo"}
    without |= {"luspo", "gmpo", "dppo", "vespo", "topr", "opo", "gradient-penalty"}
    without |= {
        "score-centring",
        "clip-cov",
        "kl-cov",
        "top-entropy",
        "gdpo",
        "skywork-or1",
    }
    assert (parsed.reference.reference == "none") == (preset in without)
    default = 0.0 if preset in {*without, "dar"} else 0.05
    coefs = {"deepseekmath": 0.04, "ema-pg": 0.001}
    assert parsed.kl_coef == coefs.get(preset, default)
    move = Mix(every=10, rate=0.1) if preset == "ema-pg" else None
    assert parsed.reference.lifecycle.move == move
    of_dapo = preset in ("dapo", "top-entropy")
    assert (parsed.sampler.max_redraws > 0) == of_dapo
    changed = parse(argv=[*needed, "--preset", preset, "--entropy-coef=0.1"])
    assert changed.method == dataclasses.replace(recipe, entropy_coef=0.1)
