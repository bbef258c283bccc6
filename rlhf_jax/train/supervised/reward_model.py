"""A reward model from your own preference pairs, on top of a language model.

    rlhf-jax reward-model --model runs/sft/model --data pairs.jsonl \\
        --out runs/reward

A line of --data is {"prompt": ..., "chosen": ..., "rejected": ...}, or two dialogues
that share their beginning, as in hh-rlhf; messages go through the tokenizer's chat
template. A fresh head on the trunk of --model learns the pairs by the Bradley-Terry
loss. Before and after training, scores are normalised to mean 0 and standard deviation
1 on responses that --model, the reference of PPO, samples to the prompts of the pairs.
With --normalise demonstrations,source=FILE only a bias is set, after training, so that
the mean on demonstrations is 0. OUT/model is a Hugging Face checkpoint (sequence
classification with one label) for `rlhf-jax ppo --reward-model`.

--lora 16 trains adapters and the head over a frozen base, and also writes OUT/adapter
for PEFT. Without it one device holds the parameters in float32 four times (GPT-2
small: 2 GiB). Fewer than about 2,000 pairs leave the accuracy near chance: on top of
the second model of `rlhf-jax sft`, the 730 pairs of hh-rlhf (harmless, first 1,800)
that fit into its context take about a minute on 2 laptop cores and give 0.48 on the 73
held-out pairs, where the standard error is 0.06.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms import reward_model
from rlhf_jax.algorithms.batch import Preferences, Prompts, Rollout, Sequences
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.algorithms.state import SupervisedState
from rlhf_jax.checkpoints import hf, pretrained
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches, encoding, files, splits
from rlhf_jax.data.batches import Batches
from rlhf_jax.data.examples import Example
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.receipts import Receipts, items
from rlhf_jax.devices import processes, sharding
from rlhf_jax.devices.row_sharding import Share
from rlhf_jax.functional.masked import Stats
from rlhf_jax.models.lora import merge
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen, adapted_params
from rlhf_jax.runs import report, run
from rlhf_jax.runs.proof import exported
from rlhf_jax.train import commands
from rlhf_jax.train.config.config import FLAT
from rlhf_jax.train.config.models import Start
from rlhf_jax.train.config.optimizer import Optimizer
from rlhf_jax.train.config.supervised import MicroBatches, SupervisedConfig
from rlhf_jax.train.supervised import loop
from rlhf_jax.train.supervised.normalisation import (
    Demonstrations,
    Samples,
    demonstrations_to_score,
    prompts_to_answer,
)
from rlhf_jax.train.supervised.task import Data, Masks, Models, Session, Task

Array = jax.Array
Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """The preference pairs of a reward model."""

    data: str
    """Preference pairs: JSONL, or hf:NAME:SPLIT."""
    margin_field: str | None = None
    """Field of a row with the margin by which the chosen response must win; None has
    no margin."""
    max_length: int | None = None
    """Longest prompt with its response, tokens; None is the model's context."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of longer pairs and demonstrations: error stops, drop leaves them
    out."""
    buckets: tuple[int, ...] | None = None
    """Widths to which batches are padded, tokens; None pads all to the longest pair."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(MicroBatches):
    """How scores are learned and normalised."""

    normalise: Samples | Demonstrations | None = Samples()
    """Responses on which scores are normalised: samples, demonstrations,source=FILE, or
    None. Samples of --model set mean 0 and standard deviation 1, with options
    num_samples= (in whole batches), max_new_tokens= and temperature= (that of PPO).
    Demonstrations in the format of `rlhf-jax sft` set mean 0. None does not
    normalise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SupervisedConfig):
    """The options of `rlhf-jax reward-model`."""

    name: ClassVar[str] = "reward-model"
    start: Annotated[Start, FLAT]
    """The model that is trained."""
    data: Annotated[Pairs, FLAT]
    """The preference pairs."""
    method: Annotated[Method, FLAT] = Method()
    """How scores are learned and normalised."""
    optimizer: Annotated[Optimizer, FLAT] = Optimizer(learning_rate=1e-5)
    """How parameters are updated from their gradients."""


class RewardModel(Task[Config]):
    """Trains a reward model, a head on the trunk of --model, from pairs."""

    role, option = "reward model", "--reward-model"
    called = "pairs"
    texts_per_row = 2
    step = staticmethod(reward_model.update)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # `trained` takes the first key, the samples the second.
        self._head_key, self._sample_key = jax.random.split(jax.random.key(config.seed))
        self._prompts: Batches[Prompts] | None = None  # of the samples
        self._texts: Sequence[Sequences | Rollout] = ()  # scores are normalised on them
        self._num_texts = 0
        self._untrained: np.ndarray | None = None
        self._scores: np.ndarray | None = None

    @property
    def samples(self) -> bool:
        """Whether --model samples before the first update."""
        return isinstance(self.config.method.normalise, Samples)

    def read(self, receipts: Receipts) -> list[Row]:
        """Reads the pairs."""
        path, self._receipts = self.config.data.data, receipts
        self._receipt = receipts.source("--data", path, called="pairs")
        return files.read_preferences(path, receipt=self._receipt)

    def encode(self, rows: list[Row], *, share: Share) -> Data:
        """Encodes the pairs, and the prompts or texts for normalising the scores."""
        config, data, receipt = self.config, self.config.data, self._receipt
        start = self.described
        everything = encoding.encode_preferences(
            start.contract(receipt),
            rows,
            limits=Limits(
                start.limit(data.max_length),
                data.overlong,
                None if data.buckets is None else max(data.buckets, default=0),
            ),
            margin=data.margin_field,
        )
        pairs, self._others = splits.hold_out(
            everything, share=config.watch.held_out, seed=config.seed, receipt=receipt
        )
        receipt.use("training", items.of_pairs(pairs))
        receipt.use("held out", items.of_pairs(self._others))
        batch_size = config.batch.batch_size
        preferences = batches.preference_batches(
            pairs,
            batch_size=batch_size,
            seed=config.seed,
            pad_id=start.pad_id,
            buckets=data.buckets,
            share=share,
        )
        match config.method.normalise:
            case Samples() as samples:
                sampled = self._receipts.source(
                    "--data, to sample from", data.data, called="prompts"
                )
                sampled.rows_of(receipt)
                prompts = prompts_to_answer(
                    everything,
                    max_new_tokens=samples.max_new_tokens,
                    start=start,
                    receipt=sampled,
                )
                self._prompts = batches.prompt_batches(
                    prompts,
                    batch_size=batch_size,
                    seed=config.seed,
                    pad_id=start.pad_id,
                )
            case Demonstrations(source):
                self._texts, self._num_texts = demonstrations_to_score(
                    source,
                    start=start,
                    limits=Limits(start.limit(data.max_length), data.overlong),
                    batch_size=batch_size,
                    receipt=self._receipts.source("--normalise demonstrations", source),
                )
            case None:
                pass
        return Data(preferences, pairs, self._others)

    def trained(self, start: Pretrained, key: Array) -> Params:
        """Makes a fresh head, on the trunk or on adapters over it."""
        del key
        lora, model = self.config.start.lora, start.model
        if lora is not None:
            return rewards.from_base(self._head_key, model=model, lora=lora)
        return rewards.init(self._head_key, start.params, model=model)

    def rehearse(self, session: Session) -> dict[str, Any]:
        """Makes the programs that score and sample."""
        lora, start, mesh = self.config.start.lora, session.start, session.mesh

        def score(params: Params, base: Frozen | None, text: Any) -> Array:
            if base is not None:
                params = adapted_params(params, base=base, lora=lora)
            return rewards.sequence_scores(
                params, model=start.model, tokens=text.tokens, mask=text.mask
            )

        self._score, self._pad_id = jax.jit(sharding.on(mesh, score)), start.pad_id
        if isinstance(samples := self.config.method.normalise, Samples):
            self._sample = jax.jit(
                functools.partial(
                    sharding.on(mesh, rollout.rollout),
                    model=start.model,
                    max_new_tokens=samples.max_new_tokens,
                    stop_ids=start.stop_ids,
                    temperature=samples.temperature,
                )
            )
            assert self._prompts is not None  # after `encode`
            first, key = self._prompts[0], self._sample_key
            jax.eval_shape(self._sample, start.params, prompts=first, key=key)
        return {}

    def prepare(
        self, initial: SupervisedState, *, session: Session, job: run.Run
    ) -> tuple[SupervisedState, Models]:
        """Samples responses, and normalises the untrained scores on them."""
        del job
        base = session.models.base
        if isinstance(samples := self.config.method.normalise, Samples):
            assert self._prompts is not None  # after `encode`
            count = -(-samples.num_samples // self.config.batch.batch_size)
            self._num_texts = count * self.config.batch.batch_size
            self._texts = [
                self._sample(
                    session.start.params, prompts=self._prompts[i], key=self._sample_key
                )
                for i in range(count)
            ]
            self._untrained = self._scores_of(initial.params, base, self._texts)
            params = rewards.normalise(
                initial.params, scores=jnp.asarray(self._untrained)
            )
            initial = dataclasses.replace(initial, params=params)
        return initial, session.models

    def texts(self, batch: Preferences) -> list[Masks]:
        """Returns the masks of both sides of a batch."""
        sides = (batch.chosen, batch.rejected)
        return [(side.mask, side.response_mask) for side in sides]

    def evaluate(self, params: Params, base: Frozen | None) -> Stats:
        """Returns the share of held-out pairs whose chosen response scores higher."""
        pairs = self._others
        if not pairs:
            return {}
        chosen = [Example(pair.prompt, pair.chosen) for pair in pairs]
        rejected = [Example(pair.prompt, pair.rejected) for pair in pairs]
        texts = batches.sequences_in_order(
            chosen + rejected,
            batch_size=self.config.batch.batch_size,
            pad_id=self._pad_id,
        )
        scores = self._scores_of(params, base, texts)[: 2 * len(pairs)]
        left, right = np.split(scores, 2)
        return {
            "accuracy": (jnp.float32((left > right).sum()), jnp.float32(len(pairs)))
        }

    def save(
        self, trained: Params, *, session: Session, to: Path
    ) -> tuple[Params, Frozen | None]:
        """Normalises the scores, and writes OUT/model and OUT/adapter."""
        start, base, lora = session.start, session.models.base, self.config.start.lora
        params = trained
        if base is not None and lora is not None:
            params = merge(
                frozen.read(base), trained, lora=lora, rounded_to=start.save_dtype
            )
            trunk = params["trunk"]  # saved without the output head
            parts = {name: trunk[name] for name in ("embed", "layers", "final_norm")}
            params = params | {"trunk": parts}
        params = hf.rounded_reward(params, dtype=start.save_dtype)
        if self._texts:
            self._scores = self._scores_of(params, None, self._texts)[: self._num_texts]
            std = 1.0 if self.samples else None
            scores = jnp.asarray(self._scores)
            params = rewards.normalise(params, scores=scores, std=std)
        if base is not None and lora is not None:
            pretrained.save_adapter(
                to,
                trained | {"score": params["score"]},
                start=start,
                base=base,
                lora=lora,
                name=self.config.start.model,
            )
        new = pretrained.is_new(to / "model", start=start)
        if new:
            hf.save_reward(
                to / "model",
                start.model,
                params,
                tokenizer=start.tokenizer,
                stop_ids=start.stop_ids,
                pad_id=start.pad_id,
                dtype=start.save_dtype,
            )
        exported.write(to / "model", anew=new)
        return params, None

    def summary(
        self, before: dict[str, float], after: dict[str, float], *, session: Session
    ) -> dict[str, Any]:
        """Prints and returns the held-out accuracy, and scores before normalising."""
        count, accuracy = len(session.data.held_out), after.get("accuracy")
        shown = [(f"accuracy on {count} held-out pairs", accuracy)] if count else []
        summary: dict[str, Any] = {
            "held_out_accuracy_before": before.get("accuracy"),
            "held_out_accuracy": accuracy,
            "held_out_pairs": count,
        }
        kind = "samples" if self.samples else "demonstrations"
        for when, scores in (("untrained", self._untrained), ("trained", self._scores)):
            if scores is not None:
                which = f"of {self._num_texts} {kind}, {when}, before normalising"
                mean, std = float(scores.mean()), float(scores.std())
                shown += [(f"mean {which}", mean), (f"standard deviation {which}", std)]
                summary |= {f"{when}_mean": mean, f"{when}_std": std}
        if shown:
            report.table("Reward model", ("", "value"), shown)
        return summary

    def _scores_of(
        self, params: Params, base: Frozen | None, texts: Sequence[Sequences | Rollout]
    ) -> np.ndarray:
        """Returns f32[N], a score per text, filling of the last batch included."""
        scores = [self._score(params, base, text) for text in texts]
        return np.concatenate(processes.whole(scores))


def main(config: Config) -> None:
    """Runs `rlhf-jax reward-model` with its options."""
    loop.main(RewardModel(config))


command = functools.partial(
    commands.supervised,
    main,
    Config,
    description=__doc__,
    first=("data.overlong", "watch.held_out"),
    training=("method.normalise",),
)
"""`rlhf-jax reward-model`: runs the command from a command line."""
