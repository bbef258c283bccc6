"""PPO on your own model, prompts and reward.

    python experiments/ppo_from_checkpoint.py --model runs/sft/model \\
        --prompts prompts.jsonl --reward-model runs/reward/model --out runs/ppo
    python experiments/ppo_from_checkpoint.py --model gpt2 \\
        --prompts prompts.txt --reward my_rewards:score --out runs/ppo

--prompts holds {"prompt": ..., and whatever the reward asks for} a line, or a prompt a
line in a .txt file. The reward is a checkpoint of `reward_model.py`, or a function

    def score(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]

of my_rewards.py in the working directory; rows are those of --prompts. The policy
maximises the score less kl_coef times its KL to the frozen --reference. OUT/model is a
Hugging Face checkpoint with its tokenizer.

One device that holds policy and critic in float32 four times each, reference and reward
model once: GPT-2 small 4.7 GiB. With the small models of `sft.py` and
`reward_model.py`, an iteration of 16 answers with 24 tokens takes 4 seconds on 2 laptop
cores, and 10 of them at --policy-learning-rate 1e-4 raise the score from -0.1 to 0.4 at
2 nats. Expect the score to rise and the KL to stay in single digits [nats per
response]; if the KL runs away while the score soars, the policy has found a hole in the
reward: raise --kl-coef or set --kl-target.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlhf_jax import (
    batches,
    checks,
    cli,
    critic,
    data,
    drift,
    encoding,
    frozen,
    hf,
    kl_control,
    metrics,
    ppo,
    pretrained,
    report,
    rewards,
    run,
    run_folder,
    self_check,
    state,
    storage,
)
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl_control import KLController
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.runtime.batches import Batches
from rlhf_jax.runtime.data import Row
from rlhf_jax.runtime.pretrained import Pretrained
from rlhf_jax.stages.batch import Prompts, Rollout
from rlhf_jax.stages.state import TrainState

Array = jax.Array
Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_folder.RunConfig):
    model: str
    """Policy to start from, a checkpoint folder or hub id."""
    prompts: str
    """JSONL, .txt, or hf:NAME:SPLIT."""
    reward: str | None = None
    """Python function of texts, module:function; or give --reward-model."""
    reward_model: str | None = None
    """Checkpoint folder or hub id of a reward model; or give --reward."""
    reference: str | None = None
    """Checkpoint that the KL is taken to; None is --model, as it starts."""
    tokenizer: str | None = None
    """Folder or hub id; None takes the one in --model."""
    prompt_field: str = "prompt"
    """Name of the prompts in --prompts."""
    overlong: Literal["error", "drop"] = "error"
    """What becomes of prompts that leave no room for the response."""
    buckets: tuple[int, ...] | None = None
    """Widths a batch of prompts may be padded to, tokens; None is the longest."""
    num_steps: int = 200
    """Iterations: a batch of answers and the updates on it."""
    batch_size: int = 64
    """Answers an iteration."""
    max_new_tokens: int = 48
    """Longest response, tokens."""
    temperature: float = 0.7
    """Divides the logits in every role."""
    kl_coef: float = 0.05
    """Reward units per nat of KL to the reference; 0 still measures it."""
    kl_target: float | None = None
    """Nats per response that kl_coef is adapted to; None leaves kl_coef fixed."""
    kl_horizon: int = 10_000
    """Answers over which an adaptive kl_coef moves."""
    gamma: float = 1.0
    """Discount a token."""
    lam: float = 0.95
    """Of GAE: 1 trusts the returns, 0 the critic."""
    whiten_advantages: Literal["rollout", "minibatch"] | None = "rollout"
    """Over which rows advantages get mean 0 and variance 1."""
    normalise_scores: bool = False
    """Scores less their running mean, over their running standard deviation."""
    missing_stop_score: float | None = None
    """Score of a response that never ended; None scores it like any other."""
    clip_range: float = 0.2
    """Of the probability ratio around 1."""
    value_clip_range: float | None = 0.2
    """Of the values around the old ones, reward units; None is off."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 4
    """Optimizer steps a pass."""
    micro_batch_size: int | None = None
    """Answers held at once in an update; None is a minibatch."""
    policy_learning_rate: float = 3e-6
    """Falls to 0 linearly."""
    critic_learning_rate: float = 1e-5
    """Falls to 0 linearly."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it, policy and critic apart."""
    critic_from: Literal["policy", "reward_model"] = "policy"
    """Whose trunk the critic starts with; values start at 0 from the policy."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations; trained parameters stay float32."""
    reference_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """In which the reference and the reward model are stored."""
    reprice: bool = False
    """Log-probs of the answers from the trainer, not the sampler (for bfloat16)."""
    sample_every: int = 10
    """Iterations between rows of samples.jsonl."""
    num_shown: int = 4
    """Answers in samples.jsonl each time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.reward is None) == (self.reward_model is None):
            got = "neither" if self.reward is None else "both"
            raise InputError(f"expected one of --reward and --reward-model, got {got}")
        if self.critic_from == "reward_model" and self.reward_model is None:
            raise InputError(
                "--critic-from reward_model: expected a --reward-model to start from, "
                "got a Python reward; start the critic from the policy"
            )
        checks.positive(
            num_steps=self.num_steps,
            batch_size=self.batch_size,
            policy_learning_rate=self.policy_learning_rate,
            critic_learning_rate=self.critic_learning_rate,
            max_grad_norm=self.max_grad_norm,
            sample_every=self.sample_every,
        )
        checks.non_negative(kl_coef=self.kl_coef, num_shown=self.num_shown)


MEASURED = {
    "objective/scores": "score",
    "objective/kl": "KL to the reference [nats]",
    "objective/entropy": "entropy [nats per token]",
    "response/length": "length [tokens]",
    "response/eos_fraction": "ended (share of answers)",
    "response/distinct_fraction": "distinct (share of answers)",
}


class RewardModel(NamedTuple):
    """A frozen reward model with its shape."""

    model: ModelConfig
    frozen: Frozen


def load_reference(options: Config, policy: Pretrained) -> Frozen:
    """A frozen copy of the policy as it starts, or of another model of its shape."""
    dtype = options.reference_dtype
    if options.reference is None:
        return frozen.freeze(policy.params, dtype=dtype)
    model, params = hf.load(options.reference, dtype="float32")
    if dataclasses.replace(model, dtype=options.dtype) != policy.model:
        raise InputError(
            f"--reference {options.reference}: expected a model of the policy's shape, "
            f"{policy.model}, got {model}; the KL is between two models of one shape"
        )
    return frozen.freeze(params, dtype=dtype)


def load_reward_model(options: Config, name: str, *, policy: Pretrained) -> RewardModel:
    """The reward model, which must read the policy's tokens as they are."""
    model, params = hf.load_reward(name, dtype="float32")
    if model.vocab_size < policy.model.vocab_size:
        raise InputError(
            f"--reward-model {name}: expected the policy's vocabulary of "
            f"{policy.model.vocab_size} ids, got {model.vocab_size}; train one on top "
            f"of this policy (reward_model.py)"
        )
    ids = policy.tokenizer.get_vocab()
    try:
        read = encoding.load_tokenizer(name).get_vocab()
    except InputError:  # it came without one: the sizes must do
        read = ids
    if not ids.items() <= read.items():
        raise InputError(
            f"--reward-model {name}: expected the policy's tokenizer, got one that "
            f"gives other ids; train one on top of this policy (reward_model.py)"
        )
    return RewardModel(
        dataclasses.replace(model, dtype=options.dtype),
        frozen.freeze(params, dtype=options.reference_dtype),
    )


