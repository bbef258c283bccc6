"""What a run prints: tables, and the placement of its models."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_jax.models import axes, layout, leaves
from rlhf_jax.models.config import ModelConfig

PyTree = Any
# Names of KL metrics, and the rounding error of a KL, since log-probs are float32.
KL = re.compile(r"(?<![a-z])kl(?!_coef|[a-z])", re.IGNORECASE)
KL_ROUNDING = 1e-6  # nats
# Path suffixes of parameters that have one row per id of the vocabulary.
VOCABULARY_TABLES = (
    *("['embed']['tokens']", "['embed']['per_layer']", "['head']['kernel']"),
)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows on stderr what the program waits for, and afterwards how long it took."""
    console, began = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with console.status(Text(what)):
            yield
    else:
        yield
    seconds = time.monotonic() - began
    console.out(f"{what}: {seconds:.0f} s", highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints rows of texts (left) and numbers (right, four digits); None is a dash.

    On a narrow terminal the texts of the widest column are broken, after a space, / or
    _ where possible. A KL within the rounding of float32 is printed as 0.
    """
    rows = list(rows)
    console = Console()
    cells = [
        [
            cell(value, of=f"{row[0]} {name}")
            for name, value in zip(columns, row, strict=True)
        ]
        for row in rows
    ]
    widths = [
        max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)
    ]
    grid = Table(title=Text(title), title_justify="left")
    widest = widths.index(max(widths))
    room = console.width - sum(widths) - 3 * len(widths) - 1 + widths[widest]
    for number, column in enumerate(columns):
        texts = all(isinstance(row[number], str) for row in rows)
        side = "left" if texts else "right"
        grid.add_column(Text(column), justify=side, overflow="fold")
    for row in cells:
        row[widest] = _broken(row[widest], width=room)
        grid.add_row(*map(Text, row))
    console.print(grid)


def _broken(text: str, *, width: int) -> str:
    """Breaks a text into lines of a width, after a space, / or _."""
    lines = [""]
    for word in re.findall(r"[^ /_]+[ /_]?|[ /_]", text):
        if cell_len(lines[-1] + word.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += word
    return "\n".join(lines)


def texts(before: Mapping[str, Any], after: Mapping[str, float]) -> dict[str, float]:
    """Prints a table of the loss on each of --texts before and after training.

    Args:
      before: the first row of metrics.jsonl.
      after: {`eval/NAME_nll`: nats per token} of every text; nothing is printed if it
        is empty.

    Returns:
      NAME_nll_before and NAME_nll_after, for the summary.
    """
    names = {name: name.removeprefix("eval/") for name in after}
    if names:
        table(
            "Texts [nats per token]",
            ("", "before", "after"),
            [
                (short.removesuffix("_nll"), before.get(name), after[name])
                for name, short in names.items()
            ],
        )
    return {
        f"{short}_{when}": row[name]
        for name, short in names.items()
        for when, row in (("before", before), ("after", after))
        if name in row
    }


def side_by_side(
    samples: Sequence[Mapping[str, str]], *, title: str = "Samples"
) -> None:
    """Prints texts side by side, with one row per sample and one column per model."""
    grid = Table(title=Text(title), title_justify="left", show_lines=True)
    for column in samples[0]:
        grid.add_column(Text(column), overflow="fold", ratio=1)
    for sample in samples:
        grid.add_row(*(Text(text) for text in sample.values()))
    Console().print(grid)


class Role(NamedTuple):
    """A model of a run, as `model_table` shows it."""

    name: str
    params: PyTree | None  # arrays or shapes in any storage; None has none of its own
    # Gives the size of the vocabulary without padding; None counts all rows.
    model: ModelConfig | None = None
    trained: bool = False
    mesh: Mesh | None = None  # where a role without parameters runs, such as a sampler


def model_table(roles: Sequence[Role]) -> None:
    """Prints the size and the placement of each model, and how much is trained.

    The line below the table reads "124,439,808 trainable, 248,880,385 frozen". The
    scales of int8 weights and the rows that pad a vocabulary take memory, but are not
    counted as parameters.
    """
    counts = {True: 0, False: 0}
    rows = []
    for role in roles:
        count = _count(role.params, model=role.model)
        arrays = jax.tree.leaves(role.params)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
        dtypes = sorted({np.dtype(leaf.dtype).name for leaf in arrays})
        counts[role.trained] += count
        status = "trainable" if role.trained else "frozen"
        figures = (role.name, count, size / 2**20, ", ".join(dtypes) or "none", status)
        placed = cells(role.params) if role.mesh is None else mesh_cells(role.mesh)
        rows.append((*figures, *placed))
    columns = ("role", "parameters", "MiB", "dtype", "status")
    table("Models", (*columns, "devices", "mesh"), rows)
    Console().print(f"{counts[True]:,} trainable, {counts[False]:,} frozen")


def _count(params: PyTree | None, *, model: ModelConfig | None) -> int:
    """Number of parameters, without rows that pad the vocabulary."""
    count = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        params, is_leaf=leaves.is_stored
    ):
        rows, *width = leaf.shape or (1,)
        table = jax.tree_util.keystr(path).endswith(VOCABULARY_TABLES)
        if table and model is not None and rows == model.padded_vocab_size:
            rows = model.vocab_size
        count += math.prod((rows, *width))
    return count


def engine(model: ModelConfig, *, columns: int, mesh: Mesh) -> None:
    """Prints the attention engine of training rows, and the reason for the choice."""
    backend = layout.backend_of(mesh.abstract_mesh)
    chosen = layout.choose(
        model,
        columns=columns,
        backend=backend,
        context=mesh.shape.get(axes.CONTEXT_AXIS, 1),
        tensor=mesh.shape.get(axes.TENSOR_AXIS, 1),
    )
    Console().print(
        f"attention over rows of {columns:,} tokens: {chosen.engine}, {chosen.reason}"
    )


def resolved(value: float, *, of: str) -> float:
    """Returns a number for display, in which a KL within rounding is 0."""
    return 0.0 if abs(value) < KL_ROUNDING and KL.search(of) else value


def cell(value: Any, *, of: str) -> str:
    """Returns a value for display; `of` names it for `resolved`."""
    match value:
        case None:
            return "—"
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case _:
            return f"{resolved(value, of=of):.4g}"


def cells(params: PyTree) -> tuple[str, str]:
    """Returns the devices, with their memory, and the mesh of a role's arrays.

    Args:
      params: arrays of one role, all in one place. Shapes have no place.

    Returns:
      For example ("gpu 0-3", "data=2,fsdp=2") or ("gpu 0, pinned_host", "none").
    """
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    shardings = {array.sharding for array in arrays}
    devices = {device for sharding in shardings for device in sharding.device_set}
    memories = {
        sharding.memory_kind
        for sharding in shardings
        if sharding.memory_kind is not None
    }
    memories -= {"device", *(device.default_memory().kind for device in devices)}
    meshes = [
        sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)
    ]
    mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
    shown = ", ".join([_devices_cell(devices), *sorted(memories)])
    return shown, "none" if mesh is None else _mesh_cell(mesh)


def mesh_cells(mesh: Mesh) -> tuple[str, str]:
    """Returns the devices and the axes of a mesh, in the form of `cells`."""
    return _devices_cell(set(mesh.devices.flat)), _mesh_cell(mesh)


def _mesh_cell(mesh: Mesh) -> str:
    sizes = (f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return ",".join(sizes) or "none"


def _devices_cell(devices: set[Any]) -> str:
    parts = []
    for platform in sorted({device.platform for device in devices}):
        ids = sorted(device.id for device in devices if device.platform == platform)
        whole = len(ids) > 1 and ids == list(range(ids[0], ids[-1] + 1))
        shown = f"{ids[0]}-{ids[-1]}" if whole else ",".join(map(str, ids))
        parts.append(f"{platform} {shown}")
    return ", ".join(parts) or "none"
