"""The conclusion of every certificate command: summary, count, limits, exit status."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.functional import checks
from rlhf_jax.runs import folder

# What no world of a few tokens can show; tests cover these on batches of a few rows.
BEYOND_EVERY_WORLD = (
    "vocabularies of several chunks, models of more than one layer, longer responses",
    "packed rows, adapters, bfloat16, several devices, a sampler apart",
)


def conclude(
    run_folder: Path,
    shown: Sequence[tuple[str, bool]],
    *,
    not_covered: Sequence[str],
    figures: Mapping[str, Any],
    started: float,
) -> None:
    """Writes summary.json and prints how many certificates hold and what they omit.

    Args:
      run_folder: the run folder.
      shown: (name, whether it holds) of each certificate.
      not_covered: phrases for what the certificates do not show, to which
        BEYOND_EVERY_WORLD is added.
      figures: the measurements, further fields of summary.json.
      started: `time.perf_counter()` at the start, seconds.

    Raises:
      StopError: a certificate fails; the error names all that do.
    """
    failed = [name for name, holds in shown if not holds]
    seconds = time.perf_counter() - started
    not_covered = [*not_covered, *BEYOND_EVERY_WORLD]
    summary = {"certificates": len(shown), "failed": failed, **figures}
    summary["not_covered"] = not_covered
    folder.write_summary(run_folder, summary | {"seconds": seconds})
    print(f"{len(shown) - len(failed)} of {len(shown)} certificates hold")
    print("They say nothing of:")
    print("\n".join(f"  - {phrase}" for phrase in not_covered))
    print(f"{seconds:.0f} s; figures in {run_folder}")
    if failed:
        raise checks.StopError(
            f"{len(failed)} of {len(shown)} certificates fail: {'; '.join(failed)}"
        )