def encode_prompts(
    options: Config, rows: list[Row], *, policy: Pretrained, context: int
) -> tuple[list[Row], list[encoding.Tokens]]:
    """The rows whose prompts leave room for a response, and their tokens."""
    room = context - options.max_new_tokens
    if max(options.buckets or (0,)) > room:
        raise InputError(
            f"--buckets: expected at most {room} tokens, the context of {context} less "
            f"--max-new-tokens, got {max(options.buckets or ())}; lower either"
        )
    return encoding.encode_prompts(
        policy.tokenizer,
        rows,
        max_length=room,
        field=options.prompt_field,
        overlong=options.overlong,
    )


def make_ppo(
    options: Config, *, policy: Pretrained, critic_model: ModelConfig
) -> ppo.PPO:
    """What is fixed during the run."""
    updates = options.num_steps * options.num_epochs * options.num_minibatches

    def adam(learning_rate: float) -> optax.GradientTransformation:
        schedule = optax.linear_schedule(learning_rate, 0.0, updates)
        return optax.chain(
            optax.clip_by_global_norm(options.max_grad_norm),
            optax.adam(schedule, eps=1e-5),
        )

    return ppo.PPO(
        model=policy.model,
        critic_model=critic_model,
        policy_optimizer=adam(options.policy_learning_rate),
        critic_optimizer=adam(options.critic_learning_rate),
        max_new_tokens=options.max_new_tokens,
        stop_ids=policy.stop_ids,
        temperature=options.temperature,
        missing_stop_score=options.missing_stop_score,
        normalise_scores=options.normalise_scores,
        reprice=options.reprice,
        gamma=options.gamma,
        lam=options.lam,
        whiten_advantages=options.whiten_advantages,
        clip_range=options.clip_range,
        value_clip_range=options.value_clip_range,
        vf_coef=options.vf_coef,
        num_epochs=options.num_epochs,
        num_minibatches=options.num_minibatches,
        micro_batch_size=options.micro_batch_size,
    )


