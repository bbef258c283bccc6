"""`python -m rlhf_jax.evaluation.harness`: lm-eval's command, with --model rlhf_jax."""

from __future__ import annotations

import sys

from rlhf_jax.functional.checks import InputError


def main() -> None:
    """Runs lm-eval's command; without the extra lm-eval, exits with status 2."""
    try:
        from rlhf_jax.evaluation.harness import model  # registers it
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    assert model.Policy is not None
    cli_evaluate()


if __name__ == "__main__":
    main()
