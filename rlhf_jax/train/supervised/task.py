"""The interface of a supervised command: its data, its loss, and what it saves."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import flax.struct
import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms.state import Optimizer, SupervisedState
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.devices.row_sharding import Share
from rlhf_jax.functional.masked import Stats
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import init as init_adapters
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import run
from rlhf_jax.train.config.supervised import SupervisedConfig
from rlhf_jax.train.reading import load_start

Array = jax.Array
Params = Any
Masks = tuple[Any, Any]  # segments or mask [B, S], response tokens [B, S]
Config = TypeVar("Config", bound=SupervisedConfig)


class Data(NamedTuple):
    """The data of a run, as its loop takes it."""

    batches: Batches[Any]
    trained_on: Sequence[Any]  # digested: a resumed run must read the same
    held_out: Sequence[Any]


@flax.struct.dataclass
class Models:
    """The frozen models of a run."""

    base: Frozen | None  # the base model under LoRA adapters
    reference: Frozen | None  # may be the base

    @property
    def beside(self) -> dict[str, Frozen]:
        """The frozen models by their names in snapshots."""
        models = {} if self.base is None else {"base": self.base}
        if self.reference is not None and self.reference is not self.base:
            models["reference"] = self.reference
        return models


class Session(NamedTuple):
    """The parts of a run that the methods of a task need."""

    start: Pretrained
    mesh: Mesh
    models: Models
    data: Data


class Task(abc.ABC, Generic[Config]):
    """The data, the loss, the evaluation and the saving of a supervised command."""

    called: str  # name of the examples, such as "pairs"
    role: ClassVar[str] = "policy"  # role of the trained model
    option: ClassVar[str] = "--model"  # option of the next command for OUT/model
    texts_per_row: ClassVar[int] = 1  # texts of a row that models read separately
    step: ClassVar[Callable[..., Any]]  # of `update`

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def samples(self) -> bool:
        """Whether --model samples before the first update."""
        return False

    @abc.abstractmethod
    def read(self, receipts: Receipts) -> Any:
        """Reads the rows of --data, before a model is loaded."""

    @functools.cached_property
    def described(self) -> Pretrained:
        """--model, read from its config and tokenizer, without parameters."""
        start = self.config.start
        return pretrained.described(start.model, tokenizer=start.tokenizer)

    def row_columns(self, start: Pretrained) -> int:
        """Returns the most tokens of a row that models read at a time."""
        return start.limit(self.config.data.max_length)

    def load(self, mesh: Mesh) -> Pretrained:
        """Loads --model with its parameters."""
        return load_start(self.config.start, mesh=mesh, start=self.described)

    @abc.abstractmethod
    def encode(self, rows: Any, *, share: Share) -> Data:
        """Encodes the rows as batches, of which this process reads a share."""

    def trained(self, start: Pretrained, key: Array) -> Params:
        """Returns the trained parameters before the first update."""
        lora = self.config.start.lora
        if lora is None:
            return start.params
        return init_adapters(key, model=start.model, lora=lora)

    def reference(self, loader: Loader, *, base: Frozen | None) -> Frozen | None:
        """Returns the frozen model that the loss reads, or None."""
        del loader, base
        return None

    def update(self, *, model: ModelConfig, optimizer: Optimizer) -> Callable[..., Any]:
        """Returns a function (state, batch=, base=, **inputs) -> (state, stats)."""
        return functools.partial(
            self.step,
            model=model,
            optimizer=optimizer,
            micro_batch_size=self.config.method.micro_batch_size,
            lora=self.config.start.lora,
        )

    def rehearse(self, session: Session) -> dict[str, Any]:
        """Makes the programs; returns arrays with the shapes of `inputs`."""
        del session
        return {}

    def prepare(
        self, initial: SupervisedState, *, session: Session, job: run.Run
    ) -> tuple[SupervisedState, Models]:
        """Prepares the first update, once there is a run folder."""
        del job
        return initial, session.models

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Returns further arguments of `update`, computed by frozen models."""
        del batch
        return {}

    @abc.abstractmethod
    def texts(self, batch: Any) -> list[Masks]:
        """Returns (segments or mask, response mask) of each text array of a batch."""

    @abc.abstractmethod
    def evaluate(self, params: Params, base: Frozen | None) -> Stats:
        """Evaluates parameters on the held-out data; empty if there is none."""

    def save(
        self, trained: Params, *, session: Session, to: Path
    ) -> tuple[Params, Frozen | None]:
        """Writes OUT/model and OUT/adapter; returns the parameters and their base."""
        pretrained.save(
            to,
            trained,
            start=session.start,
            base=session.models.base,
            lora=self.config.start.lora,
            name=self.config.start.model,
        )
        return trained, session.models.base

    @abc.abstractmethod
    def summary(
        self, before: dict[str, float], after: dict[str, float], *, session: Session
    ) -> dict[str, Any]:
        """Prints the final table; returns its figures for summary.json."""
