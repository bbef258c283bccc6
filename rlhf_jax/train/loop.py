"""The loop of every policy gradient: draw -> score -> learn -> watch.

    draw    the next responses, now or from the queue of a stale sampler
    score   reference, critic and rewards, at the same time
    learn   one program: experience, epochs, minibatches
    watch   what is measured but not trained on

The loop does not know which method it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.batch import Prompts, Rollout, Sequences
from rlhf_jax.algorithms.policy_gradient.corrections import staleness
from rlhf_jax.algorithms.policy_gradient.iteration import seen_by_reward
from rlhf_jax.data.batches import Batches
from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import StopError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.roles.reference import lifecycle
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.scores import Scores, scores_of
from rlhf_jax.runs import run
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.programs import LearnInputs, Programs, Read
from rlhf_jax.train.rewards import Early, RewardList
from rlhf_jax.train.sampler import Sampler
from rlhf_jax.train.watch.watcher import Watcher

if TYPE_CHECKING:
    from rlhf_jax.algorithms.flow.teacher import TeacherPrompts
    from rlhf_jax.train.environment.sampler import EpisodeSampler
    from rlhf_jax.train.rollouts.outside import OutsideSampler
    from rlhf_jax.train.rollouts.queue import RolloutQueue

Array = jax.Array
Params = Any
# A rollout, and the scores from processes or an environment, or a wait for them.
Drawn = tuple[Rollout, Early | Callable[[], Early]]
TOTAL = ""  # key of early scores: the total, where it was needed before the update


class Begun(NamedTuple):
    """Results of the rehearsal for a step, which the loop reuses."""

    rollout: Rollout
    early: Early  # scores from processes or an environment
    scores: Array | Scores | None
    read: Read | None  # None where it is not kept


class Loop(NamedTuple):
    """Inputs of an iteration other than the training state."""

    config: PolicyGradientConfig
    programs: Programs
    sampler: Sampler | OutsideSampler
    episodes: EpisodeSampler | None  # replaces the sampler in an environment
    rewards: RewardList
    prompts: Batches[Prompts]
    ptx: Batches[Sequences] | None
    watcher: Watcher
    root_key: Array
    begun: dict[int, Begun]  # by step; entries are removed when they are used
    # Prompts of a teacher, by row of the data; None: it reads the policy's prompts.
    of_teacher: TeacherPrompts | None = None
    # Makes the prompts of a teacher that reads scored responses of the batch.
    reprompt: Callable[[Rollout, Scores], TeacherPrompts] | None = None

    def key(self, step: int) -> Array:
        """Returns the key of a step, from which all its random numbers are drawn."""
        # A function of the step alone, so that a resumed run needs no stored key.
        return jax.random.fold_in(self.root_key, step)

    def draw(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        version: Array,
        handed: bool = False,
    ) -> Drawn:
        """Draws responses to prompts, and starts scoring them in processes.

        Args:
          key: the key of the step that will learn from them.
          handed: whether `policy` was returned by the sampler's `hand_over`.
        """
        of_step: dict[str, Any] = {"prompts": prompts, "key": key, "version": version}
        if self.episodes is not None:
            rollout, scores = self.episodes(policy, **of_step)
            return rollout, self.rewards.begin(self.shown(rollout), episodes=scores)
        draw = self.sampler.draw if handed else self.sampler
        rollout = draw(policy, **of_step)
        return rollout, self.rewards.begin(self.shown(rollout))

    def draw_there(
        self, policy: Params, *, prompts: Prompts, key: Array, version: Array
    ) -> tuple[Any, Early]:
        """Draws responses on the sampler's devices, without scoring them."""
        of_step: dict[str, Any] = {"prompts": prompts, "key": key, "version": version}
        return self.sampler.draw_there(policy, **of_step), {}

    def arrive(self, drawn: Any) -> Drawn:
        """Moves a rollout to the policy's devices and starts scoring it, as `draw`."""
        rollout = self.sampler.bring_home(drawn)
        return rollout, self.rewards.begin(self.shown(rollout))

    def shown(self, rollout: Rollout) -> Rollout:
        """Returns the rollout as the reward sees it."""
        return seen_by_reward(rollout, recipe=self.programs.recipe)

    def scores(
        self, rollout: Rollout, early: Early | Callable[[], Early]
    ) -> Array | Scores | None:
        """Returns the scores of a rollout, once every reward has computed them."""
        early = early() if callable(early) else early
        if TOTAL in early:
            return early[TOTAL]
        return self.rewards.finish(self.shown(rollout), early)

    def scored(self, rollout: Rollout, early: Early | Callable[[], Early]) -> Scores:
        """Returns the scores as one record, in a run that has a reward."""
        scores = self.scores(rollout, early)
        assert scores is not None
        return scores_of(scores)

    def taught(
        self, rollout: Rollout, early: Early | Callable[[], Early]
    ) -> tuple[TeacherPrompts | None, Early | Callable[[], Early]]:
        """Returns the teacher's prompts for a rollout, and the scores known so far.

        Waits for all scores if the teacher reads responses of the batch.
        """
        if self.reprompt is None:
            return self.of_teacher, early
        early = early() if callable(early) else early
        scores = self.scored(rollout, early)
        return self.reprompt(self.shown(rollout), scores), {**early, TOTAL: scores}

    @property
    def values_first(self) -> bool:
        """Whether the critic runs before the update's program, during the rewards."""
        apart = self.config.critic is not None and self.config.critic_place.apart
        # Rewards in JAX leave no host time during which the critic could run.
        return self.rewards.on_host or apart


