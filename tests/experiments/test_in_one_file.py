"""The one-file algorithms give the library's numbers, update by update.

The files import nothing of the library, so each is an oracle of the other. Both sides
get the same parameters and draws, and compute all else themselves: log-probs and
values, scores, KL, advantages, the order of the minibatches, and the updates.
"""

import ast
import functools
import sys
from random import Random

import grpo_in_one_file
import jax
import jax.numpy as jnp
import numpy as np
import optax
import ppo_in_one_file
import pytest
import toys
from worlds import reviews

from rlhf_jax import batch, config, grpo, kl_control, masked, ppo, state
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.corrections import Recompute
from rlhf_jax.algorithms.policy_gradient.recipe import Clip
from rlhf_jax.roles.reference.frozen import FrozenModels

FILES = {"ppo": ppo_in_one_file, "grpo": grpo_in_one_file}
LIBRARY = {"ppo": ppo, "grpo": grpo}
WORDS, EOS = ppo_in_one_file.WORDS, ppo_in_one_file.EOS
P, R = ppo_in_one_file.PROMPT_COLUMNS, ppo_in_one_file.RESPONSE_COLUMNS
DECODER = ppo_in_one_file.MODEL
MODEL = config.gpt2(
    vocab_size=len(WORDS),
    hidden_size=DECODER.width,
    num_layers=DECODER.num_layers,
    num_heads=DECODER.num_heads,
    max_positions=P + R,
)
ROWS = 16  # of a rollout: minibatches of four
TOLERANCE = 1e-5  # of the largest entry
each = pytest.mark.parametrize("file", FILES.values(), ids=FILES)


@functools.cache
def decoder_params(seed: int):
    """Parameters of the file's decoder that make <eos> likely."""
    empty = jnp.zeros((1, P + R), jnp.int32)
    shapes = jax.eval_shape(DECODER.init, jax.random.key(0), empty, empty > 0)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return centre + rng.normal(0, 0.1, leaf.shape).astype(np.float32)

    params = jax.tree.map_with_path(draw, shapes["params"])
    params["final_norm"]["bias"] += params["tokens"]["embedding"][EOS]
    return params


def start(name: str):
    """Initial trained parameters, with a critic whose values are not 0."""
    params = {"policy": decoder_params(0)}
    if name == "ppo":
        kernel = np.random.default_rng(2).normal(0, 0.1, (DECODER.width, 1))
        head = {"kernel": kernel.astype(np.float32), "bias": np.ones(1, np.float32)}
        params["critic"] = {"trunk": decoder_params(1), "head": head}
    return jax.tree.map(jnp.array, params)


