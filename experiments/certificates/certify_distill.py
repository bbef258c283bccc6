"""Certificates of distillation: its expected gradients and its optimum.

    python experiments certificates.certify_distill --out runs/certify_distill

The world has 4 tokens, one of which ends a response. All 121 responses of 1 to 4 tokens
are enumerated, and so every divergence of a student from a teacher of twice its width
is exact. The exit status is 1 if one of these fails:

gradients  The expected gradient of a run's loss is, within 1e-5, the gradient of
             - by default, the sum of divergences along prefixes that are held fixed
             - with k1 in the reward, KL(student ‖ teacher) of whole responses
             - with k1 and another reward r, β·KL - E[r]
             - if the teacher reads another response that succeeded (SDPO), the
               divergence given that response, averaged over the responses of a pair
               for which there is one
optimum    A student that samples and learns as in a run reaches
           KL(student ‖ teacher) <= 0.03 nats from more than 0.5, with every divergence.
           Sums are over all 256 responses of 4 tokens.

Expect all 12 certificates of a world to hold. Over seeds 0 to 2 the largest error of a
gradient is 1.4e-6, and the student ends 0.0014 to 0.0126 nats from its teacher.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from worlds import enumerable

from certificates import conclusion
from certificates.annealing import falling
from certificates.cases import flat
from rlhf_jax import frozen, kl_control, policy, state
from rlhf_jax.algorithms import optimizers
from rlhf_jax.algorithms.distill.recipe import Distill, DistillRecipe
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.flow.teacher import TeacherPrompts, teacher_states
from rlhf_jax.algorithms.policy_gradient.iteration import iteration
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.penalty import IN_REWARD
from rlhf_jax.roles.reference.frozen import FrozenModels
from rlhf_jax.runs import command_line, report, run, run_config

Array = jax.Array
Params = Any
TOLERANCE = 1e-5  # of a gradient, share of the largest entry of its target
NATS = 0.03  # largest final KL(student ‖ teacher), nats per response
FARTHEST = 0.5  # smallest initial KL(student ‖ teacher), nats per response
BETA = 0.3  # β of the certified gradients
SCALE = 0.3  # standard deviation of the noise on every leaf of a teacher
ITERATIONS_A_STEP = 25  # iterations in one program
DIVERGENCES: dict[str, dict[str, Any]] = {
    "reverse": {"divergence": "reverse"},
    "forward": {"divergence": "forward"},
    "Jensen-Shannon, β = 0.5": {"divergence": "jensen_shannon"},
}


class Claim(NamedTuple):
    """An option of distillation and a function that has its expected gradient."""

    name: str
    recipe: DistillRecipe
    rewarded: bool
    # (log-probs f32[N, 4] of the response, f32[N, 4, V] of all tokens, both of the
    # teacher, rewards f32[N], mask bool[N, 4]) -> f32[]; its gradient is the target.
    value: Callable[..., Array]
    shown: tuple[int, ...] = ()  # tokens that the teacher reads before the prompt


def along_fixed_prefixes(divergence: Callable[[Array, Array], Array]) -> Any:
    """β Σ_y π(y) Σ_t D_t, π(y) held fixed; D takes log-probs of student and teacher."""

    def value(logprobs: Array, words: Array, _: Array, of_teacher: Array, *rest: Array):
        chance = jax.lax.stop_gradient(jnp.exp(logprobs.sum(axis=1)))
        per_token = divergence(words, of_teacher).sum(axis=-1)
        return BETA * chance @ jnp.where(rest[1], per_token, 0.0).sum(axis=1)

    return value


def whole(logprobs: Array, _: Array, of_teacher: Array, __: Array, *rest: Array):
    """β·KL(student ‖ teacher) of whole responses."""
    log_student = logprobs.sum(axis=1)
    return BETA * jnp.exp(log_student) @ (log_student - of_teacher.sum(axis=1))


def less_reward(value: Any) -> Any:
    """Returns `value` - E[r]."""

    def less(logprobs: Array, *others: Array) -> Array:
        chance = jnp.exp(logprobs.sum(axis=1))
        return value(logprobs, *others) - chance @ others[-2]

    return less


def reverse(q: Array, p: Array) -> Array:
    """Terms of KL(student ‖ teacher), from log-probs."""
    return jnp.exp(q) * (q - p)


def forward(q: Array, p: Array) -> Array:
    """Terms of KL(teacher ‖ student), from log-probs."""
    return jnp.exp(p) * (p - q)


def jensen_shannon(q: Array, p: Array, *, beta: float) -> Array:
    """Terms of the Jensen-Shannon divergence: Agarwal et al. 2023, eq. 1."""
    mixture = jnp.log(beta * jnp.exp(p) + (1 - beta) * jnp.exp(q))
    return beta * jnp.exp(p) * (p - mixture) + (1 - beta) * jnp.exp(q) * (q - mixture)


def recipe(**options: Any) -> DistillRecipe:
    """A recipe without options that bias the expected gradient."""
    return DistillRecipe(
        aggregation="constant",
        loss_scale_factor=1.0,
        **options,
    )


IN_THE_REWARD = recipe(divergence=None, penalty=IN_REWARD, whiten_advantages=False)
CLAIMS = (
    Claim("reverse", recipe(), False, along_fixed_prefixes(reverse)),
    Claim(
        "forward", recipe(divergence="forward"), False, along_fixed_prefixes(forward)
    ),
    Claim(
        "Jensen-Shannon, β = 0.3",
        recipe(divergence="jensen_shannon", jsd_beta=0.3),
        False,
        along_fixed_prefixes(functools.partial(jensen_shannon, beta=0.3)),
    ),
    Claim(
        "reverse and a reward",
        recipe(whiten_advantages=False),
        True,
        less_reward(along_fixed_prefixes(reverse)),
    ),
    Claim(
        "reverse, to a teacher that reads a demonstration (SDFT)",
        recipe(),
        False,
        along_fixed_prefixes(reverse),
        shown=(2, 1, 2),
    ),
    Claim("k1 in the reward", IN_THE_REWARD, False, whole),
    Claim("k1 in the reward and a reward", IN_THE_REWARD, True, less_reward(whole)),
)

NOT_COVERED = (
    "texts of a data set: the student samples, as in a run",
    "whitened advantages, the mean over tokens of responses that differ in length",
    "teachers whose support is not the student's",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_worlds: int = 1
    """Number of students and teachers; their seeds are --seed, --seed + 1, ..."""
    iterations: int = 500
    """Iterations from student to teacher; a multiple of 25."""
    hidden_size: int = 32
    """Width of the student; the teacher is twice as wide."""
    batch_size: int = 128
    """Responses per iteration."""
    learning_rate: float = 3e-3
    """Initial learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            num_worlds=self.num_worlds,
            iterations=self.iterations,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
        )


