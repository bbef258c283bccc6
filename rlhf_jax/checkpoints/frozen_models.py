"""Loads the frozen models of a run: the reference and the reward model.

`Storage` is the group of options for their dtype, such as
`--reference-storage.dtype int8`; `Place` chooses devices and memory.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.checkpoints import hf
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import hub, tokenization
from rlhf_jax.data.text import TextContract, messages
from rlhf_jax.devices import moving
from rlhf_jax.devices.placement import WITH_POLICY, Place
from rlhf_jax.devices.sharding import shardings
from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import InputError, located
from rlhf_jax.models import layout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles import critic
from rlhf_jax.roles.reference import frozen, storage
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Output = TypeVar("Output")  # arrays
Params = Any
Role = Literal["reference", "critic", "teacher", "reward model"]
Load = Callable[..., tuple[ModelConfig, Params]]  # a checkpoint's path -> shape, params


@dataclasses.dataclass(frozen=True)
class Storage:
    """The dtype in which a frozen model is stored."""

    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    """Dtype of the parameters; int8 has one scale per channel."""
    embeddings: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of embeddings and output head if dtype is int8; None is int8."""

    def __post_init__(self) -> None:
        checks.one_of(dtype=self.dtype, among=(*hf.SAVE_DTYPES, "int8"))
        checks.one_of(embeddings=self.embeddings, among=(*hf.SAVE_DTYPES, None))
        storage.check_embeddings(self.embeddings, dtype=self.dtype)

    def shapes(self, params: Params) -> Params:
        """Returns the shapes of a stored copy of parameters; allocates nothing."""
        store = functools.partial(
            storage.store, dtype=self.dtype, embeddings=self.embeddings
        )
        return jax.eval_shape(store, params)

    def freeze(
        self,
        params: Params,
        *,
        place: Place = WITH_POLICY,
        policy: Mesh | None = None,
        model: ModelConfig | None = None,
    ) -> Frozen:
        """Copies parameters that are on the policy's mesh.

        Args:
          policy: the policy's mesh; only needed if `place` is apart from the policy.
          model: the shape of the parameters; None is the policy's.

        Raises:
          InputError: the dtype or memory is not available, or the mesh does not fit.
        """
        where = place.sharding(params, policy=policy)
        if where is not None and jax.process_count() > 1:
            # Moved before the cast, as no process has the whole array to place it.
            params = jax.tree.map(moving.move, params, where)
        return frozen.freeze(
            params,
            dtype=self.dtype,
            embeddings=self.embeddings,
            memory=None if place.memory == "device" else place.memory,
            sharding=where,
            model=model,
        )


COPY = Storage()  # a copy in float32


def run_beside(
    program: Callable[[Rollout], Output], model: Frozen, rollout: Rollout
) -> Output:
    """Runs a program on the devices of a frozen model; does not wait for it.

    Args:
      program: takes the rollout on those devices and returns arrays [B, ...].

    Returns:
      These arrays, on the devices of the rollout.
    """
    output = program(frozen.beside(model, rollout, put=moving.move))
    place = rollout.index.sharding  # shards rows, so it fits arrays of any rank
    return jax.tree.map(lambda leaf: moving.move(leaf, place), output)


class RewardModel(NamedTuple):
    """A frozen reward model and its shape."""

    model: ModelConfig
    frozen: Frozen


