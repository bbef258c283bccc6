"""`rlhf-jax sweep`, from its options to the tables."""

from __future__ import annotations

import sys
import time

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import folder, lock
from rlhf_jax.sweeps import declaration, execution, measures, planned, results
from rlhf_jax.sweeps.execution import Ended
from rlhf_jax.sweeps.launchers import Launcher, Local, Submitit, Workers
from rlhf_jax.train.sweep.options import Config, check_options


def main(options: Config) -> None:
    """Runs `rlhf-jax sweep` with its options.

    Raises:
      InputError: the file is no sweep, an option of a cell is not the trainer's, or
        the folder is another sweep's.
      StopError: a run failed; names each, with its last line.
      Interrupted: a signal came; the runs under way have saved.
    """
    sweep = declaration.read(options.file)
    runs = planned.runs_of(sweep, out=options.out)
    check_options(sweep, runs)
    results.check_claims(sweep)
    if options.print_:
        for run in runs:
            print(run.line())
        return
    planned.begin(sweep, out=options.out)
    launcher: Launcher = Workers() if options.map else Local()
    if options.launcher == "slurm":
        launcher = Submitit(options.out / "logs" / "slurm", parameters=sweep.slurm)
    with lock.hold(options.out):
        done = sum(run.done for run in runs)
        print(f"{len(runs)} runs of {len(sweep.cells)} cells, {done} done already")
        began, left = time.monotonic(), len(runs) - done
        num_ended, warned = 0, False

        def tell(ended: Ended) -> None:
            nonlocal num_ended, warned
            num_ended += 1
            rest = (time.monotonic() - began) / num_ended * (left - num_ended)
            verdict = f"failed: {ended.why}" if ended.failed else "done"
            print(
                f"[{done + num_ended}/{len(runs)}] {ended.run.name}: {verdict} "
                f"({ended.seconds:.0f} s; about {rest:.0f} s left)",
                flush=True,
            )
            if not ended.failed and not warned:  # by the first run that is done
                for line in measures.absent(sweep.measures, runs=[ended.run.folder]):
                    print(f"warning: {line}", file=sys.stderr, flush=True)
                warned = True

        ended = execution.run_all(runs, launcher=launcher, jobs=options.jobs, tell=tell)
        of_runs = results.collected(sweep, runs)
        folder.write_json(options.out / "results.json", results.as_json(sweep, of_runs))
    if sweep.question:
        print(f"\n{sweep.question}")
    results.tell(sweep, of_runs)
    failed = [run for run in ended if run.failed]
    if failed:
        names = "\n".join(
            f"  {run.run.name} (status {run.status}): {run.why}\n    {run.run.log}"
            for run in failed
        )
        raise StopError(
            f"{len(failed)} of {len(runs)} runs failed, the others are complete:\n"
            f"{names}\nsee to them, and give the same command again"
        )
    if of_runs.absent:
        raise InputError("\n".join(of_runs.absent))
    print(f"results are in {options.out / 'results.json'}")