def distill(options: DistillRecipe, *, hidden_size: int, **others: Any) -> Distill:
    """The algorithm of a recipe in the world's model."""
    return Distill(
        **vars(options),
        model=enumerable.model(hidden_size=hidden_size),
        max_new_tokens=enumerable.LENGTH,
        **others,
    )


def pair(
    seed: int, *, hidden_size: int, shown: int = 0
) -> tuple[Params, frozen.Frozen]:
    """A student and a teacher that is twice as wide.

    Args:
      shown: tokens that the teacher reads before the prompt.
    """
    keys = jax.random.split(jax.random.key(seed))
    student = enumerable.init(keys[0], model=enumerable.model(hidden_size=hidden_size))
    model = enumerable.model(hidden_size=2 * hidden_size)
    model = dataclasses.replace(model, max_positions=model.max_positions + shown)
    return student, frozen.freeze(
        enumerable.init(keys[1], model=model, scale=SCALE), model=model
    )


def gradient_error(claim: Claim, *, seed: int, hidden_size: int) -> float:
    """Returns max|measured - named| / max|named| over the entries of the gradients."""
    student, teacher = pair(seed, hidden_size=hidden_size, shown=len(claim.shown))
    stops = enumerable.STOPS
    algorithm = distill(
        claim.recipe,
        hidden_size=hidden_size,
        policy_optimizer=optimizers.adam(1e-3),
        stop_ids=stops,
        rewarded=claim.rewarded,
    )
    model = algorithm.model
    assert teacher.model is not None
    mask = enumerable.every_mask(stops)[:, enumerable.PROMPT :]
    tokens = enumerable.every_tokens(stops)
    rewards = jnp.asarray(
        np.random.default_rng(seed).normal(size=len(tokens)), jnp.float32
    )

    every = enumerable.every_mask(stops)

    def prefixed(shown: tuple[int, ...]) -> tuple[Array, Array]:
        before = jnp.tile(jnp.array(shown, jnp.int32), (len(tokens), 1))
        prefix_mask = jnp.ones(before.shape, bool)
        return (
            jnp.concatenate([before, tokens], axis=1),
            jnp.concatenate([prefix_mask, every], axis=1),
        )

    def known(
        params: Params, model: Any, shown: tuple[int, ...] = ()
    ) -> tuple[Array, Array]:
        texts, within = prefixed(shown)
        logits = policy.logits(params, model=model, tokens=texts, mask=within)
        first = len(shown) + enumerable.PROMPT
        words = jax.nn.log_softmax(logits)[:, first - 1 : -1]
        drawn = jnp.take_along_axis(words, texts[:, first:, None], axis=2)[..., 0]
        return jnp.where(mask, drawn, 0.0), words

    def measured(params: Params) -> Array:
        rollout = enumerable.every_response(
            student, model=model, temperature=1.0, stop_ids=stops
        )
        scored = score.score(
            rollout,
            scores=rewards if claim.rewarded else jnp.zeros_like(rewards),
            reference=teacher,
            model=model,
            max_new_tokens=enumerable.LENGTH,
            temperature=1.0,
            penalty=claim.recipe.penalty,
        )
        beta = jnp.float32(BETA)
        experience, _ = algorithm.experience(scored, kl_coef=beta)
        if claim.shown:
            read = [x[:1, : -enumerable.LENGTH] for x in prefixed(claim.shown)]
            states = teacher_states(
                teacher,
                rollout=dataclasses.replace(
                    rollout, index=jnp.zeros_like(rollout.index)
                ),
                model=model,
                max_new_tokens=enumerable.LENGTH,
                temperature=1.0,
                prompts=TeacherPrompts(*read),
            )
            experience = dataclasses.replace(experience, ref_hidden=states.hidden)

        def loss_of(row: Any) -> Array:
            minibatch, loss = algorithm.minibatch_loss(
                jax.tree.map(lambda leaf: leaf[None], row),
                kl_coef=beta,
                frozen=FrozenModels(reference=teacher),
            )
            return loss((params, None), minibatch)[0]

        chance = jnp.exp(rollout.old_logprobs.sum(axis=1))
        return chance @ jax.lax.map(loss_of, experience)

    def named(params: Params) -> Array:
        of_teacher, teacher_words = known(
            frozen.read(teacher), teacher.model, claim.shown
        )
        logprobs, words = known(params, model)
        return claim.value(logprobs, words, of_teacher, teacher_words, rewards, mask)

    ours, target = (
        flat(jax.jit(jax.grad(function))(student)) for function in (measured, named)
    )
    return float(np.abs(ours - target).max() / np.abs(target).max())


