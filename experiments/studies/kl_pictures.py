"""Three pictures of the KL: its terms, the noise of estimates, the effect of prompts.

    python experiments studies.kl_pictures --out runs/kl_pictures

Nothing is trained. In pictures 2 and 3 the reference is a random decoder and the policy
a perturbed copy of it.

1. Six tokens: three policies and one reference, token by token. A token adds
   π log(π/π_ref), negative where π < π_ref; the sum is the KL.
2. Estimators: the KL of a whole response by k1, k2, k3 (as sums over tokens, and of the
   whole response at once) and exact, and its standard deviation over responses of the
   policy, against the length of a response.
3. Prefixes: tokens before every prompt, read by both models. They are chosen greedily
   from a few tokens: to maximise or minimise the KL measured after them; to be the
   likeliest or unlikeliest under the reference; or at random. "Same responses" were
   sampled without a prefix and are used by the search; "own responses" are the
   policy's with the prefix. Weights, prompts and seed are always the same: only the
   measurement of the policy changes.

The study takes about a minute on 2 laptop cores. Picture 1 shows 0.0041, 0.2541 and
2.6733 nats. Over seeds 0 to 2 a response of 64 tokens has a KL of 9.4 to 13.5 nats. The
standard deviation of one sample is 4.5 - 5.4 nats with k1, 2.3 - 3.7 with k3 and
1.2 - 1.6 with exact, whose only noise is that of the prefixes; k2 is 10 - 14% too high.
For the whole response at once k2 is too high by a factor of 6 to 8, and k3, unbiased,
has tails too heavy for 4096 responses. A prefix of four of 32 tokens raises the
measured KL by 29 - 30% or lowers it by 14 - 15% on the same responses (27 - 31% and
13 - 17% on own ones); the unlikeliest prefix changes it by -8% to +18%.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import config, decoder, kl, kl_penalty, masked
from rlhf_jax.functional import checks
from rlhf_jax.runs import command_line
from rlhf_jax.runs.folder import open_run, write_summary
from rlhf_jax.runs.run_config import RunConfig
from studies.pictures.drawings import (
    ESTIMATORS,
    POLICY_WORDS,
    REFERENCE_WORDS,
    plots,
    tables,
)
from studies.pictures.model_pair import Pair, answer, logprobs_and_kl

Array = jax.Array
Params = Any
Row = dict[str, Any]

BEGIN = 0  # the first token of every text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    vocab_size: int = 128
    """Vocabulary of both models, tokens."""
    hidden_size: int = 64
    """Width of both models."""
    num_layers: int = 2
    """Depth of both models."""
    scale: float = 0.2
    """Standard deviation of every parameter of the reference."""
    perturbation: float = 0.1
    """Standard deviation of the policy's perturbation, as a share of `scale`."""
    lengths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Response lengths of the second picture, tokens."""
    num_responses: int = 4096
    """Responses of the second picture."""
    prompt_length: int = 8
    """Tokens of a prompt, sampled from the reference."""
    num_prompts: int = 128
    """Prompts of the third picture, with one response each."""
    response_length: int = 16
    """Response tokens of the third picture."""
    prefix_length: int = 4
    """Tokens of a prefix."""
    num_candidates: int = 32
    """Tokens that a prefix is chosen from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            scale=self.scale,
            perturbation=self.perturbation,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            prefix_length=self.prefix_length,
        )
        if not self.lengths or min(self.lengths) < 1:
            raise checks.InputError(
                f"lengths: expected numbers of tokens, 1 or more, got {self.lengths}"
            )
        if min(self.num_responses, self.num_prompts) < 2:
            raise checks.InputError(
                f"expected at least 2 --num-responses and 2 --num-prompts, got "
                f"{self.num_responses} and {self.num_prompts}"
            )
        if not 1 < self.num_candidates < self.vocab_size:
            raise checks.InputError(
                f"num_candidates: expected 2 to {self.vocab_size - 1}, tokens of the "
                f"vocabulary but its first, got {self.num_candidates}"
            )


def draw_pair(options: Config) -> Pair:
    """A random decoder and a perturbed copy."""
    context = 1 + options.prefix_length + options.prompt_length
    model = config.gpt2(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=2,
        max_positions=context + max(*options.lengths, options.response_length),
    )
    keys = jax.random.split(jax.random.key(options.seed), 3)
    params = jax.jit(decoder.init, static_argnames=("model",))(keys[0], model=model)
    reference = _with_noise(params, key=keys[1], scale=options.scale)
    moved = _with_noise(
        reference, key=keys[2], scale=options.perturbation * options.scale
    )
    return Pair(policy=moved, reference=reference, model=model)


def _with_noise(params: Params, *, key: Array, scale: float) -> Params:
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        structure,
        [
            leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)
            for leaf, key in zip(leaves, keys, strict=True)
        ],
    )


# --- 1: six tokens ------------------------------------------------------------------


def six_words() -> dict[str, dict[str, Any]]:
    """{policy: its probabilities, the terms of the KL, and the KL}, nats."""
    policies = {}
    reference = np.array(REFERENCE_WORDS)
    for name, words in POLICY_WORDS.items():
        policy_words = np.array(words)
        total = kl.exact(jnp.log(policy_words), jnp.log(reference))
        policies[name] = {
            "policy": list(words),
            "contributions": (policy_words * np.log(policy_words / reference)).tolist(),
            "kl": float(total),
        }
    return policies


# --- 2: estimators ------------------------------------------------------------------