def improve(
    loop: Loop,
    stage: run.Stage,
    *,
    queue: RolloutQueue | None,
    base: Frozen | None,
) -> None:
    """Maximises the rewards less β · KL, step by step; the stage holds the state.

    Args:
      stage: its state begins with `train`, `root_key` and, if the run has them,
        `critic` and `reference`.
      queue: rollouts of a sampler that is behind; None draws in the step itself.
      base: a reference that is the base under adapters, which the state omits.
    """
    config, programs, state = loop.config, loop.programs, stage.state
    train, critic = state["train"], state.get("critic")
    reference = state["reference"] if base is None else base
    moves, outside = config.reference.lifecycle, None
    if not isinstance(loop.sampler, Sampler):
        outside = loop.sampler
    if queue is not None:
        stage.state |= queue.begin(
            state, start=stage.start, policy=train.policy, version=train.step
        )
    if stage.start:  # the rehearsal drew from another policy
        loop.begun.clear()
    for step in stage.steps():
        key, stats = loop.key(step), {}
        # Removed, so that its arrays are freed with this step.
        begun = loop.begun.pop(step, None)
        if config.mixes_reference:
            assert isinstance(loop.sampler, Sampler)  # by the capability table
            assert reference is not None
            loop.sampler.follow(reference)
        with stage.user_code():
            if queue is None and begun is not None:
                rollout, early = begun.rollout, begun.early
            # On-policy: the very parameters that this step updates.
            elif queue is None:
                rollout, early = loop.draw(
                    train.policy,
                    prompts=loop.prompts[step],
                    key=key,
                    version=train.step,
                )
            else:
                rollout, early = queue.take()
        if queue is not None:
            # Before `learn`, which donates the policy: the queue copies what it needs.
            stage.state |= queue.submit(
                step + config.staleness, train.policy, version=train.step
            )
            stats |= staleness(rollout, step=jnp.int32(step))
        elif outside is not None:
            stats |= outside.stats()
        if config.sampler.max_redraws:
            with stage.user_code():
                rollout, early, redrawn = fill(loop, rollout, early, train, step=step)
            stats |= redrawn
        if begun is not None and begun.rollout is not rollout:
            begun = None  # some groups were drawn again
        with stage.user_code():
            of_teacher, early = loop.taught(rollout, early)
        # Decided on the host: the reference does not run in a step without a KL.
        taken = reference if moves.takes_kl(step) else None
        if begun is not None and begun.read is not None and taken is reference:
            read = begun.read
        else:
            read = programs.read(
                train,
                critic,
                rollout,
                reference=taken,
                key=key,
                values_first=loop.values_first,
                of_teacher=of_teacher,
            )
        with stage.user_code():
            if begun is None or config.sampler.max_redraws:  # `fill` has scored them
                scores = loop.scores(rollout, early)
            else:
                scores = begun.scores
            # Before the update, so that judge and held-out texts see the policy that
            # drew the rollout.
            stats |= loop.watcher.before(
                train.policy, loop.shown(rollout), reference, step=step
            )
        shown = loop.watcher.likeliest(
            train.policy, reference, loop.shown(rollout), step=step
        )
        ptx = None if loop.ptx is None else loop.ptx[step]
        # Dispatched, not awaited: the host's work below overlaps with it. The old
        # `train` is donated, so the name is bound to the new state at once.
        train, critic, learned, scored = programs.learn(
            train, critic, LearnInputs(rollout, scores, taken, read, key, ptx)
        )
        # Here, not at the end: a stop in between would save donated arrays.
        stage.state["train"] = train
        if critic is not None:
            stage.state["critic"] = critic
        # The weight drift is that of the updated policy.
        if reference is not None and step % config.watch.drift_every == 0:
            stats |= loop.watcher.drift(train.policy, reference)
        samples = loop.watcher.samples(
            loop,
            rollout=rollout,
            scores=scores,
            read=read,
            reference=reference,
            likely=shown,
            step=step,
            version=train.step,
        )
        positions = None
        if samples and read.reference is not None:
            positions = programs.positions(scored)
        if reference is not None and moves.moves:
            # After the update, from the new policy; the next step's KL is to the moved
            # reference.
            reference = lifecycle.after_step(
                reference,
                programs.brought(reference, train.policy, due=moves.due(step)),
                step=step,
                lifecycle=moves,
            )
            stage.state["reference"] = reference
        stage.end_step(
            step,
            learned | stats,
            samples,
            positions=positions,
            texts=[(rollout.mask, rollout.response_mask)],
            waits=waits_of(queue, outside),
        )


