"""DPO: a policy from your own preference pairs, without a reward model.

    rlhf-jax dpo --model runs/sft/model --data pairs.jsonl --out runs/dpo
    rlhf-jax dpo --model gpt2 --data pairs.jsonl --lora 16 \\
        --learning-rate 1e-4 --row-width 2048 --out runs/dpo_lora
    rlhf-jax dpo --kind kto --model runs/sft/model --data labels.jsonl --out runs/kto

A line of --data is {"prompt": ..., "chosen": ..., "rejected": ...}, or two dialogues
that share their beginning, as in hh-rlhf. Messages go through the tokenizer's chat
template. The reference is the initial --model, which should have learned such responses
(`rlhf-jax sft`), or --reference; with --lora it is the base of the policy. --precompute
computes the reference log-probs before the first update and then frees the reference;
the run is the same to the bit, but has no drift/*. --row-width packs several pairs into
a row, where no text attends to another. OUT/model is a Hugging Face checkpoint, and
with LoRA OUT/adapter is a PEFT adapter.

--kind kto takes {"prompt": ..., "completion": ..., "label": true} instead, or makes two
such rows of a pair. --kind simpo and orpo have no reference and thus no KL: they are
here for comparison with DPO, as is --reference none with other losses that need none.

Memory: one device holds the parameters in float32 five times, four with --precompute
(GPT-2 small: 2.4 and 2 GiB). On a model of 3.3 million parameters after 40
updates of `rlhf-jax sft` on tiny Shakespeare, one pass over the 655 pairs of hh-rlhf
(harmless, first 1,800; --overlong drop --blank drop) that fit into 128 tokens, in 181
rows of 512, at a learning rate of 1e-4, takes 2 minutes of CPU time. On 73 held-out
pairs the loss falls from 0.693 to 0.685, accuracy is 0.56 (standard error 0.06), and
both responses become less likely, the rejected one more so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms import dpo
from rlhf_jax.algorithms.batch import PackedPreferences
from rlhf_jax.algorithms.dpo import DPO, DPORecipe
from rlhf_jax.algorithms.state import Optimizer as Transformation
from rlhf_jax.algorithms.state import SupervisedState
from rlhf_jax.checkpoints import precomputed
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import packing
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.packing import PackedRow
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.devices import moving, row_sharding, sharding
from rlhf_jax.devices.placement import WITH_POLICY, Place, ReferencePlacement
from rlhf_jax.devices.row_sharding import Share
from rlhf_jax.functional import masked
from rlhf_jax.functional.masked import Stats
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import report, run
from rlhf_jax.train import commands
from rlhf_jax.train.config import capabilities
from rlhf_jax.train.config.config import FLAT
from rlhf_jax.train.config.models import NONE, START, OneReference, Start
from rlhf_jax.train.config.optimizer import Cosine, Optimizer
from rlhf_jax.train.config.supervised import Rows, SupervisedConfig, WatchPolicy
from rlhf_jax.train.supervised import loop, preferences
from rlhf_jax.train.supervised.preferences import Preferences
from rlhf_jax.train.supervised.task import Data, Masks, Models, Session, Task

Array = jax.Array
Params = Any
# batch -> the reference's log-probs; None without a reference.
RefLogprobs = Callable[[PackedPreferences], Any]
RECIPE = DPORecipe()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference(OneReference):
    """The reference, and when its log-probs are computed."""

    precompute: bool = False
    """Whether to compute all reference log-probs before the updates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SupervisedConfig):
    """The options of `rlhf-jax dpo`."""

    name: ClassVar[str] = "dpo"
    start: Annotated[Start, FLAT]
    """The model that is trained."""
    data: Annotated[Preferences, FLAT]
    """The preferences."""
    reference: Annotated[Reference, FLAT] = Reference()
    """The frozen reference of the loss."""
    method: Annotated[DPORecipe, FLAT] = RECIPE
    """Coefficients and choices of DPO."""
    optimizer: Annotated[Optimizer, FLAT] = Optimizer(learning_rate=1e-6)
    """How parameters are updated from their gradients."""
    watch: Annotated[WatchPolicy, FLAT] = WatchPolicy()
    """What is measured but not trained on."""
    placement: ReferencePlacement = ReferencePlacement()
    """Devices, mesh and memory of each role."""

    def __post_init__(self) -> None:
        super().__post_init__()
        place, adapters = self.placement.reference, self.start.lora is not None
        capabilities.exclude(
            {"--placement.reference": place.apart},
            {"--lora": adapters},
            reason="the reference runs where the policy's base is",
        )
        free_by_kind = self.method.kind in dpo.REFERENCE_FREE
        if self.reference.reference == NONE and not free_by_kind:
            self.method.check_reference_free()
        free = f"--kind {self.method.kind}" if free_by_kind else "--reference none"
        capabilities.exclude(
            {
                "--reference": self.reference.reference not in (START, NONE),
                "--precompute": self.reference.precompute,
                "--placement.reference": place != WITH_POLICY and not adapters,
            },
            {free: not self.has_reference},
            reason="there is no reference",
        )

    @property
    def has_reference(self) -> bool:
        """Whether the loss reads a reference."""
        free = self.method.kind in dpo.REFERENCE_FREE
        return self.reference.has_reference and not free

    @property
    def reference_place(self) -> Place:
        """The place of the reference, and of a base that is the reference too."""
        return self.placement.reference