class Loader(NamedTuple):
    """Loads the other models of a run, which must read its policy's tokens.

    Raises InputError for a checkpoint that is missing, has other token ids, a smaller
    vocabulary or (a reference or critic) a shorter context, and for a place that is not
    available.
    """

    policy: Pretrained
    mesh: Mesh | None = None  # the policy's; None is one device
    model: Load = hf.load
    reward: Load = hf.load_reward

    def reference(
        self,
        path_or_repo_id: str | None,
        *,
        storage: Storage,
        place: Place = WITH_POLICY,
        option: str = "--reference",
    ) -> Frozen:
        """Freezes the policy's parameters (None), or those of a checkpoint.

        Args:
          path_or_repo_id: folder or hub id.
          option: the option that names the checkpoint, for errors.
        """
        if path_or_repo_id is None:
            return storage.freeze(self.policy.params, place=place, policy=self.mesh)
        model, params = self._read(
            self.model, path_or_repo_id, self.mesh, role="reference", option=option
        )
        shape = reference_shape(model, policy=self.policy)
        return storage.freeze(params, place=place, policy=self.mesh, model=shape)

    def critic(
        self, path_or_repo_id: str, *, mesh: Mesh | None = None
    ) -> tuple[ModelConfig, Params]:
        """Loads a critic on the trunk of a language model of any shape.

        Args:
          mesh: the critic's.

        Returns:
          Its shape, with the policy's compute options, and its trainable parameters;
          values start at 0.
        """
        model, params = self._read(
            self.model, path_or_repo_id, mesh, role="critic", option="--critic.start"
        )
        shape = run_beside_policy(model, policy=self.policy)
        return shape, critic.from_policy(params, model=shape)

    def reward_model(
        self, path_or_repo_id: str, *, storage: Storage, place: Place = WITH_POLICY
    ) -> RewardModel:
        """Freezes a reward model."""
        model, params = self._read(
            self.reward,
            path_or_repo_id,
            self.mesh,
            role="reward model",
            option="--reward-model",
        )
        # A critic that starts from the reward model takes this shape and its options.
        return RewardModel(
            run_beside_policy(model, policy=self.policy),
            storage.freeze(params, place=place, policy=self.mesh),
        )

    def trainable_reward(self, path_or_repo_id: str, *, mesh: Mesh) -> Params:
        """Returns the parameters of a reward model, for a critic to start from."""
        return self._placed(self.reward, path_or_repo_id, mesh)[1]

    def _read(
        self, load: Load, name: str, mesh: Mesh | None, *, role: Role, option: str
    ) -> tuple[ModelConfig, Params]:
        with located(option, hub.NoCheckpoint):
            model, params = self._placed(load, name, mesh)
        _check_tokens(name, model=model, policy=self.policy, role=role)
        return model, params

    @staticmethod
    def _placed(load: Load, name: str, mesh: Mesh | None) -> tuple[ModelConfig, Params]:
        over = None if mesh is None else functools.partial(shardings, mesh=mesh)
        return load(name, dtype="float32", sharding=over)


def reference_shape(model: ModelConfig, *, policy: Pretrained) -> ModelConfig | None:
    """Returns the shape with which a reference scores the policy's rollouts.

    Returns:
      None if it is the policy's, apart from compute options. Otherwise its own, of any
      family, width and depth, with the policy's compute options. Ids beyond the
      policy's vocabulary or without a token, which rollouts never have, are excluded
      from its distribution.
    """
    if model.run_as(policy.model) == policy.model:
        return None
    return dataclasses.replace(
        run_beside_policy(model, policy=policy), vocab_size=policy.model.vocab_size
    )


INSTEAD: dict[Role, str] = {
    **dict.fromkeys(
        ("reference", "critic"),
        "take one with the policy's vocabulary and a context as long, or leave it out "
        "for the policy as it starts",
    ),
    "teacher": "take one with the student's vocabulary and a context as long",
    "reward model": "take one that `rlhf-jax reward-model` trained on top of this "
    "policy",
}


def _check_tokens(
    name: str, *, model: ModelConfig, policy: Pretrained, role: Role
) -> None:
    """Refuses a model with a smaller vocabulary, shorter context or other ids.

    A reward model may have a shorter context.
    """
    fields = ["vocab_size"] + ["max_positions"] * (role != "reward model")
    small = [
        f"{field} {getattr(model, field)} for {getattr(policy.model, field)}"
        for field in fields
        if getattr(model, field) < getattr(policy.model, field)
    ]
    if small:
        raise InputError(
            f"{role} {name}: expected a model that reads the policy's tokens, got "
            f"{', '.join(small)}; {INSTEAD[role]}"
        )
    _check_ids(name, own=policy.tokenizer, role=role)


