"""The loop of every policy gradient: draw -> score -> learn -> watch.

    draw    the next responses, now or from the queue of a stale sampler
    score   reference, critic and rewards, at the same time
    learn   one program: experience, epochs, minibatches
    watch   what is measured but not trained on

The loop does not know which method it runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.batch import Prompts, Request, Rollout, Sequences
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
    from rlhf_jax.environments.sampler import EpisodeSampler
    from rlhf_jax.train.rollouts.outside import OutsideSampler
    from rlhf_jax.train.rollouts.queue import RolloutQueue

Array = jax.Array
Params = Any


Entry = tuple[Rollout, Callable[[], Early]]  # as `queue.Draw` returns it


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """A rollout and its scores, each computed when it is first read, and once."""

    rollout: Rollout
    shown: Rollout  # as rewards, judge and samples see it
    pending: Callable[[], Early]  # waits for processes
    rewards: RewardList
    known: Scores | None = None  # the scores, of a batch that was put together

    @functools.cached_property
    def early(self) -> Early:
        """The scores from processes or an environment."""
        return self.pending()

    @functools.cached_property
    def scores(self) -> Array | Scores | None:
        """The scores of every reward; None in a run without rewards."""
        if self.known is not None:
            return self.known
        return self.rewards.finish(self.shown, self.early)

    @property
    def entry(self) -> Entry:
        """What the queue keeps: the rollout, and how to wait for `early`."""
        return self.rollout, lambda: self.early

    @property
    def scored(self) -> Scores:
        """The scores as one record, in a run that has a reward."""
        assert self.scores is not None
        return scores_of(self.scores)


class Begun(NamedTuple):
    """Results of the rehearsal for a step, which the loop reuses."""

    drawn: Drawn
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

    def request(self, step: int, version: Array) -> Request:
        """Returns the request of a step to a policy; no update donates its arrays."""
        version = jnp.array(version, copy=True)
        return Request(self.prompts[step], self.key(step), version)

    def draw(self, policy: Params, request: Request, *, handed: bool = False) -> Drawn:
        """Draws responses, and starts scoring them in processes.

        Args:
          handed: whether `policy` was returned by the sampler's `hand_over`.
        """
        if self.episodes is not None:
            return self.drawn(*self.episodes(policy, request))
        draw = self.sampler.draw if handed else self.sampler
        return self.drawn(draw(policy, request))

    def drawn(self, rollout: Rollout, episodes: Scores | None = None) -> Drawn:
        """Starts scoring a rollout; `episodes` are scores that an environment gave."""
        shown = self.shown(rollout)
        pending = self.rewards.begin(shown, episodes=episodes)
        return Drawn(rollout, shown, pending, self.rewards)

    def draw_ahead(self, policy: Params, request: Request) -> Entry:
        """Draws for the queue, from parameters that the sampler handed over."""
        return self.draw(policy, request, handed=True).entry

    def arrive(self, there: Any) -> Entry:
        """Moves responses of the sampler's `draw_there` home, and scores them."""
        return self.drawn(self.sampler.bring_home(there)).entry

    def taken(self, rollout: Rollout, early: Early) -> Drawn:
        """Returns a rollout of the queue with its scores from processes."""
        return Drawn(rollout, self.shown(rollout), lambda: early, self.rewards)

    def shown(self, rollout: Rollout) -> Rollout:
        """Returns the rollout as the reward sees it."""
        return seen_by_reward(rollout, recipe=self.programs.recipe)

    def taught(self, drawn: Drawn) -> TeacherPrompts | None:
        """Returns the teacher's prompts for a rollout.

        Waits for all scores if the teacher reads responses of the batch.
        """
        if self.reprompt is None:
            return self.of_teacher
        return self.reprompt(drawn.shown, drawn.scored)

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
    moves, sampler = config.reference.lifecycle, loop.sampler
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
            assert isinstance(sampler, Sampler)  # by the capability table
            assert reference is not None
            sampler.follow(reference)
        with stage.user_code():
            if queue is not None:
                drawn = loop.taken(*queue.take())
                if begun is not None and drawn.rollout is begun.drawn.rollout:
                    drawn = begun.drawn
            elif begun is not None:
                drawn = begun.drawn
            else:  # on-policy: the very parameters that this step updates
                drawn = loop.draw(train.policy, loop.request(step, train.step))
        if queue is not None:
            # Before `learn`, which donates the policy: the queue copies what it needs.
            stage.state |= queue.submit(
                step + config.staleness, train.policy, version=train.step
            )
            stats |= staleness(drawn.rollout, step=jnp.int32(step))
        else:
            stats |= sampler.stats()
        if config.sampler.max_redraws:
            with stage.user_code():
                drawn, redrawn = fill(loop, drawn, train, step=step)
            stats |= redrawn
        if begun is not None and begun.drawn is not drawn:
            begun = None  # some groups were drawn again
        rollout = drawn.rollout
        with stage.user_code():
            of_teacher = loop.taught(drawn)
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
            scores = drawn.scores
            # Before the update, so that judge and held-out texts see the policy that
            # drew the rollout.
            stats |= loop.watcher.before(
                train.policy, drawn.shown, reference, step=step
            )
        shown = loop.watcher.likeliest(train.policy, reference, drawn.shown, step=step)
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
            drawn,
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
        waits = sampler.seconds() | ({} if queue is None else queue.waits.read())
        stage.end_step(
            step,
            learned | stats,
            samples,
            positions=positions,
            texts=[(rollout.mask, rollout.response_mask)],
            waits=waits or None,
        )


