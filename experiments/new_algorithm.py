"""An algorithm that the library does not have: REINFORCE with a moving baseline.

    python new_algorithm.py --out runs/reinforce

The file needs only the installed package: copy it anywhere and change it.

    ∇J = E[(R - b) ∇ log π(y|x)],  R = score(x, y) - kl_coef · Σ_t k1_t,
    b a moving average of R

The whole algorithm is `learn` below: it samples, scores and updates with functions of
the library, but without `PolicyGradient`. An untrained model learns to write words of
praise while the KL penalty keeps it near its initial parameters. The score of a
response is the sum of its words' grades, positive for praise. In 20 seconds on two
laptop cores it rises from 0 to 10.5 - 11.1 over seeds 0 to 2, at 6.5 nats of KL.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from rlhf_jax import config, decoder, frozen, masked, policy
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import rollout, score
from rlhf_jax.data import batches
from rlhf_jax.functional import checks
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import command_line, folder, metrics, plots, report, run, run_config

Array = jax.Array
NEW_TOKENS = 12
SHOWN = ("objective/scores", "objective/kl", "objective/rlhf_reward")
PAD_ID, STOP_IDS = 0, (1,)
PRODUCTS = ("kettle", "pan", "mug", "pot", "phone", "laptop", "camera", "radio")
GRADES = {"superb": 2, "good": 1, "sturdy": 1, "dull": -1, "weak": -1, "awful": -2}
WORDS = ("<pad>", "<eos>", "the", "is", "and", "very", *PRODUCTS, *GRADES)
PROMPTS = [[WORDS.index(word) for word in ("the", product)] for product in PRODUCTS]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 100
    """Number of updates."""
    batch_size: int = 64
    """Responses per update."""
    learning_rate: float = 3e-3
    """Learning rate of Adam."""
    kl_coef: float = 1.0
    """KL coefficient β, reward units per nat of KL to the reference."""
    baseline_decay: float = 0.9
    """Decay of the moving baseline per update: b ← decay·b + (1 - decay)·mean R."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(learning_rate=self.learning_rate)
        checks.non_negative(kl_coef=self.kl_coef, baseline_decay=self.baseline_decay)


@flax.struct.dataclass
class Learner:
    """The state that an update changes."""

    params: Any
    opt: optax.OptState
    baseline: Array  # f32[], reward units


def praise(answered: Rollout) -> Array:
    """Returns the scores, f32[B]: the sum of the grades of a response's words."""
    grades = jnp.float32([GRADES.get(word, 0) for word in WORDS])[answered.tokens]
    return masked.masked_sum(grades, mask=answered.response_mask, axis=1)


def learn(
    learner: Learner,
    *,
    prompts: Prompts,
    reference: Frozen,
    key: Array,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    options: Config,
) -> tuple[Learner, masked.Stats]:
    """Samples responses, scores them and takes a step along (R - b) ∇ log π(y|x)."""
    answered = rollout.rollout(
        learner.params,
        model=model,
        prompts=prompts,
        key=key,
        max_new_tokens=NEW_TOKENS,
        stop_ids=STOP_IDS,
        temperature=1.0,
    )
    scored = score.score(
        answered,
        scores=praise(answered),
        reference=reference,
        model=model,
        max_new_tokens=NEW_TOKENS,
        temperature=1.0,
    )
    in_response = functools.partial(
        masked.masked_sum, mask=answered.response_mask, axis=1
    )
    assert scored.kl is not None  # because there is a reference
    kl = in_response(scored.kl)
    total = scored.scores - options.kl_coef * kl

    def loss(params: Any) -> Array:
        logprobs = policy.logprobs(
            params, model=model, tokens=answered.tokens, mask=answered.mask
        )
        return -jnp.mean((total - learner.baseline) * in_response(logprobs))

    grads = jax.grad(loss)(learner.params)
    updates, opt = optimizer.update(grads, learner.opt)
    decay = options.baseline_decay
    baseline = decay * learner.baseline + (1 - decay) * total.mean()
    stats: masked.Stats = {
        name: (values.sum(), jnp.float32(values.size))
        for name, values in {
            "objective/scores": scored.scores,
            "objective/kl": kl,
            "objective/rlhf_reward": total,
        }.items()
    }
    params = optax.apply_updates(learner.params, updates)
    return Learner(params=params, opt=opt, baseline=baseline), stats


def main(options: Config) -> None:
    prompts = batches.prompt_batches(
        PROMPTS,
        batch_size=options.batch_size,
        seed=options.seed,
        pad_id=PAD_ID,
    )
    model = config.gpt2(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_layers=1,
        num_heads=4,
        max_positions=64,
    )
    init_key, key = jax.random.split(jax.random.key(options.seed))
    params = jax.jit(decoder.init, static_argnames=("model",))(init_key, model=model)
    optimizer = optax.adam(options.learning_rate)
    update = jax.jit(
        functools.partial(learn, model=model, optimizer=optimizer, options=options),
        donate_argnames=("learner",),
    )
    stage_state = {
        "learner": Learner(params, optimizer.init(params), jnp.zeros(())),
        "reference": frozen.freeze(params),
        "key": key,
    }
    with (
        run.Run(options, num_steps={"reinforce": options.num_steps}) as job,
        job.stage("reinforce", stage_state, meta={}) as stage,
    ):
        for step in stage.steps():
            stage.state["learner"], stats = update(
                stage.state["learner"],
                prompts=prompts[step],
                reference=stage.state["reference"],
                key=jax.random.fold_in(stage.state["key"], step),
            )
            stage.end_step(step, stats)
    rows = metrics.read(job.folder / "metrics.jsonl")
    report.table(
        "Responses",
        ("", "first update", "last update"),
        [(name, rows[0][name], rows[-1][name]) for name in SHOWN],
    )
    plots.draw(job.folder)
    folder.write_summary(job.folder, {name: rows[-1][name] for name in SHOWN})


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
