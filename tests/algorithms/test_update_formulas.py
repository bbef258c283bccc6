"""Every formula of an update against float64: one tiny step for each set of options.

`oracle_updates` computes the loss before the step and along directions through the
parameters. The step, by SGD, must move along them by the slope, and
`oracle_statistics` computes all other metrics of an iteration. Options are
combined where that needs no further program; each alone changes the number. Bounds are
not reciprocals, groups have three rows, weights are unequal, responses have five
lengths, two of them never stop, and the vocabulary is read in several chunks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle_statistics
import oracle_updates
import oracles
import pytest
import toys
from oracle_updates import KL, Rows, Shaping, Surrogate

from rlhf_jax import frozen, grpo, kl_control, masked, ppo, reinforce, state
from rlhf_jax.algorithms import batch
from rlhf_jax.algorithms.distill import Distill
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient import corrections
from rlhf_jax.algorithms.policy_gradient.options import DAR, Centred
from rlhf_jax.algorithms.policy_gradient.recipe import CISPO, SAPO, Clip
from rlhf_jax.functional.kl.penalty import UNBIASED_K3, Penalty
from rlhf_jax.models.generation.sampling import TopK
from rlhf_jax.roles import policy
from rlhf_jax.roles.reference.frozen import FrozenModels, Further
from rlhf_jax.roles.reference.lifecycle import Lifecycle

MODEL = toys.GPT2
CAPPED = dataclasses.replace(MODEL, logit_softcap=1.5)
POLICY, REFERENCE, SECOND, CRITIC = (
    toys.params(seed=0),
    toys.params(seed=5),
    toys.params(seed=6),
    toys.scorer(seed=1),
)
TEMPERATURE, BETA, SHARE = 0.8, 0.3, 0.4  # SHARE: the weight of the second reference
STEP = 1e-4  # of the differences, along directions of unit length
PROMPT, SIZE = 3, 5
CLIP, AS_IT_IS = Surrogate(), Shaping()
PTX = slice(3, 6)  # the rows that are texts mixed in, too: those without padding before
TARGET, HORIZON = 2.0, 90  # of an adaptive β, nats per response and episodes
LENGTHS, UNFINISHED = (5, 3, 1, 4, 5, 2), (0, 4)
OLD_ROW = 4  # whose tokens parameters of two iterations before drew
FIXED: dict[str, Any] = {
    "model": MODEL,
    "policy_optimizer": optax.sgd(1.0),
    "max_new_tokens": SIZE,
    "stop_ids": toys.STOP,
    "temperature": TEMPERATURE,
    "num_epochs": 1,
}
OF_GROUPS = {"group_size": 3, **FIXED}

learn = toys.jit(ppo.learn, static_argnames=("recipe",))


@functools.cache
def texts() -> Rows:
    """Prompts and responses without log-probs."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, MODEL.vocab_size, (6, PROMPT + SIZE))
    mask = np.ones(tokens.shape, bool)
    tokens[:, :PROMPT] = np.repeat(tokens[::3, :PROMPT], 3, axis=0)
    mask[:3, 0] = False
    for row, length in enumerate(LENGTHS):
        mask[row, PROMPT + length :] = False
        if row not in UNFINISHED:
            tokens[row, PROMPT + length - 1] = toys.STOP[row % 2]
    tokens[~mask] = 0
    return Rows(
        tokens=tokens,
        mask=mask,
        response_mask=mask & (np.arange(PROMPT + SIZE) >= PROMPT),
        sampler_logprobs=np.zeros(tokens.shape),
        scores=np.array([1.5, -0.5, 0.25, 2.0, -1.0, 0.75]),
        group=3,
        stops=toys.STOP,
    )


@functools.cache
def rows() -> Rows:
    """The rows of `texts`, drawn by a sampler other than the policy."""
    drawn = texts()
    own = oracle_updates.picked(table(), drawn)
    noise = np.random.default_rng(1).normal(0, 0.4, own.shape)
    logprobs = np.where(drawn.response_mask, own + noise, 0.0).astype(np.float32)
    return dataclasses.replace(drawn, sampler_logprobs=logprobs.astype(np.float64))


