"""A step of a policy gradient as shapes, with the models that `build` makes.

sampling ─> each reward model ─> each reference ─> scoring and learning
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Prompts, ReferenceOutput, Rollout
from rlhf_jax.algorithms.flow import score, teacher
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation import continuous_batching, row_shares
from rlhf_jax.planning import decoding, model_flops, workload
from rlhf_jax.planning.workload import Program, Workload
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen, FrozenModels, Further
from rlhf_jax.runs.profile.profiler import Text
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes, Models
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.sampler import Here

BASE = "base"


def workload_of(
    config: PolicyGradientConfig,
    start: Pretrained,
    *,
    mesh: Mesh,
    texts: Sequence[Text],
) -> Workload:
    """Returns the workload of a step.

    Args:
      texts: the lengths of a batch, whose prompts are equally long.
    """
    meshes = Meshes(mesh, mesh, mesh)
    models = shapes.of_run(config, meshes=meshes, start=start)
    parts = {
        part.name: part.shapes
        for part in shapes.parts(config, models, meshes=meshes)
        if part.shapes is not None
    }
    rows = config.batch.batch_size
    columns = texts[0].prompt + config.batch.max_new_tokens
    valued = models.train.critic is not None
    sampled = sampled_model(config, models.recipe)
    of_cache = min(rows, models.recipe.continuous_batching or rows)
    return Workload(
        model=models.recipe.model,
        parts=parts,
        programs=programs(config, models, texts=texts, resident=parts),
        tokens=sum(map(sum, texts)),
        within={
            "KV cache": workload.cache_bytes(sampled, rows=of_cache, columns=columns),
            # `batch.Experience` or `batch.PolicyExperience`, and tokens.
            "experience": rows * columns * (4 + 2 + valued + 4 * (6 if valued else 4)),
            **models.recipe.record_bytes(tokens=rows * columns),
        },
    )


def refuse_apart(config: PolicyGradientConfig) -> None:
    """Raises InputError for a role on its own devices, which plans do not support."""
    for role, place in config.placement.places().items():
        alone = place.mesh is not None and role != "sampler"
        if place.devices not in ("policy", "auto") or alone:
            raise InputError(
                f"--placement.{role}: expected a plan of one set of chips, got "
                f"{place}; place it with the policy, or plan without it"
            )


def sampled_model(config: PolicyGradientConfig, recipe: PolicyGradient) -> ModelConfig:
    """Returns the model with the KV cache that sampling uses."""
    options = config.sampler.sampler
    if not isinstance(options, Here):
        raise InputError(
            "--sampler: expected the library's decoder, as only its programs can be "
            "planned; leave it out"
        )
    return options.sampled(recipe.model)


def programs(
    config: PolicyGradientConfig,
    models: Models,
    *,
    texts: Sequence[Text],
    resident: Collection[str],
) -> list[Program]:
    """Returns the programs of a step in their order, as the trainer runs them.

    Args:
      resident: names of the models and optimizers that stay in memory.
    """
    recipe, train = models.recipe, models.train
    shape: dict[str, Any] = {
        "model": recipe.model,
        "max_new_tokens": recipe.max_new_tokens,
        "temperature": recipe.temperature,
    }
    prompts = prompts_of(config.batch.batch_size, columns=texts[0].prompt)
    key = jax.eval_shape(jax.random.key, 0)
    base = (BASE,) if models.base is not None else ()
    moving = models.adapters_are_the_reference
    own = ("reference",) if "reference" in resident else ()  # otherwise it is the base
    sampler = dataclasses.replace(recipe, model=sampled_model(config, recipe))

    def sample(policy: Any, frozen: FrozenModels, prompts: Prompts, key: Any) -> Any:
        return iteration.sample(
            policy, prompts=prompts, key=key, recipe=sampler, frozen=frozen
        )

    mixed = models.reference if config.mixes_reference else None
    policy = shapes.storage_of_sampler(config, models)
    drawn = (policy, FrozenModels(mixed, models.base), prompts, key)
    rollout = jax.eval_shape(sample, *drawn)
    mesh = config.placement.sampler.mesh
    apart = mesh is not None or policy is not train.policy
    turns, repeats = turns_of(config, recipe=sampler, texts=texts)
    least, of_experts = _read_bytes(
        config, sampler, prompt=texts[0].prompt, turns=turns, repeats=repeats
    )
    of_step = [
        Program(
            name="sampling",
            function=sample,
            args=drawn,
            # A sampler on its own mesh or dtype reads a copy; the policy stays too.
            reads=(() if apart else ("policy", *base))
            + (own if mixed is not None else ()),
            batch=(2,),
            stage="rollout",
            model_flops=model_flops.forward(
                recipe.model, texts, head=True, group_size=recipe.rows_per_prompt
            ),
            trips=turns,
            repeats=repeats,
            least_bytes=least,
            expert_bytes=of_experts,
            mesh=mesh,
            resharded=() if mesh is None else (0,),
        )
    ]
    names = shapes.reward_names(models)
    for name, scorer in zip(names, models.reward_models, strict=True):

        def scored(
            reward: Frozen, rollout: Rollout, *, model: ModelConfig = scorer.model
        ) -> Any:
            return rewards.from_model(reward, model=model)(rollout)

        of_step.append(
            Program(
                name=f"the {name}",
                function=scored,
                args=(scorer.frozen, rollout),
                reads=(name,),
                batch=(1,),
                stage="score",
                model_flops=model_flops.forward(scorer.model, texts, head=False),
            )
        )

    def ref(reference: Frozen, base: Frozen | None, rollout: Rollout) -> Any:
        if models.head is not None:
            return teacher.teacher_states(reference, rollout=rollout, **shape)
        logprobs = score.reference_logprobs(
            reference,
            rollout=rollout,
            base=base,
            lora=None if base is None else recipe.lora,
            **shape,
        )
        return ReferenceOutput(logprobs)

    ref_output, references = None, []
    if models.reference is not None:
        adapted = models.base if moving else None
        ref_output = jax.eval_shape(ref, models.reference, adapted, rollout)
        reads = (*own, *(base if moving else ())) or base
        references.append(("the reference", models.reference, adapted, reads))
    for name, one in models.further.items():
        references.append((f"the reference {name}", one, None, (f"reference {name}",)))
    for name, one, adapted, reads in references:
        model = frozen.shape_of(one, policy=recipe.model)
        of_step.append(
            Program(
                name=name,
                function=ref,
                args=(one, adapted, rollout),
                reads=reads,
                batch=(2,),
                stage="score",
                model_flops=model_flops.forward(model, texts, head=True),
            )
        )
    learning = _learning(
        config, models, rollout, ref_output, texts=texts, resident=resident
    )
    return [*of_step, learning]


def _learning(
    config: PolicyGradientConfig,
    models: Models,
    rollout: Rollout,
    ref_output: ReferenceOutput | None,
    *,
    texts: Sequence[Text],
    resident: Collection[str],
) -> Program:
    """Returns the program that scores a rollout and learns from it."""
    recipe, train = models.recipe, models.train
    in_loss = models.head
    reads_reference = recipe.penalty.needs_logits and models.head is None
    if reads_reference:
        in_loss = models.reference
    weights = {ref.name: ref.weight for ref in config.reference.references}

    def learn(
        state: TrainState,
        frozen: FrozenModels,
        rollout: Rollout,
        scores: Any,
        ref: ReferenceOutput | None,
        further: dict[str, Any],
        inside: dict[str, Frozen],
        key: Any,
    ) -> Any:
        beside = {
            name: Further(frozen=inside.get(name), logprobs=one, weight=weights[name])
            for name, one in further.items()
        }
        return iteration.learn(
            state,
            rollout=rollout,
            scores=scores,
            frozen=FrozenModels(frozen.reference, frozen.base, beside),
            ref_output=ref,
            key=key,
            recipe=recipe,
        )

    further = models.further if recipe.penalty.needs_logits else {}
    learning = recipe.num_epochs * _training(train.policy, recipe, texts, head=True)
    learning *= recipe.trained_share
    if train.critic is not None:
        assert recipe.critic is not None
        if not recipe.critic.shared_trunk:
            model = recipe.critic.model
            adapters = None if recipe.lora is None else _count(train.critic)
            learning += recipe.num_epochs * model_flops.training(
                model, texts, head=False, adapters=adapters
            )
            # The forward pass of the values before the first update.
            learning += model_flops.forward(model, texts, head=False)
    unread = {*shapes.reward_names(models)}
    if not reads_reference:
        unread |= {"reference"}
    if not further:
        unread |= {f"reference {name}" for name in models.further}
    return Program(
        name="learning" if train.critic is None else "scoring and learning",
        function=learn,
        args=(
            train,
            FrozenModels(in_loss, models.base),
            rollout,
            jax.ShapeDtypeStruct((config.batch.batch_size,), jnp.float32),
            ref_output,
            dict.fromkeys(models.further, rollout.old_logprobs),
            further,
            jax.eval_shape(jax.random.key, 0),
        ),
        reads=tuple(name for name in resident if name not in unread),
        batch=(2, 3, 4, 5),
        stage="update",
        model_flops=learning,
        donate=(0,),
    )


def _read_bytes(
    config: PolicyGradientConfig,
    recipe: PolicyGradient,
    *,
    prompt: int,
    turns: tuple[int, ...],
    repeats: int,
) -> tuple[float, float]:
    """Returns `least_bytes` and `expert_bytes` of all tokens after the first."""
    first, *others = turns
    number = first * repeats + sum(others)
    options, model = config.sampler.sampler, recipe.model
    dtype = model.dtype
    if isinstance(options, Here) and options.dtype == "int8":
        dtype = "int8"
    places = recipe.continuous_batching
    rows = config.batch.batch_size if places is None else places
    mesh: MeshShape = config.placement.sampler.mesh or config.placement.policy
    copies, itemsize = mesh.dcn * mesh.data, jnp.dtype(dtype).itemsize
    least = decoding.least_bytes(
        model,
        mesh=mesh,
        rows=rows,
        prompt=prompt,
        turns=number,
        weight_bytes=itemsize,
        # The order in which places are filled is not known here.
        cached=places is None,
    )
    experts = decoding.expert_numbers(model, rows=-(-rows // copies))
    experts *= itemsize * copies / mesh.size
    return number * least, number * experts


def _training(
    trained: Any, recipe: PolicyGradient, texts: Sequence[Text], *, head: bool
) -> float:
    adapters = None if recipe.lora is None else _count(trained)
    return model_flops.training(recipe.model, texts, head=head, adapters=adapters)


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def turns_of(
    config: PolicyGradientConfig, *, recipe: PolicyGradient, texts: Sequence[Text]
) -> tuple[tuple[int, ...], int]:
    """Returns the turns of the sampler's loops, and how often the first loop runs.

    With pages every share of the rows has its own loops, and the longest count.
    """
    places, rows = recipe.continuous_batching, config.batch.batch_size
    if places is None:
        turns = workload.decoding_turns(
            texts[0].prompt,
            recipe.max_new_tokens,
            longest=max(text.response for text in texts),
        )
        return turns, 1
    model, shares = recipe.model, 1
    if model.cache_pages is not None:
        mesh: MeshShape = config.placement.sampler.mesh or config.placement.policy
        shares = mesh.data
        row_shares.check_shares(
            shares,
            rows=rows,
            places=places,
            pages=model.cache_pages,
            group_size=recipe.rows_per_prompt,
        )
        model = dataclasses.replace(model, cache_pages=model.cache_pages // shares)
    arriving = continuous_batching.prompts_at_a_time(
        model,
        places=places // shares,
        prompt=texts[0].prompt,
        new=recipe.max_new_tokens,
        group_size=recipe.rows_per_prompt,
    )
    arrivals = -(-rows // shares // arriving)
    turns = max(
        (
            workload.batching_turns(
                # Every `shares`-th response, as they are sorted here unlike in a batch.
                [text.response for text in texts[share::shares]],
                places=places // shares,
                arriving=arriving,
            )
            for share in range(shares)
        ),
        key=lambda turns: arrivals * turns[0] + sum(turns[1:]),
    )
    return turns, arrivals


def prompts_of(rows: int, *, columns: int) -> Prompts:
    """Returns the shapes of a batch of prompts."""
    return jax.eval_shape(
        lambda: Prompts(
            tokens=jnp.zeros((rows, columns), jnp.int32),
            mask=jnp.zeros((rows, columns), bool),
            index=jnp.zeros(rows, jnp.int32),
            sample=jnp.zeros(rows, jnp.int32),
        )
    )