class Learner(Task[Config]):
    """Trains a policy from preferences."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._labelled = config.method.kind == "kto"
        self.called = "texts" if self._labelled else "pairs"

    def read(self, receipts: Receipts) -> list[Row]:
        """Reads pairs, or responses with a label."""
        data = self.config.data
        if self.config.reference.precompute:  # before weights are read
            precomputed.require_one_process()
        self._receipt = receipts.source("--data", data.data, called=self.called)
        return preferences.read(data, labelled=self._labelled, receipt=self._receipt)

    def row_columns(self, start: Pretrained) -> int:
        """Returns the tokens of a pair, both texts end to end, or of a packed row."""
        return self.config.data.row_width or 2 * super().row_columns(start)

    def encode(self, rows: list[Row], *, share: Share) -> Data:
        """Encodes rows of one pair, or of as many pairs as fit."""
        config, start = self.config, self.described
        self._training, self._others = preferences.encode(
            rows, config=config, start=start, receipt=self._receipt
        )
        self._shape: Any = {
            "batch_size": config.batch.batch_size,
            "pad_id": start.pad_id,
        }
        self._held_out = packing.packed_in_order(
            self._others.rows, labels=self._others.labels, **self._shape
        )
        made = packing.packed_batches(
            self._training.rows,
            seed=config.seed,
            share=share,
            labels=self._training.labels,
            **self._shape,
        )
        return Data(made, self._training.digested, self._others.digested)

    def reference(self, loader: Loader, *, base: Frozen | None) -> Frozen | None:
        """Freezes the initial policy or a checkpoint; with adapters it is the base."""
        config = self.config
        if not config.has_reference or config.reference_is_base:
            return base if config.has_reference else None
        return loader.reference(
            config.reference.checkpoint,
            storage=config.reference.reference_storage,
            place=config.placement.reference,
        )

    def update(
        self, *, model: ModelConfig, optimizer: Transformation
    ) -> Callable[..., Any]:
        """Returns one optimizer step on the preference loss."""
        config = self.config
        self._dpo = DPO(
            **vars(config.method),
            model=model,
            optimizer=optimizer,
            lora=config.start.lora,
            reference_free=config.reference.reference == NONE
            and config.method.kind not in dpo.REFERENCE_FREE,
        )
        return functools.partial(dpo.update, dpo=self._dpo)

    @property
    def algorithm(self) -> DPO:
        """The loss with its options, as made by `update`."""
        return self._dpo

    def rehearse(self, session: Session) -> dict[str, Any]:
        """Makes the programs of the reference and of the held-out loss."""
        measure = functools.partial(dpo.measure, dpo=self._dpo)
        self._measure = jax.jit(sharding.on(session.mesh, measure))
        reference = session.models.reference
        live = live_logprobs(reference, algorithm=self._dpo, mesh=session.mesh)
        self._logprobs = self._held_out_logprobs = live
        if reference is None:
            return {"ref_logprobs": None}
        columns = session.data.batches[0].tokens.shape
        return {"ref_logprobs": np.zeros(columns, np.float32)}

    def prepare(
        self, initial: SupervisedState, *, session: Session, job: run.Run
    ) -> tuple[SupervisedState, Models]:
        """Computes all reference log-probs and frees the reference (--precompute)."""
        models, reference = session.models, session.models.reference
        if not self.config.reference.precompute or reference is None:
            return initial, models

        def cached(rows: list[PackedRow]) -> RefLogprobs:
            if not rows:
                return lambda batch: None
            cache = precomputed.load_or_compute(
                job.folder / "reference",
                [row.tokens for row in rows],
                segments=[row.segments for row in rows],
                reference=reference,
                model=self._dpo.model,
                temperature=self._dpo.temperature,
                progress=self.config.progress,
                **self._shape,
            )
            return lambda batch: cache.padded(
                np.asarray(batch.index), width=batch.tokens.shape[1]
            )

        self._logprobs = cached(self._training.rows)
        self._held_out_logprobs = cached(self._others.rows)
        return initial, dataclasses.replace(models, reference=None)

    def inputs(self, batch: PackedPreferences) -> dict[str, Any]:
        """Returns the reference log-probs of a batch."""
        return {"ref_logprobs": self._logprobs(batch)}

    def texts(self, batch: PackedPreferences) -> list[Masks]:
        """Returns the masks of the one text array of a batch."""
        return [(batch.segments, batch.response_mask)]

    def evaluate(self, params: Params, base: Frozen | None) -> Stats:
        """Returns the loss on held-out pairs, and its parts."""
        parts = [
            self._measure(
                params,
                batch=batch,
                ref_logprobs=self._held_out_logprobs(batch),
                base=base,
            )
            for batch in self._held_out
        ]
        return functools.reduce(masked.add_stats, parts) if parts else {}

    def summary(
        self, before: dict[str, float], after: dict[str, float], *, session: Session
    ) -> dict[str, Any]:
        """Prints and returns every mean on the held-out data, before and after."""
        data = session.data
        report.table(
            f"{len(data.held_out)} held-out {self.called}",
            ("", "before", "after"),
            [(name, before[name], after[name]) for name in after],
        )
        return {
            self.called: len(data.trained_on),
            "rows": len(self._training.rows),
            f"held_out_{self.called}": len(data.held_out),
            "held_out_before": before,
            "held_out": after,
            "reference_fingerprint": None,  # the loop replaces it if there is one
        }


def live_logprobs(
    reference: Frozen | None, *, algorithm: DPO, mesh: Mesh
) -> RefLogprobs:
    """Returns a function that computes reference log-probs of one batch at a time."""
    if reference is None:
        return lambda batch: None
    on_its_mesh = sharding.on(frozen.mesh_of(reference), dpo.reference_logprobs)
    compute = jax.jit(functools.partial(on_its_mesh, dpo=algorithm))

    def ref_logprobs(batch: PackedPreferences) -> Array:
        output = compute(
            reference, batch=frozen.beside(reference, batch, put=moving.move)
        )
        return row_sharding.put_rows(output, mesh=mesh)

    return ref_logprobs


COSINE = Cosine(warmup=0.1)
PRESETS: dict[str, dict[str, Any]] = {
    "simpo": {
        "method": dpo.SIMPO,
        "batch": Rows(batch_size=128),
        "optimizer": Optimizer(learning_rate=6e-7, schedule=COSINE),
    },
    "orpo": {
        "method": dpo.ORPO,
        "batch": Rows(batch_size=32),
        "optimizer": Optimizer(learning_rate=5e-6, schedule=COSINE),
    },
}
"""--preset NAME: published settings that differ from the defaults."""


def main(config: Config) -> None:
    """Runs `rlhf-jax dpo` with its options."""
    loop.main(Learner(config))


command = functools.partial(
    commands.supervised,
    main,
    Config,
    description=__doc__,
    first=("data.row_width", "watch.held_out"),
    start=("reference.reference",),
    training=("method.kind", "method.beta", "reference.precompute"),
    presets=PRESETS,
)
"""`rlhf-jax dpo`: runs the command from a command line."""
