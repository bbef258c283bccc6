"""GRPO in one file, from the prompts to the improved policy.

    python experiments/grpo_in_one_file.py

    maximise  E[score(x, y)] - β·KL(π ‖ π_ref)       x a prompt, y ~ π(·|x) a response

Read it from top to bottom: 1. the language, 2. the model, 3. the sampler, 4. the
experience, 5. the loss, 6. the updates, 7. the training run. It imports only JAX, Flax,
optax and NumPy, and a test compares its updates with the library's.
`diff ppo_in_one_file.py grpo_in_one_file.py` shows how GRPO differs from PPO. In 65
seconds of CPU time the score rises from about -0.4 to 1.3, at 2 to 4 nats of KL.

Column t of every array is about tokens[:, t]:

    column           0    1    2    3    4    5    6
    tokens           ·   the  mug  it   is  EOS   ·      the prompt, then the response
    mask             0    1    1    1    1    1    0
    response_mask    0    0    0    1    1    1    0
    logprobs[t]      log π(tokens[t] | tokens[<t])
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import zip_longest
from random import Random
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

Array = jax.Array
Params = Any
Stats = dict[str, Array]

NUM_STEPS, BATCH_SIZE = 40, 128  # iterations, and responses in each
NUM_EPOCHS, NUM_MINIBATCHES = 4, 4  # passes over a batch, optimizer steps per pass
LEARNING_RATE = 5e-4  # falls to 0 linearly
GROUP_SIZE = 8  # G, responses per prompt, in adjacent rows
KL_COEF = 0.2  # β, reward units per nat; 0 removes the penalty
TEMPERATURE = 0.7  # divides the logits in every role, so that KL(π ‖ π) = 0
CLIP_RANGE = 0.2  # ε of probability ratios
MISSING_STOP_SCORE = -3.0  # the score of a response without EOS
SFT_STEPS, SFT_LEARNING_RATE = 400, 3e-3


# 1. The language: a part of the quickstart's product reviews. A response to the prompt
#    "review : the blue kettle ." is "it works well . we love it . <eos>".

PAD, EOS = 0, 1
GRADES = {  # {opinion word: how favourable it is}
    word: grade
    for grade, words in {
        2: "amazing brilliant excellent superb wonderful flawlessly adore love",
        1: "decent fine good nice solid sturdy nicely well enjoy like",
        -1: "clumsy dull flimsy poor ugly weak badly poorly dislike regret",
        -2: "awful dreadful horrible terrible worthless terribly hate loathe",
    }.items()
    for word in words.split()
}
ADVERBS = ("flawlessly", "nicely", "well", "badly", "poorly", "terribly")
VERBS = ("adore", "love", "enjoy", "like", "dislike", "regret", "hate", "loathe")
PROMPTS = {  # {prompt: whether its product is plural}
    f"review : the {look}{noun}{'s' * plural} .": plural
    for noun in ("kettle", "pan", "toaster", "mug", "phone", "camera", "lamp", "tent")
    for look in ("", "blue ", "red ", "green ", "black ", "small ", "large ", "old ")
    for plural in (False, True)
}


def sentences(opinion: str, *, plural: bool) -> list[str]:
    """Returns the sentences with an opinion word; they agree with the product."""
    forms = "they them are work" if plural else "it it is works"
    it, them, are, work = forms.split()
    if opinion in VERBS:
        return [f"{who} {opinion} {them} ." for who in ("i", "we", "my parents")]
    if opinion in ADVERBS:
        return [f"{it} {work} {opinion} .", f"{it} {work} very {opinion} ."]
    of_parts = [f"the {part} is {opinion} ." for part in ("lid", "handle", "design")]
    return [f"{it} {are} {opinion} .", f"{it} {are} very {opinion} .", *of_parts]


OPINION_OF = {  # {whether plural: {sentence: its opinion word}}
    plural: {text: word for word in GRADES for text in sentences(word, plural=plural)}
    for plural in (False, True)
}
TEXTS = (*PROMPTS, *OPINION_OF[False], *OPINION_OF[True])
WORDS = ("<pad>", "<eos>", *sorted({word for text in TEXTS for word in text.split()}))
IDS = {word: number for number, word in enumerate(WORDS)}
PROMPT_COLUMNS, RESPONSE_COLUMNS = 6, 22  # the longest texts, and one column to spare


def write_review(rng: Random, *, plural: bool) -> str:
    """Writes one to four sentences, no opinion word twice, then <eos>."""
    opinions = rng.sample(list(GRADES), k=rng.randint(1, 4))
    chosen = [rng.choice(sentences(word, plural=plural)) for word in opinions]
    return " ".join([*chosen, "<eos>"])


def is_fluent(response: str, *, plural: bool) -> bool:
    """Whether a response belongs to the language, <eos> included."""
    *parts, end = response.split(" . ")
    opinions = {OPINION_OF[plural].get(f"{sentence} .") for sentence in parts}
    return end == "<eos>" and len(opinions - {None}) == len(parts) > 0


class Texts(NamedTuple):
    """Prompts, padded on the left, with responses, padded on the right."""

    tokens: Array  # i32[B, S]
    mask: Array  # bool[B, S], not padding
    response_mask: Array  # bool[B, S], <eos> included


def texts_of(prompts: Sequence[str], responses: Sequence[str] = ()) -> Texts:
    """Encodes texts; responses, or padding, begin at column PROMPT_COLUMNS."""
    shape = (len(prompts), PROMPT_COLUMNS + RESPONSE_COLUMNS)
    tokens, mask = np.full(shape, PAD, np.int32), np.zeros(shape, bool)
    for row, pair in enumerate(zip_longest(prompts, responses, fillvalue="")):
        words = " ".join(pair).split()
        first = PROMPT_COLUMNS - len(pair[0].split())
        tokens[row, first : first + len(words)] = [IDS[word] for word in words]
        mask[row, first : first + len(words)] = True
    response_mask = mask & (np.arange(shape[1]) >= PROMPT_COLUMNS)[None, :]
    return Texts(jnp.array(tokens), jnp.array(mask), jnp.array(response_mask))


def score_of(texts: Texts) -> Array:
    """s = 2 tanh(Σ grade / 4) - ½((n - 12) / 6)², f32[B]: praise, in about 12 words.

    Σ runs over the distinct words of a response; n counts its words before <eos>. The
    score ignores grammar: only the KL to the reference keeps the policy's language.
    """
    tokens, mask = texts.tokens, texts.response_mask
    grades = jnp.array([GRADES.get(word, 0) for word in WORDS], jnp.float32)
    used = (nn.one_hot(tokens, len(WORDS), dtype=bool) & mask[..., None]).any(axis=1)
    num_words = jnp.sum(mask & (tokens != EOS), axis=1)
    score = 2 * jnp.tanh(used @ grades / 4) - 0.5 * jnp.square((num_words - 12) / 6)
    return jnp.where((mask & (tokens == EOS)).any(axis=1), score, MISSING_STOP_SCORE)


# 2. The model: a small GPT-2.


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    num_heads: int

    @nn.compact
    def __call__(self, x: Array, visible: Array) -> Array:
        width = x.shape[-1]
        heads = (*x.shape[:2], self.num_heads, width // self.num_heads)
        y = nn.LayerNorm(epsilon=1e-5, name="attention_norm")(x)
        query, key, value = (
            nn.Dense(width, name=name)(y).reshape(heads)
            for name in ("query", "key", "value")
        )
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / heads[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -1e30))
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
        x = x + nn.Dense(width, name="output")(y)
        y = nn.LayerNorm(epsilon=1e-5, name="mlp_norm")(x)
        y = nn.gelu(nn.Dense(4 * width, name="up")(y))
        return x + nn.Dense(width, name="down")(y)


class Decoder(nn.Module):
    """Hidden states [B, S, D] and logits [B, S, V], both after tokens[:, t]."""

    width: int = 64
    num_heads: int = 4
    num_layers: int = 2

    @nn.compact
    def __call__(self, tokens: Array, mask: Array) -> tuple[Array, Array]:
        # Padding does not count: the first token of every prompt has position 0.
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        visible = mask[:, None, :] & jnp.tri(tokens.shape[1], dtype=bool)[None]
        embed = nn.Embed(len(WORDS), self.width, name="tokens")
        longest = PROMPT_COLUMNS + RESPONSE_COLUMNS
        x = embed(tokens) + nn.Embed(longest, self.width, name="positions")(positions)
        for number in range(self.num_layers):
            x = Block(self.num_heads, name=f"layer_{number}")(x, visible)
        hidden = nn.LayerNorm(epsilon=1e-5, name="final_norm")(x)
        return hidden, embed.attend(hidden)


MODEL: Any = Decoder()


def logprobs_of(policy: Params, texts: Texts, *, temperature: float) -> Array:
    """log π(tokens[t] | tokens[<t]), π = softmax(logits / temperature); f32[B, S]."""
    _, logits = MODEL.apply({"params": policy}, texts.tokens, texts.mask)
    log_softmax = jax.nn.log_softmax(logits[:, :-1] / temperature)
    picked = jnp.take_along_axis(log_softmax, texts.tokens[:, 1:, None], axis=-1)
    picked = jnp.pad(picked[..., 0], ((0, 0), (1, 0)))  # from column t - 1 to t
    return jnp.where(texts.response_mask, picked, 0.0)


# 3. The sampler.


def sample(policy: Params, prompts: Texts, *, key: Array) -> Texts:
    """y_t ~ π(· | x, y_<t), a token at a time, until <eos>; `prompts` has no responses.

    Each step runs the model on all tokens again; a key-value cache would avoid this.
    """

    def step(column: Array, carry: tuple[Array, Array, Array]) -> Any:
        tokens, mask, running = carry
        _, logits = MODEL.apply({"params": policy}, tokens, mask)
        step_key = jax.random.fold_in(key, column)
        drawn = jax.random.categorical(step_key, logits[:, column - 1] / TEMPERATURE)
        tokens = tokens.at[:, column].set(jnp.where(running, drawn, PAD))
        mask = mask.at[:, column].set(running)
        return tokens, mask, running & (drawn != EOS)

    rows, columns = prompts.tokens.shape
    start = (prompts.tokens, prompts.mask, jnp.ones(rows, bool))
    tokens, mask, _ = jax.lax.fori_loop(PROMPT_COLUMNS, columns, step, start)
    return Texts(tokens, mask, mask & ~prompts.mask)


# 4. The experience: what the updates read. It stays fixed while the policy changes.


class Experience(NamedTuple):
    """A rollout and arrays f32[B, S], which are 0 outside the response."""

    texts: Texts
    old_logprobs: Array  # nats, of the policy that sampled
    ref_logprobs: Array  # nats, of the reference
    advantages: Array  # standard deviations, one number per response


def mean(x: Array, mask: Array) -> Array:
    """The mean over each response's own tokens, then over responses."""
    return jnp.mean(jnp.sum(x, axis=1, where=mask) / jnp.sum(mask, axis=1))