@functools.cache
def recorded():
    """Three recorded tokens and their log-probs, from another policy as the sampler."""
    tokens = np.argsort(-of_reference(6), axis=-1)[..., :3]
    return tokens, np.take_along_axis(of_reference(6), tokens, axis=-1)


@functools.cache
def ages():
    """The age, in iterations, of the parameters that drew each token."""
    old = (np.arange(len(LENGTHS)) == OLD_ROW)[:, None]
    return np.where(texts().response_mask & old, 2, 0)


@functools.cache
def entropies():
    """Entropies as a sampler reports them, from an unknown distribution."""
    drawn = np.random.default_rng(4).uniform(0.2, 2.5, texts().tokens.shape)
    return np.where(texts().response_mask, drawn, 0.0)


@functools.cache
def directions():
    """Directions of unit length in the parameters of policy and critic."""
    rng = np.random.default_rng(3)

    def one():
        drawn = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), (POLICY, CRITIC))
        size = math.sqrt(sum((x**2).sum() for x in jax.tree.leaves(drawn)))
        return jax.tree.map(lambda x: x / size, drawn)

    return [one(), one()]


def moved(params, part: int, number: int, step: float):
    toward = directions()[number][part]
    return jax.tree.map(
        lambda leaf, to: np.asarray(leaf, np.float64) + step * to, params, toward
    )


@functools.cache
def raw(number: int = 0, step: float = 0.0):
    """Logits of the policy, moved along a direction."""
    return oracle_updates.logits(moved(POLICY, 0, number, step), MODEL, texts())


def table(number: int = 0, step: float = 0.0, temperature: float = TEMPERATURE):
    return oracle_updates.table(raw(number, step), temperature)


@functools.cache
def of_reference(seed: int, softcap: float | None = None):
    params = jax.tree.map(np.asarray, toys.params(seed=seed))
    of_texts = oracle_updates.logits(params, MODEL, texts())
    return oracle_updates.table(of_texts, TEMPERATURE, softcap)


@functools.cache
def critic_values(number: int = 0, step: float = 0.0):
    """f64[B, S]: hidden·kernel + bias of the state before each response token."""
    critic = moved(CRITIC, 1, number, step)
    identity = np.eye(MODEL.hidden_size)
    trunk = {**critic["trunk"], "head": {"kernel": identity}}
    shape = dataclasses.replace(
        MODEL, tied_head=False, vocab_size=MODEL.hidden_size, vocab_multiple=1
    )
    hidden = oracle_updates.logits(trunk, shape, texts())
    values = hidden @ critic["score"]["kernel"] + critic["score"]["bias"]
    return np.where(texts().response_mask, values, 0.0)


@functools.cache
def old_values():
    """Values of another critic, so that clipping has an effect."""
    noise = np.random.default_rng(2).normal(0, 0.4, texts().tokens.shape)
    values = np.where(texts().response_mask, critic_values() + noise, 0.0)
    return values.astype(np.float32).astype(np.float64)


