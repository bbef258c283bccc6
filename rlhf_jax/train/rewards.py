"""The weighted rewards of a run, as its loop calls them.

begin      starts verifiers in processes, while devices continue
finish     runs reward models, Python functions and the length; sums all, weighted
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import RewardModel
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.json_lines import Row, place
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import Written
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.extensions import entry_points
from rlhf_jax.functional.checks import StopError
from rlhf_jax.models.packing import SizedPacking
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.runs import command_line
from rlhf_jax.train.config.rewards import (
    Environment,
    Function,
    Length,
    Model,
    Reward,
)
from rlhf_jax.train.config.rewards import Verifier as VerifierChoice

if TYPE_CHECKING:
    from rlhf_jax.roles.rewards.text import TextReward
    from rlhf_jax.roles.rewards.verifiers import Verifier
    from rlhf_jax.train.config.config import PolicyGradientConfig
    from rlhf_jax.train.evaluate.options import Config as Evaluation
    from rlhf_jax.verification.pool import VerifierPool

Array = jax.Array
Early = dict[str, Scores]  # scores from processes, by the name of the reward
EPISODES = "(environment)"  # key of an environment's own scores; no reward's name
Programmed = Callable[[Rollout], Array | Scores]
Pack = Callable[[Rollout], SizedPacking | None]  # how reward models read a rollout


class RewardPools:
    """Functions, verifiers and processes of the rewards, for the whole run."""

    def __init__(
        self,
        config: PolicyGradientConfig | Evaluation,
        *,
        mesh: Mesh,
        stack: contextlib.ExitStack,
    ) -> None:
        """Loads the user's functions; processes start with the first response."""
        self.config, self.mesh = config, mesh
        self.functions: dict[str, Any] = {}
        self.verifiers: dict[str, Verifier] = {}
        self.pools: dict[str, VerifierPool] = {}
        for source in config.sources:
            if isinstance(source.source, Function):
                # Imported here and below because only some rewards need them.
                from rlhf_jax.roles.rewards.text import TextReward

                self.functions[source.name] = command_line.load_function(
                    source.source.function,
                    called=_option(config, source),
                    takes=TextReward.TAKES,
                )
            if isinstance(source.source, VerifierChoice):
                verifier = make_verifier(
                    source.source,
                    called=_option(config, source),
                    unsafe=config.rewards.unsafe_verifier,
                )
                self.verifiers[source.name] = verifier
                from rlhf_jax.verification.pool import VerifierPool

                self.pools[source.name] = stack.enter_context(
                    VerifierPool(verifier, **config.rewards.of_pool)
                )

    def check_answers(self, rows: Sequence[Row]) -> None:
        """Refuses rows whose correct answer a verifier cannot read."""
        for verifier in self.verifiers.values():
            from rlhf_jax.roles.rewards import verifiers

            if isinstance(verifier, verifiers.Readable):
                located = ((place(row, n), row) for n, row in enumerate(rows))
                verifiers.check_answers(located, verifier=verifier)

    def tell(self, receipt: Receipt) -> None:
        """Records in a receipt which fields of the rows the rewards read."""
        for source in self.config.sources:
            match source.source:
                case Function(name):
                    receipt.gives(f"{_option(self.config, source)} {name}")
                case VerifierChoice(name) if source.source.is_function:
                    receipt.gives(f"{_option(self.config, source)} {name}")
                case VerifierChoice():
                    receipt.reads(source.source.answer_field)

    @property
    def reads_rows(self) -> bool:
        """Whether a reward reads the rows of the data."""
        return bool(self.functions or self.pools)

    @property
    def reads_prompts(self) -> bool:
        """Whether a user's function reads the prompts."""
        return bool(self.functions) or any(
            isinstance(source.source, VerifierChoice) and source.source.is_function
            for source in self.config.sources
        )


