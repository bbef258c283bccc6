"""`python -m rlhf_jax.evaluation.harness`: lm-eval's command, with --model rlhf_jax."""

from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

from rlhf_jax.evaluation.harness import model  # registers it

if __name__ == "__main__":
    assert model.Policy is not None
    cli_evaluate()
