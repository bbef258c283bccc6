"""Prints a plan (`plan.plan`) on the terminal."""

from __future__ import annotations

from typing import Any

from rlhf_jax.runs import report

GIB = 2**30
WORK = (("flops", 1e12), ("memory_bytes", 1e9), ("sent_bytes", 1e9))
SHOWN = 0.02  # least share of a program's sent bytes for a row; the JSON has all


def show(result: dict[str, Any]) -> None:
    """Prints memory, work, collectives and the verdict of a plan."""
    chip, programs = result["chip"], result["programs"]
    where = f"{result['chips']} x {chip['name']}"
    print(f"Compiled for {where}, never run; the compiler is {result['compiler']}")
    for line in (*result.get("auto", ()), result.get("sampler")):
        if line is not None:
            print(line)
    columns = ("argument", "temporary", "output", "alias")
    if "sampler_meshes" in result:
        report.table(
            "Meshes to sample on, the best first (resharding included)",
            ("", "GiB per chip", "seconds, at the least", "ms per token"),
            [
                (
                    one["mesh"],
                    one["total"] / GIB,
                    one["seconds"],
                    _times(one["seconds_of_token"], 1e3),
                )
                if one["refused"] is None
                else (f"{one['mesh']}: {one['refused']:.60}", None, None, None)
                for one in result["sampler_meshes"]
            ],
        )
    report.table(
        "Programs [GiB per chip]",
        ("", *columns),
        [
            (one["name"], *(one["bytes"].get(name, 0) / GIB for name in columns))
            for one in programs
        ],
    )
    report.table(
        "Work of a step, per chip",
        ("", "TFLOP", "GB read, written", "GB sent"),
        [(one["name"], *(one[name] / unit for name, unit in WORK)) for one in programs],
    )
    report.table(
        f"Collectives of more than {SHOWN:.0%} of a program's",
        ("", "kind", "MB", "times", "GB sent"),
        [
            (
                one["name"],
                row["kind"],
                row["size"] / 1e6,
                row["times"],
                row["sent"] / 1e9,
            )
            for one in programs
            for row in one["collectives"]
            if row["sent"] > SHOWN * one["sent_bytes"]
        ],
    )
    # Leaves out columns of zeros: one chip has no links, one node or slice no network.
    parts = [
        name
        for name in programs[0]["seconds"]
        if name == "bound" or any(one["seconds"][name] for one in programs)
    ]
    report.table(
        "Seconds, at the least (roofline)",
        ("", *parts, "by hand"),
        [
            (one["name"], *(one["seconds"][name] for name in parts), one["by_hand"])
            for one in programs
        ],
    )
    report.table(
        "Speed, at the most",
        ("", "stage", "share of the step [%]", "model TFLOP per chip", "MFU [%]"),
        [
            (
                one["name"],
                one["stage"],
                100 * (one["seconds"]["bound"] / result["seconds"]),
                one["model_flops"] / result["chips"] / 1e12,
                _times(one["mfu"], 100),
            )
            for one in programs
            if result["seconds"]
        ],
    )
    report.table(
        "Held throughout",
        ("", "GiB per chip"),
        [(name, size / GIB) for name, size in result["held"].items()],
    )
    columns = ("others", *columns, "total")
    report.table(
        "Alive at the same time [GiB per chip]",
        ("during", *columns),
        [
            (row["during"], *(row[name] / GIB for name in columns))
            for row in result["alive"]
        ],
    )
    _verdict(result)


def _verdict(result: dict[str, Any]) -> None:
    chip, peak = result["chip"], result["peak"]
    for one in result["programs"]:
        if one["refused"] is not None:
            print(f"{one['name']}: {one['refused']}")
    for what, size in result["within"].items():
        print(f"of the temporaries, {what}: {size / GIB:.3g} GiB")
    verdict = "Fits" if result["fits"] else "Does NOT fit"
    print(
        f"{verdict}: {peak['total'] / GIB:.2f} GiB "
        f"per chip during {peak['during']}, of {chip['memory'] / GIB:.2f} GiB "
        f"({chip['reserved']})"
    )
    _speed(result)
    for line in result["advice"]:
        print(f"  try {line}")
    if "largest_batch" in result:
        most = result["largest_batch"]
        known = "the largest" if most["exact"] else "the largest that was tried"
        print(f"Batch: {most['rows']} responses fit, {known} of {most['multiple_of']}s")


def _speed(result: dict[str, Any]) -> None:
    for one in result["programs"]:
        turn = one.get("seconds_of_turn")
        if turn is not None:
            rates = ", ".join(
                f"{name} {1e3 * turn[name]:.3g}"
                for name in ("products", "memory", "links", "network", "latency")
                if turn[name]
            )
            experts = ""
            if "expert_bytes" in turn:
                experts = f" ({turn['expert_bytes'] / 1e9:.3g} GB of them experts)"
            print(
                f"A token of {one['name']} takes {1e3 * turn['bound']:.3g} ms at the "
                f"least ({rates}), the mean of {one['turns']}; by hand, reading weights"
                f"{experts} and filled cache once takes "
                f"{1e3 * turn['by_hand']:.3g} ms; "
                f"it waits {turn['exchanges']:.0f} times for other chips"
            )
    print(f"A step takes {result['seconds']:.3g} s at the least")
    if not result["seconds"]:
        return
    shares = ", ".join(
        f"{stage} {share:.0%}" for stage, share in result["shares"].items()
    )
    print(
        f"{result['tokens']:,} tokens per step, at most "
        f"{result['tokens_per_second_per_chip']:,.0f} per second and chip; {shares}"
    )
    print(
        f"MFU at the bound: {result['mfu']:.1%} = model FLOPs / (seconds · chips · "
        f"peak) = {result['model_flops']:.3g} / ({result['seconds']:.3g} · "
        f"{result['chips']} · {result['chip']['flops']:.3g})"
    )
    if "lengths" in result:
        lengths = result["lengths"]
        print(
            f"Responses: {lengths['responses']} lengths, {lengths['mean']:.0f} tokens "
            f"on average, {lengths['longest']} the longest, padded to one width"
        )


def _times(number: float | None, factor: float) -> float | None:
    return None if number is None else factor * number
