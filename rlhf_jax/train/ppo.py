"""PPO on your own model, prompts and reward.

    rlhf-jax ppo --model runs/sft/model \\
        --prompts prompts.jsonl --reward-model runs/reward/model --out runs/ppo
    rlhf-jax ppo --model gpt2 \\
        --prompts prompts.txt --reward my_rewards:score --out runs/ppo

--prompts holds {"prompt": ..., and whatever the reward asks for} a line, or a prompt a
line in a .txt file; a prompt of messages is put by the tokenizer's chat template. The
reward is a checkpoint of `rlhf-jax reward-model`, or a function

    def score(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]

of my_rewards.py in the working directory; rows are those of --prompts. The policy
maximises the score less kl_coef times its KL to the frozen --reference. OUT/model is a
Hugging Face checkpoint with its tokenizer.

--lora.rank 16 trains adapters of policy and critic over one frozen base, which is the
reference too; OUT/adapter then is a PEFT adapter and OUT/model is merged.
--reference-storage.dtype int8 (or .memory pinned_host, or cpu) makes the reference
cheaper, --lifecycle.* moves it, --no-measure-kl with --kl-coef 0 leaves it out.
--preset openai-2019 or n-plus starts from a published recipe.
--held-out and --out-of-domain texts and a --judge are watched every --eval-every steps,
and --alarms.* are the limits beyond which the run tells you to look.

One device that holds policy and critic in float32 four times each, reference and reward
model once: GPT-2 small 4.7 GiB. With the small models of `rlhf-jax sft` and
`rlhf-jax reward-model`, an iteration of 16 responses of 24 tokens takes 4 seconds on 2
laptop cores, and 10 of them at --policy-learning-rate 1e-4 raise the score from -0.1 to
0.4 at 2 nats. Expect the score to rise and the KL to stay in single digits [nats per
response]; if the KL runs away while the score soars, the policy has found a hole in the
reward: raise --kl-coef, or hold the KL with --kl-control.kind adaptive.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import optax
import tyro
from jax.sharding import Mesh

from rlhf_jax.algorithms import evaluation, optimizers, ppo, self_check, state
from rlhf_jax.algorithms.batch import Prompts, Rollout, Scored, Sequences
from rlhf_jax.algorithms.flow import objective, score
from rlhf_jax.algorithms.ppo.recipe import N_PLUS, OPENAI_2019, Recipe
from rlhf_jax.algorithms.state import SupervisedState, TrainState
from rlhf_jax.checkpoints import frozen_models, hf, pretrained
from rlhf_jax.checkpoints.frozen_models import RewardModel, Storage
from rlhf_jax.checkpoints.pretrained import Adapters, Pretrained
from rlhf_jax.data import batches, digests, encoding, files, tokenization
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.json_lines import Row
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.devices.critic_devices import CriticDevices
from rlhf_jax.devices.sharding import MeshOption, MeshShape
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.functional.kl.control import CONSTANT, Control
from rlhf_jax.functional.kl.penalty import IN_REWARD
from rlhf_jax.functional.masked import Stats
from rlhf_jax.models.config import Attention, ModelConfig, Remat
from rlhf_jax.models.lora import init, merge
from rlhf_jax.planning import memory_check
from rlhf_jax.planning.memory_check import Part
from rlhf_jax.roles import adapted, critic, rewards
from rlhf_jax.roles.reference import drift, frozen, lifecycle
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.reference.lifecycle import Lifecycle
from rlhf_jax.roles.rewards.model import Scores, TextReward
from rlhf_jax.runs import (
    alarms,
    command_line,
    drift_report,
    folder,
    metrics,
    plots,
    report,
    run,
    run_config,
)
from rlhf_jax.runs.alarms import Limits

Array = jax.Array
Params = Any


RECIPE = Recipe(num_minibatches=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    """The options of `rlhf-jax ppo`."""

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
    kl_coef: float = 0.05
    """Reward units per nat of KL to the reference; 0 still measures it."""
    kl_control: Control = CONSTANT
    """What becomes of kl_coef during the run."""
    ppo: Annotated[Recipe, tyro.conf.arg(name="")] = RECIPE
    """The coefficients and choices of PPO, options without a prefix."""
    ptx: str | None = None
    """Text or demonstrations mixed in with --ptx-coef."""
    ptx_batch_size: int = 16
    """Rows of --ptx an iteration."""
    ptx_max_length: int | None = None
    """Longest row of --ptx, tokens; None is the model's context."""
    policy_learning_rate: float = 3e-6
    """Falls to 0 linearly."""
    critic_learning_rate: float = 1e-5
    """Falls to 0 linearly."""
    max_grad_norm: float | None = 1.0
    """Gradients of a larger norm are scaled down to it, policy and critic apart; None
    leaves them."""
    adam: optimizers.Style = "standard"
    """Where Adam's eps stands: outside the bias correction in "tf" (OAI)."""
    adam_mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of Adam's first moment, 2 bytes a parameter less in bfloat16."""
    critic_from: Literal["policy", "reward_model"] = "policy"
    """Whose trunk the critic starts with; values start at 0 from the policy."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations; trained parameters stay float32."""
    reference_storage: Storage = frozen_models.COPY
    """How the reference is held; with LoRA it is the base."""
    reward_storage: Storage = frozen_models.COPY
    """How the reward model is held."""
    lifecycle: Lifecycle = lifecycle.FROZEN
    """What becomes of the reference during the run."""
    measure_kl: bool = True
    """Off, with kl_coef 0, there is no reference: never loaded, never run."""
    lora: Adapters = pretrained.ALL_PARAMETERS
    """Adapters instead of all parameters."""
    remat: Remat = "none"
    """What of a layer a gradient computes again, to save memory."""
    attention: Attention = "xla"
    """Of whole sequences; cudnn is flash attention, on a GPU in bfloat16."""
    mesh: MeshOption = sharding.ONE_DEVICE
    """How several devices share rows and parameters."""
    check_memory: bool = True
    """Refuse what cannot fit, before weights are read."""
    sampling_mesh: MeshOption | None = None
    """The last devices, which --mesh leaves free: they draw the next answers while
    these are learned from, one step off-policy. None samples where it learns."""
    critic_mesh: MeshOption | None = None
    """The last devices, which --mesh leaves free: the critic is held and trained there,
    beside the policy. None holds both where the policy is."""
    sample_every: int = 10
    """Iterations between rows of samples.jsonl."""
    num_shown: int = 4
    """Answers in samples.jsonl each time."""
    drift_every: int = 1
    """Iterations between measurements of the weight drift."""
    held_out: str | None = None
    """Text or demonstrations like those of SFT; its perplexity shows forgetting."""
    out_of_domain: str | None = None
    """Text of another kind; its perplexity shows the alignment tax."""
    judge: str | None = None
    """A second reward that is not trained on, module:function; shows reward hacking."""
    judge_failure: Literal["stop", "warn"] = "stop"
    """What a judge that fails does to the run; warn leaves that judge/score out."""
    stop_timeout: float = 20.0
    """Seconds that answers, reward and judge may still take after SIGTERM or Ctrl-C.
    Then the state from before this step is saved, and the run ends."""
    eval_every: int = 10
    """Iterations between looks at held_out, out_of_domain and judge."""
    eval_rows: int = 64
    """Rows of each text to look at."""
    alarms: Limits = alarms.LIMITS
    """When to ask for a look."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.reward is None) == (self.reward_model is None):
            got = "neither" if self.reward is None else "both"
            raise InputError(f"expected one of --reward and --reward-model, got {got}")
        if self.judge is None and self.judge_failure != "stop":
            raise InputError(
                f"--judge-failure {self.judge_failure}: expected a --judge that may "
                f"fail, got none; name one, or leave it out"
            )
        if self.critic_from == "reward_model" and self.reward_model is None:
            raise InputError(
                "--critic-from reward_model: expected a --reward-model to start from, "
                "got a Python reward; start the critic from the policy"
            )
        checks.rows(batch_size=self.batch_size)
        checks.positive(
            num_steps=self.num_steps,
            policy_learning_rate=self.policy_learning_rate,
            critic_learning_rate=self.critic_learning_rate,
            sample_every=self.sample_every,
            drift_every=self.drift_every,
            eval_every=self.eval_every,
            eval_rows=self.eval_rows,
            stop_timeout=self.stop_timeout,
        )
        checks.non_negative(kl_coef=self.kl_coef, num_shown=self.num_shown)
        if self.max_grad_norm is not None:
            checks.positive(max_grad_norm=self.max_grad_norm)
        self.kl_control.controller(self.kl_coef, num_steps=self.num_steps)  # or raises
        if not self.measure_kl and (
            self.kl_coef
            or self.kl_control != CONSTANT
            or self.reference is not None
            or self.lifecycle != lifecycle.FROZEN
            or self.ppo.penalty != IN_REWARD
        ):
            raise InputError(
                "--no-measure-kl: expected --kl-coef 0 and neither --kl-control, "
                "--reference, --penalty nor a lifecycle, as there is no reference "
                "then; leave one or the other out"
            )
        if self.ppo.penalty.placement is None and (
            self.kl_coef or self.kl_control != CONSTANT
        ):
            raise InputError(
                f"--penalty.placement None: expected --kl-coef 0 and no --kl-control, "
                f"as the KL is measured then and acts nowhere, got {self.kl_coef:g} "
                f"and {self.kl_control.kind}; place the penalty, or leave them out"
            )
        if self.ppo.critic_warmup >= self.num_steps:
            raise InputError(
                f"--critic-warmup: expected less than the {self.num_steps} of "
                f"--num-steps, got {self.ppo.critic_warmup}; the policy would never "
                f"learn"
            )
        if (self.ptx is None) != (self.ppo.ptx_coef == 0):
            raise InputError(
                f"expected --ptx and --ptx-coef together, got {self.ptx} and "
                f"{self.ppo.ptx_coef:g}; give both, or neither"
            )
        if self.ppo.shared_trunk and self.critic_from != "policy":
            raise InputError(
                f"--critic-from: expected policy with --shared-trunk, where the critic "
                f"is a head on the policy, got {self.critic_from}; leave one of them "
                f"out"
            )
        if self.sampling_mesh is not None and (self.buckets or self.ppo.reprice):
            raise InputError(
                "--sampling-mesh: expected neither --buckets, as a snapshot holds the "
                "next answers, nor --reprice, which would take the older policy that "
                "drew them for this one; leave it out, or them"
            )
        if self.critic_mesh is not None:
            try:
                self.ppo.refuse_critic_apart()
            except InputError as error:
                raise InputError(f"--critic-mesh: {error}") from None
        if self.ppo.penalty.needs_logits and self.reference_storage.apart:
            raise InputError(
                "--reference-storage: expected it where the policy lies for exact KL, "
                "which needs the hidden states of both in one program, got memory cpu, "
                "a mesh or own_devices; leave it out, or choose k1, k2 or k3"
            )
        if not self.measure_kl and self.lora.lora is None:
            _refuse_unused("--reference-storage", self.reference_storage)
        if self.reward_model is None:
            _refuse_unused("--reward-storage", self.reward_storage)
        if self.lora.lora is not None:
            self.lifecycle.refuse_mixing_adapters()
            if self.ppo.penalty.needs_logits and self.lifecycle.moves:
                raise InputError(
                    "--penalty: expected k1, k2 or k3 with --lora.rank and a lifecycle "
                    "that moves the reference, got exact KL; leave one of them out"
                )
            if self.reference_storage.apart:
                raise InputError(
                    "--reference-storage: expected it where the policy lies with "
                    "--lora.rank, got memory cpu, a mesh or own_devices; the reference "
                    "is the policy's base then, which runs with it"
                )
            if self.reference is not None and self.lifecycle.moves:
                raise InputError(
                    "--reference: expected none with --lora.rank and a lifecycle, as a "
                    f"reset makes the reference adapters of the base, got "
                    f"{self.reference}; leave one of them out"
                )
            if self.critic_from == "reward_model":
                raise InputError(
                    "--critic-from: expected policy with --lora.rank, got reward_model;"
                    " the critic's adapters are over the policy's base"
                )


def _refuse_unused(option: str, given: Storage) -> None:
    if given != frozen_models.COPY:
        raise InputError(
            f"{option}: expected none where no such model is held, got {given}; leave "
            f"it out"
        )


PRESETS: dict[str, dict[str, Any]] = {
    "openai-2019": {
        "ppo": OPENAI_2019,
        "kl_coef": 0.15,
        "kl_control": Control(
            kind="adaptive", target=6.0, unit="response", horizon=10_000
        ),
        "adam": "tf",
        "num_steps": 1954,
        "max_new_tokens": 24,
        "batch_size": 512,
        "policy_learning_rate": 1e-5,
        "critic_learning_rate": 1e-5,
        "max_grad_norm": None,
    },
    "n-plus": {
        "ppo": N_PLUS,
        "kl_coef": 0.05,
        "critic_from": "reward_model",
        "num_steps": 1953,
        "max_new_tokens": 53,
        "batch_size": 512,
        "policy_learning_rate": 3e-6,
        "critic_learning_rate": 3e-6,
        "max_grad_norm": None,
    },
}
"""--preset NAME: what the published runs set, where it differs from the defaults."""
ADAPTERS = 2**32 - 1  # folded into the root key where a step is, which none reaches
MEASURED = {
    "objective/scores": "score",
    "objective/kl": "KL to the reference [nats]",
    "objective/entropy": "entropy [nats per token]",
    "response/length": "length [tokens]",
    "response/eos_fraction": "ended (share of answers)",
    "response/distinct_fraction": "distinct (share of answers)",
}


class Models(NamedTuple):
    """What is held during the run."""

    mesh: Mesh  # that all lies on but what has devices of its own
    sampling: Mesh | None  # the devices that sample, if they are others
    algorithm: ppo.PPO
    train: TrainState  # without a critic where it has devices of its own
    critic: SupervisedState | None  # there
    critic_devices: CriticDevices | None
    base: Frozen | None  # that policy and critic adapt, with LoRA
    reference: Frozen | None
    reward: RewardModel | None

    @property
    def adapters_are_the_reference(self) -> bool:
        """The reference is adapters over the base, as it is to be reset."""
        return self.base is not None and self.algorithm.lifecycle.moves


def mesh_of(options: Config) -> Mesh:
    """What all lies on but what has devices of its own."""
    storages = (options.reference_storage, options.reward_storage)
    meshes = (options.sampling_mesh, options.critic_mesh)
    taken = [storage.num_own for storage in storages]
    taken += [mesh.size for mesh in meshes if mesh is not None]
    return frozen_models.policy_mesh(options.mesh, taken=max(taken))


def last_devices(shape: MeshShape | None) -> Mesh | None:
    """The mesh of what has devices of its own; None where there is no shape."""
    return None if shape is None else shape.make(jax.devices()[-shape.size :])


def make_models(options: Config, policy: Pretrained) -> Models:
    """Policy and critic to train, reference and reward model frozen."""
    lora, model, reward = options.lora.lora, policy.model, None
    mesh = mesh_of(options)
    over = functools.partial(sharding.shardings, mesh=mesh)
    if options.reward_model is not None:
        reward = frozen_models.load_reward_model(
            options.reward_model,
            policy=policy,
            storage=options.reward_storage,
            sharding=over,
        )
    there = last_devices(options.critic_mesh)
    over_critic = functools.partial(
        sharding.shardings, mesh=mesh if there is None else there
    )
    base, critic_model = None, model
    if lora is not None:
        base = options.reference_storage.freeze(policy.params)
        policy_key, critic_key = jax.random.split(
            jax.random.fold_in(jax.random.key(options.seed), ADAPTERS)
        )
        trained = init(policy_key, model=model, lora=lora)
        valued = (
            critic.on_policy_trunk(model=model)
            if options.ppo.shared_trunk
            else critic.from_base(critic_key, model=model, lora=lora)
        )
    elif options.ppo.shared_trunk:
        trained, valued = policy.params, critic.on_policy_trunk(model=model)
    elif options.critic_from == "policy":
        trained = policy.params
        seen = trained if there is None else sharding.place(trained, mesh=there)
        valued = critic.from_policy(seen, model=model)
    else:
        assert options.reward_model is not None  # checked by Config
        assert reward is not None  # of it
        # Read again: what is frozen may be rounded, or be on the host.
        _, valued = hf.load_reward(
            options.reward_model, dtype="float32", sharding=over_critic
        )
        trained, critic_model = policy.params, reward.model
    algorithm = make_ppo(
        options, model=model, critic_model=critic_model, stop_ids=policy.stop_ids
    )
    reference = None
    if options.measure_kl and base is not None and options.reference is None:
        reference = frozen.freeze(trained) if options.lifecycle.moves else base
    elif options.measure_kl:
        reference = frozen_models.load_reference(
            options.reference,
            policy=policy,
            storage=options.reference_storage,
            sharding=over,
        )
    kl = options.kl_control.controller(options.kl_coef, num_steps=options.num_steps)
    devices, critic_state = None, None
    if there is None:
        train = state.ppo_state(
            policy=trained,
            critic=valued,
            policy_optimizer=algorithm.policy_optimizer,
            critic_optimizer=algorithm.critic_optimizer,
            kl=kl,
        )
    else:
        train = state.grpo_state(
            policy=trained, policy_optimizer=algorithm.policy_optimizer, kl=kl
        )
        devices = CriticDevices(recipe=algorithm, mesh=there, home=mesh, base=base)
        critic_state = devices.state_of(valued)
    # All of it, as what comes back from a frozen model is on the mesh: a state that is
    # not would be after its first step, and `jit` would compile everything again.
    train = sharding.place(train, mesh=mesh)
    return Models(
        mesh,
        last_devices(options.sampling_mesh),
        algorithm,
        train,
        critic_state,
        devices,
        base,
        reference,
        reward,
    )


def check_memory(options: Config) -> None:
    """Refuses a run that cannot fit, by the shapes of what `make_models` will make.

    Raises:
      InputError: as `memory_check.check`, or there is no such checkpoint.
    """
    model = dataclasses.replace(hf.model_config(options.model), dtype=options.dtype)
    mesh, lora = mesh_of(options), options.lora.lora
    there = last_devices(options.critic_mesh) or mesh
    sampling = last_devices(options.sampling_mesh)
    stored, rewarding = options.reference_storage, options.reward_storage
    params = memory_check.shapes_of(model)
    policy, held = params, list[Part]()
    valued = jax.eval_shape(functools.partial(critic.from_policy, model=model), params)
    key, critic_model = jax.eval_shape(jax.random.key, 0), model
    if options.reward_model is not None:
        scoring = hf.model_config(options.reward_model)
        scorer = jax.eval_shape(
            functools.partial(critic.from_policy, model=scoring),
            memory_check.shapes_of(scoring),
        )
        if options.critic_from == "reward_model":
            valued, critic_model = scorer, scoring
        at = rewarding.mesh_beside(mesh)
        held += [Part("reward model", rewarding.shapes(scorer), at)]
    if options.ppo.shared_trunk:
        valued = jax.eval_shape(functools.partial(critic.on_policy_trunk, model=model))
    base = []
    if lora is not None:
        base = [Part("base", stored.shapes(params), stored.mesh_beside(mesh))]
        adapters = functools.partial(init, model=model, lora=lora)
        policy = jax.eval_shape(adapters, key)
        if not options.ppo.shared_trunk:
            from_base = functools.partial(critic.from_base, model=model, lora=lora)
            valued = jax.eval_shape(from_base, key)
    if options.measure_kl and (lora is None or options.reference is not None):
        at = stored.mesh_beside(mesh)
        held += [Part("reference", stored.shapes(params), at)]
    elif options.measure_kl and options.lifecycle.moves:
        held += [Part("reference", policy, mesh)]
    algorithm = make_ppo(options, model=model, critic_model=critic_model, stop_ids=())
    moments = jax.eval_shape(algorithm.policy_optimizer.init, policy)
    critic_moments = jax.eval_shape(algorithm.critic_optimizer.init, valued)
    held = [
        Part("policy", policy, mesh),
        Part("policy's optimizer", moments, mesh),
        Part("critic", valued, there),
        Part("critic's optimizer", critic_moments, there),
        *base,
        *held,
    ]
    sampled = [] if sampling is None else [Part("policy", policy, sampling)]

    def passing() -> list[memory_check.Passing]:
        rows = min(options.batch_size, options.ppo.slots or options.batch_size)
        return [
            memory_check.cache(
                model,
                rows=rows,
                max_new_tokens=options.max_new_tokens,
                mesh=mesh if sampling is None else sampling,
                beside=tuple(sampled),
            ),
            memory_check.gradients("gradients", policy, model=model, mesh=mesh),
            memory_check.gradients("gradients", valued, model=model, mesh=there),
        ]

    memory_check.check(
        held,
        passing,
        change="lower --max-new-tokens, --batch-size or --slots, train adapters with "
        "--lora.rank, store the reference with --reference-storage.dtype, or share it "
        "among devices with --mesh",
    )


def encode_prompts(
    options: Config, rows: list[Row], *, policy: Pretrained, context: int
) -> tuple[list[Row], list[encoding.Tokens]]:
    """The rows whose prompts leave room for a response, and their tokens."""
    room = policy.room(max_new_tokens=options.max_new_tokens, context=context)
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
        widest=None if options.buckets is None else max(options.buckets, default=0),
    )


def make_ppo(
    options: Config,
    *,
    model: ModelConfig,
    critic_model: ModelConfig,
    stop_ids: tuple[int, ...],
) -> ppo.PPO:
    """What is fixed during the run."""
    recipe = options.ppo
    updates = recipe.num_epochs * recipe.num_minibatches  # an iteration

    def adam(learning_rate: float, iterations: int) -> optax.GradientTransformation:
        schedule = optax.linear_schedule(learning_rate, 0.0, iterations * updates)
        optimizer = optimizers.adam(
            schedule, eps=1e-5, style=options.adam, mu_dtype=options.adam_mu_dtype
        )
        if options.max_grad_norm is None:
            return optimizer
        clip = optax.clip_by_global_norm(options.max_grad_norm)
        return optax.chain(clip, optimizer)

    return ppo.PPO(
        **vars(recipe),
        model=model,
        critic_model=critic_model,
        policy_optimizer=adam(
            options.policy_learning_rate, options.num_steps - recipe.critic_warmup
        ),
        critic_optimizer=adam(options.critic_learning_rate, options.num_steps),
        max_new_tokens=options.max_new_tokens,
        stop_ids=stop_ids,
        lifecycle=options.lifecycle,
        lora=options.lora.lora,
    )


class Programs:
    """What is compiled: a program an arrow, each with its parameters as arguments."""

    def __init__(self, models: Models) -> None:
        algorithm = models.algorithm
        shape = {
            "model": algorithm.model,
            "max_new_tokens": algorithm.max_new_tokens,
            "temperature": algorithm.temperature,
        }
        on, mesh = functools.partial(sharding.on, models.mesh), models.mesh
        self._models = models
        self._lora = algorithm.lora if models.adapters_are_the_reference else None
        self._base = models.base if models.adapters_are_the_reference else None
        self._sampling = mesh if models.sampling is None else models.sampling
        self._sample = jax.jit(
            functools.partial(sharding.on(self._sampling, ppo.sample), recipe=algorithm)
        )
        self._sampling_base = models.base
        if models.base is not None and models.sampling is not None:
            self._sampling_base = sharding.place(models.base, mesh=models.sampling)
        self._values = jax.jit(functools.partial(on(ppo.values), recipe=algorithm))
        donated = functools.partial(jax.jit, donate_argnames=("state",))
        self._learn = donated(functools.partial(on(ppo.learn), recipe=algorithm))
        self._make_experience = donated(
            functools.partial(on(ppo.make_experience), recipe=algorithm)
        )
        self._update = donated(
            functools.partial(on(ppo.update), recipe=algorithm, critic_apart=True)
        )
        self._shuffle_key = jax.jit(ppo.shuffle_key)
        self.measure = jax.jit(
            functools.partial(
                on(self_check.measure), reference=None, lora=algorithm.lora, **shape
            )
        )
        self.positions = jax.jit(
            functools.partial(
                objective.kl_by_position, max_new_tokens=algorithm.max_new_tokens
            )
        )
        self.evaluate = jax.jit(
            on(
                lambda policy, texts, base: evaluation.text_stats(
                    adapted.params(policy, base=base, lora=algorithm.lora),
                    texts,
                    model=algorithm.model,
                )
            )
        )
        if models.reference is not None:  # it may lie elsewhere
            on = functools.partial(sharding.on, frozen.mesh_of(models.reference))
        self._price = jax.jit(
            functools.partial(on(score.reference_logprobs), lora=self._lora, **shape)
        )
        self._drift = jax.jit(self._drift_of)

    def _inside(self, reference: Frozen | None) -> Frozen | None:
        """The reference where `learn` runs it again, for exact KL; else None."""
        return reference if self._models.algorithm.penalty.needs_logits else None

    def sample(self, policy: Params, *, prompts: Prompts, key: Array) -> Rollout:
        """Answers where the devices that sample are, brought to where it is learned.

        Asynchronous: what is dispatched next on other devices runs beside it.
        """
        if self._models.sampling is None:
            return self._sample(
                policy, prompts=prompts, key=key, base=self._sampling_base
            )
        policy, key = sharding.place((policy, key), mesh=self._sampling)
        prompts = row_sharding.put_rows(prompts, mesh=self._sampling)
        answered = self._sample(
            policy, prompts=prompts, key=key, base=self._sampling_base
        )
        return row_sharding.put_rows(answered, mesh=self._models.mesh)

    def values(
        self, train: TrainState, critic: SupervisedState | None, answered: Rollout
    ) -> Array:
        """The critic's values, taken where the critic is held."""
        if critic is None:
            return self._values(train, rollout=answered, base=self._models.base)
        assert self._models.critic_devices is not None  # as it has them
        return self._models.critic_devices.values(critic, rollout=answered)

    def learn(
        self,
        train: TrainState,
        critic: SupervisedState | None,
        *,
        answered: Rollout,
        scores: Array | Scores,
        reference: Frozen | None,
        ref_logprobs: Array | None,
        values: Array | None,
        key: Array,
        ptx: Sequences | None,
    ) -> tuple[TrainState, SupervisedState | None, Stats, Scored]:
        """`ppo.learn`; the critic's update beside it where the critic is held apart."""
        base, reference = self._models.base, self._inside(reference)
        seen = {
            "rollout": answered,
            "scores": scores,
            "reference": reference,
            "ref_logprobs": ref_logprobs,
            "values": values,
            "base": base,
        }
        if critic is None:
            train, stats, scored = self._learn(train, **seen, key=key, ptx=ptx)
            return train, None, stats, scored
        assert self._models.critic_devices is not None  # as it has them
        train, experience, stats, scored = self._make_experience(train, **seen)
        key = self._shuffle_key(key)
        critic, critic_stats = self._models.critic_devices.update(
            critic, experience=experience, key=key
        )
        train, update_stats = self._update(
            train,
            experience=experience,
            key=key,
            base=base,
            reference=reference,
            ptx=ptx,
        )
        return train, critic, update_stats | stats | critic_stats, scored

    def price(self, reference: Frozen, answered: Rollout) -> Array:
        """The reference's log-probs, taken where the reference is held."""
        return frozen_models.run_beside(
            lambda there: self._price(reference, rollout=there, base=self._base),
            reference,
            answered,
        )

    def drift(self, policy: Params, reference: Frozen) -> dict[str, Any]:
        """`drift.weight_drift` of the policy, merged with its base under LoRA."""
        there = frozen.beside(reference, policy)
        return self._drift(there, reference, self._models.base)

    def _drift_of(
        self, policy: Params, reference: Frozen, base: Frozen | None
    ) -> dict[str, Any]:
        lora, anchor = self._models.algorithm.lora, reference.stored
        if base is None or lora is None:
            return drift.weight_drift(policy, anchor)
        start = frozen.read(base)
        if self._models.adapters_are_the_reference:
            anchor = merge(start, anchor, lora=lora)
        return drift.weight_drift(merge(start, policy, lora=lora), anchor)


