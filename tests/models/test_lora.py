"""Adapters: their values, their frozen base, and PPO over one base."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import toys

from rlhf_jax import (
    batch,
    critic,
    decoder,
    frozen,
    kl_control,
    lora,
    masked,
    policy,
    ppo,
    rewards,
    sft,
    state,
)
from rlhf_jax.algorithms import reward_model, self_check
from rlhf_jax.algorithms.policy_gradient.corrections import Recompute
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import FrozenModels, adapted_params

ALL = LoRA(rank=2, alpha=6.0)
FEW = LoRA(rank=3, alpha=4.0, modules=("attention/[qv]*", "mlp/up"))
KEY = jax.random.key(9)
SIZES = {  # of toys: hidden 16; GPT-2's MLP 64, Llama's 24; one of two heads has keys
    "gpt2": {
        **dict.fromkeys(
            [f"attention/{name}" for name in ("query", "key", "value", "output")],
            (16, 16),
        ),
        "mlp/up": (16, 64),
        "mlp/down": (64, 16),
    },
    "llama": {
        **dict.fromkeys(["attention/query", "attention/output"], (16, 16)),
        **dict.fromkeys(["attention/key", "attention/value"], (16, 8)),
        **dict.fromkeys(["mlp/up", "mlp/gate"], (16, 24)),
        "mlp/down": (24, 16),
    },
}


fresh = toys.jit(lora.init, static_argnames=("model", "lora"))
of_base = toys.jit(rewards.from_base, static_argnames=("model", "lora"))
attach, merge, unmerge = (
    toys.jit(change, static_argnames=("lora",))
    for change in (lora.attach, lora.merge, lora.unmerge)
)
scores_of = toys.jit(rewards.sequence_scores, static_argnames=("model",))


def trained(model, *, options=ALL, seed=0):
    """Adapters as after training: no B is 0."""
    start = fresh(jax.random.key(seed), model=model, lora=options)
    return toys.perturbed(start, seed=seed, scale=0.2)


@functools.cache
def texts():
    return tiny.batch((5, 9, 3), 10, side="left")


def logits(params, *, model):
    tokens, mask = texts()
    return np.asarray(toys.logits(params, model=model, tokens=tokens, mask=mask))[mask]


def by_hand(base, adapters, *, scale):
    """W + scale · A B of each layer, in float64."""
    changed = jax.tree.map(np.array, base)
    for part, modules in adapters["layers"].items():
        for name, pair in modules.items():
            kernel = changed["layers"][part][name]["kernel"]
            for layer in range(len(kernel)):
                down = np.asarray(pair["lora_a"][layer], np.float64)
                up = np.asarray(pair["lora_b"][layer], np.float64)
                kernel[layer] += scale * down @ up
    return changed


# What there is to adapt.


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("family", toys.FAMILIES)
def test_every_linear_layer_is_adapted_by_default(family):
    model = toys.FAMILIES[family]
    assert lora.targets(model=model, lora=ALL) == SIZES[family]
    adapters = lora.init(KEY, model=model, lora=ALL)
    assert sorted(lora.paths(adapters)) == sorted(SIZES[family])
    for path, (size_in, size_out) in SIZES[family].items():
        part, name = path.split("/")
        pair = adapters["layers"][part][name]
        assert pair["lora_a"].shape == (model.num_layers, size_in, 2)
        assert pair["lora_b"].shape == (model.num_layers, 2, size_out)


def test_patterns_choose():
    adapters = lora.init(KEY, model=toys.LLAMA, lora=FEW)
    assert set(lora.paths(adapters)) == {"attention/query", "attention/value", "mlp/up"}


def test_a_rank_above_a_layer_s_smaller_width_is_refused():
    wide = toys.LLAMA
    narrow = wide.num_kv_heads * wide.head_dim
    assert lora.targets(model=wide, lora=LoRA(rank=narrow))
    with pytest.raises(
        InputError,
        match=rf"--lora: expected a rank of at most .*, {narrow}, got {narrow + 1}, "
        rf"which is above that of attention/key \({wide.hidden_size} x {narrow}\), att",
    ):
        lora.targets(model=wide, lora=LoRA(rank=narrow + 1))
    few = LoRA(rank=narrow + 1, modules=("mlp/up",))
    assert list(lora.targets(model=wide, lora=few)) == ["mlp/up"]


@pytest.mark.slow
def test_a_starts_uniform_and_b_at_zero():
    """Like torch.nn.Linear and PEFT: variance 1 / (3 · in)."""
    wide = dataclasses.replace(toys.GPT2, intermediate_size=4096)
    adapters = fresh(KEY, model=wide, lora=dataclasses.replace(ALL, rank=16))
    down = np.asarray(adapters["layers"]["mlp"]["down"]["lora_a"])
    assert abs(down).max() <= 1 / 64
    assert abs(down).max() > 0.99 / 64
    np.testing.assert_allclose(down.var(), 1 / (3 * 4096), rtol=0.02)
    assert abs(down.mean()) < 1e-4
    assert bool(lora.changes_nothing(adapters))
    up = np.array(adapters["layers"]["mlp"]["up"]["lora_b"])
    assert not up.any()
    up[0, 1, 2] = 1e-30
    adapters["layers"]["mlp"]["up"]["lora_b"] = jnp.asarray(up)
    assert not bool(lora.changes_nothing(adapters))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank: expected a finite number above 0, got 0"),
        ({"alpha": -1.0}, r"alpha: expected a finite number above 0, got -1\.0"),
        ({"modules": ()}, "modules: expected at least one pattern"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(InputError, match=message):
        LoRA(**options)


def test_a_pattern_that_matches_nothing_says_what_there_is():
    message = "attention/key, .*mlp/down, mlp/up; got 'mlp/gate', which matches none"
    gated = LoRA(rank=2, modules=("attention/*", "mlp/gate"))
    assert "mlp/gate" in lora.targets(model=toys.LLAMA, lora=gated)
    with pytest.raises(InputError, match=message):
        lora.init(KEY, model=toys.GPT2, lora=gated)


# What adapters compute.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(tiny.GPT2, FEW, id="gpt2-few", marks=pytest.mark.slow),
        pytest.param(tiny.LLAMA, ALL, id="llama-all"),
        pytest.param(tiny.GPT2, ALL, id="gpt2-all", marks=pytest.mark.slow),
        pytest.param(tiny.LLAMA, FEW, id="llama-few", marks=pytest.mark.slow),
    ],
)
def test_attached_and_merged_are_w_plus_a_b(model, options):
    base = tiny.params(model)
    adapters = trained(model, options=options)
    expected = logits(
        by_hand(base, adapters, scale=options.alpha / options.rank), model=model
    )
    plain = logits(base, model=model)
    attached = logits(lora.attach(base, adapters, lora=options), model=model)
    merged = logits(merge(base, adapters, lora=options), model=model)
    assert abs(expected - plain).max() > 0.5
    np.testing.assert_allclose(attached, expected, atol=2e-4)
    np.testing.assert_allclose(merged, expected, atol=2e-4)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "way"),
    [
        (tiny.GPT2, {"dtype": "int8"}),
        (tiny.LLAMA, {"dtype": "int8"}),
        (tiny.LLAMA, {"memory": "pinned_host"}),
    ],
    ids=["gpt2-int8", "llama-int8", "llama-host"],
)
def test_over_a_base_stored_in_another_way(model, way):
    adapters = trained(model)
    base = frozen.freeze(tiny.params(model), **way)
    read = jax.tree.map(np.asarray, lora.leaves.read(base.stored))
    expected = logits(by_hand(read, adapters, scale=3.0), model=model)
    attached = logits(adapted_params(adapters, base=base, lora=ALL), model=model)
    merged = lora.merge(base.stored, adapters, lora=ALL)
    np.testing.assert_allclose(attached, expected, atol=2e-4)
    np.testing.assert_allclose(logits(merged, model=model), expected, atol=2e-4)


@pytest.mark.parametrize(
    "model",
    [pytest.param(tiny.GPT2, marks=pytest.mark.slow), tiny.LLAMA],
    ids=tiny.NAMES,
)
def test_at_the_start_it_is_the_base_to_the_bit(model):
    base = tiny.params(model)
    start = fresh(KEY, model=model, lora=ALL)
    attached = lora.attach(base, start, lora=ALL)
    tokens, mask = texts()
    compute = toys.jit(policy.logprobs, static_argnames=("model",))
    output, expected = (
        compute(params, model=model, tokens=tokens, mask=mask)
        for params in (attached, base)
    )
    np.testing.assert_array_equal(output, expected)
    assert float(jnp.abs(expected).max()) > 1


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("model", tiny.BOTH, ids=tiny.NAMES)
def test_unmerge_takes_back_what_merge_added(model):
    base, adapters = tiny.params(model), trained(model)
    merged = merge(base, adapters, lora=ALL)
    kernel, before = (
        np.asarray(params["layers"]["mlp"]["down"]["kernel"])
        for params in (merged, base)
    )
    assert np.abs(kernel - before).max() > 0.1
    back = unmerge(merged, adapters, lora=ALL)
    assert jax.tree.structure(back) == jax.tree.structure(base)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), back, base)


@pytest.mark.slow
def test_a_merged_model_keeps_the_dtype_of_its_base():
    store = toys.jit(functools.partial(storage.store, dtype="bfloat16"))
    merged = merge(store(toys.params()), trained(toys.GPT2), lora=ALL)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(merged)} == {"bfloat16"}


@pytest.mark.slow
def test_a_scalar_model_has_a_score_over_the_adapted_trunk():
    base, model = tiny.params(tiny.LLAMA), tiny.LLAMA
    params = of_base(KEY, model=model, lora=ALL)
    assert bool(lora.changes_nothing(params["trunk"]))
    params = toys.perturbed(params, seed=3, scale=0.2)
    tokens, mask = texts()
    whole = {
        "trunk": by_hand(base, params["trunk"], scale=3.0),
        "score": params["score"],
    }
    expected = scores_of(whole, model=model, tokens=tokens, mask=mask)
    merged = merge(base, params, lora=ALL)
    for full in (lora.attach(base, params, lora=ALL), merged):
        scores = scores_of(full, model=model, tokens=tokens, mask=mask)
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    back = unmerge(merged, params, lora=ALL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), back, base)


# What moves, and what does not.


def loss(adapters, base, *, model=toys.LLAMA):
    tokens, mask = texts()
    params = adapted_params(adapters, base=base, lora=ALL)
    return policy.logprobs(params, model=model, tokens=tokens, mask=mask).sum()


def test_the_gradient_is_that_of_a_and_b_and_of_nothing_else():
    base = toys.freeze(toys.params(toys.LLAMA))
    adapters = trained(toys.LLAMA)
    both = toys.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))
    grads, of_base = both(adapters, base)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(of_base.stored))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(grads))
    # Against a difference quotient along a random direction.
    on_host = jax.tree.map(np.asarray, adapters)
    step = jax.tree.map(
        lambda leaf: np.float32(
            np.random.default_rng(leaf.size).normal(size=leaf.shape)
        ),
        on_host,
    )
    slope = sum(
        float((np.asarray(g) * s).sum())
        for g, s in zip(jax.tree.leaves(grads), jax.tree.leaves(step), strict=True)
    )
    value = toys.jit(loss)
    forward, back = (
        float(value(jax.tree.map(lambda a, s, e=e: a + e * s, on_host, step), base))
        for e in (1e-3, -1e-3)
    )
    np.testing.assert_allclose((forward - back) / 2e-3, slope, rtol=2e-2)
    assert abs(slope) > 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_the_backward_pass_holds_no_second_base(dtype):
    """The gradient keeps activations, but no kernels that were read."""
    deep = dataclasses.replace(
        toys.LLAMA, num_layers=8, hidden_size=64, head_dim=32, intermediate_size=256
    )
    one = np.ones((1, 4), np.int32)

    def loss(adapters, base):
        full = adapted_params(adapters, base=base, lora=ALL)
        return policy.logprobs(full, model=deep, tokens=one, mask=one > 0).sum()

    # The compiler needs shapes alone.
    params = jax.eval_shape(functools.partial(decoder.init, model=deep), KEY)
    base = jax.eval_shape(functools.partial(frozen.freeze, dtype=dtype), params)
    adapters = jax.eval_shape(functools.partial(lora.init, model=deep, lora=ALL), KEY)
    compiled = toys.jit(jax.grad(loss)).lower(adapters, base).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # Measured: 0.32 and, each layer being read again, 0.18 (else 1.33).
    assert temporary < 0.5 * storage.nbytes(params["layers"])


# The stages.


def small_update(stage, start, **of_stage):
    """Two steps of Adam over a frozen base, which is verified afterwards."""
    base = toys.freeze(toys.params())
    optimizer = optax.adam(1e-2)
    step = toys.jit(
        functools.partial(
            stage, model=toys.GPT2, optimizer=optimizer, lora=ALL, **of_stage
        ),
        donate_argnames=("state",),
    )
    current = state.supervised_state(start, optimizer=optimizer)
    assert storage.nbytes(current.opt) < 2.1 * storage.nbytes(start)
    rows = []
    for _ in range(8):
        current, stats = step(current, base=base)
        rows.append(masked.mean_stats(stats))
    frozen.verify(base)
    return current, rows


def sequences(seed):
    tokens, mask = tiny.batch((9, 7, 8, 5), 9, side="right", seed=seed)
    return batch.Sequences(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(mask),
        response_mask=jnp.asarray(mask & (np.arange(9) > 2)),
    )


@pytest.mark.slow
def test_sft_trains_adapters():
    start = lora.init(KEY, model=toys.GPT2, lora=ALL)
    after, rows = small_update(sft.update, start, batch=sequences(0))
    assert rows[-1]["loss/language_model"] < rows[0]["loss/language_model"] - 0.2
    assert jax.tree.structure(after.params) == jax.tree.structure(
        lora.init(KEY, model=toys.GPT2, lora=ALL)
    )


@pytest.mark.slow
def test_a_reward_model_is_adapters_and_a_score():
    start = of_base(KEY, model=toys.GPT2, lora=ALL)
    pairs = batch.Preferences(chosen=sequences(0), rejected=sequences(1), margin=None)
    after, rows = small_update(reward_model.update, start, batch=pairs)
    assert rows[-1]["loss/pairwise"] < rows[0]["loss/pairwise"] - 0.2
    assert not bool(lora.changes_nothing(after.params["trunk"]))


# PPO: four models, one base.

OPTIMIZER = optax.adam(3e-3, eps=1e-5)
SETTINGS = ppo.PPO(
    model=toys.LLAMA,
    critic_model=toys.LLAMA,
    policy_optimizer=OPTIMIZER,
    critic_optimizer=OPTIMIZER,
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    num_epochs=2,
    num_minibatches=2,
    # By the pass that scores the reference, so that 0 is 0.
    sampler_correction=Recompute(),
    lora=ALL,
)


def start_state(settings=SETTINGS):
    start = toys.jit(critic.from_base, static_argnames=("model", "lora"))
    return state.ppo_state(
        policy=fresh(jax.random.key(1), model=settings.model, lora=ALL),
        critic=start(jax.random.key(2), model=settings.model, lora=ALL),
        policy_optimizer=settings.policy_optimizer,
        critic_optimizer=settings.critic_optimizer,
        kl=kl_control.fixed(0.05),
    )


def judge():
    """A frozen reward model with adapters, as after training."""
    start = of_base(jax.random.key(3), model=toys.LLAMA, lora=ALL)
    return toys.freeze(toys.perturbed(start, seed=4, scale=0.3))


@pytest.fixture(scope="module")
def run():
    """Four iterations of policy, critic, reward model and reference over one base."""
    source = toys.params(toys.LLAMA)  # kept for all tests, so not one of these
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    base = toys.freeze(source)
    reward_adapters = judge()
    reward = rewards.from_model(reward_adapters, model=toys.LLAMA, base=base, lora=ALL)
    step = toys.jit(
        functools.partial(ppo.iteration, recipe=SETTINGS), donate_argnames=("state",)
    )
    current, rows = start_state(), []
    prompts = toys.prompts(lengths=(4, 2, 3, 1) * 4)
    for number in range(4):
        current, stats, _ = step(
            current,
            prompts=prompts,
            frozen=FrozenModels(reference=base, base=base),
            reward=reward,
            key=jax.random.fold_in(KEY, number),
        )
        rows.append(jax.device_get(masked.mean_stats(stats)))
    del stats, _
    gc.collect()
    new_arrays = [array for array in jax.live_arrays() if id(array) not in before]
    return {
        "base": base,
        "state": current,
        "reward": reward_adapters,
        "prompts": prompts,
        "rows": rows,
        "bytes": sum(array.nbytes for array in new_arrays),
    }


@pytest.mark.slow
def test_kl_is_exactly_zero_before_any_update_and_not_after(run):
    first, last = run["rows"][0], run["rows"][-1]
    assert first["objective/kl"] == 0.0
    assert first["objective/kl_k3"] == 0.0
    assert last["objective/kl_k3"] > 1e-4
    assert all(row["update/skipped"] == 0 for row in run["rows"])


@pytest.mark.slow
def test_four_models_hold_one_base(run):
    """Counted from the live arrays: there is no second copy of the base."""
    base = storage.nbytes(run["base"].stored)
    named = sum(
        storage.nbytes(run[name]) for name in ("base", "state", "reward", "prompts")
    )
    # Beyond what has a name there are only keys and a few scalars.
    assert named <= run["bytes"] < named + 200
    # A policy, a critic, a reward model and a reference of their own would be 4 · base.
    adapters = storage.nbytes(run["state"].policy)
    assert run["bytes"] < base + 10 * adapters
    assert adapters < 0.5 * base


@pytest.mark.slow
def test_optimizer_state_is_of_the_adapters_alone(run):
    smallest = storage.nbytes(run["state"].policy)
    num_bytes = storage.nbytes(run["state"].policy_opt)
    assert 2 * smallest <= num_bytes <= 2 * smallest + 16
    shapes = {leaf.shape for leaf in jax.tree.leaves(run["base"].stored)}
    for leaf in jax.tree.leaves((run["state"].policy_opt, run["state"].policy)):
        assert leaf.shape not in shapes or leaf.ndim < 2


@pytest.mark.slow
def test_adapters_have_moved_and_the_base_has_not(run):
    frozen.verify(run["base"])
    frozen.verify(run["reward"])
    assert toys.leaves_equal(run["base"].stored, toys.params(toys.LLAMA))
    start = start_state()
    for part, name in (
        ("policy", run["state"].policy),
        ("critic", run["state"].critic),
    ):
        pairs = zip(
            jax.tree.leaves(name), jax.tree.leaves(getattr(start, part)), strict=True
        )
        assert all((np.asarray(a) != np.asarray(b)).any() for a, b in pairs), part


@pytest.mark.slow
def test_policy_adapters_run_as_the_merged_model_does(run):
    """Sampled again without LoRA: merged parameters give the same samples."""
    merged = merge(run["base"].stored, run["state"].policy, lora=ALL)
    plain = dataclasses.replace(SETTINGS, lora=None)
    sample = toys.jit(ppo.sample, static_argnames=("recipe",))
    over = sample(
        run["state"].policy,
        prompts=run["prompts"],
        key=KEY,
        recipe=SETTINGS,
        frozen=FrozenModels(base=run["base"]),
    )
    whole = sample(merged, prompts=run["prompts"], key=KEY, recipe=plain)
    np.testing.assert_array_equal(over.tokens, whole.tokens)
    np.testing.assert_allclose(over.old_logprobs, whole.old_logprobs, atol=1e-5)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_adapters_are_trained_over_a_base_in_int8(memory):
    """In either memory; the reference is the base itself, so the KL starts at 0."""
    params = toys.params(toys.LLAMA)
    base = frozen.freeze(params, dtype="int8", memory=memory)
    reward = rewards.from_model(judge(), model=toys.LLAMA, base=base, lora=ALL)
    step = toys.jit(
        functools.partial(ppo.iteration, recipe=SETTINGS), donate_argnames=("state",)
    )
    after, stats, _ = step(
        start_state(),
        prompts=toys.prompts(),
        frozen=FrozenModels(reference=base, base=base),
        reward=reward,
        key=KEY,
    )
    means = masked.mean_stats(stats)
    assert means["objective/kl_k3"] == 0.0
    assert means["policy/sampler_mismatch"] < 1e-5
    assert not bool(lora.changes_nothing(after.policy))
    frozen.verify(base)


@pytest.mark.slow
def test_a_critic_over_the_base_starts_at_zero():
    params = critic.from_base(KEY, model=toys.LLAMA, lora=ALL)
    full = lora.attach(toys.params(toys.LLAMA), params, lora=ALL)
    tokens, mask = texts()
    values_of = toys.jit(critic.values, static_argnames=("model",))
    values = values_of(full, model=toys.LLAMA, tokens=tokens, mask=mask)
    assert not np.asarray(values).any()


# The self-check.


@pytest.fixture(scope="module")
def measure():
    return toys.jit(
        functools.partial(
            self_check.measure,
            model=toys.LLAMA,
            max_new_tokens=toys.SIZE,
            temperature=0.7,
            lora=ALL,
        )
    )


@pytest.mark.slow
def test_the_self_check_knows_that_adapters_start_as_the_base(measure, run):
    base = run["base"]
    start = fresh(KEY, model=toys.LLAMA, lora=ALL)
    rollout = toys.sampled(base.stored, model=toys.LLAMA)
    clean = measure(start, rollout=rollout, reference=base, base=base)
    assert bool(clean.starts_equal)
    np.testing.assert_array_equal(clean.trainer, clean.reference)
    self_check.require(clean, tolerance=self_check.TOLERANCE["float32"])

    wrong = dataclasses.replace(clean, reference=clean.reference - 0.1)
    with pytest.raises(self_check.SelfCheckError, match="KL must start at 0"):
        self_check.require(wrong, tolerance=self_check.TOLERANCE["float32"])

    # Adapters that were trained before, or a reference that is not the base: no claim.
    moved = measure(trained(toys.LLAMA), rollout=rollout, reference=base, base=base)
    other = toys.freeze(toys.params(toys.LLAMA, seed=1))
    apart = measure(start, rollout=rollout, reference=other, base=base)
    assert not bool(moved.starts_equal)
    assert not bool(apart.starts_equal)


# Bad input.


def test_base_and_lora_come_together():
    base = toys.freeze(toys.params(toys.LLAMA))
    prompts = toys.prompts()
    plain = dataclasses.replace(SETTINGS, lora=None)
    adapters = start_state().policy
    with pytest.raises(InputError, match="expected base and lora together, got no ba"):
        ppo.sample(adapters, prompts=prompts, key=KEY, recipe=SETTINGS)
    with pytest.raises(InputError, match="expected base and lora together, got no lo"):
        ppo.sample(
            adapters,
            prompts=prompts,
            key=KEY,
            recipe=plain,
            frozen=FrozenModels(base=base),
        )


def test_adapters_of_another_model_or_rank_are_named():
    base = toys.params(toys.GPT2)
    with pytest.raises(InputError) as error:
        lora.attach(base, trained(toys.LLAMA), lora=ALL)
    assert "unknown: layers/mlp/gate/lora_a" in str(error.value)
    assert "layers/mlp/up/lora_b, expected [1, 2, 64], got [1, 2, 24]" in str(
        error.value
    )
    with pytest.raises(InputError, match="of rank 3 for the layers of this base"):
        lora.merge(base, trained(toys.GPT2), lora=FEW)
    half = trained(toys.GPT2)
    del half["layers"]["mlp"]["up"]["lora_b"]
    with pytest.raises(InputError, match="missing: layers/mlp/up/lora_b"):
        lora.attach(base, half, lora=ALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": LoRA(modules=("mlp/fc",))}, "got 'mlp/fc', which matches none"),
        ({"critic_model": toys.GPT2}, "expected one shape of policy and critic with"),
    ],
)
def test_settings_that_do_not_fit_the_model(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SETTINGS, **changes)
