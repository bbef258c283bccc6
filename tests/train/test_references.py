"""Options of the references: what does not fit together is told at once."""

import dataclasses
from pathlib import Path

import pytest

from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.devices.placement import Place, Placement, SamplerPlacement
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.train import grpo, ppo

OUT = Path("run")


def of_ppo(**options):
    recipe = ppo.options.RECIPE
    penalty = options.pop("penalty", None)
    if penalty is not None:
        recipe = dataclasses.replace(recipe, penalty=penalty)
    return ppo.Config(
        out=OUT, model="m", prompts="p", reward="r:f", ppo=recipe, **options
    )


def of_grpo(**options):
    return grpo.Config(out=OUT, model="m", data="d", held_out="h", **options)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            of_ppo,
            {"references": ("b=x", "b=y")},
            "each name once, got b twice",
        ),
        (
            of_ppo,
            {"references": ("b=x",), "measure_kl": False, "kl_coef": 0.0},
            "--references: expected none with --no-measure-kl",
        ),
        (
            of_ppo,
            {"references": ("b=x,place=cpu",), "penalty": Penalty("exact")},
            "--references b: expected place=policy for exact KL",
        ),
        (
            of_ppo,
            {"references": ("b=x,weight=-0.5",)},
            "weight of 0 or more for re",
        ),
        (
            of_grpo,
            {"references": ("b=x",), "reference": "none"},
            "--references: expected none with --reference none",
        ),
        (
            of_grpo,
            {"reference": "none", "reference_storage": Storage("int8")},
            "--reference-storage: expected none in a run without such a model",
        ),
        (
            of_grpo,
            {
                "placement": SamplerPlacement(reference=Place("cpu")),
                "grpo": grpo.options.GroupRecipe(
                    penalty=Penalty("exact", placement="loss")
                ),
            },
            "--placement.reference: expected policy for exact KL",
        ),
    ],
)
def test_references_that_cannot_be_had_together(config, options, message):
    with pytest.raises(InputError) as error:
        config(**options)
    assert message in str(error.value)


def test_a_checkpoint_as_reference_has_the_kl_coefficient_of_the_start():
    assert of_grpo(reference="x").beta == of_grpo().beta == grpo.options.KL_COEF
    assert of_grpo(reference="none").beta == 0.0
    assert of_grpo(reference_storage=Storage("int8")).reference_tolerance > 0
    assert of_grpo().reference_tolerance == 0.0


def test_the_last_devices_of_any_reference_are_left_free_by_the_policy():
    options = of_ppo(references=("b=x", "c=x,place=last:data=2"))
    assert options.policy_mesh(options.placement).devices.flat[0].id == 0
    both = of_ppo(
        references=("b=x,place=last:data=4",),
        placement=Placement(policy=Placement().policy, reference=Place("last")),
    )
    assert both.policy_mesh(both.placement).size == 1
    wide = of_ppo(references=("b=x,place=last:data=8",))
    with pytest.raises(InputError, match="more devices than the 8 last ones"):
        wide.policy_mesh(wide.placement)
    uneven = of_ppo(references=("b=x,place=data=3",))
    with pytest.raises(InputError, match=r"^--references b: "):
        uneven.policy_mesh(uneven.placement)