def make_kl(options: Config) -> KLController:
    if options.kl_target is None:
        return kl_control.fixed(options.kl_coef)
    return kl_control.adaptive(
        options.kl_coef, target=options.kl_target, horizon=options.kl_horizon
    )


def rehearse(
    train: TrainState,
    reference: Frozen,
    *,
    prompts: Prompts,
    sample: Callable[..., Rollout],
    reward: ppo.Reward,
    learn: Callable[..., Any],
    key: Array,
    algorithm: ppo.PPO,
    options: Config,
) -> None:
    """The first iteration up to its update, before there is a run folder.

    A reward function that fails is told now, and so is whatever does not fit together.
    """
    answered = sample(train.policy, prompts=prompts, key=key)
    scores = reward(answered)
    jax.eval_shape(
        learn,
        train,
        rollout=answered,
        scores=scores,
        reference=reference,
        key=key,
    )
    measure = jax.jit(
        functools.partial(
            self_check.measure,
            model=algorithm.model,
            max_new_tokens=algorithm.max_new_tokens,
            temperature=algorithm.temperature,
        )
    )
    tolerance = self_check.TOLERANCE
    rounding = 0.0
    if options.reference_dtype != "float32":
        rounding = tolerance[options.reference_dtype]
    self_check.require(
        measure(train.policy, rollout=answered, reference=reference),
        tolerance=tolerance[options.dtype],
        storage_tolerance=rounding,
    )


def sample_rows(
    answered: Rollout, scores: Array, *, policy: Pretrained, count: int
) -> list[dict[str, Any]]:
    """The first answers of a batch, for samples.jsonl."""
    shown = jax.tree.map(lambda leaf: leaf[:count], answered)
    return [
        {"row": int(row), "prompt": prompt, "response": response, "score": float(score)}
        for row, score, (prompt, response) in zip(
            shown.index,
            scores[:count],
            encoding.texts(shown, decode=policy.decode),
            strict=True,
        )
    ]


def improve(
    initial: TrainState,
    reference: Frozen,
    *,
    sample: Callable[..., Rollout],
    reward: ppo.Reward,
    learn: Callable[..., Any],
    prompts: Batches[Prompts],
    key: Array,
    job: run.Run,
    meta: dict[str, str],
    policy: Pretrained,
    options: Config,
) -> Params:
    """PPO, score - kl_coef · KL to the reference; the policy at the end."""
    distance = jax.jit(drift.weight_drift)
    with job.stage(
        "ppo",
        {"train": initial, "reference": reference, "root_key": key},
        meta=meta,
        verify=lambda held: frozen.verify(held["reference"]),
    ) as stage:
        train, reference = stage.state["train"], stage.state["reference"]
        for step in stage.steps():
            step_key = jax.random.fold_in(key, step)
            answered = sample(train.policy, prompts=prompts[step], key=step_key)
            scores = reward(answered)
            train, stats, _ = learn(
                train,
                rollout=answered,
                scores=scores,
                reference=reference,
                key=step_key,
            )
            stage.state["train"] = train
            moved = distance(train.policy, reference.stored)["relative"]
            stats["drift/relative"] = (moved, jnp.ones_like(moved))
            samples = []
            if step % options.sample_every == 0:
                samples = sample_rows(
                    answered, scores, policy=policy, count=options.num_shown
                )
            stage.end_step(step, stats, samples)
    return train.policy


