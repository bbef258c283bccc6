"""PPO under every lifecycle of the reference: a resumed run is equal to the bit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reread
import toys

from rlhf_jax import frozen, kl_control, masked, ppo, state
from rlhf_jax.roles.reference import lifecycle
from rlhf_jax.roles.reference.frozen import FrozenModels
from rlhf_jax.roles.reference.lifecycle import Lifecycle, Reset
from rlhf_jax.runs import metrics, run, run_config
from rlhf_jax.runs.snapshots import proof

pytestmark = pytest.mark.slow
KEY = jax.random.key(9)
ADAM = optax.adam(1e-2, eps=1e-5)
sample = toys.jit(ppo.sample, static_argnames=("recipe",))
learn = toys.jit(ppo.learn, static_argnames=("recipe",), donate_argnames=("state",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 8
    snapshot_every: int = 1
    progress: bool = False
    lifecycle: Lifecycle = lifecycle.FROZEN


def play(config, *, stop=None):
    """An experiment's loop, with the share of even tokens as reward."""
    algorithm = ppo.PPO(
        model=toys.GPT2,
        critic_model=toys.GPT2,
        policy_optimizer=ADAM,
        critic_optimizer=ADAM,
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
        num_epochs=1,
        num_minibatches=2,
        lifecycle=config.lifecycle,
    )
    life = algorithm.lifecycle
    initial = state.ppo_state(
        policy=jax.tree.map(jnp.copy, toys.params()),
        critic=toys.scorer(seed=1),
        policy_optimizer=ADAM,
        critic_optimizer=ADAM,
        kl=kl_control.Adaptive(target=0.05, unit="response", horizon=80).controller(
            0.1
        ),
    )
    reference = frozen.freeze(toys.params())
    arrays = {"train": initial, "reference": reference, "root_key": KEY}
    with (
        run.Run(config, num_steps={"ppo": config.num_steps}) as job,
        job.stage(
            "ppo", arrays, meta={}, moving=("reference",) if life.moves else ()
        ) as stage,
    ):
        for step in stage.steps():
            if step == stop:
                break
            key = jax.random.fold_in(KEY, step)
            train, reference = stage.state["train"], stage.state["reference"]
            rollout = sample(
                train.policy, prompts=toys.prompts(), key=key, recipe=algorithm
            )
            even = (rollout.tokens % 2 == 0).astype(jnp.float32)
            train, stats, _ = learn(
                train,
                rollout=rollout,
                scores=masked.masked_mean(even, mask=rollout.response_mask, axis=1),
                frozen=FrozenModels(
                    reference=reference if life.takes_kl(step) else None
                ),
                key=key,
                recipe=algorithm,
            )
            stage.state |= {
                "train": train,
                "reference": lifecycle.after_step(
                    reference, train.policy, step=step, lifecycle=life
                ),
            }
            stage.end_step(step, stats)
    return stage.state


@pytest.mark.long
def test_a_stopped_run_goes_on_to_the_last_bit(tmp_path):
    """Resets, with a KL every second step; train/test_ppo_ways.py has mixing."""
    life = Lifecycle(Reset(3), kl_every=2, scale_kl_coef=True)
    whole = play(Config(out=tmp_path / "whole", lifecycle=life))
    parts = Config(out=tmp_path / "parts", lifecycle=life)
    play(parts, stop=4)  # between two moves, and between two KLs
    fields = json.loads((parts.out / "config.json").read_text())["config"]
    assert reread.config(Config, fields, source=parts.out) == parts
    again = play(dataclasses.replace(parts, resume=True))
    assert toys.leaves_equal(
        *({**s, "root_key": jax.random.key_data(s["root_key"])} for s in (again, whole))
    )
    files = [tmp_path / name / "metrics.jsonl" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    rows = metrics.read(files[0])
    taken = [row["step"] for row in rows if "objective/kl" in row]
    assert taken == [step for step in range(8) if life.takes_kl(step)]
    kl_coefs = [row["objective/kl_coef"] for row in rows]
    changes = [step + 1 for step in range(7) if kl_coefs[step] != kl_coefs[step + 1]]
    assert changes == [step + 1 for step in taken if step < 7]  # after each KL
    roots = {row.step: row.fingerprint for row in proof.check_run(tmp_path / "whole")}
    assert roots[8] == frozen.fingerprint_of(whole["reference"]).root
    moved = roots[8] != frozen.fingerprint_of(frozen.freeze(toys.params())).root
    assert moved


@pytest.mark.long
def test_after_a_reset_the_kl_starts_again_at_zero(tmp_path):
    play(Config(out=tmp_path, lifecycle=Lifecycle(Reset(4))))
    kl = [row["objective/kl"] for row in metrics.read(tmp_path / "metrics.jsonl")]
    np.testing.assert_allclose([kl[0], kl[4]], 0, atol=1e-4)
    assert min(abs(kl[3]), abs(kl[7])) > 1e-2