def rehearse(
    models: Models,
    programs: Programs,
    *,
    prompts: Prompts,
    ptx: Batches[Sequences] | None,
    reward: ppo.Reward,
    judge: Judge | None,
    key: Array,
    options: Config,
) -> None:
    """The first iteration up to its update, before there is a run folder.

    A reward function that fails is told now, and so is whatever does not fit together.
    """
    train, base, reference = models.train, models.base, models.reference
    answered = programs.sample(train.policy, prompts=prompts, key=key)
    seen = ppo.seen_by_reward(answered, recipe=models.algorithm)
    scores = reward(seen)
    if judge is not None:
        judge(seen)
    priced = None if reference is None else programs.price(reference, answered)
    values = None
    if models.critic is not None:
        values = programs.values(train, models.critic, answered)
    jax.eval_shape(
        programs.learn,
        train,
        models.critic,
        answered=answered,
        scores=scores,
        reference=reference,
        ref_logprobs=priced,
        values=values,
        key=key,
        ptx=None if ptx is None else ptx[0],
    )
    measured = programs.measure(
        train.policy, rollout=answered, ref_logprobs=priced, base=base
    )
    self_check.require(
        processes.whole(measured),
        tolerance=self_check.TOLERANCE[options.dtype],
        storage_tolerance=rounding_of(models, options),
        expect_equal=options.reference is None,
    )