def group_relative(scores: Array) -> Array:
    """A_i = (s_i - mean(s)) / std(s) over the G responses to a prompt, f32[B]."""
    groups = scores.reshape(-1, GROUP_SIZE)
    centred = groups - groups.mean(axis=1, keepdims=True)
    return (centred / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)


def experience_of(
    params: Params, texts: Texts, *, reference: Params
) -> tuple[Experience, Stats]:
    """A_t = A_i on every token of response i: its score relative to its group."""
    mask = texts.response_mask
    scores = score_of(texts)
    old_logprobs = logprobs_of(params["policy"], texts, temperature=TEMPERATURE)
    ref_logprobs = logprobs_of(reference, texts, temperature=TEMPERATURE)
    kl = old_logprobs - ref_logprobs
    advantages = jnp.where(mask, group_relative(scores)[:, None], 0.0)
    stats = {"score": scores.mean(), "kl": kl.sum(axis=1).mean()}
    return Experience(texts, old_logprobs, ref_logprobs, advantages), stats


# 5. The loss of a minibatch.


def loss_of(params: Params, batch: Experience) -> tuple[Array, Stats]:
    """L = L_π + β·L_KL

    L_π = mean max(-ρA, -clip(ρ, 1 - ε, 1 + ε)A),  ρ = π / π_old of the token
    L_KL = mean k3,  k3 = exp(-x) - 1 + x,  x = log π - log π_ref

    Over samples of π the mean of k3 is the KL, and k3 is never negative. Differentiated
    here, its expected gradient is that of each token's forward KL(π_ref ‖ π).
    """
    mask, advantages = batch.texts.response_mask, batch.advantages
    logprobs = logprobs_of(params["policy"], batch.texts, temperature=TEMPERATURE)
    ratio = jnp.exp(logprobs - batch.old_logprobs)
    unclipped = -ratio * advantages
    clipped = -jnp.clip(ratio, 1 - CLIP_RANGE, 1 + CLIP_RANGE) * advantages
    policy_loss = mean(jnp.maximum(unclipped, clipped), mask)

    log_ratio = logprobs - batch.ref_logprobs
    kl_loss = mean(jnp.expm1(-log_ratio) + log_ratio, mask)
    losses = {"policy_loss": policy_loss, "kl_loss": kl_loss}
    return policy_loss + KL_COEF * kl_loss, losses


