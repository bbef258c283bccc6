"""Takes finished runs of the quickstart over into this folder.

    python experiments/recorded/quickstart/record.py runs/seed_0 runs/seed_1 ...
    python experiments/recorded/quickstart/plot.py

Each run's PPO rows become seed_N.jsonl, or seed_N_kl_coef_0.jsonl without a penalty,
and its summary and versions an entry of record.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORD = HERE / "record.json"


def take(run: Path, record: dict) -> str:
    """Writes the rows of one run, and enters its summary; its name here."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    options = config["config"]
    name = f"seed_{options['seed']}"
    if options["kl_coef"] == 0:
        name += "_kl_coef_0"
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if json.loads(line)["stage"] == "ppo"]
    (HERE / f"{name}.jsonl").write_text("\n".join([*rows, ""]), encoding="utf-8")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    summary.pop("proof")  # sums of the run folder, which is not kept
    record["summaries"][name] = summary
    record["versions"][name] = config["versions"]
    return name


def main() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for run in sys.argv[1:]:
        print(take(Path(run), record))
    RECORD.write_text(
        json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