def rounding_of(models: Models, options: Config) -> float:
    """How far the reference may be from the policy it is a copy of, nats per token."""
    dtype = options.reference_storage.dtype
    if models.base is not None or dtype == "float32":
        return 0.0  # under LoRA the two are rounded alike
    return self_check.TOLERANCE[dtype]


def sample_rows(
    answered: Rollout, scores: Array | Scores, *, policy: Pretrained, count: int
) -> list[dict[str, Any]]:
    """The first answers of a batch, for samples.jsonl."""
    answered, total = row_sharding.local_rows(
        (answered, rewards.scores_of(scores).total)
    )
    shown = jax.tree.map(lambda leaf: leaf[:count], answered)
    return [
        {"row": int(row), "prompt": prompt, "response": response, "score": float(score)}
        for row, score, (prompt, response) in zip(
            shown.index,
            total[:count],
            tokenization.texts(shown, decode=policy.decode),
            strict=True,
        )
    ]


def improve(
    models: Models,
    programs: Programs,
    *,
    reward: ppo.Reward,
    judge: Judge | None,
    texts: dict[str, Sequences],
    prompts: Batches[Prompts],
    ptx: Batches[Sequences] | None,
    key: Array,
    job: run.Run,
    meta: dict[str, str],
    policy: Pretrained,
    options: Config,
) -> tuple[Params, Frozen | None]:
    """PPO, score - kl_coef · KL to the reference; policy and reference at the end."""
    base, reference = models.base, models.reference
    held: dict[str, Any] = {"train": models.train, "root_key": key}
    if models.critic is not None:
        held["critic"] = models.critic
    beside = {} if models.reward is None else {"reward": models.reward.frozen}
    if base is not None:
        beside["base"] = base
    if models.critic_devices is not None and models.critic_devices.base is not None:
        beside["critic_base"] = models.critic_devices.base
    if reference is not None and reference is not base:
        held["reference"] = reference
    if models.sampling is not None:  # the answers to learn from next
        held["rollout"] = programs.sample(
            models.train.policy, prompts=prompts[0], key=jax.random.fold_in(key, 0)
        )
    moving = ("reference",) if options.lifecycle.moves else ()
    with job.stage("ppo", held, meta=meta, beside=beside, moving=moving) as stage:
        train, critic = stage.state["train"], stage.state.get("critic")
        reference = stage.state.get("reference", base)
        if models.reference is None:
            reference = None
        for step in stage.steps():
            step_key = jax.random.fold_in(key, step)
            if models.sampling is None:
                answered = programs.sample(
                    train.policy, prompts=prompts[step], key=step_key
                )
            else:
                answered = stage.state["rollout"]
            shown = ppo.seen_by_reward(answered, recipe=models.algorithm)
            priced, values = None, None
            if reference is not None and options.lifecycle.prices(step):
                priced = programs.price(reference, answered)
            if models.reward is None or critic is not None:  # beside what comes next
                values = programs.values(train, critic, answered)
            more = step + 1 < options.num_steps
            if models.sampling is not None and more:  # beside the rest of this step
                stage.state["rollout"] = programs.sample(
                    train.policy,
                    prompts=prompts[step + 1],
                    key=jax.random.fold_in(key, step + 1),
                )
            seen = {}
            with stage.user_code():
                scores = reward(shown)
                if step % options.eval_every == 0:
                    seen = look(programs, train.policy, texts, base, judge, shown)
            train, critic, stats, scored = programs.learn(
                train,
                critic,
                answered=answered,
                scores=scores,
                reference=None if priced is None else reference,
                ref_logprobs=priced,
                values=values,
                key=step_key,
                ptx=None if ptx is None else ptx[step],
            )
            stage.state["train"] = train
            if critic is not None:
                stage.state["critic"] = critic
            stats |= seen
            if reference is not None and step % options.drift_every == 0:
                stats |= drift.stats(programs.drift(train.policy, reference))
            samples, positions = [], None
            if step % options.sample_every == 0:
                samples = sample_rows(
                    shown, scores, policy=policy, count=options.num_shown
                )
                positions = None if priced is None else programs.positions(scored)
            if reference is not None and options.lifecycle.moves:
                reference = lifecycle.after_step(
                    reference, train.policy, step=step, lifecycle=options.lifecycle
                )
                stage.state["reference"] = reference
            stage.end_step(step, stats, samples, positions=positions)
    return train.policy, reference


