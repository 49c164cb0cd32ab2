"""Figures: what is drawn, by the artists on the axes."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.axes import Axes

from scalerl.fitting import figures
from scalerl.fitting.curves import Curve, Settings, fit_run
from scalerl.fitting.errors import InputError
from scalerl.fitting.runs import Run


def make(name="run", a=0.61, compute=None, held_out_from=np.inf, **settings) -> Curve:
    compute = np.linspace(0, 6000, 31) if compute is None else np.asarray(compute, dtype=float)
    rate = 0.40 + (a - 0.40) / (1 + (2500 / np.maximum(compute, 1e-9)) ** 1.9)
    rate = np.clip(rate + np.random.default_rng(0).normal(0, 0.002, len(rate)), 0, 1)
    run = Run(name, compute, rate, compute > held_out_from, x_name="gpu_hours")
    return fit_run(run, Settings(**settings))


def lines(axes: Axes, style: str):
    return [line for line in axes.get_lines() if line.get_linestyle() == style]


def xs(line) -> list[float]:
    return np.asarray(line.get_xdata()).tolist()


def marked(axes: Axes, marker: str):
    return [
        x for line in axes.get_lines() if line.get_marker() == marker for x in np.asarray(line.get_xdata()).tolist()
    ]


def test_solid_to_the_end_of_the_window_and_dotted_beyond():
    (axes,) = figures.curves([make(window=(None, 4000))], until=12_000).axes
    (solid,), (dotted,) = lines(axes, "-"), lines(axes, ":")
    assert axes.get_xscale() == "log"
    assert xs(solid)[0] == pytest.approx(200) and xs(solid)[-1] == pytest.approx(4000)
    assert xs(dotted)[0] == pytest.approx(4000) and xs(dotted)[-1] == pytest.approx(12_000)
    assert min(marked(axes, "x")) == 4200 and len(marked(axes, "x")) == 10
    assert len(marked(axes, "o")) == 20
    assert len(axes.collections) == 1  # the band, under both parts of the curve


def test_points_that_the_input_holds_out_are_crosses():
    (axes,) = figures.curves([make(held_out_from=5000)]).axes
    assert marked(axes, "x") == [5200, 5400, 5600, 5800, 6000]
    assert xs(lines(axes, ":")[0])[-1] == pytest.approx(6000)


def test_legend_names_the_parameters_and_withholds_what_the_status_withholds():
    good, flat = make("good"), make("flat-run", a=0.40)
    labels = [text.get_text() for text in figures.curves([good, flat]).legends[0].get_texts()]
    assert f"A {good.result.A:.3f} [" in labels[0] and "B " in labels[0] and "C_{mid}" in labels[0]
    assert labels[1] == "flat-run: flat"


def test_the_linearised_points_lie_on_their_line():
    curve = make()
    figure = figures.leave_one_out([curve], [curve])
    right = figure.axes[1]
    (line,) = lines(right, "-")
    x, y = np.log(np.asarray(line.get_xdata())), np.asarray(line.get_ydata())
    assert (y[1] - y[0]) / (x[1] - x[0]) == pytest.approx(curve.result.B)
    assert f"{curve.result.A:.3f}" in right.get_title(loc="left")


def test_many_runs_have_distinct_looks():
    curves = [make(f"run {i}", a=0.5 + i / 100) for i in range(9)]
    figure = figures.curves(curves)
    looks = {(line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()}
    assert len(looks) == 9


def test_same_figure_same_bytes(tmp_path):
    for name in ("a.svg", "b.svg"):
        figures.save(figures.curves([make()]), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_unwritable(tmp_path):
    figure = figures.curves([make()])
    with pytest.raises(InputError, match=r"figures end in \.png, \.svg, \.pdf"):
        figures.save(figure, tmp_path / "a.bmp")
    with pytest.raises(InputError, match="can't be written"):
        figures.save(figure, tmp_path / "no" / "a.png")