@functools.cache
def of_trust() -> dict[str, float]:
    """Equal in all cases, because they do not depend on the update."""
    behaviour = rows().sampler_logprobs
    return oracle_statistics.of_trust(
        rows(), behaviour=behaviour, policy=table(), age=ages(), room=SIZE
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A case: the library's options and those of the oracle."""

    recipe: Callable[[], Any]
    kl: KL | None = None  # None where no KL is penalised
    surrogate: Surrogate = CLIP
    shaping: Shaping = AS_IT_IS
    further: bool = False
    softcap: float | None = None  # of the reference
    entropy: float = 0.0
    aggregation: str = "token_mean"
    scale: float | None = None
    advantages: str = "groups"
    groups: tuple[tuple[str, Any], ...] = ()
    kl_to_go: bool = False
    whiten: bool = False
    # (correction of `oracles.importance_weights`, cap, floor); None has no weights.
    weights: tuple[str, float, float | None] | None = None
    recomputes: bool = False
    value_clip: float | None = None
    vf_coef: float = 0.0
    divergence: tuple[str, float | None, int | None] | None = None
    policy_loss: bool = True
    ptx: float = 0.0
    every: int = 1  # iterations from one KL to the next; β is scaled by it


class Oracle:
    """A case in float64: `loss` along a direction, and the stats before the step."""

    def __init__(self, case: Case) -> None:
        self.case, everything = case, rows()
        self.of_groups: dict[str, float] = {}
        self.references = [(of_reference(5, case.softcap), 1.0)]
        if case.further:
            self.references.append((of_reference(6), SHARE))
        start = table()
        own = oracle_updates.picked(start, everything)
        self.behaviour = everything.sampler_logprobs
        self.old = own if case.recomputes else self.behaviour
        shaped = case.shaping.of(everything)
        kl = np.zeros(own.shape)
        if case.kl is not None and case.kl.placement in ("reward", "both"):
            for reference, weight in self.references:
                added = case.kl.in_reward(everything, self.old, start, reference)
                kl += weight * added
        self.beta = BETA * case.every
        self.rewards = oracles.token_rewards(
            shaped, kl, everything.response_mask, self.beta
        )
        self.penalty = -self.beta * kl.sum() / len(own)
        trained: Any = [True] * len(own)
        advantages = np.zeros(own.shape)
        if case.advantages == "groups":
            options: dict[str, Any] = {"baseline": "group", "normalise": None}
            options |= {"overlong_mask": None, "equal_groups": "keep"}
            options |= dict(case.groups)
            alone = self.rewards
            if case.kl_to_go:
                nothing = np.zeros_like(kl)
                alone = oracles.token_rewards(
                    shaped, nothing, everything.response_mask, 0.0
                )
            of_rows, trained = oracle_updates.over_groups(everything, alone, **options)
            leaves_out = options["overlong_mask"] or options["equal_groups"] != "keep"
            ended = everything.finished
            self.of_groups = oracle_statistics.of_groups(
                everything,
                alone,
                counted=[options["overlong_mask"] != "group" or end for end in ended],
                trained=list(trained) if leaves_out else None,
            )
            advantages += of_rows[:, None]
            if case.kl_to_go:
                paid = -self.beta * kl
                advantages += oracle_updates.to_go(everything, paid, whiten=False)
        elif case.advantages == "gae":
            self.values = old_values()
            advantages, self.returns = oracles.gae(
                self.rewards, self.values, everything.response_mask, 0.9, 0.8
            )
        else:
            advantages = oracle_updates.to_go(everything, self.rewards, whiten=False)
        self.rows = oracle_updates.kept(everything, trained)
        advantages = np.where(self.rows.response_mask, advantages, 0.0)
        if case.whiten:
            advantages = oracles.masked_whiten(advantages, self.rows.response_mask)
        self.compared = self.rows  # before any is rejected for its weight
        if case.weights is not None:
            correction, cap, floor = case.weights
            log_ratio = self.old - self.behaviour
            weights, left = oracles.importance_weights(
                log_ratio, self.rows.response_mask, correction, cap, floor
            )
            advantages = advantages * weights
            if correction.endswith("_reject"):
                self.rows = oracle_updates.kept(self.rows, left)
        self.advantages = advantages
        self.own = own
        self.weights = oracle_updates.token_weights(
            self.rows, case.aggregation, case.scale
        )

    def loss(
        self, number: int = 0, step: float = 0.0
    ) -> tuple[float, dict[str, float]]:
        case, now, start = self.case, table(number, step), table()
        cells, weights = oracles.entries(self.rows.response_mask), self.weights
        token = {"now": oracle_updates.picked(now, self.rows), "old": self.old}
        token["start"] = oracle_updates.picked(start, self.rows)
        terms, bounded = self._terms(
            token["now"], start=token["start"], tables=(now, start)
        )
        loss = math.fsum(weights[cell] * terms[cell] for cell in cells)
        ratios = case.surrogate.ratios(self.rows, **token)
        log_ratios = [token["now"][cell] - self.old[cell] for cell in cells]
        stats = {
            "loss/policy": loss,
            "policy/approxkl": np.mean([x * x / 2 for x in log_ratios]),
            "policy/ratio_mean": np.mean([ratios[cell] for cell in cells]),
            "policy/ratio_max": max(ratios[cell] for cell in cells),
        }
        if bounded:
            stats["policy/clipfrac"] = np.mean([bounded[cell] for cell in cells])
        if not case.policy_loss:
            loss, stats = 0.0, {}
        if case.entropy:
            entropy = {
                cell: -math.fsum(np.exp(now[cell]) * now[cell]) for cell in cells
            }
            bonus = math.fsum(weights[cell] * entropy[cell] for cell in cells)
            loss -= case.entropy * bonus
            stats["loss/entropy"] = -bonus
        if case.kl is not None and case.kl.placement in ("loss", "both"):
            total = 0.0
            for reference, weight in self.references:
                kl, values = case.kl.in_loss(
                    self.rows,
                    start=start,
                    now=now,
                    reference=reference,
                    behaviour=self.behaviour,
                    weights=weights,
                )
                loss += self.beta * weight * kl
                total += weight * values
            stats["loss/kl"] = total / len(cells)
        if case.divergence is not None:
            kind, share, top_k = case.divergence
            reference = self.references[0][0]
            if kind == "jensen_shannon":
                of_cells = {
                    cell: oracles.jensen_shannon(
                        now[cell], reference[cell], share, top_k
                    )
                    for cell in cells
                }
            else:
                exact = KL(direction=kind, top_k=top_k)
                of_all = exact.exact(now, reference, self.rows.response_mask)
                of_cells = {cell: of_all[cell] for cell in cells}
            loss += self.beta * math.fsum(
                weights[cell] * of_cells[cell] for cell in cells
            )
            stats["loss/divergence"] = np.mean(list(of_cells.values()))
        if case.ptx:
            of_text = oracle_updates.picked(table(number, step, 1.0), rows())
            stats["loss/ptx"] = oracles.language_model_loss(
                of_text[PTX], rows().response_mask[PTX]
            )
            loss += case.ptx * stats["loss/ptx"]
        if case.advantages == "gae":
            values = critic_values(number, step)
            of_values = oracles.value_terms(
                values,
                self.values,
                self.returns,
                rows().response_mask,
                case.value_clip,
            )
            value = np.mean(of_values["loss"])
            loss += case.vf_coef * value
            stats["loss/value"] = value
            stats["value/clipfrac"] = np.mean(of_values["clipped"])
        return loss, stats

    def logged(self) -> dict[str, float]:
        """All statistics but those of `loss`, and the norms of the gradients."""
        case, everything = self.case, rows()
        ref, *further = (
            oracle_updates.picked(reference, everything)
            for reference, _ in self.references
        )
        mask = everything.response_mask
        gaps = np.abs(self.own - self.behaviour)[self.compared.response_mask]
        stats = {
            "objective/non_score_reward": self.penalty,
            "objective/rlhf_reward": everything.scores.mean() + self.penalty,
            "objective/kl_coef": self.beta,
            "policy/sampler_mismatch": gaps.mean(),
            "update/skipped": 0.0,
            "update/skipped_in_a_row": 0.0,
            **self.of_groups,
            **oracle_statistics.of_responses(
                everything, old=self.old, ref=ref, entropy=entropies()
            ),
            **of_trust(),
        }
        for other in further:
            stats["objective/kl_second"] = (self.old - other)[mask].sum() / len(ref)
        if case.weights is not None:
            stats |= oracle_statistics.of_weights(
                everything,
                old=self.old,
                behaviour=self.behaviour,
                age=ages(),
                correction=case.weights,
            )
        if case.advantages == "gae":
            of_values = (self.values, self.returns, mask)
            stats["value/explained_variance"] = oracles.explained_variance(*of_values)
        return stats | self._of_penalty() | self._of_surrogate()

    def _terms(self, now: Any, *, start: Any, tables: Any) -> Any:
        return self.case.surrogate.terms(
            self.rows,
            tables=tables,
            now=now,
            start=start,
            old=self.old,
            advantages=self.advantages,
            reference=oracle_updates.picked(self.references[0][0], self.rows),
        )

    def _of_penalty(self) -> dict[str, float]:
        """Shares of estimates that are clipped, or (none here) beyond float32."""
        kl, stats = self.case.kl, {}
        if kl is None:
            return stats
        large = {"k3"} & {kl.value, kl.grad} or kl.weights
        if kl.placement in ("reward", "both"):
            if kl.value == "k3":
                stats["penalty/overflowfrac"] = 0.0
            if kl.clip is not None:
                free = dataclasses.replace(kl, clip=None)
                estimates = np.array(
                    [
                        free.in_reward(rows(), self.old, table(), reference)
                        for reference, _ in self.references
                    ]
                )[:, rows().response_mask]
                stats["penalty/clipfrac"] = (np.abs(estimates) > kl.clip).mean()
        if kl.placement in ("loss", "both") and large:
            stats["loss/kl_overflowfrac"] = 0.0
        return stats

    def _of_surrogate(self) -> dict[str, float]:
        """Shares of tokens beyond float32 or the dual clip; slopes of soft gates."""
        case, stats = self.case, {}
        if not case.policy_loss:
            return stats
        token = oracle_updates.picked(table(), self.rows)
        ratios = case.surrogate.ratios(self.rows, now=token, start=token, old=self.old)
        trained = self.rows.response_mask
        ratio, advantage = ratios[trained], self.advantages[trained]
        if case.surrogate.kind == "clip":
            stats["policy/overflowfrac"] = 0.0
        if case.surrogate.dual is not None:
            beyond = (advantage < 0) & (ratio > case.surrogate.dual)
            stats["policy/dual_clipfrac"] = beyond.mean()
        if case.surrogate.kind == "sapo":
            positive, negative = case.surrogate.positive, case.surrogate.negative
            steep = np.where(advantage > 0, positive, negative)
            gate = 1 / (1 + np.exp(-steep * (ratio - 1)))
            stats["policy/gate"] = (4 * gate * (1 - gate)).mean()
        if case.surrogate.kind == "dar":
            losses, _ = self._terms(token, start=token, tables=(table(), table()))
            weights = [-losses[b, t] / token[b, t] for b, t in losses]
            stats["policy/gate"] = np.mean(weights)
        if case.surrogate.recorded is not None:
            mass = np.exp(case.surrogate.recorded()[1]).sum(axis=-1)
            stats["policy/top_mass"] = mass[trained].mean()
        return stats


def run(case: Case):
    """One step of the method, and the stats of its iteration."""
    drawn, recipe = rows(), case.recipe()
    floats = functools.partial(jnp.asarray, dtype=jnp.float32)
    index = np.arange(6) // 3
    rollout = batch.Rollout(
        tokens=jnp.asarray(drawn.tokens, jnp.int32),
        mask=jnp.asarray(drawn.mask),
        response_mask=jnp.asarray(drawn.response_mask),
        old_logprobs=floats(drawn.sampler_logprobs),
        entropy=floats(entropies()),
        index=jnp.asarray(index, jnp.int32),
        sample=jnp.asarray(np.arange(6) % 3, jnp.int32),
        version=jnp.asarray(-ages(), jnp.int32),
    )
    if case.surrogate.recorded is not None:
        tokens, logprobs = case.surrogate.recorded()
        of_sampler = TopK(jnp.asarray(tokens, jnp.int32), floats(logprobs))
        rollout = dataclasses.replace(rollout, top_k=of_sampler)
    own = jax.tree.map(jnp.copy, POLICY)
    ptx = None
    if case.ptx:
        ptx = batch.Sequences(
            *(x[PTX] for x in (rollout.tokens, rollout.mask, rollout.response_mask))
        )
    if recipe.critic is None:
        adaptive = kl_control.Adaptive(target=TARGET, unit="response", horizon=HORIZON)
        start = state.grpo_state(
            policy=own,
            policy_optimizer=recipe.policy_optimizer,
            kl=adaptive.controller(BETA, num_steps=1),
        )
    else:
        start = state.ppo_state(
            policy=own,
            critic=jax.tree.map(jnp.copy, CRITIC),
            policy_optimizer=recipe.policy_optimizer,
            critic_optimizer=recipe.critic_optimizer,
            kl=kl_control.fixed(BETA),
        )
    model = None if case.softcap is None else CAPPED
    models = FrozenModels(reference=frozen.freeze(REFERENCE, model=model))
    if case.further:
        second = Further(frozen.freeze(SECOND), None, SHARE)
        models = dataclasses.replace(models, further={"second": second})
    after, stats, _ = learn(
        start,
        rollout=rollout,
        scores=floats(drawn.scores),
        frozen=models,
        key=jax.random.key(0),
        recipe=recipe,
        values=None if recipe.critic is None else floats(old_values()),
        ptx=ptx,
    )
    means = {name: float(x) for name, x in masked.mean_stats(stats).items()}
    means["β after"] = float(after.kl.kl_coef)
    return (after.policy, after.critic), means


CASES = {
    "clip-higher, k1 with the gradient of k2, two references, entropy": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=Clip(0.2, clip_range_high=0.5),
            penalty=Penalty("k1", "k2", placement="loss"),
            entropy_coef=0.05,
        ),
        surrogate=Surrogate(high=0.5),
        kl=KL(value="k1", grad="k2", placement="loss"),
        entropy=0.05,
        further=True,
    ),
    "leave one out, dual clip, means over responses, k1 in the reward": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=Clip(0.15, dual_clip=1.3),
            baseline="leave_one_out",
            aggregation="sequence_mean",
            penalty=Penalty(clip=0.5),
            lifecycle=Lifecycle(kl_every=3, scale_kl_coef=True),
        ),
        surrogate=Surrogate(low=0.15, high=0.15, dual=1.3),
        kl=KL(clip=0.5),
        groups=(("baseline", "leave_one_out"),),
        every=3,
        aggregation="sequence_mean",
        further=True,
    ),
    "unbiased k3 with weights of tokens, a constant divisor, normalised": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            normalise="group",
            aggregation="constant",
            loss_scale_factor=2.5,
            penalty=UNBIASED_K3,
            scores=ScoreShaping(length_penalty=0.1, missing_stop_penalty=0.3),
        ),
        groups=(("normalise", "group"),),
        aggregation="constant",
        scale=2.5,
        kl=KL(
            value="k3",
            grad="k2",
            placement="loss",
            weights="token",
        ),
        shaping=Shaping(length_penalty=0.1, missing_stop_penalty=0.3),
    ),
    "CISPO, means over prompts, advantages whitened, k2 of responses": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=CISPO(0.3, clip_range_high=0.2),
            normalise="rollout",
            aggregation="prompt_mean",
            penalty=Penalty("k2", placement="loss", per="response"),
            scores=ScoreShaping(
                overlong_penalty=0.7, overlong_after=2, overlong_buffer=3
            ),
        ),
        surrogate=Surrogate(kind="cispo", low=0.3, high=0.2),
        whiten=True,
        aggregation="prompt_mean",
        kl=KL(value="k2", placement="loss", per="response"),
        shaping=Shaping(overlong=(0.7, 2, 3)),
    ),
    "CISPO of responses, k1 divided by the length": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=CISPO(0.1, clip_range_high=0.3, ratio_level="sequence"),
            penalty=Penalty("k1", "k2", placement="both", per="length"),
            ptx_coef=0.6,
        ),
        ptx=0.6,
        surrogate=Surrogate(kind="cispo", low=0.1, high=0.3, level="sequence"),
        kl=KL(value="k1", grad="k2", placement="both", per="length"),
    ),
    "SAPO, a forward KL with weights of tokens": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=SAPO(temperature_pos=0.9, temperature_neg=1.4),
            penalty=Penalty(
                "k3",
                placement="loss",
                direction="forward",
                importance_weights="token",
            ),
        ),
        surrogate=Surrogate(kind="sapo", positive=0.9, negative=1.4),
        kl=KL(value="k3", placement="loss", direction="forward", weights="token"),
    ),
    "GSPO, exact KL to a reference with a soft cap": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=Clip(0.05, clip_range_high=0.1, ratio_level="sequence"),
            penalty=Penalty("exact", placement="loss"),
        ),
        surrogate=Surrogate(low=0.05, high=0.1, level="sequence"),
        kl=KL(value="exact", placement="loss"),
        softcap=1.5,
    ),
    "GSPO-token, the top 3 of an exact KL": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=Clip(0.1, clip_range_high=0.05, ratio_level="sequence_token"),
            penalty=Penalty("exact", placement="loss", top_k=3),
        ),
        surrogate=Surrogate(low=0.1, high=0.05, level="sequence_token"),
        kl=KL(value="exact", placement="loss", top_k=3),
    ),
    "the top 3 of a KL, and a sampled tail": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            penalty=Penalty(
                "exact",
                placement="loss",
                top_k=3,
                tail="sampled",
                importance_weights="token",
            ),
        ),
        kl=KL(
            value="exact",
            placement="loss",
            top_k=3,
            sampled_tail=True,
            weights="token",
        ),
        softcap=1.5,
    ),
    "the KL to go beside the std, to a mixture with the sampler": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            normalise="group",
            kl_to_go=True,
            penalty=Penalty(reference_share=0.6),
        ),
        groups=(("normalise", "group"),),
        kl_to_go=True,
        kl=KL(of_reference=0.6),
    ),
    "k2 of responses, to a mixture with the sampler": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            penalty=Penalty(
                "k1",
                grad_estimator="k2",
                placement="loss",
                per="response",
                reference_share=0.4,
            ),
        ),
        kl=KL(grad="k2", placement="loss", per="response", of_reference=0.4),
    ),
    "DAR, the others of a group as the baseline": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=DAR(beta=0.8, share=0.3, cap=3.0),
            baseline="leave_one_out",
            penalty=Penalty(placement=None),
        ),
        surrogate=Surrogate(kind="dar", beta=0.8, share=0.3, cap=3.0),
        groups=(("baseline", "leave_one_out"),),
    ),
    "score centring, truncated": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=Centred(top_k=3, cap=1.1),
            penalty=Penalty(placement=None),
        ),
        surrogate=Surrogate(kind="centred", cap=1.1, recorded=recorded),
    ),
    "score centring, masked": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            surrogate=Centred(top_k=3, cap=1.6, floor=0.7),
            penalty=Penalty(placement=None),
        ),
        surrogate=Surrogate(kind="centred", cap=1.6, floor=0.7, recorded=recorded),
    ),
    "weights of tokens, masked, forward KL in the reward": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            sampler_correction=corrections.Mask(cap=1.6, floor=0.8),
            penalty=Penalty("exact", direction="forward"),
        ),
        weights=("token_mask", 1.6, 0.8),
        recomputes=True,
        kl=KL(value="exact", direction="forward"),
    ),
    "weights of responses, masked, with the KL's own": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            sampler_correction=corrections.Mask(cap=2.5, floor=0.7, level="sequence"),
            penalty=Penalty("k3", placement="loss", importance_weights="prefix"),
        ),
        weights=("sequence_mask", 2.5, 0.7),
        recomputes=True,
        kl=KL(value="k3", placement="loss", weights="prefix"),
    ),
    "rejected responses, means over prompts": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            sampler_correction=corrections.Reject(cap=2.5, floor=0.7),
            aggregation="prompt_mean",
            penalty=Penalty(placement=None),
            entropy_coef=0.1,
        ),
        weights=("sequence_reject", 2.5, 0.7),
        recomputes=True,
        aggregation="prompt_mean",
        entropy=0.1,
    ),
    "rejected by their geometric mean": Case(
        recipe=partial(
            grpo.GRPO,
            **OF_GROUPS,
            sampler_correction=corrections.Reject(
                cap=1.25, floor=0.9, level="geometric"
            ),
            penalty=Penalty(placement=None),
        ),
        weights=("geometric_reject", 1.25, 0.9),
        recomputes=True,
    ),
    "REINFORCE++ with truncated weights, scores clipped and replaced": Case(
        recipe=partial(
            reinforce.REINFORCE,
            **FIXED,
            sampler_correction=corrections.Truncate(cap=1.2),
            penalty=Penalty("k3"),
            scores=ScoreShaping(clip=0.8, missing_stop_score=-0.6, normalise=True),
        ),
        advantages="to go",
        whiten=True,
        weights=("token_truncate", 1.2, None),
        recomputes=True,
        kl=KL(value="k3"),
        shaping=Shaping(clip=0.8, missing_stop_score=-0.6, normalise=True),
    ),
    "unfinished responses left out of the loss": Case(
        recipe=partial(
            grpo.GRPO, **OF_GROUPS, overlong_mask="loss", equal_groups="leave_out"
        ),
        groups=(("overlong_mask", "loss"), ("equal_groups", "leave_out")),
        kl=KL(value="k1", grad="k2", placement="loss"),
    ),
    "unfinished responses left out of their group": Case(
        recipe=partial(
            grpo.GRPO, **OF_GROUPS, overlong_mask="group", normalise="group"
        ),
        groups=(("overlong_mask", "group"), ("normalise", "group")),
        kl=KL(value="k1", grad="k2", placement="loss"),
    ),
    "PPO: GAE, whitened, values clipped, k1 in the reward": Case(
        recipe=partial(
            ppo.PPO,
            **FIXED,
            critic_model=MODEL,
            critic_optimizer=optax.sgd(1.0),
            gamma=0.9,
            lam=0.8,
            value_clip_range=0.2,
            vf_coef=0.3,
            entropy_coef=0.05,
        ),
        advantages="gae",
        whiten=True,
        kl=KL(),
        value_clip=0.2,
        vf_coef=0.3,
        entropy=0.05,
        further=True,
    ),
    "distillation: Jensen-Shannon with a reward and an entropy bonus": Case(
        recipe=partial(
            Distill,
            **FIXED,
            rewarded=True,
            divergence="jensen_shannon",
            jsd_beta=0.3,
            entropy_coef=0.05,
        ),
        advantages="to go",
        whiten=True,
        divergence=("jensen_shannon", 0.3, None),
        entropy=0.05,
    ),
    "distillation: a forward KL of the top 3 alone": Case(
        recipe=partial(Distill, **FIXED, divergence="forward", top_k=3),
        advantages="to go",
        divergence=("forward", None, 3),
        policy_loss=False,
    ),
}