def look(
    programs: Programs,
    policy: Params,
    texts: dict[str, Sequences],
    base: Frozen | None,
    judge: Judge | None,
    answered: Rollout,
) -> Stats:
    """What is watched and not trained on: fixed texts, and a judge of the answers."""
    stats = programs.evaluate(policy, texts, base)
    if judge is not None:
        stats |= judge(answered)
    return stats


class Judge:
    """--judge: a Python function of texts; each process judges its own rows."""

    def __init__(self, judge: TextReward, *, mesh: Mesh, may_fail: bool) -> None:
        self._judge, self._mesh, self._may_fail = judge, mesh, may_fail
        self._told = False

    def __call__(self, answered: Rollout) -> Stats:
        """`evaluation.judge_stats`; without scores where the judge fails and may.

        Raises:
          InputError, StopError: as `TextReward`, where it may not.
        """
        mine = row_sharding.local_rows(answered)
        judged = np.ones(len(mine.index), bool)
        try:
            scores = self._judge(mine)
        except (InputError, StopError) as error:
            if not self._may_fail:
                raise
            scores, judged = np.zeros(len(judged), np.float32), ~judged
            if not self._told:
                print(
                    f"warning: {error}\n--judge-failure warn: the run goes on, without "
                    f"a judge/score where this happens; later failures are counted in "
                    f"judge/failed and told at the end",
                    file=sys.stderr,
                )
            self._told = True
        scores, judged = row_sharding.put_computed((scores, judged), mesh=self._mesh)
        return evaluation.judge_stats(scores, judged=judged if self._may_fail else None)