def to_library(params):
    """Converts a decoder's or critic's parameters to the library's layout."""
    if "trunk" in params:
        head = {"kernel": params["head"]["kernel"][:, 0]}
        head |= {"bias": params["head"]["bias"][0]}
        return {"trunk": to_library(params["trunk"]), "score": head}
    layers = [params[f"layer_{number}"] for number in range(DECODER.num_layers)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    room = ((0, MODEL.padded_vocab_size - len(WORDS)), (0, 0))
    tree = {
        "embed": {
            "tokens": np.pad(params["tokens"]["embedding"], room),
            "positions": params["positions"]["embedding"],
        },
        "layers": {
            "attention": {x: stacked[x] for x in ("query", "key", "value", "output")},
            "attention_norm": stacked["attention_norm"],
            "mlp": {x: stacked[x] for x in ("up", "down")},
            "mlp_norm": stacked["mlp_norm"],
        },
        "final_norm": params["final_norm"],
    }
    return jax.tree.map(toys.array, tree)


def recipe_of(name: str):
    """The library's recipe for a file, and its initial state."""
    file = FILES[name]
    steps = file.NUM_STEPS * file.NUM_EPOCHS * file.NUM_MINIBATCHES
    schedule = optax.linear_schedule(file.LEARNING_RATE, 0.0, steps)
    optimizer = optax.adam(schedule, eps=1e-5)
    options = {
        "model": MODEL,
        "policy_optimizer": optimizer,
        "max_new_tokens": R,
        "stop_ids": (EOS,),
        "temperature": file.TEMPERATURE,
        "num_epochs": file.NUM_EPOCHS,
        "num_minibatches": file.NUM_MINIBATCHES,
        "surrogate": Clip(clip_range=file.CLIP_RANGE),
        "scores": ScoreShaping(missing_stop_score=file.MISSING_STOP_SCORE),
        "sampler_correction": Recompute(),
    }
    trained = {role: to_library(params) for role, params in start(name).items()}
    fixed = kl_control.fixed(file.KL_COEF)
    if name == "grpo":
        options |= {"group_size": file.GROUP_SIZE}
        return grpo.GRPO(
            **vars(grpo.published.DEEPSEEK_MATH) | options
        ), state.grpo_state(
            policy=trained["policy"], policy_optimizer=optimizer, kl=fixed
        )
    recipe = ppo.PPO(
        critic_model=MODEL,
        critic_optimizer=optimizer,
        gamma=file.GAMMA,
        lam=file.LAM,
        value_clip_range=file.VALUE_CLIP_RANGE,
        vf_coef=file.VF_COEF,
        **options,
    )
    return recipe, state.ppo_state(
        policy=trained["policy"],
        critic=trained["critic"],
        policy_optimizer=optimizer,
        critic_optimizer=optimizer,
        kl=fixed,
    )


@functools.cache
def programs(name: str):
    """The sampler and the iteration of a file."""
    file = FILES[name]

    def iteration(params, opt, texts, reference, key):
        experience, stats = file.experience_of(params, texts, reference=reference)
        params, opt, losses = file.update(params, opt, experience, key=key)
        return params, opt, stats | losses, experience

    return toys.jit(file.sample), toys.jit(iteration)


@functools.cache
def library(name: str):
    """The library's iteration and its initial state."""
    method = LIBRARY[name]
    recipe, initial = recipe_of(name)

    def learn(train, rollout, scores, frozen, key):
        """Runs `method.learn`; also returns the experience that it makes."""
        args = {"frozen": frozen, "recipe": recipe}
        train, experience, stats, scored = method.make_experience(
            train, rollout=rollout, scores=scores, **args
        )
        train, losses = method.update(
            train, experience=experience, key=method.shuffle_key(key), **args
        )
        return train, stats | losses, scored, experience

    return toys.jit(learn), initial


def rollout_of(texts, *, group_size: int) -> batch.Rollout:
    """A rollout with tokens only: `Recompute` makes the log-probs."""
    nothing = jnp.zeros(texts.tokens.shape, jnp.float32)
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    return batch.Rollout(
        tokens=texts.tokens,
        mask=texts.mask,
        response_mask=texts.response_mask,
        old_logprobs=nothing,
        entropy=nothing,
        index=rows // group_size,
        sample=rows % group_size,
    )


def words_of(texts) -> list[list[str]]:
    rows = zip(np.array(texts.tokens), np.array(texts.response_mask), strict=True)
    return [[WORDS[i] for i in tokens[inside]] for tokens, inside in rows]


def near(left, right, what: str, *, largest: float | None = None) -> None:
    left, right = np.asarray(left), np.asarray(right)
    assert left.shape == right.shape, what
    largest = np.abs(right).max() if largest is None else largest
    assert np.abs(left - right).max() <= TOLERANCE * largest, what


def losses_of(name: str, stats, response_mask, *, key) -> dict[str, float]:
    """Means over the updates of an iteration, as the library weights them."""
    file, lengths = FILES[name], np.array(response_mask).sum(axis=1)
    keys = [jax.random.fold_in(key, epoch) for epoch in range(file.NUM_EPOCHS)]
    order = np.stack([jax.random.permutation(of_epoch, ROWS) for of_epoch in keys])
    tokens = lengths[order].reshape(len(stats["policy_loss"]), -1).sum(axis=1)
    assert len({*tokens}) > 1
    if name == "grpo":  # whose loss is a mean over responses
        return {"loss/policy": np.mean(stats["policy_loss"])}
    return {
        f"loss/{of}": np.average(stats[f"{of}_loss"], weights=tokens)
        for of in ("policy", "value")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_three_updates_are_those_of_the_library(name):
    file = FILES[name]
    draw, iteration = programs(name)
    library_iteration, train = library(name)
    params = start(name)
    opt = file.OPTIMIZER.init(params)
    reference = jax.tree.map(jnp.array, decoder_params(3))
    frozen = FrozenModels(reference=toys.freeze(to_library(reference)))
    prompts = np.repeat(
        list(file.PROMPTS)[1:3], ROWS // 2
    ).tolist()  # of different lengths
    group_size = file.GROUP_SIZE if name == "grpo" else 1
    for step in range(3):
        key = jax.random.key(step)
        shuffle_key = ppo.shuffle_key(key)
        texts = draw(params["policy"], file.texts_of(prompts), key=key)
        responses = words_of(texts)
        assert len({len(words) for words in responses}) > 3
        assert {words[-1] == "<eos>" for words in responses} == {True, False}
        scores = jnp.array([reviews.gold(words) for words in responses], jnp.float32)
        rollout = rollout_of(texts, group_size=group_size)
        params, opt, stats, experience = iteration(
            params, opt, texts, reference, shuffle_key
        )
        train, library_stats, scored, library_experience = library_iteration(
            train, rollout, scores, frozen, key
        )
        near(stats["score"], scored.scores.mean(), "score")
        for field in experience._fields[1:]:
            actual = np.where(texts.response_mask, getattr(experience, field), 0)
            expected = getattr(library_experience, field)
            near(actual, np.where(texts.response_mask, expected, 0), field)
        means = masked.mean_stats(library_stats)
        near(stats["kl"], means["objective/kl"], "kl")
        losses = losses_of(name, stats, texts.response_mask, key=shuffle_key)
        # Advantages of either sign cancel in the loss, but their rounding does not.
        largest = np.abs(experience.advantages).max()
        for loss, mean in losses.items():
            near(mean, means[loss], loss, largest=largest)
        assert means["policy/clipfrac"] > 0.01
        assert name == "grpo" or means["value/clipfrac"] > 0.01
        for role, of_role in params.items():
            for (path, leaf), expected in zip(
                jax.tree.leaves_with_path(to_library(of_role)),
                jax.tree.leaves(getattr(train, role)),
                strict=True,
            ):
                near(leaf, expected, f"{role}{jax.tree_util.keystr(path)}")


@pytest.mark.slow
def test_the_sampler_draws_from_the_library_s_policy():
    draw, _ = programs("ppo")
    params, key = decoder_params(0), jax.random.key(7)
    prompts = ppo_in_one_file.texts_of(list(ppo_in_one_file.PROMPTS)[:ROWS])
    texts = draw(jax.tree.map(jnp.array, params), prompts, key=key)
    logits = toys.logits(
        to_library(params), model=MODEL, tokens=texts.tokens, mask=texts.mask
    )
    logits = logits / ppo_in_one_file.TEMPERATURE
    expected = [
        jax.random.categorical(jax.random.fold_in(key, column), logits[:, column - 1])
        for column in range(P, P + R)
    ]
    inside = np.array(texts.response_mask)
    stops = inside & (np.array(texts.tokens) == EOS)
    np.testing.assert_array_equal(
        np.array(texts.tokens)[:, P:][inside[:, P:]],
        np.stack(expected, axis=1)[inside[:, P:]],
    )
    after_stop = np.cumsum(stops, axis=1) - stops
    np.testing.assert_array_equal(inside[:, P:], after_stop[:, P:] == 0)
    np.testing.assert_array_equal(inside | prompts.mask, texts.mask)
    np.testing.assert_array_equal(texts.tokens[:, :P], prompts.tokens[:, :P])


def test_the_language_is_a_part_of_the_quickstart_s():
    file, rng = ppo_in_one_file, Random(0)
    for prompt, plural in file.PROMPTS.items():
        review = file.write_review(rng, plural=plural)
        assert reviews.parses(prompt.split(), review.split())
        assert file.is_fluent(review, plural=plural)
        for broken in (f"it {review}", review.removesuffix(" <eos>"), "<eos>"):
            assert not file.is_fluent(broken, plural=plural)
            assert not reviews.parses(prompt.split(), broken.split())
        assert file.texts_of([prompt], [review]).response_mask[:, :-1].any()
    assert not file.is_fluent("it is good . it is very good . <eos>", plural=False)


@each
def test_a_file_stands_alone_and_is_short(file):
    with open(file.__file__, encoding="utf-8") as opened:
        text = opened.read()
    assert len(text.splitlines()) <= 450
    packages = {"jax", "flax", "optax", "numpy"} | sys.stdlib_module_names
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= packages
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.module.split(".")[0] in packages


def test_the_files_differ_in_what_grpo_is():
    parts = []
    for file in FILES.values():
        with open(file.__file__, encoding="utf-8") as opened:
            text = opened.read()
        lines = text.splitlines()
        definitions = (ast.FunctionDef, ast.ClassDef)
        parts.append(
            {
                node.name: lines[node.lineno - 1 : node.end_lineno]
                for node in ast.parse(text).body
                if isinstance(node, definitions)
            }
        )
    of_ppo, of_grpo = parts
    assert of_ppo.keys() - of_grpo.keys() == {"Critic", "values_of", "gae"}
    assert of_grpo.keys() - of_ppo.keys() == {"group_relative"}
    shared = of_ppo.keys() & of_grpo.keys()
    assert {part for part in shared if of_ppo[part] != of_grpo[part]} == {
        *("Experience", "experience_of", "mean", "loss_of", "start_of", "main")
    }


@pytest.mark.slow
@each
def test_a_file_runs_from_top_to_bottom(file, monkeypatch, capsys):
    monkeypatch.setattr(file, "NUM_STEPS", 2)
    monkeypatch.setattr(file, "SFT_STEPS", 2)
    monkeypatch.setattr(file, "BATCH_SIZE", 16)
    file.main(0)
    printed = capsys.readouterr().out
    assert "reference unchanged: True" in printed
    assert printed.count("KL") == 4
    before = next(line for line in printed.splitlines() if line.startswith("before"))
    assert "KL  0.00" in before
