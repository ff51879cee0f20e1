"""Which figures become files, and how they look on paper."""

from moescope.figures import OVER_STEPS, ROUTING
from moescope.reporting.export import paper_figure, routing_figures, weight_figures


def test_every_figure_of_a_trace_becomes_a_file_of_its_own(traced_run):
    found = dict(routing_figures([traced_run]))
    names = list(found)
    assert len([name for name in names if name.startswith("routing1-step200-prefill-")]) == len(ROUTING)
    assert {f"routing0-steps-{spec.name}" for spec in OVER_STEPS} <= set(names)
    assert "routing3-step200-decode-cv_by_layer" in names
    assert list(weight_figures([traced_run])) == []


def test_on_paper_a_slider_stands_at_its_start(traced_run):
    figure = dict(routing_figures([traced_run]))["routing1-step200-prefill-usage_by_expert"]
    drawn = paper_figure(figure)
    assert len(drawn["data"]) == figure.slider.per_value
    start = figure.slider.start * figure.slider.per_value
    even = figure.slider.per_value - 3  # the grey line of an even share
    assert list(drawn["data"][even]["y"]) == list(figure.data[start + even]["y"])
    assert figure.title[:40] in drawn["layout"]["title"]["text"].replace("<br>", " ")