def judge_failures(measured: list[Row]) -> int:
    """Steps at which a judge that may fail did, told on stderr."""
    looks = [row["judge/failed"] for row in measured if "judge/failed" in row]
    failures = sum(share > 0 for share in looks)
    if failures:
        print(
            f"warning: the judge failed at {failures} of the {len(looks)} steps at "
            f"which it was asked",
            file=sys.stderr,
        )
    return failures


def load_text_reward(
    option: str, spec: str, *, policy: Pretrained, rows: list[Row]
) -> TextReward:
    """The Python function module:function that an option names."""
    return TextReward(
        function=command_line.load_function(spec),
        decode=policy.decode,
        rows=rows,
        called=f"{option} {spec}",
    )


def text_reward(reward: TextReward, *, mesh: Mesh) -> ppo.Reward:
    """A Python function of texts as a reward; each process scores its own rows."""

    def scored(answered: Rollout) -> Array:
        return row_sharding.put_computed(
            reward(row_sharding.local_rows(answered)), mesh=mesh
        )

    return scored


def model_reward(scorer: RewardModel) -> ppo.Reward:
    """A reward model, run where it is held."""
    # An argument of the program: a closure would bake its parameters in.
    reward = rewards.from_model(scorer.frozen, model=scorer.model)
    mesh = frozen.mesh_of(scorer.frozen)
    apply = jax.jit(sharding.on(mesh, lambda reward, rollout: reward(rollout)))
    return lambda answered: frozen_models.run_beside(
        lambda there: apply(reward, there), scorer.frozen, answered
    )