def check_teacher(teacher: str, *, student: str, tokenizer: str | None) -> None:
    """Refuses a teacher with other tokens, before weights are read.

    Args:
      tokenizer: of the student, a folder or hub id; None takes the one in `student`.

    Raises:
      InputError: a checkpoint is missing, or the teacher has other token ids, a smaller
        vocabulary or a shorter context.
    """
    # First, so that a missing checkpoint is not reported as a missing tokenizer.
    with located("--model", hub.NoCheckpoint):
        shape = hf.model_config(student)
    with located("--model" if tokenizer is None else "--tokenizer", hub.NoCheckpoint):
        reader = tokenization.load_tokenizer(
            student if tokenizer is None else tokenizer
        )
    reads = Pretrained(shape, params=None, tokenizer=reader, stop_ids=())
    check_reference(teacher, policy=reads, role="teacher")


def check_reference(
    reference: str, *, policy: Pretrained, role: Role = "reference"
) -> None:
    """Refuses a reference with other tokens, before weights are read.

    Args:
      role: what an error calls it.

    Raises:
      InputError: the checkpoint is missing, or has other token ids, a smaller
        vocabulary or a shorter context.
    """
    with located("--reference", hub.NoCheckpoint):
        model = hf.model_config(reference)
    _check_tokens(reference, model=model, policy=policy, role=role)


def run_beside_policy(model: ModelConfig, *, policy: Pretrained) -> ModelConfig:
    """Gives a frozen model the policy's compute dtype, remat and attention.

    The model keeps its own vocabulary, but predicts no id without a token in the
    policy's tokenizer.
    """
    return layout.fastest(
        dataclasses.replace(
            model,
            unused_ids=policy.model.unused_ids,
            dtype=policy.model.dtype,
            remat=policy.model.remat,
            attention=policy.model.attention,
        ),
        backend=policy.backend,
    )


def _check_ids(path_or_repo_id: str, *, own: Any, role: Role) -> None:
    """Refuses a checkpoint whose tokenizer gives texts other ids than the policy's.

    Prints a note if the checkpoint has no tokenizer. `own` is None in a plan.
    """
    if own is None:
        return
    named = f"{role} {path_or_repo_id}"
    whose = own.name_or_path or "the policy"
    if not tokenization.has_files(path_or_repo_id):
        _note(
            f"{named} has no tokenizer to compare with that of {whose}: only the size "
            f"of its vocabulary was checked, not that its ids mean the same"
        )
        return
    theirs = tokenization.load_tokenizer(path_or_repo_id)
    differing = tokenization.differing(own, theirs)
    if differing is not None:
        text, ids, read = differing
        raise InputError(
            f"{named}: expected the policy's tokenizer, got one that gives other ids: "
            f"{read} for {text!r}, for which {whose} gives {ids}; both must read the "
            f"same tokens, so take one that was trained on top of this policy or of "
            f"its ancestor"
        )
    if role in ("reward model", "teacher") and _written_otherwise(own, theirs):
        _note(
            f"{named} has a chat template that writes conversations otherwise than "
            f"that of {whose}: it reads messages as the latter writes them"
        )


@functools.cache  # a run looks at a checkpoint before it reads the weights, and then
def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _written_otherwise(own: Any, theirs: Any) -> bool:
    """Whether the chat templates of two tokenizers write a conversation differently."""
    if None in (own.chat_template, theirs.chat_template):
        return False
    said = [messages.OPENING, messages.of_assistant("Hello")]
    try:
        one, other = (TextContract(reader).rendered(said) for reader in (own, theirs))
    except InputError:  # a template takes no such conversation
        return False
    return one != other
