"""Settings of JAX, grain and matplotlib for tests; `conftest.py` imports this file."""

import functools
import gc
from pathlib import Path
from types import SimpleNamespace

import jax
from grain._src.python.dataset.transformations import shuffle
from jax._src import core
from jax._src.interpreters import mlir
from matplotlib.figure import Figure

from rlhf_jax.runs import plots

jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing creates many long-lived objects. Collecting garbage among them, and recording
# the source line of each operation, take an eighth of the time.
gc.set_threshold(100_000, 20, 50)
jax.config.update("jax_traceback_in_locations_limit", 0)
# `jnp.asarray` of a NumPy array would compile an identity program for every shape.
if hasattr(core, "stage_p"):
    core.stage_p.def_impl(jax.device_put)
# All programs share one MLIR context: separate ones take a quarter of the time of a
# one-op program and a third of a worker's memory.
if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# grain takes 10 ms to compute a shuffled index, and tests repeat it often.
if hasattr(shuffle, "index_shuffle"):
    shuffle.index_shuffle = SimpleNamespace(
        index_shuffle=functools.cache(shuffle.index_shuffle.index_shuffle)
    )

SAVEFIG = Figure.savefig
OF_A_RUN = {*plots.PLOTS, "drift_by_layer", "kl_by_position"}


def savefig(figure: Figure, path: Path, **options) -> None:
    """Creates empty files for a run's figures, which take up to 2 s to draw."""
    if Path(path).stem in OF_A_RUN:
        Path(path).touch()
    else:
        SAVEFIG(figure, path, **options)


Figure.savefig = savefig
