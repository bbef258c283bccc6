"""The loop of every policy gradient: draw -> score -> learn -> watch.

    draw    the next responses, now or from the queue of a stale sampler
    score   reference, critic and rewards, side by side
    learn   one program: experience, epochs, minibatches
    watch   what is measured and not trained on

Nothing here knows which method it runs.
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
# A rollout, and what processes or an environment computed of its scores, or will.
Drawn = tuple[Rollout, Early | Callable[[], Early]]
TOTAL = ""  # of early scores: the whole list's, where a draw needed it


class Begun(NamedTuple):
    """What the rehearsal made of a step: the loop does not make it again."""

    rollout: Rollout
    early: Early  # of processes, which have computed it
    scores: Array | Scores | None
    read: Read | None  # None where it is not kept


class Loop(NamedTuple):
    """What an iteration takes, beside the state that it changes."""

    config: PolicyGradientConfig
    programs: Programs
    sampler: Sampler | OutsideSampler
    episodes: EpisodeSampler | None  # in an environment, in the sampler's place
    rewards: RewardList
    prompts: Batches[Prompts]
    ptx: Batches[Sequences] | None
    watcher: Watcher
    root_key: Array
    begun: dict[int, Begun]  # by step; the loop takes out what it uses
    # What a teacher reads in place of the prompts, by row; None is the same.
    of_teacher: TeacherPrompts | None = None
    # The same by the scores of a batch, of a teacher that reads its responses.
    reprompt: Callable[[Rollout, Scores], TeacherPrompts] | None = None

    def key(self, step: int) -> Array:
        """The key of a step, from which everything random in it comes."""
        # A function of the step alone: a resumed run needs no stored key, and step 7
        # draws the same whatever came before.
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
        """Responses to prompts, and the scores that processes have begun to compute.

        Args:
          key: of the step that is to learn from them.
          handed: the policy comes from the sampler's `hand_over`.
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
        """Responses as the sampler has them, which nobody has begun to score."""
        of_step: dict[str, Any] = {"prompts": prompts, "key": key, "version": version}
        return self.sampler.draw_there(policy, **of_step), {}

    def arrive(self, drawn: Any) -> Drawn:
        """The same on the policy's devices, and the scores as `draw` begins them."""
        rollout = self.sampler.bring_home(drawn)
        return rollout, self.rewards.begin(self.shown(rollout))

    def shown(self, rollout: Rollout) -> Rollout:
        """What the reward sees of a rollout."""
        return seen_by_reward(rollout, recipe=self.programs.recipe)

    def scores(
        self, rollout: Rollout, early: Early | Callable[[], Early]
    ) -> Array | Scores | None:
        """The scores of a rollout, once all rewards have them."""
        early = early() if callable(early) else early
        if TOTAL in early:
            return early[TOTAL]
        return self.rewards.finish(self.shown(rollout), early)

    def scored(self, rollout: Rollout, early: Early | Callable[[], Early]) -> Scores:
        """The same of a run that has a reward, as one record."""
        scores = self.scores(rollout, early)
        assert scores is not None
        return scores_of(scores)

    def taught(
        self, rollout: Rollout, early: Early | Callable[[], Early]
    ) -> tuple[TeacherPrompts | None, Early | Callable[[], Early]]:
        """What the teacher reads of a rollout, and its scores as far as they are known.

        A teacher that reads its responses waits for all scores.
        """
        if self.reprompt is None:
            return self.of_teacher, early
        early = early() if callable(early) else early
        scores = self.scored(rollout, early)
        return self.reprompt(self.shown(rollout), scores), {**early, TOTAL: scores}

    @property
    def values_first(self) -> bool:
        """The critic runs beside the reward, and not in one program with the update."""
        apart = self.config.critic is not None and self.config.critic_place.apart
        # A reward in JAX is in one stream with the critic: there is no host time to
        # fill.
        return self.rewards.on_host or apart


def improve(
    loop: Loop,
    stage: run.Stage,
    *,
    queue: RolloutQueue | None,
    base: Frozen | None,
) -> None:
    """Maximises the rewards less β · KL, step by step; the stage has what it made.

    Args:
      stage: whose state begins with `train`, `root_key` and, where there are some,
        `critic` and `reference`.
      queue: of a sampler that is behind; None draws in the step itself.
      base: the reference where it is the base under adapters, which no state holds.
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
    if stage.start:  # what was begun is of another policy
        loop.begun.clear()
    for step in stage.steps():
        key, stats = loop.key(step), {}
        # Taken out: its arrays are freed with this step.
        begun = loop.begun.pop(step, None)
        if config.mixes_reference:
            assert isinstance(loop.sampler, Sampler)  # as the capability table has it
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
            # Before `learn`, which donates the policy: the queue has taken what it
            # needs of it.
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
            begun = None  # some of it was drawn again
        with stage.user_code():
            of_teacher, early = loop.taught(rollout, early)
        # Decided on the host: a step without a KL runs no reference at all.
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
            if begun is None or config.sampler.max_redraws:  # which has scored them
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
        # Dispatched, not awaited: what follows on the host overlaps with it. `train` is
        # donated, and the name is bound to the new state at once.
        train, critic, learned, scored = programs.learn(
            train, critic, LearnInputs(rollout, scores, taken, read, key, ptx)
        )
        # Here, not at the end: a stop between would save donated arrays.
        stage.state["train"] = train
        if critic is not None:
            stage.state["critic"] = critic
        # Weights are compared after the update, unlike what describes the rollout.
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
            # After the update, by the policy it made; the next step's KL is to this
            # one.
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
    """Seconds of this step for timings.jsonl; None where nobody waits."""
    if queue is None and outside is None:
        return None
    waits = {} if queue is None else queue.waits.read()
    return waits | ({} if outside is None else outside.seconds())


@functools.partial(jax.jit, static_argnames=("group_size",))
def _refilled(
    batch: tuple[Rollout, Scores], drawn: tuple[Rollout, Scores], *, group_size: int
) -> tuple[Rollout, Scores]:
    # Groups that teach nothing are drawn again by few runs.
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
    """A rollout whose groups of equal scores are replaced, as far as the limit allows.

    Draw d of a step takes the prompts and the key of step `step + d * num_steps`, which
    no other draw takes: the run stays a function of its seed, and resumes to the bit.

    Args:
      rollout, early: of the step's own prompts and key.

    Returns:
      The rollout, its scores and {name: (sum, weight)}: `group/redraws`, batches drawn
      again, and `group/drawn_equal_fraction`, the share of groups of equal scores in
      all that was drawn.

    Raises:
      StopError: after the last draw every group of the batch has equal scores.
    """
    config, size = loop.config, loop.programs.recipe.rows_per_prompt
    batch = rollout, loop.scored(rollout, early)
    equal = _equal(batch[1], size)
    # The host decides, as the number of draws is not known to any program.
    of_draws, draws = [equal], 0
    while equal.any() and draws < config.sampler.max_redraws:
        draws += 1
        # Steps beyond the run's own: keys and prompts that no step of it will use.
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
        # On the devices of a rollout that was sampled, or `learn` would compile again.
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
    """bool[B / G], on the host."""
    groups = processes.whole(scores.total).reshape(-1, group_size)
    return (groups == groups[:, :1]).all(axis=1)