def distance(left, right) -> float:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    squares = (((np.float64(a) - np.float64(b)) ** 2).sum() for a, b in pairs)
    return math.sqrt(sum(squares))


@pytest.mark.cases(quick=2)
@pytest.mark.filterwarnings("ignore:KL penalty")
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_its_formula(name, monkeypatch):
    case = CASES[name]
    # Five tokens of the vocabulary of 13 at a time, so that the last chunk overlaps.
    monkeypatch.setattr(policy, "MAX_LOGITS", 2 * len(LENGTHS) * SIZE * 5)
    oracle = Oracle(case)
    after, means = run(case)
    expected = oracle.loss()[1] | oracle.logged()
    if case.advantages == "gae":
        expected["β after"] = BETA
    else:
        mask, own = oracle.rows.response_mask, oracle.old
        ref = oracle_updates.picked(oracle.references[0][0], rows())
        kl = np.where(mask, own - ref, 0.0).sum() / mask.any(axis=1).sum()
        episodes = len(own) * case.every
        expected["β after"] = oracles.adaptive_kl_coef(
            BETA, kl, episodes, TARGET, HORIZON
        )
    # By SGD of rate 1 the parameters move by the gradient.
    parts = zip(("policy", "critic"), (POLICY, CRITIC), after, strict=True)
    for role, before, moved_to in parts:
        if moved_to is not None:
            expected[f"{role}/grad_norm"] = distance(before, moved_to)
    assert means.keys() == expected.keys()
    for stat, value in expected.items():
        assert means[stat] == pytest.approx(value, rel=2e-4, abs=2e-5), stat
    slopes = [
        (oracle.loss(number, STEP)[0] - oracle.loss(number, -STEP)[0]) / (2 * STEP)
        for number in range(len(directions()))
    ]
    before = (POLICY, CRITIC) if case.advantages == "gae" else (POLICY, None)
    for toward, slope in zip(directions(), slopes, strict=True):
        part = toward if before[1] is not None else (toward[0], None)
        moves = jax.tree.map(
            lambda new, old, to: float(
                ((np.asarray(new, np.float64) - np.asarray(old)) * to).sum()
            ),
            after,
            before,
            part,
        )
        assert sum(jax.tree.leaves(moves)) == pytest.approx(-slope, rel=1e-3, abs=1e-5)