def main(options: Config) -> None:
    started = time.perf_counter()
    function = None if options.reward is None else cli.load_function(options.reward)
    rows = data.read_prompts(options.prompts, field=options.prompt_field)
    policy = pretrained.load(
        options.model, tokenizer=options.tokenizer, dtype=options.dtype
    )
    reference = load_reference(options, policy)
    judge, context = None, policy.model.max_positions
    if options.reward_model is not None:
        judge = load_reward_model(options, options.reward_model, policy=policy)
        context = min(context, judge.model.max_positions)
    rows, token_lists = encode_prompts(options, rows, policy=policy, context=context)
    prompts = batches.prompt_batches(
        token_lists,
        batch_size=options.batch_size,
        seed=options.seed,
        pad_id=policy.pad_id,
        buckets=options.buckets,
    )
    if options.critic_from == "reward_model":
        assert judge is not None  # checked by Config
        critic_model = judge.model
        critic_params = storage.store(judge.frozen.stored, dtype="float32")
    else:
        critic_model = policy.model
        critic_params = critic.from_policy(policy.params, model=critic_model)
    algorithm = make_ppo(options, policy=policy, critic_model=critic_model)
    initial = state.ppo_state(
        policy=policy.params,
        critic=critic_params,
        policy_optimizer=algorithm.policy_optimizer,
        critic_optimizer=algorithm.critic_optimizer,
        kl=make_kl(options),
    )
    sample = jax.jit(functools.partial(ppo.sample, ppo=algorithm))
    learn = jax.jit(
        functools.partial(ppo.learn, ppo=algorithm), donate_argnames=("state",)
    )
    reward: ppo.Reward
    if function is not None:
        reward = rewards.TextReward(function=function, decode=policy.decode, rows=rows)
    else:
        assert judge is not None  # checked by Config
        # An argument of the program: a closure would bake its parameters in.
        reward = functools.partial(
            jax.jit(lambda model, rollout: model(rollout)),
            rewards.from_model(judge.frozen, model=judge.model),
        )
    key = jax.random.key(options.seed)
    rehearse(
        initial,
        reference,
        prompts=prompts[0],
        sample=sample,
        reward=reward,
        learn=learn,
        key=jax.random.fold_in(key, 0),
        algorithm=algorithm,
        options=options,
    )

    fingerprint = frozen.fingerprint_of(reference).root
    meta = {
        "data_digest": encoding.digest(token_lists),
        "reference_fingerprint": fingerprint,
    }
    if judge is not None:
        meta["reward_fingerprint"] = frozen.fingerprint_of(judge.frozen).root
    with run.Run(options, num_steps={"ppo": options.num_steps}) as job:
        report.model_table(
            [
                ("policy", initial.policy, True),
                ("critic", initial.critic, True),
                ("reference", reference.stored, False),
                ("reward", None if judge is None else judge.frozen.stored, False),
            ]
        )
        trained = improve(
            initial,
            reference,
            sample=sample,
            reward=reward,
            learn=learn,
            prompts=prompts,
            key=key,
            job=job,
            meta=meta,
            policy=policy,
            options=options,
        )
    frozen.verify(reference)
    if judge is not None:
        frozen.verify(judge.frozen)

    saved = job.folder / "model"
    if not saved.exists():  # it is there, and whole, when a finished run is resumed
        hf.save(
            saved,
            policy.model,
            trained,
            tokenizer=policy.tokenizer,
            stop_ids=policy.stop_ids,
        )
    measured = metrics.read(job.folder / "metrics.jsonl")
    first, last = measured[0], measured[-1]
    report.table(
        "Answers to the prompts",
        ("", "first iteration", "last iteration"),
        [(name, first[metric], last[metric]) for metric, name in MEASURED.items()],
    )
    moved = last["drift/relative"]
    print(f"reference verified unchanged, fingerprint {fingerprint}")
    print(f"policy moved, relative weight drift {moved:.3g}")
    report.plots(job.folder)
    summary = {
        "score_first": first["objective/scores"],
        "score_last": last["objective/scores"],
        "kl_first": first["objective/kl"],
        "kl_last": last["objective/kl"],
        "reference_fingerprint": fingerprint,
        "reference_verified": True,
        "drift_relative": moved,
        "seconds": time.perf_counter() - started,
    }
    run_folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; the policy is in {saved}")


if __name__ == "__main__":
    cli.main(main, Config, description=__doc__)