def waits_of(
    queue: RolloutQueue | None, outside: OutsideSampler | None
) -> dict[str, float] | None:
    """Returns seconds of waiting in this step for timings.jsonl, or None."""
    if queue is None and outside is None:
        return None
    waits = {} if queue is None else queue.waits.read()
    return waits | ({} if outside is None else outside.seconds())


@functools.partial(jax.jit, static_argnames=("group_size",))
def _refilled(
    batch: tuple[Rollout, Scores], drawn: tuple[Rollout, Scores], *, group_size: int
) -> tuple[Rollout, Scores]:
    # Imported here because few runs draw groups again.
    from rlhf_jax.algorithms.flow import selection

    return selection.refilled(batch, drawn, group_size=group_size)


def fill(
    loop: Loop,
    rollout: Rollout,
    early: Early | Callable[[], Early],
    train: Any,
    *,
    step: int,
) -> tuple[Rollout, Early, Stats]:
    """Replaces groups of equal scores by groups of new draws, up to --max-redraws.

    Draw d of a step takes the prompts and the key of step `step + d * num_steps`, which
    no other draw takes. So the run is a function of its seed, and resumes to the bit.

    Args:
      rollout, early: drawn from the step's own prompts and key.

    Returns:
      The rollout, its scores and {name: (sum, weight)}: `group/redraws`, batches drawn
      again, and `group/drawn_equal_fraction`, the share of groups of equal scores in
      all draws.

    Raises:
      StopError: after the last draw every group of the batch has equal scores.
    """
    config, size = loop.config, loop.programs.recipe.rows_per_prompt
    batch = rollout, loop.scored(rollout, early)
    equal = _equal(batch[1], size)
    # Decided on the host: compiled programs cannot know the number of draws.
    of_draws, draws = [equal], 0
    while equal.any() and draws < config.sampler.max_redraws:
        draws += 1
        # A step after the end of the run, whose key and prompts no other step uses.
        other = step + draws * config.num_steps
        again, begun = loop.draw(
            train.policy,
            prompts=loop.prompts[other],
            key=loop.key(other),
            version=train.step,
        )
        drawn = again, loop.scored(again, begun)
        of_draws.append(_equal(drawn[1], size))
        filled = _refilled(batch, drawn, group_size=size)
        # With the shardings of a sampled rollout, or `learn` would compile again.
        batch = jax.device_put(filled, jax.tree.map(lambda x: x.sharding, batch))
        equal = _equal(batch[1], size)
    if equal.all():
        raise StopError(
            f"step {step}: expected groups of unequal scores among "
            f"{len(of_draws) * equal.size} in {len(of_draws)} batches, got none, so "
            f"that there is nothing to learn from; choose prompts that are solved "
            f"sometimes, a larger --group-size, or --max-redraws 0"
        )
    one = jnp.ones((), jnp.float32)
    every = np.concatenate(of_draws)
    stats: Stats = {
        "group/redraws": (jnp.float32(draws), one),
        "group/drawn_equal_fraction": (
            jnp.float32(every.sum()),
            jnp.float32(every.size),
        ),
    }
    return batch[0], {TOTAL: batch[1]}, stats


def _equal(scores: Scores, group_size: int) -> np.ndarray[Any, Any]:
    """bool[B / G], on the host: whether all scores of a group are equal."""
    groups = processes.whole(scores.total).reshape(-1, group_size)
    return (groups == groups[:, :1]).all(axis=1)
