"""When a run stops because its gradients are not finite."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_jax.functional.checks import StopError

MAX_SKIPPED = 5  # updates in a row without a finite gradient, before a run stops
# The metrics that count skipped updates, and what a message adds about each; the second
# one belongs to the critic.
SKIPPED = {
    "update/skipped_in_a_row": (
        "and nothing was updated meanwhile. The snapshots hold what was before"
    ),
    "critic/skipped_in_a_row": (
        "of the critic's, which was not updated meanwhile, though the policy was. "
        "Snapshots of before the first critic/skipped in metrics.jsonl have both whole"
    ),
}


class DivergedError(StopError):
    """Several updates in a row had no finite gradient."""


def check(row: Mapping[str, float | None], *, step: int, newest: int | None) -> None:
    """Stops a run whose last updates were all skipped.

    Args:
      row: a row of metrics.jsonl.
      step: of the run, for the message.
      newest: the number of the newest snapshot, None without one.

    Raises:
      DivergedError: at least `MAX_SKIPPED` updates in a row had no finite gradient.
    """
    for name, told in SKIPPED.items():
        skipped = row.get(name)
        if skipped is not None and skipped >= MAX_SKIPPED:
            raise DivergedError(
                f"by step {step} the gradient was not finite {skipped:.0f} times "
                f"in a row, {told} (newest: {newest}); look for "
                f"NaN in the rewards, or start again with a smaller learning rate"
            )
