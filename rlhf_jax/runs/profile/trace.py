"""Seconds of devices by named scope, from a trace.

    time          ─────────────────────────────────────────>
    device        rollout │ reference │   loss │opt│loss │opt
    host                  │  reward: waits for a verifier    waited: no device runs

The time of a scope is that in which at least one of its operations runs. Operations
that run at the same time count in each of their scopes. The event of a loop or branch
spans the events of its body, and counts only for the time between them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.profiler import ProfileData
from numpy.typing import NDArray

from rlhf_jax.runs.profile import HOST_SCOPE
from rlhf_jax.runs.profile.op_names import OpNames, op_names

SCOPES = ("rollout", "reference", "reward", "values", "loss", "optimizer")
"""The scopes of a step, in order."""
# Matches scopes inside transformations, "jit(learn)/transpose(jvp(loss))/dot_general",
# but not a jitted function of the same name, "jit(values)".
SCOPE = re.compile(rf"(?:^|/|(?<!jit)\()({'|'.join(SCOPES)})(?=[/)]|$)")
Event = tuple[str | None, float, float]  # scope, start and end, ns
Spans = NDArray[np.float64]  # [n, 2], start and end, ns
ROUNDING = 1.0  # ns
OfDevices = dict[str, dict[str | None, Spans]]  # by device and scope


class Times(NamedTuple):
    """Seconds of a trace, means over its devices."""

    scopes: dict[str, float]  # scopes in the trace, in the order of SCOPES
    busy: float  # while a device ran any operation
    unscoped: float  # the part of `busy` in which no scope's operation ran
    waited: float  # while no operation ran and the host was in user code
    devices: int


def scope_of(op_name: str) -> str | None:
    """Returns the innermost scope in an operation's name; None if it has none."""
    scopes = SCOPE.findall(op_name)
    return scopes[-1] if scopes else None


def times(path: Path) -> Times:
    """Reads a trace, the .xplane.pb of one process; ValueError if truncated."""
    data = path.read_bytes()
    names = op_names(data)
    space = ProfileData.from_serialized_xspace(data)
    of_devices, of_host = _operations(space, names)
    # CPU operations run in the host's threads; other devices have planes of their own.
    devices = of_devices or of_host
    host = _annotations(space)
    count = max(len(devices), 1)
    scopes: dict[str | None, float] = defaultdict(float)
    totals = np.zeros(3)
    for of_scope in devices.values():
        every = _union(np.concatenate(list(of_scope.values())))
        scoped = [x for scope, x in of_scope.items() if scope is not None]
        in_scopes = _union(np.concatenate([np.zeros((0, 2)), *scoped]))
        both = _union(np.concatenate([every, host]))
        busy = _length(every)
        totals += (busy, busy - _length(in_scopes), _length(both) - busy)
        for scope, spans in of_scope.items():
            scopes[scope] += _length(_union(spans)) / count
    return Times(
        {scope: scopes[scope] for scope in SCOPES if scope in scopes},
        *(totals / count).tolist(),
        devices=len(devices),
    )


def _operations(space: Any, names: OpNames) -> tuple[OfDevices, OfDevices]:
    """The spans of operations by device and scope: on devices, and on the host."""
    of_devices, of_host = defaultdict(list), defaultdict(list)
    scopes: dict[tuple[str, int | None, str | None], str | None] = {}
    for plane in space.planes:
        is_device = plane.name.startswith("/device:")
        if not is_device and plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            # The lines of operations on TPUs and GPUs; other lines repeat them.
            if is_device and not (line.name or "").startswith(("XLA Ops", "Stream")):
                continue
            of_line: dict[str, list[Event]] = defaultdict(list)
            for event in line.events:
                stats = dict(event.stats)
                if not is_device and "hlo_op" not in stats:
                    continue
                key = (event.name, stats.get("program_id"), stats.get("hlo_op"))
                if key not in scopes:
                    known = names.names(
                        event=key[0],
                        program=key[1],
                        module=stats.get("hlo_module"),
                        operation=key[2],
                    ) or {str(stats.get("tf_op", ""))}
                    # If the candidate programs disagree, the event is in no scope.
                    (scope, *others) = {scope_of(name) for name in known}
                    scopes[key] = None if others else scope
                device = plane.name
                if not is_device:
                    device = str(stats.get("device_ordinal", 0))
                end = event.start_ns + event.duration_ns
                of_line[device].append((scopes[key], event.start_ns, end))
            target = of_devices if is_device else of_host
            for device, events in of_line.items():
                target[device] += _own(events)
    return _by_scope(of_devices), _by_scope(of_host)


def _own(events: list[Event]) -> list[Event]:
    """The events of a line, each without the time of events nested inside it.

    while   0 ────────────── 9       0 ─ 2     5 ─ 6     8 ─ 9
    body        2 ─── 5  6 ─ 8           2 ─ 5     6 ─ 8
    """
    own: list[Event] = []
    around: list[tuple[str | None, float]] = []  # scope and end, the innermost last
    at = 0.0  # time up to which the innermost event is in `own`

    def leave(until: float) -> None:
        nonlocal at
        while around and around[-1][1] <= until:
            scope, end = around.pop()
            own.append((scope, at, end))
            at = end

    for scope, start, end in sorted(events, key=lambda event: (event[1], -event[2])):
        leave(start)
        if around:
            outer, last = around[-1]
            if end > last + ROUNDING:  # overlaps it, and is not nested
                own.append((scope, start, end))
                continue
            own.append((outer, at, start))
            end = min(end, last)
        around.append((scope, end))
        at = start
    leave(np.inf)
    return own


def _by_scope(devices: dict[str, list[Event]]) -> OfDevices:
    by_device = {}
    for device, events in devices.items():
        lists = defaultdict(list)
        for scope, *span in events:
            lists[scope].append(span)
        by_device[device] = {scope: np.array(spans) for scope, spans in lists.items()}
    return by_device


def _annotations(space: Any) -> Spans:
    spans = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in space.planes
        if plane.name == "/host:CPU"
        for line in plane.lines
        for event in line.events
        if event.name == HOST_SCOPE
    ]
    return _union(np.array(spans, np.float64).reshape(-1, 2))


def _union(spans: Spans) -> Spans:
    """Merges overlapping spans; the result is in order."""
    if not len(spans):
        return spans.reshape(0, 2)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    begins = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    last = np.concatenate([np.flatnonzero(begins)[1:] - 1, [len(spans) - 1]])
    return np.stack([spans[begins, 0], ends[last]], axis=1)


def _length(spans: Spans) -> float:
    """Total seconds of spans that do not overlap."""
    return float((spans[:, 1] - spans[:, 0]).sum()) / 1e9
