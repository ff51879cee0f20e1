"""Which figures become files, and how they look on paper."""

from moescope.reporting.export import paper_figure, report_figures


def test_every_figure_of_a_trace_becomes_a_file_of_its_own(traced_run):
    names = [name for name, _ in report_figures([traced_run])]
    assert len(set(names)) == len(names)
    assert any(name.startswith("trace0-load") and name.endswith("-cv_by_layer") for name in names)
    assert any("decode" in name for name in names)
    drawn = {name.rpartition("-")[2] for name in names}
    assert drawn <= {spec.name for spec in traced_run.verb.figures}


def test_on_paper_a_slider_stands_at_its_start(traced_run):
    figures = dict(report_figures([traced_run]))
    figure = next(figure for name, figure in figures.items() if name.endswith("-usage_by_expert"))
    drawn = paper_figure(figure)
    assert len(drawn["data"]) == figure.slider.per_value
    start = figure.slider.start * figure.slider.per_value
    even = figure.slider.per_value - 3  # the grey line of an even share
    assert list(drawn["data"][even]["y"]) == list(figure.data[start + even]["y"])
    assert figure.title in drawn["layout"]["title"]["text"].replace("<br>", " ")
