"""What a supervised command learns: its data, its loss, and what it leaves behind."""

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
from rlhf_jax.checkpoints.frozen_models import Load
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.receipts import Receipts
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
    """What a run reads, as its loop takes it."""

    batches: Batches[Any]
    trained_on: Sequence[Any]  # a resumed run must find the same
    held_out: Sequence[Any]


@flax.struct.dataclass
class Models:
    """The frozen models of a run."""

    base: Frozen | None  # that adapters adapt
    reference: Frozen | None  # the base where that is the reference

    @property
    def beside(self) -> dict[str, Frozen]:
        """Frozen models by their names in snapshots."""
        models = {} if self.base is None else {"base": self.base}
        if self.reference is not None and self.reference is not self.base:
            models["reference"] = self.reference
        return models


class Session(NamedTuple):
    """What a task's programs and its end need to know of the run."""

    start: Pretrained
    mesh: Mesh
    models: Models
    data: Data


class Task(abc.ABC, Generic[Config]):
    """What a command learns: its data, its loss, and what it leaves behind."""

    called: str  # what the data is made of
    role: ClassVar[str] = "policy"  # of what is trained
    option: ClassVar[str] = "--model"  # by which the next command takes OUT/model
    texts_per_row: ClassVar[int] = 1  # of a batch, that models read one by one

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def samples(self) -> bool:
        """Whether --model samples before the first update."""
        return False

    @abc.abstractmethod
    def read(self, receipts: Receipts) -> Any:
        """The rows of --data, before a model is loaded."""

    @functools.cached_property
    def described(self) -> Pretrained:
        """--model by its small files, without parameters."""
        return pretrained.described(self._path, tokenizer=self.config.start.tokenizer)

    def row_columns(self, start: Pretrained) -> int:
        """Tokens that models may read at a time, of a row of a batch."""
        return start.limit(self.config.data.max_length)

    def load(self, mesh: Mesh) -> Pretrained:
        """--model with its parameters."""
        start = self.config.start
        return load_start(
            self._path,
            options=start,
            save_dtype=start.save_dtype,
            lora=start.lora,
            mesh=mesh,
            start=self.described,
        )

    @property
    def _path(self) -> str:
        return self.config.start.model

    @abc.abstractmethod
    def encode(
        self, rows: Any, *, start: Pretrained, mesh: Mesh, receipts: Receipts
    ) -> Data:
        """The rows as batches."""

    def trained(self, start: Pretrained, key: Array) -> Params:
        """What is trained, as it is before the first update."""
        lora = self.config.start.lora
        if lora is None:
            return start.params
        return init_adapters(key, model=start.model, lora=lora)

    def reference(
        self, start: Pretrained, *, base: Frozen | None, mesh: Mesh, load: Load
    ) -> Frozen | None:
        """The frozen model that the loss reads; None of a loss without one."""
        del start, base, mesh, load
        return None

    @abc.abstractmethod
    def update(self, *, model: ModelConfig, optimizer: Optimizer) -> Callable[..., Any]:
        """(state, batch=, base=, and what `inputs` has) -> (state, stats)."""

    def rehearse(self, session: Session) -> dict[str, Any]:
        """Makes the programs; the shapes of what `inputs` will have for a batch."""
        del session
        return {}

    def prepare(
        self, initial: SupervisedState, *, session: Session, job: run.Run
    ) -> tuple[SupervisedState, Models]:
        """What precedes the first update, in the run folder."""
        del job
        return initial, session.models

    def inputs(self, batch: Any) -> dict[str, Any]:
        """What frozen models say of a batch, by the names that `update` takes."""
        del batch
        return {}

    @abc.abstractmethod
    def texts(self, batch: Any) -> list[Masks]:
        """(segments or mask, response tokens) of what a batch holds."""

    def columns(self, batch: Any) -> int:
        """Tokens of a row of a batch."""
        return self.texts(batch)[0][1].shape[1]

    @abc.abstractmethod
    def evaluate(self, params: Params, base: Frozen | None) -> Stats:
        """What is held out, under the parameters; empty without any."""

    def save(
        self, trained: Params, *, session: Session, to: Path
    ) -> tuple[Params, Frozen | None]:
        """Writes OUT/model, and OUT/adapter; what was written, and its base."""
        pretrained.save(
            to,
            trained,
            start=session.start,
            base=session.models.base,
            lora=self.config.start.lora,
            name=self._path,
        )
        return trained, session.models.base

    @abc.abstractmethod
    def summary(
        self, before: dict[str, float], after: dict[str, float], *, session: Session
    ) -> dict[str, Any]:
        """Prints the table of the end; its figures for summary.json."""
