"""A reward model from your own preference pairs, on top of a language model.

    rlhf-jax reward-model --model runs/sft/model --data pairs.jsonl \\
        --out runs/reward

A line of --data is {"prompt": ..., "chosen": ..., "rejected": ...}, or two dialogues
that share their beginning, as in hh-rlhf; messages go through the tokenizer's chat
template. A fresh head on the trunk of --model learns the pairs by the Bradley-Terry
loss. Before and after training, scores are normalised to mean 0 and standard deviation
1 on responses that --model, the reference of PPO, samples to the prompts of the pairs.
With --normalise demonstrations --demonstrations FILE a bias alone sets the mean to 0
on demonstrations, after training. OUT/model is a Hugging Face checkpoint (sequence
classification with one label) for `rlhf-jax ppo --reward-model`.

It needs one device that holds the parameters in float32 five times over (GPT-2 small:
2.4 GiB). Fewer than about 2,000 pairs leave the accuracy near chance: on top of the
second model of `rlhf-jax sft`, the 730 pairs of hh-rlhf (harmless, first 1,800) that
fit into its context take about a minute on 2 laptop cores and give 0.48 on the 73
held-out pairs, where the standard error is 0.06.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax.algorithms import reward_model, state
from rlhf_jax.algorithms.batch import Prompts, Rollout, Sequences
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.checkpoints import hf, pretrained
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches, digests, encoding, files, splits
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.examples import Example, Pair
from rlhf_jax.data.receipts import Receipt, Receipts, items
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.devices.placement import PolicyPlacement
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import profiled
from rlhf_jax.roles import rewards
from rlhf_jax.runs import command_line, folder, plots, report, run
from rlhf_jax.train.start import TrainerConfig, load_start, receipt_of

Array = jax.Array
Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TrainerConfig):
    """The options of `rlhf-jax reward-model`."""

    model: str
    """Language model to start from, a checkpoint folder or hub id."""
    data: str
    """Preference pairs: JSONL, or hf:NAME:SPLIT."""
    margin_field: str | None = None
    """Field of --data with the margin by which the chosen response must win; None has
    no margin."""
    max_length: int | None = None
    """Longest prompt with its response, tokens; None is the model's context."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of longer pairs and demonstrations: an error, or drop them."""
    buckets: tuple[int, ...] | None = None
    """Widths to which a batch may be padded, tokens; None is the longest pair."""
    held_out: float = 0.1
    """Share of the pairs that is held out, by prompt, to measure the accuracy; 0
    holds out none."""
    num_steps: int | None = None
    """Number of updates; None is one pass over the pairs."""
    batch_size: int = 16
    """Pairs per update."""
    micro_batch_size: int | None = None
    """Pairs per forward and backward pass; None is all of an update."""
    learning_rate: float = 1e-5
    """Learning rate at the start; it falls to 0 linearly."""
    max_grad_norm: float = 1.0
    """Norm to which larger gradients are scaled down."""
    normalise: Literal["samples", "demonstrations"] | None = "samples"
    """Responses on which scores are normalised: samples to mean 0 and standard
    deviation 1, demonstrations to mean 0; None does not normalise."""
    demonstrations: str | None = None
    """Demonstrations for --normalise demonstrations, in the files of `rlhf-jax sft`."""
    num_samples: int = 256
    """Number of responses sampled from --model to normalise on, in whole batches."""
    max_new_tokens: int = 48
    """Longest of these responses, tokens."""
    temperature: float = 0.7
    """Sampling temperature of these responses; use that of PPO."""
    placement: PolicyPlacement = dataclasses.field(default_factory=PolicyPlacement)
    """Where each role is: devices, mesh and memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is not None:
            checks.positive(num_steps=self.num_steps)
        checks.rows(batch_size=self.batch_size)
        checks.positive(
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
            num_samples=self.num_samples,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
        )
        if (self.normalise == "demonstrations") != (self.demonstrations is not None):
            raise InputError(
                f"expected --normalise demonstrations and --demonstrations together, "
                f"got {self.normalise} and {self.demonstrations}; give both, or neither"
            )
        values = dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            unread = field.name in SAMPLING and self.normalise != "samples"
            if unread and values[field.name] != field.default:
                raise InputError(
                    f"{field.name}: expected none with --normalise {self.normalise}, "
                    f"for which nothing is sampled, got {values[field.name]}; leave it "
                    f"out"
                )


SCREEN = {
    "Start": ("model",),
    "Data": ("data", "max_length", "overlong"),
    "Training": ("num_steps", "batch_size", "learning_rate", "held_out", "dtype"),
    "Scores": ("normalise", "max_new_tokens", "temperature"),
    "Run": ("out", "resume"),
}
"""The options of --help."""
SAMPLING = ("num_samples", "max_new_tokens", "temperature")


def prompts_to_answer(
    pairs: list[Pair],
    *,
    options: Config,
    start: Pretrained,
    receipt: Receipt | None = None,
) -> Batches[Prompts]:
    """The prompts of the pairs that leave room for a response.

    Args:
      receipt: of the same pairs; it is told of the others.
    """
    room = start.room(max_new_tokens=options.max_new_tokens)
    short = [pair.prompt for pair in pairs if len(pair.prompt) <= room]
    if not short:
        raise InputError(
            f"expected a prompt of at most {room} tokens to sample a response to (the "
            f"context of {start.model.max_positions} less --max-new-tokens), got none; "
            f"ask for fewer new tokens"
        )
    if receipt is not None:
        for where, pair in zip(receipt.places, pairs, strict=True):
            if len(pair.prompt) > room:
                asked = f"{options.max_new_tokens} tokens"
                receipt.drop(f"no room for a response of {asked}", where=where)
        receipt.use("normalised on", items.of_prompts(short))
    return batches.prompt_batches(
        short, batch_size=options.batch_size, seed=options.seed, pad_id=start.pad_id
    )


def demonstrations_to_score(
    options: Config, start: Pretrained, *, receipt: Receipt | None = None
) -> tuple[list[Sequences], int]:
    """What people wrote, in batches, and how many rows of them count.

    Args:
      receipt: is told of every row, and of those that are left out.
    """
    assert options.demonstrations is not None  # checked by Config
    examples = encoding.encode_demonstrations(
        start.tokenizer,
        files.read_demonstrations(options.demonstrations, receipt=receipt),
        max_length=start.limit(options.max_length),
        stop_ids=start.stop_ids,
        overlong=options.overlong,
        receipt=receipt,
    )
    if receipt is not None:
        receipt.use("normalised on", items.of_texts(examples))
    texts = batches.sequences_in_order(
        examples, batch_size=options.batch_size, pad_id=start.pad_id
    )
    return texts, len(examples)


def scores_of(
    params: Params,
    texts: Sequence[Sequences | Rollout],
    *,
    rows: int,
    score: Callable[..., Array],
) -> np.ndarray:
    """f32[rows], a score a text; batches may be filled up beyond that."""
    scored = [score(params, tokens=text.tokens, mask=text.mask) for text in texts]
    return np.concatenate(processes.whole(scored))[:rows]


def accuracy(
    params: Params,
    pairs: list[Pair],
    *,
    score: Callable[..., Array],
    batch_size: int,
    pad_id: int,
) -> float | None:
    """Share of pairs whose chosen side scores higher; None without any pair."""
    if not pairs:
        return None
    chosen = [Example(pair.prompt, pair.chosen) for pair in pairs]
    rejected = [Example(pair.prompt, pair.rejected) for pair in pairs]
    texts = batches.sequences_in_order(
        chosen + rejected, batch_size=batch_size, pad_id=pad_id
    )
    scores = scores_of(params, texts, rows=2 * len(pairs), score=score)
    left, right = np.split(scores, 2)
    return float((left > right).mean())


def main(options: Config) -> None:
    """Runs `rlhf-jax reward-model` with its options."""
    started = time.perf_counter()
    mesh = options.placement.policy_mesh()
    receipts = Receipts()
    data = receipts.source("--data", options.data, called="pairs")
    rows = files.read_preferences(options.data, receipt=data)
    start = load_start(options.model, options=options, mesh=mesh)
    model = start.model
    everything = encoding.encode_preferences(
        start.tokenizer,
        rows,
        max_length=start.limit(options.max_length),
        stop_ids=start.stop_ids,
        margin=options.margin_field,
        overlong=options.overlong,
        widest=None if options.buckets is None else max(options.buckets, default=0),
        receipt=data,
    )
    pairs, held_out = splits.hold_out(
        everything,
        share=options.held_out,
        seed=options.seed,
        receipt=data,
    )
    data.use("training", items.of_pairs(pairs))
    data.use("held out", items.of_pairs(held_out))
    processes.agree("the pairs", digests.of_tokens(everything))
    preferences = batches.preference_batches(
        pairs,
        batch_size=options.batch_size,
        seed=options.seed,
        pad_id=start.pad_id,
        buckets=options.buckets,
        share=row_sharding.row_share(mesh),
    ).map(lambda batch: row_sharding.put_rows(batch, mesh=mesh))
    num_steps = options.num_steps
    if num_steps is None:
        num_steps = preferences.steps_per_epoch
    optimizer = optax.chain(
        optax.clip_by_global_norm(options.max_grad_norm),
        optax.adam(
            optax.linear_schedule(options.learning_rate, 0.0, num_steps), eps=1e-5
        ),
    )
    on = functools.partial(sharding.on, mesh)
    update = jax.jit(
        functools.partial(
            on(reward_model.update),
            model=model,
            optimizer=optimizer,
            micro_batch_size=options.micro_batch_size,
        ),
        donate_argnames=("state",),
    )
    sample = jax.jit(
        functools.partial(
            on(rollout.rollout),
            model=model,
            max_new_tokens=options.max_new_tokens,
            stop_ids=start.stop_ids,
            temperature=options.temperature,
        )
    )
    score = jax.jit(functools.partial(on(rewards.sequence_scores), model=model))
    head_key, sample_key = jax.random.split(jax.random.key(options.seed))
    initial = state.supervised_state(
        rewards.init(head_key, start.params, model=model), optimizer=optimizer
    )
    initial = sharding.place(initial, mesh=mesh)  # the head and the counters too
    # What does not fit is told here, before there is a run folder.
    jax.eval_shape(update, initial, batch=preferences[0])
    texts, num_texts = [], 0  # to normalise on
    prompts = None
    if options.normalise == "samples":
        sampled = receipts.source(
            "--data, to sample from", options.data, called="prompts"
        )
        sampled.rows_of(data)
        prompts = prompts_to_answer(
            everything, options=options, start=start, receipt=sampled
        )
        jax.eval_shape(sample, start.params, prompts=prompts[0], key=sample_key)
    elif options.normalise == "demonstrations":
        assert options.demonstrations is not None  # checked by Config
        texts, num_texts = demonstrations_to_score(
            options,
            start,
            receipt=receipts.source("--demonstrations", options.demonstrations),
        )

    told = receipt_of(receipts, start=start)
    with run.Run(options, num_steps={"reward_model": num_steps}, data=told) as job:
        untrained = None
        if prompts is not None:
            num_batches = -(-options.num_samples // options.batch_size)
            num_texts = num_batches * options.batch_size
            texts = [
                sample(start.params, prompts=prompts[i], key=sample_key)
                for i in range(num_batches)
            ]
            untrained = scores_of(initial.params, texts, rows=num_texts, score=score)
            initial = dataclasses.replace(
                initial,
                params=rewards.normalise(initial.params, scores=jnp.asarray(untrained)),
            )
        report.model_table([("reward model", initial.params, True)])
        columns = preferences[0].chosen.tokens.shape[1]
        report.engine(start.model, columns=columns, mesh=mesh)
        meta = {"data_digest": digests.of_tokens(pairs), **start.meta}
        with job.stage("reward_model", initial, meta=meta) as stage:
            for step in stage.steps():
                batch = preferences[step]
                stage.state, stats = update(stage.state, batch=batch)
                sides = (batch.chosen, batch.rejected)
                texts_read = [(side.mask, side.response_mask) for side in sides]
                stage.end_step(step, stats, texts=texts_read)
    # What is saved is normalised, and measured.
    trained = hf.rounded_reward(stage.state.params, dtype=start.save_dtype)

    scores = None
    if texts:
        scores = scores_of(trained, texts, rows=num_texts, score=score)
        std = 1.0 if options.normalise == "samples" else None
        trained = rewards.normalise(trained, scores=jnp.asarray(scores), std=std)
    saved = job.folder / "model"
    if pretrained.is_new(saved, start=start):
        hf.save_reward(
            saved,
            model,
            trained,
            tokenizer=start.tokenizer,
            stop_ids=start.stop_ids,
            pad_id=start.pad_id,
            dtype=start.save_dtype,
        )
    held_out_accuracy = accuracy(
        trained,
        held_out,
        score=score,
        batch_size=options.batch_size,
        pad_id=start.pad_id,
    )
    shown = [(f"accuracy on {len(held_out)} held-out pairs", held_out_accuracy)]
    summary = {
        "held_out_accuracy": held_out_accuracy,
        "held_out_pairs": len(held_out),
    }
    for when, values in (("untrained", untrained), ("trained", scores)):
        if values is not None:
            of = f"of {num_texts} {options.normalise}, {when}, before normalising"
            mean, std = float(values.mean()), float(values.std())
            shown += [(f"mean {of}", mean), (f"standard deviation {of}", std)]
            summary |= {f"{when}_mean": mean, f"{when}_std": std}
    report.table("Reward model", ("", "value"), shown)
    plots.draw(job.folder)
    summary |= profiled.summary(
        job.folder,
        profile=options.profile,
        flops=functools.partial(profiled.supervised_flops, model=model, head=False),
    )
    summary["seconds"] = time.perf_counter() - started
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; go on with --reward-model {saved}")


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax reward-model`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        screen=SCREEN,
        prog="rlhf-jax reward-model",
        argv=argv,
    )