class RewardList:
    """The rewards of responses to the rows of one data set."""

    def __init__(
        self,
        pools: RewardPools,
        *,
        models: Sequence[RewardModel],
        pack: Pack | None,
        policy: Pretrained,
        rows: list[Row],
        prompts: Sequence[Written],
    ) -> None:
        """Compiles nothing yet.

        Args:
          models: the reward models, in the order of the config.
          rows: the data that `rollout.index` points into.
        """
        self._mesh, config = pools.mesh, pools.config
        self._sources = config.sources
        self._pooled = {
            name: pool.reward(decode=policy.decode, rows=rows, prompts=prompts)
            for name, pool in pools.pools.items()
        }
        self._programmed: dict[str, Programmed] = {}
        left = list(models)
        for source in self._sources:
            match source.source:
                case Model(paths):
                    mine, left = left[: len(paths)], left[len(paths) :]
                    self._programmed[source.name] = model_reward(
                        mine, pack=pack, source=source.source
                    )
                case Function(spec):
                    from rlhf_jax.roles.rewards.text import TextReward

                    reward = TextReward(
                        function=pools.functions[source.name],
                        decode=policy.decode,
                        rows=rows,
                        called=f"{_option(config, source)} {spec}",
                        prompts=prompts,
                    )
                    self._programmed[source.name] = text_reward(reward, mesh=pools.mesh)
                case Length():
                    self._programmed[source.name] = jax.jit(_length)
        self._own = {  # {name: weight} of the environment's own rewards
            source.name: source.weight
            for source in self._sources
            if isinstance(source.source, Environment)
        }
        self._combined = jax.jit(self._combine)
        short = {config.rewards.reward_model, config.rewards.reward}
        self._named = bool(config.rewards.rewards) and short == {None}

    @property
    def on_host(self) -> bool:
        """Whether a reward runs on the host, where devices would wait for it."""
        of_models = all(
            isinstance(source.source, Model | Length) for source in self._sources
        )
        return not (of_models and self._sources)

    def begin(
        self, shown: Rollout, *, episodes: Scores | None = None
    ) -> Callable[[], Early]:
        """Starts the verifiers; returns a function that waits for their scores.

        Args:
          shown: the rollout as the reward sees it.
          episodes: scores that an environment gave.
        """
        own = {} if episodes is None else {EPISODES: episodes}
        if not self._pooled:
            return lambda: own
        asked = _Asked.of(shown, mesh=self._mesh)
        pending = {
            name: one.submit(asked.rollout) for name, one in self._pooled.items()
        }

        def collect() -> Early:
            return own | {
                name: asked.put(one.collect, mesh=self._mesh)
                for name, one in pending.items()
            }

        return collect

    def finish(self, shown: Rollout, early: Early) -> Array | Scores | None:
        """Returns the scores of a rollout; None in a run without rewards."""
        episodes = early.get(EPISODES)
        if episodes is not None:
            early = early | dict.fromkeys(self._own, episodes)
        scores: dict[str, Array | Scores] = {
            source.name: early[source.name]
            if source.name in early
            else self._programmed[source.name](shown)
            for source in self._sources
        }
        if not scores:
            return None
        whole = self._combined(scores) if self._named else next(iter(scores.values()))
        if episodes is None or any(self._own.values()):
            return whole
        if self._own:  # `whole` has the parts of an environment of weight 0 already
            episodes = dataclasses.replace(episodes, parts={})
        return _without_failed(whole, episodes)

    def _combine(self, scores: dict[str, Array | Scores]) -> Scores:
        weights = {source.name: source.weight for source in self._sources}
        # `rewards.weighted` takes functions: these return the scores at hand.
        parts = {
            name: (weights[name], lambda _, one=one: one)
            for name, one in scores.items()
        }
        return rewards.weighted(parts)(None)


@jax.jit
def _without_failed(scores: Array | Scores, episodes: Scores) -> Scores:
    """Adds the logs and failures of episodes whose own reward is not maximised.

    Episodes that failed in the environment are left out.
    """
    whole, left_out = rewards.scores_of(scores), episodes.left_out
    assert left_out is not None  # set by `finished.Finished.scores`
    if whole.left_out is not None:
        left_out = whole.left_out | left_out
    ends = whole.turn_ends if whole.turn_ends is not None else episodes.turn_ends
    parts = {**episodes.parts, **whole.parts}
    return dataclasses.replace(whole, parts=parts, left_out=left_out, turn_ends=ends)


def require_some(scores: Array | Scores | None, *, sources: Sequence[Reward]) -> None:
    """Stops a run if no response of its first batch could be scored.

    Raises:
      StopError: every response failed.
    """
    if not isinstance(scores, Scores):
        return
    for name, part in scores.parts.items():
        failing = name.rpartition("/")[2] == "failed"
        if not failing or not (failed := processes.whole(part)).all():
            continue
        named = ", ".join(str(source) for source in sources)
        raise StopError(
            f"reward {named}: expected a number for some response of the first batch, "
            f"got none for {failed.size} of {failed.size} (the warning above says "
            f"why); mend it: a verifier is verify(prompt, response, row) -> float, and "
            f"an environment answers step(state, response)"
        )


