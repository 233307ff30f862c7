"""The figure of placements shows every predicted and measured value."""

from ridgeplan.dashboards.charts.placement import placement_figure
from ridgeplan.planner.sweeps import PlacementTimes


def test_lines_are_predicted_and_points_measured():
    times = PlacementTimes((1000, 2000), (0, 3), (5.0, 8.0), (5.0, 40.0))
    figure = placement_figure(times, [{"context": 2000, "adaptive_ms": 9.0, "static_ms": 41.0}])
    adaptive, static, one, all_at_once, layers = figure.data
    assert (list(adaptive.y), list(static.y), list(layers.y)) == ([5, 8], [5, 40], [0, 3])
    assert (list(one.x), list(one.y), list(all_at_once.y)) == ([2000], [9], [41])
    assert len(placement_figure(times).data) == 3