def estimators(pair: Pair, options: Config, *, key: Array) -> list[Row]:
    """A row per length: mean and standard deviation of every estimator."""
    longest = max(options.lengths)
    begin = jnp.full((options.num_responses, 1), BEGIN, jnp.int32)
    tokens = answer(
        pair.policy, begin, model=pair.model, key=key, max_new_tokens=longest
    )

    @jax.jit
    def compute(moved: Params, reference: Params, tokens: Array) -> dict[str, Array]:
        return logprobs_and_kl(Pair(moved, reference, pair.model), tokens)

    computed = compute(pair.policy, pair.reference, tokens)
    columns = np.arange(1 + longest)[None, :]
    rows = []
    for length in sorted(options.lengths):
        mask = jnp.asarray(
            np.repeat((columns > 0) & (columns <= length), len(begin), 0)
        )
        row: Row = {"length": length}
        for name, penalty in ESTIMATORS.items():
            value, _ = kl_penalty.reward_kl(penalty=penalty, mask=mask, **computed)
            total = np.asarray(masked.masked_sum(value, mask=mask, axis=1), np.float64)
            row[f"{name} mean"], row[f"{name} std"] = total.mean(), total.std(ddof=1)
        rows.append(row)
    return rows


# --- 3: prefixes --------------------------------------------------------------------


def prefixes(pair: Pair, options: Config, *, key: Array) -> list[Row]:
    """A row per prefix: its log-prob, and the KL measured after it."""
    prompt_key, key = jax.random.split(key)
    begin = jnp.full((options.num_prompts, 1), BEGIN, jnp.int32)
    prompts = answer(
        pair.reference,
        begin,
        model=pair.model,
        key=prompt_key,
        max_new_tokens=options.prompt_length,
    )
    respond = functools.partial(
        answer, model=pair.model, key=key, max_new_tokens=options.response_length
    )
    texts = respond(pair.policy, prompts)
    rng = np.random.default_rng(options.seed)
    words = 1 + rng.permutation(options.vocab_size - 1)[: options.num_candidates]

    @jax.jit
    def measure(
        moved: Params, reference: Params, prefix: Array, texts: Array
    ) -> tuple[Array, Array]:
        """f32[B] KL of the responses and f32[] log π_ref of the prefix, nats."""
        computed = logprobs_and_kl(
            Pair(moved, reference, pair.model), _with_prefix(prefix, texts)
        )
        inside = computed["ref_logprobs"][0, 1 : 1 + prefix.size]
        response = computed["exact"][:, -options.response_length :]
        return jnp.sum(response, axis=1), jnp.sum(inside)

    @jax.jit
    def measure_each(
        moved: Params, reference: Params, candidates: Array, texts: Array
    ) -> tuple[Array, Array]:
        """f32[C] mean KL and f32[C] log π_ref, for i32[C, n] prefixes."""

        def of(prefix: Array) -> tuple[Array, Array]:
            kl_of_rows, logprob = measure(moved, reference, prefix, texts)
            return kl_of_rows.mean(), logprob

        return jax.lax.map(of, candidates)

    def greedy(best: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """The prefix whose tokens in turn maximise `best` of (mean KL, log π_ref)."""
        prefix = np.zeros(0, np.int32)
        for _ in range(options.prefix_length):
            candidates = np.array([[*prefix, word] for word in words], np.int32)
            measured = measure_each(pair.policy, pair.reference, candidates, texts)
            prefix = candidates[np.argmax(best(*map(np.asarray, measured)))]
        return prefix

    chosen = {
        "none": np.zeros(0, np.int32),
        "likeliest": greedy(lambda _, logprob: logprob),
        "by lot": rng.choice(words, options.prefix_length).astype(np.int32),
        "unlikeliest": greedy(lambda _, logprob: -logprob),
        "smallest KL": greedy(lambda mean, _: -mean),
        "largest KL": greedy(lambda mean, _: mean),
    }
    rows = []
    for name, prefix in chosen.items():
        same, logprob = measure(pair.policy, pair.reference, prefix, texts)
        own_texts = respond(pair.policy, _with_prefix(prefix, prompts))
        other_texts = np.delete(own_texts, np.s_[1 : 1 + prefix.size], axis=1)
        own, _ = measure(pair.policy, pair.reference, prefix, other_texts)
        row: Row = {"prefix": name, "words": " ".join(map(str, prefix))}
        row["ref_logprob"] = float(logprob)
        for which, kl_of_rows in (("same", same), ("own", own)):
            values = np.asarray(kl_of_rows, np.float64)
            row[f"kl_{which}"] = values.mean()
            row[f"kl_{which}_error"] = values.std(ddof=1) / math.sqrt(len(values))
        rows.append(row)
    return rows


def _with_prefix(prefix: Array, texts: Array) -> Array:
    """Inserts the prefix after the first token of every text."""
    shape = (texts.shape[0], prefix.size)
    between = jnp.broadcast_to(jnp.asarray(prefix, jnp.int32)[None, :], shape)
    return jnp.concatenate([texts[:, :1], between, texts[:, 1:]], axis=1)


def main(options: Config) -> None:
    folder = open_run(options)
    pair = draw_pair(options)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(options.seed), 1))
    summary = {
        "six_words": six_words(),
        "estimators": estimators(pair, options, key=keys[0]),
        "prefixes": prefixes(pair, options, key=keys[1]),
    }
    tables(summary)
    plots(folder, summary)
    write_summary(folder, summary)


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