def main(options: Config) -> None:
    """Runs `rlhf-jax ppo` with its options."""
    started = time.perf_counter()
    for spec in (options.reward, options.judge):  # before anything is loaded
        if spec is not None:
            command_line.load_function(spec)
    rows = files.read_prompts(options.prompts, field=options.prompt_field)
    mesh = mesh_of(options)
    if options.check_memory:
        check_memory(options)
    policy = pretrained.load(
        options.model,
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        remat=options.remat,
        attention=options.attention,
        sharding=functools.partial(sharding.shardings, mesh=mesh),
    )
    models = make_models(options, policy)
    context = policy.model.max_positions
    if models.reward is not None:
        context = min(context, models.reward.model.max_positions)
    rows, token_lists = encode_prompts(options, rows, policy=policy, context=context)
    processes.agree("the prompts", json.dumps([rows, token_lists]))
    put_rows = functools.partial(row_sharding.put_rows, mesh=mesh)
    prompts = batches.prompt_batches(
        token_lists,
        batch_size=options.batch_size,
        seed=options.seed,
        pad_id=policy.pad_id,
        buckets=options.buckets,
        share=row_sharding.row_share(mesh),
    ).map(put_rows)
    sources = {"held_out": options.held_out, "out_of_domain": options.out_of_domain}
    texts = {
        name: pretrained.read_texts(
            policy,
            source,
            batch_size=min(8, options.eval_rows),
            max_rows=options.eval_rows,
        )
        for name, source in sources.items()
        if source is not None
    }
    meta = {"data_digest": digests.of_tokens(token_lists)}
    if options.reward is not None or options.judge is not None:
        meta["rows_digest"] = digests.of_rows(rows)  # all that they are given
    ptx = None
    if options.ptx is not None:
        examples = pretrained.read_examples(
            policy, options.ptx, max_length=options.ptx_max_length
        )
        meta["ptx_digest"] = digests.of_tokens(examples)
        ptx = batches.sequence_batches(
            examples,
            batch_size=options.ptx_batch_size,
            seed=options.seed,
            pad_id=policy.pad_id,
            share=row_sharding.row_share(mesh),
        ).map(put_rows)
    policy = policy._replace(params=None)  # with LoRA the base is a copy: the only one
    programs, judge = Programs(models), None
    if options.judge is not None:
        judge = Judge(
            load_text_reward("--judge", options.judge, policy=policy, rows=rows),
            mesh=mesh,
            may_fail=options.judge_failure == "warn",
        )
    if options.reward is not None:
        reward = text_reward(
            load_text_reward("--reward", options.reward, policy=policy, rows=rows),
            mesh=mesh,
        )
    else:
        assert models.reward is not None  # checked by Config
        reward = model_reward(models.reward)
    key = sharding.place(jax.random.key(options.seed), mesh=mesh)
    rehearse(
        models,
        programs,
        prompts=prompts[0],
        ptx=ptx,
        reward=reward,
        judge=judge,
        key=jax.random.fold_in(key, 0),
        options=options,
    )

    check = functools.partial(
        alarms.check,
        limits=options.alarms,
        kl_target=options.kl_control.target_per_response,
    )
    with run.Run(
        options,
        num_steps={"ppo": options.num_steps},
        check=check,
        stop_timeout=options.stop_timeout,
    ) as job:
        reference, scorer = models.reference, models.reward
        report.model_table(
            [
                ("policy", models.train.policy, True),
                (
                    "critic",
                    models.train.critic
                    if models.critic is None
                    else models.critic.params,
                    True,
                ),
                ("base", None if models.base is None else models.base.stored, False),
                (
                    "reference",
                    None
                    if reference is None or reference is models.base
                    else reference.stored,
                    False,
                ),
                ("reward", None if scorer is None else scorer.frozen.stored, False),
            ]
        )
        trained, reference = improve(
            models,
            programs,
            reward=reward,
            judge=judge,
            texts=texts,
            prompts=prompts,
            ptx=ptx,
            key=key,
            job=job,
            meta=meta,
            policy=policy,
            options=options,
        )
    for held in (models.base, reference, None if scorer is None else scorer.frozen):
        if held is not None:
            frozen.verify(held)
    pretrained.save(
        job.folder,
        trained,
        start=policy,
        base=models.base,
        lora=models.algorithm.lora,
        name=options.model,
    )

    measured = metrics.read(job.folder / "metrics.jsonl")
    first = measured[0]
    last = functools.reduce(dict.__or__, measured)  # not every step takes the KL
    report.table(
        "Answers to the prompts",
        ("", "first iteration", "last measured"),
        [(name, first.get(at), last.get(at)) for at, name in MEASURED.items()],
    )
    summary: dict[str, Any] = {
        "score_first": first["objective/scores"],
        "score_last": last["objective/scores"],
        "kl_first": first.get("objective/kl"),
        "kl_last": last.get("objective/kl"),
        "alarms": job.alarms,
    }
    if options.judge is not None and options.judge_failure == "warn":
        summary["judge_failures"] = judge_failures(measured)
    if reference is not None:
        moved = processes.whole(programs.drift(trained, reference))
        drift_report.table(moved)
        drift_report.plots(job.folder, moved)
        summary |= {
            "reference_fingerprint": frozen.fingerprint_of(reference).root,
            "reference_verified": True,
            "drift_relative": float(moved["relative"]),
        }
        print(f"reference verified, fingerprint {summary['reference_fingerprint']}")
        print(f"policy moved, relative weight drift {moved['relative']:.3g}")
    plots.draw(job.folder)
    summary["seconds"] = time.perf_counter() - started
    folder.write_summary(job.folder, summary)
    print(f"{summary['seconds']:.0f} s; the policy is in {job.folder / 'model'}")


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax ppo`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        presets=PRESETS,
        prog="rlhf-jax ppo",
        argv=argv,
    )