@functools.partial(jax.jit, static_argnames=("group_size",))
def _refilled(
    batch: tuple[Rollout, Scores], drawn: tuple[Rollout, Scores], *, group_size: int
) -> tuple[Rollout, Scores]:
    # Imported here because few runs draw groups again.
    from rlhf_jax.algorithms.flow import selection

    return selection.refilled(batch, drawn, group_size=group_size)


def fill(loop: Loop, drawn: Drawn, train: Any, *, step: int) -> tuple[Drawn, Stats]:
    """Replaces groups of equal scores by groups of new draws, up to --max-redraws.

    Draw d of a step takes the prompts and the key of step `step + d * num_steps`, which
    no other draw takes. So the run is a function of its seed, and resumes to the bit.

    Args:
      drawn: from the step's own prompts and key.

    Returns:
      The rollout with its scores, and {name: (sum, weight)}: `group/redraws`, batches
      drawn again, and `group/drawn_equal_fraction`, the share of groups of equal scores
      in all draws.

    Raises:
      StopError: after the last draw every group of the batch has equal scores.
    """
    config, size = loop.config, loop.programs.recipe.rows_per_prompt
    batch = drawn.rollout, drawn.scored
    equal = _equal(batch[1], size)
    # Decided on the host: compiled programs cannot know the number of draws.
    of_draws, draws = [equal], 0
    while equal.any() and draws < config.sampler.max_redraws:
        draws += 1
        # A step after the end of the run, whose key and prompts no other step uses.
        other = step + draws * config.num_steps
        again = loop.draw(train.policy, loop.request(other, train.step))
        of_draws.append(_equal(again.scored, size))
        filled = _refilled(batch, (again.rollout, again.scored), group_size=size)
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
    if draws:
        shown = loop.shown(batch[0])
        drawn = Drawn(batch[0], shown, dict, loop.rewards, known=batch[1])
    return drawn, stats


def _equal(scores: Scores, group_size: int) -> np.ndarray[Any, Any]:
    """bool[B / G], on the host: whether all scores of a group are equal."""
    groups = processes.whole(scores.total).reshape(-1, group_size)
    return (groups == groups[:, :1]).all(axis=1)