def successes_error(*, seed: int, hidden_size: int, count: int = 3) -> float:
    """`gradient_error` of SDPO over pairs of responses, of which `count` are successes.

    For a pair (y, c) with a success c the loss is β·D(y; c), where the teacher reads c.
    For two successes it is the mean of β·D(y; c) and β·D(c; y), prefixes held fixed.
    """
    shown = enumerable.LENGTH  # columns of a demonstration
    student, teacher = pair(seed, hidden_size=hidden_size, shown=shown)
    algorithm = distill(
        recipe(group_size=2, success_score=1.0),
        hidden_size=hidden_size,
        policy_optimizer=optimizers.adam(1e-3),
        stop_ids=enumerable.STOPS,
        rewarded=True,
    )
    model, stops = algorithm.model, enumerable.STOPS
    tokens, mask = enumerable.every_tokens(stops), enumerable.every_mask(stops)
    chosen = np.random.default_rng(seed).choice(len(tokens), count, replace=False)
    success = np.isin(np.arange(len(tokens)), chosen)
    beta = jnp.float32(BETA)

    def teacher_prompts(number: int) -> TeacherPrompts:
        """The response `number`, left-padded, and the prompt; the same in every row."""
        own = mask[number, enumerable.PROMPT :]
        order = jnp.argsort(own, stable=True)
        prompt = enumerable.PROMPT
        before = tokens[number, prompt:][order], own[order]
        read, read_mask = (
            jnp.concatenate([x, rest[number, :prompt]])
            for x, rest in zip(before, (tokens, mask), strict=True)
        )
        return TeacherPrompts(
            *(jnp.tile(x, (len(tokens), 1)) for x in (read, read_mask)),
            taught=jnp.ones(len(tokens), bool),
        )

    def given(number: int, rollout: Any) -> Array:
        hidden = teacher_states(
            teacher,
            rollout=rollout,
            model=model,
            max_new_tokens=enumerable.LENGTH,
            temperature=1.0,
            prompts=teacher_prompts(number),
        ).hidden
        assert hidden is not None  # because the teacher has a head
        return hidden

    rollout = enumerable.every_response(
        student, model=model, temperature=1.0, stop_ids=stops
    )
    states = {int(number): given(int(number), rollout) for number in chosen}
    chance = jnp.exp(rollout.old_logprobs.sum(axis=1))
    # A pair with one success counts in both orders.
    orders = jnp.where(jnp.asarray(success), 1.0, 2.0)

    def measured(params: Params) -> Array:
        scored = score.score(
            rollout,
            scores=jnp.asarray(success, jnp.float32),
            reference=teacher,
            model=model,
            max_new_tokens=enumerable.LENGTH,
            temperature=1.0,
            penalty=algorithm.penalty,
        )
        experience, _ = algorithm.experience(scored, kl_coef=beta)

        def beside(number: int) -> Array:
            own = jax.tree.map(lambda leaf: leaf[number], experience)
            # The teacher of the success reads the other response, if it succeeded too.
            read = jnp.zeros_like(states[number])
            for other in states:
                read = read.at[other].set(states[other][number])

            def loss_of(of: tuple[Any, Array, Array, Array]) -> Array:
                row, here, there, taught = of
                both = jax.tree.map(lambda *x: jnp.stack(x), row, own)
                both = dataclasses.replace(
                    both,
                    ref_hidden=jnp.stack([here, there]),
                    response_mask=both.response_mask
                    & jnp.stack([True, taught])[:, None],
                )
                minibatch, loss = algorithm.minibatch_loss(
                    both, kl_coef=beta, frozen=FrozenModels(reference=teacher)
                )
                return loss((params, None), minibatch)[0]

            rows = (experience, states[number], read, jnp.asarray(success))
            return chance[number] * (chance * orders) @ jax.lax.map(loss_of, rows)

        return sum((beside(number) for number in states), start=jnp.zeros(()))

    def words_of(params: Params, shape: Any, prompts: TeacherPrompts | None) -> Array:
        texts, within = tokens, mask
        if prompts is not None:
            after = slice(enumerable.PROMPT, None)
            texts = jnp.concatenate([prompts.tokens, tokens[:, after]], axis=1)
            within = jnp.concatenate([prompts.mask, mask[:, after]], axis=1)
        logits = policy.logits(params, model=shape, tokens=texts, mask=within)
        first = texts.shape[1] - enumerable.LENGTH
        return jax.nn.log_softmax(logits)[:, first - 1 : -1]

    def named(params: Params) -> Array:
        q, total = words_of(params, model, None), jnp.zeros(())
        for number in states:
            p = words_of(frozen.read(teacher), teacher.model, teacher_prompts(number))
            of_rows = jnp.where(
                mask[:, enumerable.PROMPT :], reverse(q, p).sum(axis=-1), 0.0
            ).sum(axis=1)
            # Two successes count half each, in both orders of the pair.
            total += chance[number] * (chance * orders) @ of_rows
        return BETA * total

    ours, target = (
        flat(jax.jit(jax.grad(function))(student)) for function in (measured, named)
    )
    return float(np.abs(ours - target).max() / np.abs(target).max())


