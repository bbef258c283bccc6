"""An experiment without a model, with a run's config, metrics, steps and summary.

    python tests/programs/toy_experiment.py --slope 2 --seed 0 --out OUT [--resume]

A step writes slope * step + noise of the seed, and takes --seconds. It starts as fast
as Python does. A resume goes on after the rows of OUT/metrics.jsonl.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--slope", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-progress", action="store_true")
    options = parser.parse_args()
    if options.slope == 13:
        print("starting")
        sys.exit("error: a slope of 13 brings bad luck")
    rows = options.out / "metrics.jsonl"
    if (options.out / "config.json").exists():
        assert options.resume, "has begun"
        whole = rows.read_text().count("\n") if rows.exists() else 0
    else:
        assert not options.resume, "has not begun"
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "config.json").write_text(json.dumps({"slope": options.slope}))
        whole = 0
    for step in range(whole, options.steps):
        time.sleep(options.seconds)
        noise = random.Random(1000 * options.seed + step).random()
        value = options.slope * (step + 1) + noise
        row = {"stage": "toy", "step": step, "value": value, "seed": options.seed}
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
    (options.out / "summary.json").write_text(json.dumps({"at": {"end": value}}))


if __name__ == "__main__":
    main()