def _option(config: PolicyGradientConfig | Evaluation, reward: Reward) -> str:
    """Returns the option of a reward, for messages."""
    if config.rewards.rewards:
        return f"--rewards {reward.name}"
    return "--reward" if isinstance(reward.source, Function) else "--verifier"


def _length(rollout: Rollout) -> Array:
    return rollout.response_mask.sum(axis=1).astype(jnp.float32)


def text_reward(reward: TextReward, *, mesh: Mesh) -> Programmed:
    """Wraps a Python function of texts as a reward; each process scores its rows."""

    def scored(rollout: Rollout) -> Array:
        asked = _Asked.of(rollout, mesh=mesh)
        return asked.put(lambda: reward(asked.rollout), mesh=mesh)

    return scored


class _Asked(NamedTuple):
    """The responses about which this process asks rewards on the host."""

    rollout: Rollout
    asked: np.ndarray[Any, Any]  # bool[b], of its rows; False where they fill a batch

    @classmethod
    def of(cls, rollout: Rollout, *, mesh: Mesh) -> _Asked:
        mine = row_sharding.unshared(row_sharding.local_rows(rollout), mesh=mesh)
        asked = np.asarray(mine.sample) >= 0
        return cls(jax.tree.map(lambda leaf: leaf[asked], mine), asked)

    def put(self, compute: Callable[[], Any], *, mesh: Mesh) -> Any:
        """Returns scores of all rows on the mesh, 0 for those that were not asked."""

        def of_all(leaf: Any) -> np.ndarray[Any, Any]:
            rows = np.zeros((len(self.asked), *leaf.shape[1:]), leaf.dtype)
            rows[self.asked] = np.asarray(leaf)
            return rows

        return row_sharding.put_computed(
            lambda: jax.tree.map(of_all, compute()), mesh=mesh
        )


def model_reward(
    scorers: Sequence[RewardModel], *, pack: Pack | None, source: Model
) -> Programmed:
    """Runs reward models on their own devices, packed where that is less work."""
    # Arguments of the program: a closure would bake their parameters into it.
    members = [
        rewards.from_model(scorer.frozen, model=scorer.model) for scorer in scorers
    ]
    combine: Callable[[list[Array]], Array | Scores] = operator.itemgetter(0)
    if len(members) > 1:
        combine = jax.jit(
            functools.partial(
                rewards.combine,
                how=source.combine,
                std_coef=source.std_coef,
                risk=source.risk,
            )
        )
    mesh = frozen.mesh_of(scorers[0].frozen)
    apply = jax.jit(
        sharding.on(mesh, lambda reward, rollout, packing: reward(rollout, packing))
    )

    def scored(rollout: Rollout) -> Array | Scores:
        packing = None if pack is None else pack(rollout)
        return combine(
            [
                frozen_models.run_beside(
                    functools.partial(apply, member, packing=packing),
                    scorer.frozen,
                    rollout,
                )
                for member, scorer in zip(members, scorers, strict=True)
            ]
        )

    return scored


def make_verifier(
    choice: VerifierChoice, *, called: str = "--verifier", unsafe: bool = False
) -> Verifier:
    """Makes the verifier that a choice names.

    "gsm8k", "integer" and "exact" compare the answer of a row with the response's
    number after ####, its last number, or its whole text. "module:function" is
    verify(prompt, response, row) -> float of an installed module, or of one in the
    working directory. Any other name is that of an entry point.

    Args:
      unsafe: --unsafe-verifier, for a verifier that runs code of the model.

    Raises:
      StopError: the module calls `sys.exit` when it is imported.
    """
    from rlhf_jax.roles.rewards import verifiers  # only runs with a verifier need them

    field = choice.answer_field
    match choice.name:
        case "gsm8k":
            return verifiers.Gsm8k(field, choice.unmarked)
        case "integer":
            return verifiers.LastInteger(field)
        case "exact":
            return verifiers.ExactMatch(field)
        case name if ":" in name:
            verifier = command_line.load_function(
                name, called=called, takes=verifiers.TAKES
            )
        case name:
            verifier = entry_points.load(name, group="verifiers")
            command_line.expect_arguments(
                verifier, takes=verifiers.TAKES, where=f"{called} {name}"
            )
    isolating = isinstance(verifier, verifiers.Isolating)
    return verifier.isolated(unsafe=unsafe) if isolating else verifier