# 6. The updates: epochs over reshuffled minibatches, one optimizer step for each.

NUM_UPDATES = NUM_STEPS * NUM_EPOCHS * NUM_MINIBATCHES
OPTIMIZER = optax.adam(optax.linear_schedule(LEARNING_RATE, 0.0, NUM_UPDATES), eps=1e-5)


def update(
    params: Params, opt: optax.OptState, experience: Experience, *, key: Array
) -> tuple[Params, optax.OptState, Stats]:
    """θ ← θ - Adam(∇L), minibatch by minibatch; the losses are f32[minibatches]."""
    rows = len(experience.old_logprobs)
    keys = [jax.random.fold_in(key, epoch) for epoch in range(NUM_EPOCHS)]
    shuffled = jnp.concatenate([jax.random.permutation(key, rows) for key in keys])

    def step(carry: tuple[Params, optax.OptState], chosen: Array) -> Any:
        params, opt = carry
        minibatch = jax.tree.map(lambda leaf: leaf[chosen], experience)
        grads, losses = jax.grad(loss_of, has_aux=True)(params, minibatch)
        updates, opt = OPTIMIZER.update(grads, opt)
        return (optax.apply_updates(params, updates), opt), losses

    minibatches = shuffled.reshape(-1, rows // NUM_MINIBATCHES)
    (params, opt), losses = jax.lax.scan(step, (params, opt), minibatches)
    return params, opt, losses


# 7. The training run: SFT, a copy of the policy as the reference, and the iterations.


def start_of(policy: Params) -> Params:
    """The trained parameters: the policy alone."""
    return {"policy": policy}


def fine_tuned(prompts: Sequence[str], *, rng: Random, key: Array) -> Params:
    """SFT minimises L = -mean log π(y_t | x, y_<t) over reviews of the language."""
    optimizer = optax.adam(optax.cosine_decay_schedule(SFT_LEARNING_RATE, SFT_STEPS))

    def loss_of(policy: Params, texts: Texts) -> Array:
        return -mean(logprobs_of(policy, texts, temperature=1.0), texts.response_mask)

    @jax.jit
    def step(policy: Params, opt: optax.OptState, texts: Texts) -> Any:
        updates, opt = optimizer.update(jax.grad(loss_of)(policy, texts), opt)
        return optax.apply_updates(policy, updates), opt

    empty = texts_of(prompts[:1])
    policy = MODEL.init(key, empty.tokens, empty.mask)["params"]
    opt = optimizer.init(policy)
    for _ in range(SFT_STEPS):
        chosen = rng.choices(prompts, k=64)
        reviews = [write_review(rng, plural=PROMPTS[prompt]) for prompt in chosen]
        policy, opt = step(policy, opt, texts_of(chosen, reviews))
    return policy


def report(name: str, prompts: Sequence[str], texts: Texts, stats: Stats) -> list[str]:
    """Prints the score, KL and fluency of a rollout, and returns its responses."""
    rows = np.array(texts.tokens[:, PROMPT_COLUMNS:])
    responses = [" ".join(WORDS[i] for i in row if i != PAD) for row in rows]
    pairs = zip(prompts, responses, strict=True)
    fluent = np.mean([is_fluent(y, plural=PROMPTS[x]) for x, y in pairs])
    score, kl = stats["score"], stats["kl"]
    print(f"{name:8} score {score:5.2f}   KL {kl:5.2f} nats   fluent {fluent:.2f}")
    return responses


def main(seed: int) -> None:
    started, rng = time.perf_counter(), Random(seed)
    init_key, key = jax.random.split(jax.random.key(seed))
    prompts = rng.sample(list(PROMPTS), k=len(PROMPTS))
    held_out, prompts = prompts[:16] * 16, prompts[16:]
    policy = fine_tuned(prompts, rng=rng, key=init_key)
    # A copy: the updates reuse the policy's memory (donation), never the reference's.
    reference = jax.tree.map(jnp.copy, policy)
    at_first = jax.tree.map(np.array, reference)
    params = start_of(policy)
    opt = OPTIMIZER.init(params)

    draw, assess = jax.jit(sample), jax.jit(experience_of)
    learn = jax.jit(update, donate_argnames=("params", "opt"))
    for step in range(NUM_STEPS):
        keys = jax.random.split(jax.random.fold_in(key, step))
        chosen = rng.choices(prompts, k=BATCH_SIZE // GROUP_SIZE)
        chosen = [prompt for prompt in chosen for _ in range(GROUP_SIZE)]
        texts = draw(params["policy"], texts_of(chosen), key=keys[0])
        experience, stats = assess(params, texts, reference=reference)
        params, opt, _ = learn(params, opt, experience, key=keys[1])
        if step % 5 == 0 or step == NUM_STEPS - 1:
            report(f"step {step}", chosen, texts, stats)

    responses = []
    for name, policy in (("before", reference), ("after", params["policy"])):
        texts = draw(policy, texts_of(held_out), key=key)
        _, stats = assess(params | {"policy": policy}, texts, reference=reference)
        responses.append(report(name, held_out, texts, stats))
    for row in range(4):
        print("", held_out[row], *(texts[row] for texts in responses), sep="\n    ")
    same = jax.tree.map(np.array_equal, at_first, reference)
    print(f"\nreference unchanged: {all(jax.tree.leaves(same))}", end="")
    print(f" ({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args().seed)
