"""The whole of RLHF on a laptop: SFT, a reward model, PPO against a frozen reference.

    python experiments/quickstart.py --out runs/quickstart

A small model learns a language of product reviews (`reviews.py`), whose grammar makes
fluency exact. Pairs of its own samples are labelled by a noisy gold judge who stands in
for people; a reward model learns from the labels alone; PPO improves the policy against
the reward model while the KL penalty holds it near the frozen reference. The table at
the end asks the gold judge, whom nothing was trained on.

Two CPU cores take about three minutes. Expect, over seeds 0 to 2, the gold score up
from -0.12 to 1.02 - 1.20 (its standard deviation in the reference is 0.81), a KL of 1.9
to 3.7 nats, fluency 0.89 - 0.93 (reference 0.93 - 0.95) and hardly two responses alike.
With `--kl-coef 0` the reward-model score is higher still, at a KL of 38 nats where no
response parses and half are copies. Recorded curves are in `recorded/quickstart`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from worlds import reviews

from rlhf_jax import (
    config,
    critic,
    decoder,
    drift,
    frozen,
    kl_control,
    ppo,
    rewards,
    sft,
    state,
)
from rlhf_jax.algorithms import reward_model, self_check
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.flow import objective, rollout, score
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.data import batches, tokenization
from rlhf_jax.data.encoding import Example, Pair
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.control import Control
from rlhf_jax.models import layout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import (
    alarms,
    command_line,
    drift_report,
    folder,
    plots,
    report,
    run,
    run_config,
)

Array = jax.Array
Params = Any

STOP_IDS = (reviews.EOS_ID,)
PROMPT_COLUMNS = max(map(len, reviews.TRAIN_PROMPTS))
RESPONSE_COLUMNS = 26  # the longest review, <eos> and one more
TRAIN_PROMPTS = [reviews.encode(prompt) for prompt in reviews.TRAIN_PROMPTS]
HELD_OUT_PROMPTS = [reviews.encode(prompt) for prompt in reviews.HELD_OUT_PROMPTS]
NUM_REVIEWS = 20_000  # demonstrations for SFT
SHOWN = 6  # samples side by side at the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 40
    """PPO iterations."""
    kl_coef: float = 0.2
    """Reward units per nat of KL to the reference; 0 lets the policy go."""
    kl_control: Control = kl_control.CONSTANT
    """What becomes of kl_coef during the run."""
    temperature: float = 0.7
    """Divides the logits in every role."""
    sft_steps: int = 400
    """Updates of supervised fine-tuning."""
    reward_steps: int = 120
    """Updates of reward-model training."""
    sft_batch_size: int = 64
    """Reviews an update of SFT, and pairs an update of the reward model."""
    num_pairs: int = 4096
    """Labelled pairs; an eighth of them is held out."""
    label_noise: float = 0.4
    """Of the gold judge, in gold units: the temperature of its Bradley-Terry choice."""
    hidden_size: int = 128
    """Width of all four models."""
    num_layers: int = 2
    """Depth of all four models."""
    num_heads: int = 4
    """Attention heads of all four models."""
    batch_size: int = 128
    """Prompts an iteration."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 4
    """Optimizer steps a pass."""
    sft_learning_rate: float = 3e-3
    """Peak, after a warm-up; falls to 0 along a cosine."""
    reward_learning_rate: float = 1e-3
    """Falls to 0 linearly."""
    policy_learning_rate: float = 3e-4
    """Falls to 0 linearly."""
    critic_learning_rate: float = 1e-3
    """Falls to 0 linearly."""
    missing_stop_score: float = -3.0
    """Score of a response that never ended, in the reward model's standard units."""
    num_evaluated: int = 512
    """Responses to held-out prompts in the final table."""
    sample_every: int = 10
    """Iterations between rows of samples.jsonl."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # They raise now what would be found after two stages of training.
        control = self.kl_control.controller(self.kl_coef, num_steps=self.num_steps)
        one = jnp.ones((), jnp.float32)
        control.update(kl=one, mean_length=one, num_episodes=self.batch_size)
        checks.positive(
            label_noise=self.label_noise,
            sft_batch_size=self.sft_batch_size,
            sample_every=self.sample_every,
            sft_learning_rate=self.sft_learning_rate,
            reward_learning_rate=self.reward_learning_rate,
            policy_learning_rate=self.policy_learning_rate,
            critic_learning_rate=self.critic_learning_rate,
        )
        if self.num_pairs < 16 or self.num_evaluated < 2 or self.num_evaluated % 2:
            raise checks.InputError(
                "expected --num-pairs of at least 16 and an even --num-evaluated, got "
                f"{self.num_pairs} and {self.num_evaluated}"
            )


def algorithm_of(options: Config) -> ppo.PPO:
    """PPO with four models of one shape; finds sizes that do not fit."""
    model = layout.fastest(
        config.gpt2(
            vocab_size=len(reviews.VOCABULARY),
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            max_positions=PROMPT_COLUMNS + RESPONSE_COLUMNS,
        )
    )
    updates = options.num_steps * options.num_epochs * options.num_minibatches
    algorithm = ppo.PPO(
        model=model,
        critic_model=model,
        policy_optimizer=adam(options.policy_learning_rate, updates),
        critic_optimizer=adam(options.critic_learning_rate, updates),
        max_new_tokens=RESPONSE_COLUMNS,
        stop_ids=STOP_IDS,
        temperature=options.temperature,
        scores=ScoreShaping(missing_stop_score=options.missing_stop_score),
        num_epochs=options.num_epochs,
        num_minibatches=options.num_minibatches,
    )
    algorithm.minibatch_size(options.batch_size)
    return algorithm


def fine_tune(
    params: Params, *, job: run.Run, model: ModelConfig, options: Config
) -> Params:
    """Stage 1: the model learns the language from reviews."""
    demonstrations = batches.sequence_batches(
        [
            Example(reviews.encode(prompt), reviews.encode(response))
            for prompt, response in reviews.sample_reviews(options.seed, NUM_REVIEWS)
        ],
        batch_size=options.sft_batch_size,
        seed=options.seed,
        pad_id=reviews.PAD_ID,
    )
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.sft_learning_rate, options.sft_steps // 10, options.sft_steps
    )
    optimizer = adamw(schedule)
    update = jax.jit(
        functools.partial(sft.update, model=model, optimizer=optimizer),
        donate_argnames=("state",),
    )
    initial = state.supervised_state(params, optimizer=optimizer)
    with job.stage("sft", initial, meta={}) as stage:
        for step in stage.steps():
            stage.state, stats = update(stage.state, batch=demonstrations[step])
            stage.end_step(step, stats)
    return stage.state.params


def label_pairs(
    params: Params,
    generate: Any,
    *,
    judge: Callable[[Sequence[str], Sequence[str]], float],
    key: Array,
    options: Config,
) -> tuple[list[Pair], list[Pair]]:
    """Two samples to a prompt, labelled by a noisy judge of prompt and response.

    Returns:
      Pairs to train on, and held-out pairs whose margin is the noise-free gold lead of
      their chosen side (below 0 where the noise decided).

    Raises:
      InputError: the judge tells no held-out pair apart.
    """
    prompts = batches.prompt_batches(
        TRAIN_PROMPTS,
        batch_size=options.num_evaluated,
        samples_per_prompt=2,
        seed=options.seed,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS,),
    )
    sampled: list[tuple[str, str]] = []
    while len(sampled) < 2 * options.num_pairs:
        batch = prompts[len(sampled) // options.num_evaluated]
        sampled += answers_in(generate(params, prompts=batch, key=key))
    gold = np.array([judge(prompt.split(), said.split()) for prompt, said in sampled])
    labels = reviews.noisy_preferences(
        np.random.default_rng(options.seed), gold[::2], gold[1::2], options.label_noise
    )
    pairs = []
    for number, first_is_chosen in enumerate(labels[: options.num_pairs]):
        chosen = 2 * number + (not first_is_chosen)
        rejected = 2 * number + first_is_chosen
        (prompt, better), (_, worse) = sampled[chosen], sampled[rejected]
        if better != worse:
            texts = map(ids_of, (prompt, better, worse))
            pairs.append(Pair(*texts, margin=float(gold[chosen] - gold[rejected])))
    held_out = pairs[: len(pairs) // 8]
    if not any(pair.margin for pair in held_out):
        raise checks.InputError(
            f"expected pairs of responses that the judge tells apart, got "
            f"{len(held_out)} of equal gold, as where nothing parses; give more "
            f"--sft-steps or --num-pairs"
        )
    return [pair._replace(margin=None) for pair in pairs[len(held_out) :]], held_out


def train_reward_model(
    params: Params,
    pairs: list[Pair],
    *,
    job: run.Run,
    model: ModelConfig,
    options: Config,
) -> Params:
    """Stage 2: a reward model learns from the labels alone."""
    preferences = batches.preference_batches(
        pairs,
        batch_size=options.sft_batch_size,
        seed=options.seed,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS + RESPONSE_COLUMNS,),
    )
    optimizer = adamw(
        optax.linear_schedule(options.reward_learning_rate, 0.0, options.reward_steps)
    )
    update = jax.jit(
        functools.partial(reward_model.update, model=model, optimizer=optimizer),
        donate_argnames=("state",),
    )
    initial = state.supervised_state(params, optimizer=optimizer)
    with job.stage("reward_model", initial, meta={}) as stage:
        for step in stage.steps():
            stage.state, stats = update(stage.state, batch=preferences[step])
            stage.end_step(step, stats)
    return stage.state.params


def measure_reward_model(
    params: Params, held_out: list[Pair], *, model: ModelConfig
) -> tuple[Params, float]:
    """The reward model on pairs it never saw, which are samples of the reference.

    Returns:
      Its parameters, normalised to mean 0 and standard deviation 1 on these samples,
      and the share of pairs that it orders as noise-free gold does.
    """
    pairs = batches.preference_batches(
        held_out, batch_size=len(held_out), seed=0, pad_id=reviews.PAD_ID
    )[0]
    score = jax.jit(functools.partial(rewards.sequence_scores, model=model))
    chosen, rejected = (
        score(params, tokens=side.tokens, mask=side.mask)
        for side in (pairs.chosen, pairs.rejected)
    )
    lead = np.asarray(pairs.margin)
    agrees = (np.asarray(chosen - rejected) > 0) == (lead > 0)
    everything = jnp.concatenate([chosen, rejected])
    accuracy = float(agrees[lead != 0].mean())
    return rewards.normalise(params, scores=everything), accuracy


def improve(
    params: Params,
    reference: Frozen,
    scorer: Frozen,
    *,
    key: Array,
    job: run.Run,
    algorithm: ppo.PPO,
    options: Config,
) -> Params:
    """Stage 3: PPO, score - kl_coef · KL to the reference."""
    prompts = batches.prompt_batches(
        TRAIN_PROMPTS,
        batch_size=options.batch_size,
        seed=options.seed,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS,),
    )
    initial = state.ppo_state(
        policy=storage.store(params),
        critic=critic.from_policy(params, model=algorithm.critic_model),
        policy_optimizer=algorithm.policy_optimizer,
        critic_optimizer=algorithm.critic_optimizer,
        kl=options.kl_control.controller(options.kl_coef, num_steps=options.num_steps),
    )
    report.model_table(
        [
            ("policy", initial.policy, True),
            ("critic", initial.critic, True),
            ("reference", reference.stored, False),
            ("reward model", scorer.stored, False),
        ]
    )
    sample = jax.jit(functools.partial(ppo.sample, recipe=algorithm))
    # The reward is an argument: a closure would bake its parameters into the program.
    reward = rewards.from_model(scorer, model=algorithm.model)
    apply = jax.jit(lambda reward, rollout: reward(rollout))
    learn = jax.jit(
        functools.partial(ppo.learn, recipe=algorithm), donate_argnames=("state",)
    )
    stage_state = {"train": initial, "reference": reference, "root_key": key}
    distance = jax.jit(drift.weight_drift)
    by_position = jax.jit(
        functools.partial(
            objective.kl_by_position, max_new_tokens=algorithm.max_new_tokens
        )
    )
    with job.stage(
        "ppo",
        stage_state,
        meta={},
        beside={"reward model": scorer},
    ) as stage:
        train, reference = stage.state["train"], stage.state["reference"]
        for step in stage.steps():
            step_key = jax.random.fold_in(key, step)
            answered = sample(train.policy, prompts=prompts[step], key=step_key)
            if step == 0:
                check_start(train.policy, answered, reference, algorithm)
            train, stats, scored = learn(
                train,
                rollout=answered,
                scores=apply(reward, answered),
                reference=reference,
                key=step_key,
            )
            stage.state["train"] = train
            stats |= drift.stats(distance(train.policy, reference.stored))
            samples, positions = [], None
            if step % options.sample_every == 0:
                positions = by_position(scored)
                texts = answers_in(answered)[:SHOWN]
                samples = [
                    {"prompt": prompt, "response": response, "score": float(value)}
                    for (prompt, response), value in zip(
                        texts, scored.scores[:SHOWN], strict=True
                    )
                ]
            stage.end_step(step, stats, samples, positions=positions)
    return train.policy


def evaluate(
    params: Params,
    *,
    generate: Any,
    reference: Frozen,
    scorer: Frozen,
    key: Array,
    model: ModelConfig,
    options: Config,
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """What gold judge, grammar and frozen models say of answers to held-out prompts."""
    prompts = batches.prompt_batches(
        HELD_OUT_PROMPTS,
        batch_size=options.num_evaluated,
        seed=options.seed,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS,),
    )[0]
    answered = generate(params, prompts=prompts, key=key)
    scored = jax.jit(
        functools.partial(
            score.score,
            model=model,
            critic=None,
            critic_model=None,
            max_new_tokens=RESPONSE_COLUMNS,
            temperature=options.temperature,
        )
    )(
        answered,
        scores=rewards.from_model(scorer, model=model)(answered),
        reference=reference,
    )
    answers = answers_in(answered)
    gold = np.array([reviews.gold(response.split()) for _, response in answers])
    lengths = [len(response.split()) for _, response in answers]
    fluent = [
        reviews.parses(prompt.split(), response.split()) for prompt, response in answers
    ]
    return {
        "gold": float(gold.mean()),
        "gold_std": float(gold.std()),
        "score": float(scored.scores.mean()),
        "kl": float(jnp.sum(scored.kl, where=answered.response_mask) / len(answers)),
        "fluency": float(np.mean(fluent)),
        "distinct": len({response for _, response in answers}) / len(answers),
        "length": float(np.mean(lengths)),
    }, answers


MEASURED = {
    "gold": "gold score",
    "gold_std": "gold score, std",
    "score": "reward-model score",
    "kl": "KL to the reference [nats]",
    "fluency": "fluency (share that parses)",
    "distinct": "distinct (share of responses)",
    "length": "length [tokens]",
}


def check_start(
    policy: Params, answered: Rollout, reference: Frozen, algorithm: ppo.PPO
) -> None:
    """PPO proves itself before its first update."""
    measured = jax.jit(
        functools.partial(
            self_check.measure,
            model=algorithm.model,
            max_new_tokens=algorithm.max_new_tokens,
            temperature=algorithm.temperature,
        )
    )(policy, rollout=answered, reference=reference)
    self_check.require(
        measured, tolerance=self_check.TOLERANCE["float32"], expect_equal=True
    )


def adamw(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.01)
    )


def adam(learning_rate: float, updates: int) -> optax.GradientTransformation:
    schedule = optax.linear_schedule(learning_rate, 0.0, updates)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, eps=1e-5))


def answers_in(answered: Rollout) -> list[tuple[str, str]]:
    """(prompt, response) of every row, words separated by blanks."""
    return tokenization.texts(
        answered, decode=lambda ids: " ".join(reviews.decode(ids))
    )


def ids_of(text: str) -> list[int]:
    return reviews.encode(text.split())


def main(options: Config) -> None:
    started = time.perf_counter()
    algorithm = algorithm_of(options)
    model = algorithm.model
    generate = jax.jit(
        functools.partial(
            rollout.rollout,
            model=model,
            max_new_tokens=RESPONSE_COLUMNS,
            stop_ids=STOP_IDS,
            temperature=options.temperature,
        )
    )
    # One root key; every use folds in its own number, every step its own after that.
    root = jax.random.key(options.seed)
    init_key, pair_key, head_key, ppo_key, test_key = (
        jax.random.fold_in(root, number) for number in range(5)
    )
    num_steps = {
        "sft": options.sft_steps,
        "reward_model": options.reward_steps,
        "ppo": options.num_steps,
    }
    check = functools.partial(
        alarms.check,
        limits=alarms.LIMITS,
        kl_target=options.kl_control.target_per_response,
    )
    with run.Run(options, num_steps=num_steps, check=check) as job:
        tuned = fine_tune(
            decoder.init(init_key, model=model), job=job, model=model, options=options
        )
        pairs, held_out = label_pairs(
            tuned,
            generate,
            judge=lambda _, response: reviews.gold(response),
            key=pair_key,
            options=options,
        )
        reward_params = rewards.init(head_key, tuned, model=model)
        reward_params = train_reward_model(
            reward_params, pairs, job=job, model=model, options=options
        )
        reward_params, accuracy = measure_reward_model(
            reward_params, held_out, model=model
        )
        reference, scorer = frozen.freeze(tuned), frozen.freeze(reward_params)
        trained = improve(
            tuned,
            reference,
            scorer,
            key=ppo_key,
            job=job,
            algorithm=algorithm,
            options=options,
        )
    frozen.verify(reference)

    answers = functools.partial(
        evaluate,
        generate=generate,
        reference=reference,
        scorer=scorer,
        key=test_key,
        model=model,
        options=options,
    )
    (before, before_texts), (after, after_texts) = answers(tuned), answers(trained)
    report.table(
        "Responses to held-out prompts",
        ("", "reference", "policy"),
        [(name, before[key], after[key]) for key, name in MEASURED.items()],
    )
    shown = zip(before_texts[:SHOWN], after_texts[:SHOWN], strict=True)
    report.side_by_side(
        [
            {"prompt": prompt, "reference": old, "policy": new}
            for (prompt, old), (_, new) in shown
        ]
    )
    found = jax.device_get(drift.weight_drift(trained, reference.stored))
    moved = float(found["relative"])
    drift_report.table(found)
    drift_report.plots(job.folder, found)
    fingerprint = frozen.fingerprint_of(reference).root
    print(f"reference verified unchanged, fingerprint {fingerprint}")
    print(f"policy moved, relative weight drift {moved:.4f}")
    print(f"reward model agrees with the gold order of {accuracy:.1%} held-out pairs")
    plots.draw(job.folder)
    summary = {
        **{f"{key}_reference": before[key] for key in MEASURED},
        **{f"{key}_policy": after[key] for key in MEASURED},
        "gold_reference_std": before["gold_std"],
        "kl": after["kl"],
        "reward_model_accuracy": accuracy,
        "reference_fingerprint": fingerprint,
        "reference_verified": True,
        "drift_relative": moved,
        "alarms": job.alarms,
        "seconds": time.perf_counter() - started,
    }
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; figures, samples and plots in {job.folder}")


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
