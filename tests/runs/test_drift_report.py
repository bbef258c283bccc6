"""The table and plots of drift show the given numbers."""

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from rlhf_jax import drift
from rlhf_jax.runs import metrics, plots

REFERENCE = {
    "embed": {"tokens": np.full((4, 4), 2.0)},  # size 8
    "final_norm": {"bias": np.zeros(9)},
    "layers": {"kernel": np.stack([np.full((2, 2), x) for x in (1.0, 2.0, 3.0)])},
}


def moved(*, embed=0.0, bias=0.0, layers=(0.0, 0.0, 0.0)):
    steps = {
        "embed": {"tokens": embed},
        "final_norm": {"bias": bias},
        "layers": {"kernel": np.array(layers)[:, None, None]},
    }
    params = jax.tree.map(lambda w, step: np.float32(w + step), REFERENCE, steps)
    return jax.jit(drift.weight_drift)(params, REFERENCE)


def test_the_table_is_sorted_and_names_the_layer(capsys):
    """Layers of sizes 2, 4 and 6 move by 1, 0.4 and 0: the first by half."""
    plots.drift_table(moved(embed=0.1, bias=0.5, layers=(0.5, 0.2, 0.0)))
    lines = capsys.readouterr().out.splitlines()
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in lines
        if line.startswith("│")
    ]
    assert rows == [
        ["layers/kernel", "1.4", "0.1167", "0.5", "0"],  # 1.4 / 12
        ["embed/tokens", "0.4", "0.05", "—", "—"],
        ["final_norm/bias", "1.5", "—", "—", "—"],
        ["all", "3.3", "0.165", "—", "—"],  # 3.3 / 20
    ]
    norm = np.sqrt((1 + 0.16 + 0.16 + 2.25) / (64 + 4 + 16 + 36))
    assert lines[-1] == f"as one vector, ‖Δ‖ / ‖ref‖: {norm:.4g}"


def test_nothing_has_moved(capsys):
    plots.drift_table(moved())
    out = capsys.readouterr().out
    assert "nan" not in out
    assert "as one vector, ‖Δ‖ / ‖ref‖: 0" in out


def test_a_line_a_module_over_the_layers():
    figure = plots._by_layer(moved(embed=0.1, layers=(0.5, 0.2, 0.0)))
    (axis,) = figure.axes
    (line,) = axis.lines
    assert line.get_label() == "kernel"
    np.testing.assert_allclose(line.get_ydata(), [0.5, 0.1, 0.0], rtol=1e-5)
    title = axis.get_title(loc="left")
    assert title == ("outside of the layers: embed/tokens 0.05, final_norm/bias 0")


def position_row(step):
    ramp = [step + 0.1, step + 0.2, None]
    return {
        "stage": "ppo",
        "step": step,
        "k1": ramp,
        "k3": ramp,
        "responses": [2, 1, 0],
    }


def test_positions_at_the_first_the_middle_and_the_last_step():
    figure = plots._by_position([position_row(s) for s in (0, 10, 20, 30, 40)])
    top = figure.axes[0]
    assert [line.get_label() for line in top.lines] == ["step 0", "step 20", "step 40"]
    np.testing.assert_allclose(top.lines[1].get_ydata(), [20.1, 20.2, np.nan])
    np.testing.assert_array_equal(figure.axes[2].lines[0].get_ydata(), [2, 1, 0])
    alone = plots._by_position([position_row(7)])
    assert len(alone.axes[0].lines) == 1


@pytest.mark.slow
def test_plots_of_what_a_recorder_wrote(tmp_path, rendered):
    table = moved(bias=1.0, layers=(0.5, 0.2, 0.0))
    assert [path.name for path in plots.draw_drift(tmp_path, table)] == [
        "drift_by_layer.png"
    ]
    one = jnp.ones(3)
    with metrics.Recorder(tmp_path) as record:
        record.begin("ppo")
        positions = {"k1": (one, one), "k3": (one, one), "responses": (one, one)}
        record.write(0, {"x": (jnp.float32(1), None)}, positions=positions)
    drawn = plots.draw_drift(tmp_path, table)
    assert [path.stem for path in drawn] == ["drift_by_layer", "kl_by_position"]
    for path in drawn:
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 300
        assert len(np.unique(image)) > 10
