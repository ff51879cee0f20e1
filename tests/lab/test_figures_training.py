"""Figures of a training.

Drawn from a real run, validated by plotly, titles and references from its numbers.
"""

from __future__ import annotations

import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.lab.figures_training import (
    gradient_by_step,
    loss_by_step,
    saved_by_domain,
    speed_by_step,
)
from moescope.plotting.style import GREY, Figure, Tables


@pytest.fixture
def tables() -> Tables:
    steps = pd.DataFrame(
        {
            "step": [0, 10, 20],
            "lm_loss": [None, 4.0, 3.0],
            "validation_loss": [5.5, None, 2.5],
            "validation_loss_published": [None, None, None],
            "gradient_norm": [None, 2.0, 0.5],
            "tokens_per_second": [None, 100.0, 300.0],
            "peak_memory_bytes": [None, 1e9, 2e9],
        }
    ).astype(float)
    references = pd.DataFrame({"name": ["uniform", "unigram", "clip"], "value": [5.6, 3.5, 1.0]})
    domains = pd.DataFrame(
        {
            "step": [0, 20] * 2,
            "domain": ["code"] * 2 + ["prose"] * 2,
            "loss": [5.5, 2.0, 5.5, 3.6],
            "unigram": [3.0, 3.0, 3.4, 3.4],
        }
    )
    return {"steps": steps, "references": references, "domain_losses": domains}


def checked(figure: Figure) -> Figure:
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    return figure


def grey(figure: Figure) -> dict[str, list[float]]:
    return {trace["name"]: list(trace["y"]) for trace in figure.data if trace["line"]["color"] == GREY}


def test_losses_stand_beside_models_without_skill(tables: Tables):
    figure = checked(loss_by_step(tables))
    assert grey(figure) == {"every token alike": [5.6, 5.6], "frequencies alone": [3.5, 3.5]}
    assert "from 5.5 (step 0) to 2.5 nats a token (step 20); 3.5 by frequencies alone, 5.6" in figure.title
    assert len(figure.data) == 4


def test_the_published_loss_is_drawn_where_there_is_one_and_called_by_its_name(tables: Tables):
    tables["steps"].loc[2, "validation_loss_published"] = 1.1
    figure = checked(loss_by_step(tables))
    assert figure.data[-1]["name"] == "validation, padding counted"
    assert "look smaller" in figure.caption


def test_domains_are_told_by_what_they_save_over_frequencies(tables: Tables):
    figure = checked(saved_by_domain(tables))
    assert list(figure.data[0]["y"]) == [-2.5, 1.0]
    assert figure.title == (
        "Code is learned best, 1 nat a token below frequencies alone; prose least, 0.2 nats a "
        "token above frequencies alone"
    )
    assert grey(figure) == {"frequencies alone": [0, 0]}


def test_what_is_worse_than_frequencies_is_not_called_learned(tables: Tables):
    tables["domain_losses"]["unigram"] = 1.5
    title = saved_by_domain(tables).title
    assert title == (
        "No domain is learned yet: nearest comes code, 0.5 nats a token above frequencies alone; "
        "farthest is prose, 2.1 nats a token above frequencies alone"
    )
    alone = tables["domain_losses"][lambda rows: rows["domain"] == "code"]
    title = saved_by_domain({**tables, "domain_losses": alone}).title
    assert title == "Code is not learned yet: 0.5 nats a token above frequencies alone"


def test_gradient_and_speed_have_their_references(tables: Tables):
    assert "50 % of the points lie above 1" in checked(gradient_by_step(tables)).title
    speed = checked(speed_by_step(tables))
    assert grey(speed) == {"median": [200.0, 200.0]}
    assert speed.title == "200 tokens a second (median), 2 GB of memory at most"
