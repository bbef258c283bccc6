"""Does a student learn more from its own samples than from its teacher's?

    python experiments studies.distillation --out runs/distillation

A teacher learns the quickstart's language of reviews. A student with an eleventh of its
parameters learns from 40 batches of reviews, after which none of its responses parses.
Then the student learns from the teacher in four ways, from the same initial parameters
and with the same optimizer:

teacher's samples    The teacher responds, and the student learns its tokens by
                     cross-entropy: sequence-level distillation (Kim and Rush 2016).
reverse, forward, Jensen-Shannon
                     The student responds and learns the teacher's distribution of each
                     token, over the whole vocabulary (`rlhf-jax distill`).

Compute is equal. A teacher's token costs the same to read as to write. The ways that
sample from the student take fewer steps, by the cost of sampling in floating-point
operations per parameter (2 per token forward, 4 backward).

Measured on held-out prompts are exact KLs over the vocabulary, summed over the tokens
of a response and averaged over responses: KL(student ‖ teacher) on the student's
responses and KL(teacher ‖ student) on the teacher's. The third measure is the share of
the student's responses that parse.

Expect, over seeds 0 to 2, a larger share that parses from the reverse KL on the
student's samples (0.34 against 0.23), and smaller KLs from the teacher's samples: 4.3
nats against 4.7 (one seed has the opposite order) and 1.8 against 8.1. The student
starts 79 nats away, so its first samples are unlike the teacher's. Not measured: a
fine-tuned start (--student-steps 400) and a learning rate for each way.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pipeline.options import (
    PROMPT_COLUMNS,
    RESPONSE_COLUMNS,
    STOP_IDS,
    TRAIN_PROMPTS,
)
from worlds import reviews

from rlhf_jax import config, decoder, frozen, kl_control, sft, state
from rlhf_jax.algorithms.batch import Prompts, Sequences
from rlhf_jax.algorithms.distill.recipe import Distill, DistillRecipe
from rlhf_jax.algorithms.policy_gradient.iteration import iteration
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Example
from rlhf_jax.functional import checks
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import Frozen, FrozenModels
from rlhf_jax.runs import command_line, folder, report, run, run_config
from studies.distilled_students import look, prompts_of, respond

Array = jax.Array
Params = Any
Row = dict[str, Any]
STEPS_A_PROGRAM = 25
NUM_REVIEWS = 16_384
OF_TEACHER = "teacher's samples"
RECIPES = {
    "reverse": DistillRecipe(),
    "forward": DistillRecipe(divergence="forward"),
    "Jensen-Shannon": DistillRecipe(divergence="jensen_shannon"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_seeds: int = 3
    """Number of seeds, of models and samples: --seed, --seed + 1, ..."""
    num_steps: int = 300
    """Steps on the teacher's samples; the other ways take fewer, at equal compute."""
    batch_size: int = 64
    """Responses per step."""
    learning_rate: float = 3e-3
    """Learning rate of the student in every way; it falls to 0 linearly."""
    teacher_steps: int = 400
    """Updates of the teacher on reviews."""
    student_steps: int = 40
    """Updates of the student on reviews, before it learns from the teacher."""
    teacher_size: int = 96
    """Width of the teacher, which has two layers."""
    student_size: int = 32
    """Width of the student, which has one layer."""
    num_answers: int = 512
    """Responses to held-out prompts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            num_seeds=self.num_seeds,
            num_steps=self.num_steps,
            learning_rate=self.learning_rate,
            teacher_steps=self.teacher_steps,
            student_steps=self.student_steps,
            num_answers=self.num_answers,
        )


def shape(hidden_size: int, *, num_layers: int) -> ModelConfig:
    """The config of a decoder for the language."""
    return config.gpt2(
        vocab_size=len(reviews.VOCABULARY),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=4,
        max_positions=PROMPT_COLUMNS + RESPONSE_COLUMNS,
    )


def fine_tuned(seed: int, *, model: ModelConfig, num_steps: int) -> Params:
    """Trains a model on reviews of the grammar for `num_steps` updates."""
    stream = batches.sequence_batches(
        [
            Example(reviews.encode(prompt), reviews.encode(response))
            for prompt, response in reviews.sample_reviews(seed, NUM_REVIEWS)
        ],
        batch_size=64,
        seed=seed,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS + RESPONSE_COLUMNS,),
    )
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 3e-3, num_steps // 10, num_steps)
    )
    update = jax.jit(
        functools.partial(sft.update, model=model, optimizer=optimizer),
        donate_argnames=("state",),
    )
    init = jax.jit(decoder.init, static_argnames=("model",))
    train = state.supervised_state(
        init(jax.random.key(seed), model=model), optimizer=optimizer
    )
    for step in range(num_steps):
        train, _ = update(train, batch=stream[step])
    return train.params


def steps_of(way: str, options: Config, *, student: Params, teacher: Params) -> int:
    """Steps of a way at equal compute, by operations per response token."""
    if way == OF_TEACHER:
        return options.num_steps
    small, large = size(student), size(teacher)
    write, read, learn = 2 * large, 2 * large, 6 * small
    sample = 2 * small
    return round(options.num_steps * (write + learn) / (read + learn + sample))


def size(params: Params) -> int:
    """Number of parameters of a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def stacked(stream: Any, *, first: int, count: int) -> Prompts:
    """Stacks `count` batches of a stream, every leaf [count, ...]."""
    several = [stream[first + i] for i in range(count)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)


