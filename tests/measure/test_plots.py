"""Plots: a colour for each name, outliers that none loses, a knee that is named."""

from __future__ import annotations

from pronk.measure import plot_style, plots_outliers


def test_colours_are_one_for_a_name() -> None:
    colour = plot_style.colours(["b", "a", "c", "b"], "a")
    assert colour["a"] == plot_style.ORIGINAL
    assert len(set(colour.values())) == 3
    assert plot_style.colours(["b", "a", "c"], "a") == colour
    assert len(plot_style.colours([str(n) for n in range(20)])) == 20


def test_a_name_that_has_no_colour_yet_gets_one_that_no_other_has() -> None:
    """Of seven formats in one plot two were blue and two orange: each list was given the palette from its beginning."""
    known = plot_style.colours(["bf16", "llm-int8", "q8", "q4"], "bf16")
    colour = plot_style.colours(["f32", "f16", "bf16", "int8", "llm-int8", "q8", "q4"], known=known)
    assert len(set(colour.values())) == 7
    assert {name: colour[name] for name in known} == known


def test_outliers_are_drawn_so_that_none_is_lost() -> None:
    import numpy as np

    counts = np.zeros((4, 5000))
    counts[2, 4321] = 7
    picture = plot_style.svg(plots_outliers.heat_map(counts, "columns over 6.0"))
    assert ">4321<" in picture
    assert "columns over 6.0" in picture
    figure = plots_outliers.heat_map(counts, "t")
    shown = figure.axes[0].images[0].get_array()
    assert shown is not None
    assert shown.count() == 1  # one cell is coloured, of fewer than 5000
    assert shown.max() == 7
    assert "no column passed" in plot_style.svg(plots_outliers.heat_map(np.zeros((2, 3)), "none"))


def test_a_sweep_names_its_knee() -> None:
    inf = float("inf")
    picture = plot_style.svg(
        plots_outliers.sweep([0, 6, inf], [0.001, 0.002, 0.03], [{"median": 9, "min": 8, "max": 10}, 20, None], 6)
    )
    assert "knee: 6" in picture
    assert ">∞<" in picture
    assert plots_outliers.sweep([0, 6], [None, None], [None, None]).axes
