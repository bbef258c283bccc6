"""How every command of certificates ends: a summary, a count, and the exit status."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.functional import checks
from rlhf_jax.runs import folder


def conclude(
    run_folder: Path,
    shown: Sequence[tuple[str, bool]],
    *,
    figures: Mapping[str, Any],
    started: float,
) -> None:
    """Writes summary.json and says how many certificates hold.

    Args:
      run_folder: of the run.
      shown: the name of each certificate, and whether it holds.
      figures: what was measured, beside the count and the names of those that fail.
      started: `time.perf_counter()` at the start, seconds.

    Raises:
      StopError: one fails; all that do are named.
    """
    failed = [name for name, holds in shown if not holds]
    seconds = time.perf_counter() - started
    summary = {"certificates": len(shown), "failed": failed, **figures}
    folder.write_summary(run_folder, summary | {"seconds": seconds})
    print(f"{len(shown) - len(failed)} of {len(shown)} certificates hold")
    print(f"{seconds:.0f} s; figures in {run_folder}")
    if failed:
        raise checks.StopError(
            f"{len(failed)} of {len(shown)} certificates fail: {'; '.join(failed)}"
        )
