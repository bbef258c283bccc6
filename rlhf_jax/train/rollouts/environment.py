"""The environment of a run in its processes, and the sampler of its episodes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.devices import processes
from rlhf_jax.environments.calculator import Calculator
from rlhf_jax.environments.episodes import Limits
from rlhf_jax.environments.guessing import Guessing
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.environments.programming import Programming
from rlhf_jax.environments.programs import EpisodePrograms, Sampled
from rlhf_jax.environments.protocol import Environment
from rlhf_jax.environments.rooms import Rooms
from rlhf_jax.environments.sampler import EpisodeSampler
from rlhf_jax.extensions import entry_points
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.generation.sampling import Shaping
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.verifiers import Isolating
from rlhf_jax.runs import command_line
from rlhf_jax.train.config.rewards import Workers
from rlhf_jax.train.config.sampler import Episodes

if TYPE_CHECKING:
    from rlhf_jax.train.rows import ReadRows

Array = jax.Array
Params = Any


class OpenedEnvironment:
    """The environment of --environment, with processes that last as long as the run."""

    def __init__(
        self,
        options: Episodes,
        *,
        pool: Workers,
        chat: bool,
        max_new_tokens: int,
        start: Pretrained,
        mesh: Mesh | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Its processes start with the first row, and end with `stack`.

        Args:
          chat: whether its texts become user messages of the chat template.
          max_new_tokens: most tokens of an episode.
          mesh: the sampler's mesh, whose devices along `tensor` draw episodes together;
            None is one device. Each of several processes has its own rows of a batch
            and its own environment.

        Raises:
          InputError: a turn may be longer than an episode, or a process has no device
            of the mesh.
        """
        self.name, turn_tokens = options.name, options.max_turn_tokens
        checks.within(
            most=max_new_tokens,
            advice="an episode has the tokens of --max-new-tokens; raise those, or "
            "lower it",
            **{"max_turn_tokens of --environment": turn_tokens},
        )
        owners = {jax.process_index()} if mesh is None else processes.owners(mesh)
        if idle := {*range(jax.process_count())} - owners:
            raise InputError(
                f"--environment: expected a sampler with devices of every process, as "
                f"each plays the episodes of its own rows, got none of process "
                f"{', '.join(map(str, sorted(idle)))}; place other roles at last:MESH "
                f"instead of hosts:MESH"
            )
        self.pool = stack.enter_context(
            EnvironmentPool(
                make_environment(options.name, unsafe=pool.unsafe_verifier),
                **pool.of_pool,
            )
        )
        self.encoder = TurnEncoder(start.tokenizer, stop_ids=start.stop_ids, chat=chat)
        self._decode = start._replace(params=None).decode
        self._limits = Limits(
            tokens=max_new_tokens,
            turn_tokens=max_new_tokens if turn_tokens is None else turn_tokens,
            turns=options.max_turns,
            seconds=options.seconds,
        )
        self._chunk, self._mesh = options.observation_chunk, mesh

    def sampler(
        self,
        recipe: PolicyGradient | Sampled,
        *,
        begun: ReadRows,
        rows: int,
        home: Mesh,
        base: Frozen | None = None,
        greedy: bool | None = None,
    ) -> EpisodeSampler:
        """Makes a sampler of episodes that begin with the rows of `begun`.

        Args:
          begun: rows from `rows.read_begun`.
          rows: episodes per call.
          home: mesh of the rollouts.
          greedy: True decodes greedily and False samples, for evaluation: neither has a
            time limit, which would make figures depend on the clock. None trains.
        """
        assert begun.states is not None  # from `read_begun`
        limits = self._limits
        if greedy is not None:
            limits = limits._replace(seconds=None)
        programs = EpisodePrograms(
            recipe,
            columns=max(map(len, begun.prompts)) + limits.tokens,
            places=min(recipe.continuous_batching or rows, rows),
            chunk=self._chunk,
            mesh=self._mesh,
            base=base,
            shaping=Shaping(greedy=True) if greedy else None,
        )
        return EpisodeSampler(
            programs,
            pool=self.pool,
            encoder=self.encoder,
            decode=self._decode,
            limits=limits,
            states=begun.states,
            home=home,
        )


def make_environment(name: str, *, unsafe: bool = False) -> Environment:
    """Makes the environment of --environment, which isolates the code that it runs.

    "module:name" is a user's class, or function without arguments, that makes an
    environment. Any other name is that of an entry point.

    Args:
      unsafe: --unsafe-verifier, for an environment that runs code of the model.

    Raises:
      StopError: the module calls `sys.exit` when it is imported.
    """
    match name:
        case "calculator":
            return Calculator()
        case "guessing":
            return Guessing()
        case "programming":
            return Programming().isolated(unsafe=unsafe)
        case "rooms":
            return Rooms()
    if ":" in name:
        make = command_line.load_function(name, kind="class")
    else:
        make = entry_points.load(name, group="environments")
    cause = None
    try:
        environment = make()
        result = f"{environment!r:.80}"
    except Exception as error:  # whatever the user's own code raises
        cause, environment, result = error, None, f"{type(error).__name__}: {error}"
    if isinstance(environment, Environment):
        where, expect = f"--environment {name}", command_line.expect_arguments
        expect(environment.reset, takes=["row"], where=f"{where}, reset")
        expect(environment.step, takes=["state", "response"], where=f"{where}, step")
        isolating = isinstance(environment, Isolating)
        return environment.isolated(unsafe=unsafe) if isolating else environment
    raise InputError(
        f"--environment {name}: expected a class or a function without arguments that "
        f"makes an object with the methods reset and step, got {result}; see "
        f"environments/README.md"
    ) from cause
