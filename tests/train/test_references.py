"""Options of the references: incompatible ones are errors at once."""

import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.train.methods import grpo, ppo


def parse(method, *argv):
    needed = ("--out=run", "--model=m", "--prompts=p", "--reward=r:f")
    return command_line.parse(method.Config, description="", argv=[*needed, *argv])


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("method", "argv", "message"),
    [
        (ppo, ["--references", "b=x", "b=y"], "each name once, got b twice"),
        (
            ppo,
            ["--references", "b=x", "--reference=none"],
            "--reference none cannot be combined with --references",
        ),
        (
            ppo,
            ["--references", "b=x,place=cpu", "--penalty.value-estimator=exact"],
            "exact --penalty cannot be combined with place= of --references",
        ),
        (
            ppo,
            ["--references", "b=x,weight=-0.5"],
            "reference b: expected a number of",
        ),
        (
            grpo,
            ["--references", "b=x", "--reference=none"],
            "--reference none cannot be combined with --references",
        ),
        (
            grpo,
            ["--reference=none", "--reference-storage.dtype=int8"],
            "--reference none cannot be combined with --reference-storage",
        ),
        (
            grpo,
            [
                "--placement.reference=cpu",
                "--penalty.value-estimator=exact",
                "--penalty.placement=loss",
            ],
            "exact --penalty cannot be combined with --placement.reference",
        ),
    ],
)
def test_references_that_cannot_be_had_together(method, argv, message, capsys):
    with pytest.raises((InputError, SystemExit)) as error:
        parse(method, *argv)
    text = f"{error.value} {capsys.readouterr().err}"
    assert message in " ".join(text.replace("│", " ").split())


def test_a_checkpoint_as_reference_has_the_kl_coefficient_of_the_start():
    assert parse(grpo, "--reference=x").kl_coef == parse(grpo).kl_coef == 0.05
    assert parse(grpo, "--reference=none").kl_coef == 0.0
    rounded = parse(grpo, "--reference-storage.dtype=int8")
    assert rounded.storage_tolerance > 0
    assert parse(grpo).storage_tolerance == 0.0


@pytest.mark.slow
def test_the_last_devices_of_any_reference_are_left_free_by_the_policy():
    options = parse(ppo, "--references", "b=x", "c=x,place=last:data=2")
    assert options.policy_mesh().devices.flat[0].id == 0
    both = parse(
        ppo, "--references", "b=x,place=last:data=4", "--placement.reference=last"
    )
    assert both.policy_mesh().size == 1
    wide = parse(ppo, "--references", "b=x,place=last:data=8")
    with pytest.raises(
        InputError, match="at least 9 devices, of which roles take the last 8"
    ):
        wide.policy_mesh()
    uneven = parse(ppo, "--references", "b=x,place=data=3")
    with pytest.raises(InputError, match=r"^--references b: "):
        uneven.policy_mesh()
