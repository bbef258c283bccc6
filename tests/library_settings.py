"""What JAX, grain and matplotlib are set to for tests; `conftest.py` imports it."""

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
# Tracing leaves many objects that live on; looking for garbage among them, and writing
# where each operation was asked for into its program, is an eighth of the time.
gc.set_threshold(100_000, 20, 50)
jax.config.update("jax_traceback_in_locations_limit", 0)
# `jnp.asarray` of a NumPy array is a program that returns it, one for every shape.
if hasattr(core, "stage_p"):
    core.stage_p.def_impl(jax.device_put)
# Of a program of one operation a quarter of the time, and of a worker a third of the
# memory, is an MLIR context of its own: all programs share one.
if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# Where a shuffled row of few ends up takes grain 10 ms, and tests ask again and again.
if hasattr(shuffle, "index_shuffle"):
    shuffle.index_shuffle = SimpleNamespace(
        index_shuffle=functools.cache(shuffle.index_shuffle.index_shuffle)
    )

SAVEFIG = Figure.savefig
OF_A_RUN = {*plots.PLOTS, "drift_by_layer", "kl_by_position"}


def savefig(figure: Figure, path: Path, **options) -> None:
    """Figures of a run take up to 2 s to draw: those of a test with `rendered` are."""
    if Path(path).stem in OF_A_RUN:
        Path(path).touch()
    else:
        SAVEFIG(figure, path, **options)


Figure.savefig = savefig