def reach(options: Config, divergence: dict[str, Any], *, seed: int) -> list[float]:
    """KL(student ‖ teacher), nats, before and after every tenth of the iterations."""
    student, teacher = pair(seed, hidden_size=options.hidden_size)
    assert teacher.model is not None
    algorithm = distill(
        DistillRecipe(**divergence),
        hidden_size=options.hidden_size,
        policy_optimizer=optimizers.adam(
            falling(options.learning_rate, updates=1, iterations=options.iterations),
            eps=1e-8,
        ),
        stop_ids=(),
    )
    log_teacher = enumerable.known(
        frozen.read(teacher), model=teacher.model, temperature=1.0
    )

    def distance(params: Params) -> float:
        log_student = enumerable.known(params, model=algorithm.model, temperature=1.0)
        return enumerable.divergence(log_student, log_teacher)

    prompts = enumerable.prompts(options.batch_size)

    @functools.partial(jax.jit, donate_argnums=0)
    def advance(train: Any, teacher: frozen.Frozen, key: Array, first: Array) -> Any:
        def one(train: Any, step: Array) -> tuple[Any, None]:
            train, _, _ = iteration(
                train,
                prompts=prompts,
                frozen=FrozenModels(reference=teacher),
                reward=lambda rollout: jnp.zeros(rollout.index.shape, jnp.float32),
                key=jax.random.fold_in(key, step),
                recipe=algorithm,
            )
            return train, None

        return jax.lax.scan(one, train, first + jnp.arange(ITERATIONS_A_STEP))[0]

    train = state.grpo_state(
        policy=student,
        policy_optimizer=algorithm.policy_optimizer,
        kl=kl_control.fixed(1.0),
    )
    distances, key = [distance(student)], jax.random.key(seed)
    steps = options.iterations // ITERATIONS_A_STEP
    for step in range(steps):
        train = advance(train, teacher, key, jnp.int32(step * ITERATIONS_A_STEP))
        if (step + 1) % max(1, steps // 10) == 0 or step + 1 == steps:
            distances.append(distance(train.policy))
    return distances


def main(options: Config) -> None:
    """Prints the tables; raises StopError if a certificate fails."""
    started = time.perf_counter()
    shown: dict[str, bool] = {}
    errors, reached = [], []
    with run.Run(options, num_steps={}) as job:
        for seed in range(options.seed, options.seed + options.num_worlds):
            for claim in CLAIMS:
                error = gradient_error(
                    claim, seed=seed, hidden_size=options.hidden_size
                )
                errors.append({"seed": seed, "name": claim.name, "error": error})
                shown[f"gradient: {claim.name}, seed {seed}"] = error <= TOLERANCE
            error = successes_error(seed=seed, hidden_size=options.hidden_size)
            name = "reverse, to a teacher that reads a success of the pair (SDPO)"
            errors.append({"seed": seed, "name": name, "error": error})
            shown[f"gradient: {name}, seed {seed}"] = error <= TOLERANCE
            farthest = 0.0
            for name, divergence in DIVERGENCES.items():
                distances = reach(options, divergence, seed=seed)
                reached.append({"seed": seed, "name": name, "distances": distances})
                where = f"{name}, seed {seed}"
                shown[f"optimum: {where}"] = distances[-1] <= NATS
                farthest = distances[0]
            shown[f"world: seed {seed}"] = farthest >= FARTHEST
    report.table(
        f"Expected gradients (error at most {TOLERANCE:g} of the largest entry)",
        ("seed", "loss", "error"),
        [(str(row["seed"]), row["name"], f"{row['error']:.0e}") for row in errors],
    )
    report.table(
        f"KL(student ‖ teacher) [nats per response], at most {NATS:g} at the end",
        ("seed", "divergence", "before", "after"),
        [
            (
                str(row["seed"]),
                row["name"],
                f"{row['distances'][0]:.3f}",
                f"{row['distances'][-1]:.6f}",
            )
            for row in reached
        ],
    )
    conclusion.conclude(
        job.folder,
        list(shown.items()),
        not_covered=NOT_COVERED,
        figures={
            "gradients": errors,
            "reached": reached,
        },
        started=started,
    )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