def from_samples(
    student: Params, teacher: Frozen, *, seed: int, model: ModelConfig, options: Config
) -> Params:
    """Trains by cross-entropy on the teacher's responses, new ones in every step."""
    teacher_model = frozen.shape_of(teacher, policy=model)
    optimizer = adam(options, options.num_steps)

    def step(train: Any, teacher: Frozen, prompts: Prompts, key: Array) -> Any:
        responses = respond(
            frozen.read(teacher), model=teacher_model, prompts=prompts, key=key
        )
        batch = Sequences(responses.tokens, responses.mask, responses.response_mask)
        return sft.update(train, batch=batch, model=model, optimizer=optimizer)[0]

    train = state.supervised_state(storage.store(student), optimizer=optimizer)
    train = run_steps(
        step, train, teacher, num_steps=options.num_steps, seed=seed, options=options
    )
    return train.params


def on_policy(
    recipe: DistillRecipe,
    student: Params,
    teacher: Frozen,
    *,
    num_steps: int,
    seed: int,
    model: ModelConfig,
    options: Config,
) -> Params:
    """Trains as `rlhf-jax distill` does, with the teacher inside the update."""
    algorithm = Distill(
        **vars(recipe),
        model=model,
        policy_optimizer=adam(options, num_steps),
        max_new_tokens=RESPONSE_COLUMNS,
        stop_ids=STOP_IDS,
    )

    def step(train: Any, teacher: Frozen, prompts: Prompts, key: Array) -> Any:
        return iteration(
            train,
            prompts=prompts,
            frozen=FrozenModels(reference=teacher),
            reward=lambda responses: jnp.zeros(responses.index.shape, jnp.float32),
            key=key,
            recipe=algorithm,
        )[0]

    train = state.grpo_state(
        policy=storage.store(student),
        policy_optimizer=algorithm.policy_optimizer,
        kl=kl_control.fixed(1.0),
    )
    train = run_steps(
        step, train, teacher, num_steps=num_steps, seed=seed, options=options
    )
    return train.policy


def adam(options: Config, num_steps: int) -> optax.GradientTransformation:
    """The optimizer of every way."""
    schedule = optax.linear_schedule(options.learning_rate, 0.0, num_steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


def run_steps(
    step: Callable[..., Any],
    train: Any,
    teacher: Frozen,
    *,
    num_steps: int,
    seed: int,
    options: Config,
) -> Any:
    """Runs all steps, STEPS_A_PROGRAM of them per program."""
    stream = prompts_of(TRAIN_PROMPTS, count=options.batch_size, seed=seed)
    root = jax.random.key(seed)

    @functools.partial(jax.jit, donate_argnums=0)
    def several(train: Any, teacher: Frozen, prompts: Prompts, keys: Array) -> Any:
        def one(train: Any, prompts_and_key: tuple[Prompts, Array]) -> tuple[Any, None]:
            return step(train, teacher, *prompts_and_key), None

        return jax.lax.scan(one, train, (prompts, keys))[0]

    for first in range(0, num_steps, STEPS_A_PROGRAM):
        count = min(STEPS_A_PROGRAM, num_steps - first)
        keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(
            first + jnp.arange(count)
        )
        batches = stacked(stream, first=first, count=count)
        train = several(train, teacher, batches, keys)
    return train


def main(options: Config) -> None:
    """Runs every way for every seed, and prints means and standard deviations."""
    started = time.perf_counter()
    small = shape(options.student_size, num_layers=1)
    large = shape(options.teacher_size, num_layers=2)
    rows: list[Row] = []
    parameters: dict[str, int] = {}
    with run.Run(options, num_steps={}) as job:
        for seed in range(options.seed, options.seed + options.num_seeds):
            teacher = frozen.freeze(
                fine_tuned(seed, model=large, num_steps=options.teacher_steps),
                model=large,
            )
            student = fine_tuned(
                seed + 1000, model=small, num_steps=options.student_steps
            )
            parameters = {"student": size(student), "teacher": size(teacher.stored)}
            measure = functools.partial(
                look,
                teacher=teacher,
                seed=seed,
                model=small,
                num_answers=options.num_answers,
            )
            known = look(
                frozen.read(teacher),
                teacher,
                seed=seed,
                model=large,
                num_answers=options.num_answers,
            )
            rows.append({"seed": seed, "way": "teacher", "fluency": known["fluency"]})
            rows.append({"seed": seed, "way": "start", **measure(student)})
            for way in (OF_TEACHER, *RECIPES):
                begun = time.perf_counter()
                num_steps = steps_of(
                    way, options, student=student, teacher=teacher.stored
                )
                settings = {"seed": seed, "model": small, "options": options}
                if way == OF_TEACHER:
                    learned = from_samples(student, teacher, **settings)
                else:
                    learned = on_policy(
                        RECIPES[way], student, teacher, num_steps=num_steps, **settings
                    )
                row = {"seed": seed, "way": way, "steps": num_steps}
                row |= measure(learned) | {"seconds": time.perf_counter() - begun}
                rows.append(row)
                print(row, flush=True)
    show(rows)
    summary = {
        "rows": rows,
        "parameters": parameters,
        "seconds": time.perf_counter() - started,
    }
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; figures in {job.folder}")


def show(rows: list[Row]) -> None:
    """Prints mean ± standard deviation over the seeds."""

    def spread(way: str, name: str) -> str:
        values = [row[name] for row in rows if row["way"] == way and name in row]
        return f"{np.mean(values):.3f} ± {np.std(values):.3f}" if values else ""

    names = ("kl_to_teacher", "kl_from_teacher", "fluency")
    report.table(
        "Held-out prompts: KLs in nats per response, share that parses",
        ("", "KL(student ‖ teacher)", "KL(teacher ‖ student)", "parses"),
        [
            (way, *(spread(way, name) for name in names))
            for way in dict.fromkeys(row["way"] for row in rows)
        ],
    )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
