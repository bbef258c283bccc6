"""A reward model from your own preference pairs, on top of a language model.

    python experiments/reward_model.py --model runs/sft/model --data pairs.jsonl \\
        --out runs/reward

--data holds {"prompt": ..., "chosen": ..., "rejected": ...} a line, or dialogues as in
hh-rlhf that share their beginning. The trunk of --model gets a fresh head, learns the
pairs by Bradley-Terry, and is normalised to mean 0 and standard deviation 1 on answers
that --model itself, the reference of PPO, samples to the prompts of the pairs.
OUT/model is a Hugging Face checkpoint (sequence classification with one label) for
`ppo_from_checkpoint.py --reward-model`.

One device that holds the parameters in float32 five times over (GPT-2 small: 2.4 GiB).
Fewer than about 2,000 pairs leave the accuracy near chance: on top of the second model
of `sft.py`, the 730 pairs of hh-rlhf (harmless, first 1,800) that fit into its context
take a minute on 2 laptop cores and give 0.55 on held-out pairs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax import (
    batches,
    checks,
    cli,
    data,
    encoding,
    hf,
    pretrained,
    report,
    rewards,
    rollout,
    run,
    run_folder,
    state,
    train_reward,
)
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runtime.batches import Batches
from rlhf_jax.runtime.encoding import Example, Pair
from rlhf_jax.runtime.pretrained import Pretrained
from rlhf_jax.stages.batch import Prompts

Array = jax.Array
Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_folder.RunConfig):
    model: str
    """Language model to start from, a checkpoint folder or hub id."""
    data: str
    """Preference pairs: JSONL, or hf:NAME:SPLIT."""
    tokenizer: str | None = None
    """Folder or hub id; None takes the one in --model."""
    margin_field: str | None = None
    """Field of --data with the score difference to ask for; None asks for none."""
    max_length: int | None = None
    """Tokens of the longest prompt and answer; None is the context."""
    overlong: Literal["error", "drop"] = "error"
    """What becomes of longer pairs."""
    buckets: tuple[int, ...] | None = None
    """Widths a batch may be padded to, tokens; None is the longest pair."""
    held_out: float = 0.1
    """Share of the pairs that measures the accuracy and is not trained on."""
    num_steps: int | None = None
    """Updates; None is one pass over the pairs."""
    batch_size: int = 16
    """Pairs an update."""
    micro_batch_size: int | None = None
    """Pairs held at once; None is all of an update."""
    learning_rate: float = 1e-5
    """Falls to 0 linearly."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    num_samples: int = 256
    """Answers of --model that the reward is normalised on, in whole batches."""
    max_new_tokens: int = 48
    """Of these answers."""
    temperature: float = 0.7
    """Of these answers; use PPO's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations; parameters stay float32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is not None:
            checks.positive(num_steps=self.num_steps)
        checks.positive(
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
            num_samples=self.num_samples,
            max_new_tokens=self.max_new_tokens,
        )


def prompts_to_answer(
    pairs: list[Pair], *, options: Config, start: Pretrained
) -> Batches[Prompts]:
    """The prompts of the pairs that leave room for an answer."""
    room = start.model.max_positions - options.max_new_tokens
    short = [pair.prompt for pair in pairs if len(pair.prompt) <= room]
    if not short:
        raise InputError(
            f"expected a prompt of at most {room} tokens to sample an answer to (the "
            f"context of {start.model.max_positions} less --max-new-tokens), got none; "
            f"ask for fewer new tokens"
        )
    return batches.prompt_batches(
        short, batch_size=options.batch_size, seed=options.seed, pad_id=start.pad_id
    )


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
    scored = [
        score(params, tokens=batch.tokens, mask=batch.mask)
        for batch in batches.sequences_in_order(
            chosen + rejected, batch_size=batch_size, pad_id=pad_id
        )
    ]
    left, right, _ = np.split(
        np.concatenate(jax.device_get(scored)), (len(pairs), 2 * len(pairs))
    )
    return float((left > right).mean())


def main(options: Config) -> None:
    started = time.perf_counter()
    rows = data.read_preferences(options.data)
    start = pretrained.load(
        options.model, tokenizer=options.tokenizer, dtype=options.dtype
    )
    model = start.model
    everything = encoding.encode_preferences(
        start.tokenizer,
        rows,
        max_length=start.limit(options.max_length),
        margin=options.margin_field,
        overlong=options.overlong,
    )
    prompts = prompts_to_answer(everything, options=options, start=start)
    pairs, held_out = data.hold_out(
        everything, share=options.held_out, seed=options.seed
    )
    preferences = batches.preference_batches(
        pairs,
        batch_size=options.batch_size,
        seed=options.seed,
        pad_id=start.pad_id,
        buckets=options.buckets,
    )
    num_steps = options.num_steps
    if num_steps is None:
        num_steps = preferences.steps_per_epoch
    optimizer = optax.chain(
        optax.clip_by_global_norm(options.max_grad_norm),
        optax.adam(
            optax.linear_schedule(options.learning_rate, 0.0, num_steps), eps=1e-5
        ),
    )
    update = jax.jit(
        functools.partial(
            train_reward.update,
            model=model,
            optimizer=optimizer,
            micro_batch_size=options.micro_batch_size,
        ),
        donate_argnames=("state",),
    )
    sample = jax.jit(
        functools.partial(
            rollout.rollout,
            model=model,
            max_new_tokens=options.max_new_tokens,
            stop_ids=start.stop_ids,
            temperature=options.temperature,
        )
    )
    score = jax.jit(functools.partial(rewards.sequence_scores, model=model))
    head_key, sample_key = jax.random.split(jax.random.key(options.seed))
    initial = state.supervised_state(
        rewards.init(head_key, start.params, model=model), optimizer=optimizer
    )
    # What does not fit is told here, before there is a run folder.
    jax.eval_shape(update, initial, batch=preferences[0])
    jax.eval_shape(sample, start.params, prompts=prompts[0], key=sample_key)

    with run.Run(options, num_steps={"reward_model": num_steps}) as job:
        report.model_table([("reward model", initial.params, True)])
        meta = {"data_digest": encoding.digest(pairs)}
        with job.stage("reward_model", initial, meta=meta) as stage:
            for step in stage.steps():
                stage.state, stats = update(stage.state, batch=preferences[step])
                stage.end_step(step, stats)
    trained = stage.state.params

    answers = [
        sample(start.params, prompts=prompts[i], key=sample_key)
        for i in range(-(-options.num_samples // options.batch_size))
    ]
    scores = [score(trained, tokens=a.tokens, mask=a.mask) for a in answers]
    sampled = jnp.concatenate(scores)
    mean, std = float(sampled.mean()), float(sampled.std())
    trained = rewards.normalise(trained, scores=sampled)
    saved = job.folder / "model"
    if not saved.exists():  # it is there, and whole, when a finished run is resumed
        hf.save_reward(
            saved,
            model,
            trained,
            tokenizer=start.tokenizer,
            stop_ids=start.stop_ids,
            pad_id=start.pad_id,
        )
    agreed = accuracy(
        trained,
        held_out,
        score=score,
        batch_size=options.batch_size,
        pad_id=start.pad_id,
    )
    report.table(
        "Reward model",
        ("", "value"),
        [
            (f"accuracy on {len(held_out)} held-out pairs", agreed),
            (f"mean on {sampled.size} samples, before it was made 0", mean),
            ("standard deviation on them, before it was made 1", std),
        ],
    )
    report.plots(job.folder)
    summary = {
        "held_out_accuracy": agreed,
        "held_out_pairs": len(held_out),
        "sample_mean": mean,
        "sample_std": std,
        "seconds": time.perf_counter() - started,
    }
    run_folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; go on with --reward-model {saved}")


if __name__ == "__main__":
    cli.main(main, Config, description=__doc__)
