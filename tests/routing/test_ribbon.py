"""The routing ribbon: which tokens it holds, what adjacent tokens share, and what is drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from moescope.plotting.style import CATEGORICAL
from moescope.routing.figures import routing_ribbon
from moescope.routing.ribbon import LONGEST, ribbon_rows
from moescope.routing.tables import TABLES
from moescope.tables import conform

EXPERTS, TOKENS, RUN = 16, 400, 10  # tokens in a row with the same experts


def planted(path, layers=2, documents=4):
    """Tokens whose experts change every ten tokens, in documents of two domains."""
    rows = [
        {
            "step": 0,
            "document": document,
            "position": position,
            "layer": layer,
            "layer_name": f"layer {layer}",
            "token_id": position % 7,
            "domain": "code" if document < documents // 2 else "prose",
            "phase": "prefill",
            "experts": [(position // RUN + document) % EXPERTS, (position // RUN + document + 1) % EXPERTS],
        }
        for document in range(documents)
        for position in range(TOKENS)
        for layer in range(layers)
    ]
    pq.write_table(conform(TABLES["tokens"], pd.DataFrame(rows)), path)
    load = [
        {"step": 0, "layer": layer, "phase": "prefill", "expert": expert, "tokens": 10}
        for layer in range(layers)
        for expert in range(EXPERTS)
    ]
    return pd.DataFrame(load)


@pytest.fixture(scope="module")
def ribbon(tmp_path_factory):
    path = tmp_path_factory.mktemp("ribbon") / "tokens.parquet"
    load = planted(path)
    setups = [{"step": 0, "coverage": {"domains": {"code": 2, "empty": 0, "prose": 2}}}]
    return ribbon_rows(path, setups, load, {0: "<b>", 1: "the"})


def test_the_ribbon_is_the_beginning_of_the_first_document_of_each_domain(ribbon):
    conform(TABLES["ribbon"], ribbon)
    assert set(zip(ribbon["document"], ribbon["domain"], strict=True)) == {(0, "code"), (2, "prose")}
    assert ribbon["position"].max() == LONGEST - 1 < TOKENS
    assert len(ribbon) == 2 * LONGEST * 2
    one = ribbon.query("document == 2 and layer == 1").set_index("position")
    assert one.loc[[0, 9, 10], "expert"].tolist() == [2, 2, 3]
    assert one.loc[[0, 1], "token"].tolist() == ["<b>", "the"]


def test_shared_experts_are_counted_and_chance_is_that_of_independent_tokens(ribbon):
    shared = ribbon.query("document == 0 and layer == 0").set_index("position")["shared"]
    assert np.isnan(shared[0])  # nothing stands before it, not the end of another document either
    assert shared[[1, 9, 10, 11]].tolist() == [1.0, 1.0, 0.5, 1.0]
    np.testing.assert_allclose(ribbon["shared_chance"], 2 / EXPERTS)  # even loads: k/n


def test_colours_are_the_experts_and_words_cannot_act(ribbon):
    figure = routing_ribbon({"ribbon": ribbon})
    assert figure.slider.values == ["0, code", "2, prose"]
    heat = figure.data[0]
    np.testing.assert_array_equal(heat["customdata"][0][:11], [0] * 10 + [1])
    np.testing.assert_array_equal(heat["z"], np.asarray(heat["customdata"]) % len(CATEGORICAL))
    assert heat["x"][:2] == ["0 ‹b›", "1 the"]
    assert "0.952" in figure.caption  # 270 whole and 29 half of 299
    assert "0.125" in figure.caption


def test_a_trace_with_tokens_has_a_ribbon_of_its_own_routing(traced_run):
    ribbon, tokens = traced_run.table("ribbon"), traced_run.table("tokens")
    first = tokens.assign(first=tokens["experts"].map(lambda experts: experts[0]))
    keys = ["step", "document", "position", "layer"]
    both = ribbon.merge(first, on=keys, validate="one_to_one")
    assert len(both) == len(ribbon)
    assert (both["first"] == both["expert"]).all()
    assert set(ribbon["domain"]) == {"plain", "other"}
    assert ribbon["shared"].dropna().between(0, 1).all()
    assert traced_run.figure("routing_ribbon").data


def test_without_stored_tokens_there_is_no_ribbon(traced_run):
    spec = traced_run.verb.figure("routing_ribbon")
    assert not spec.can_draw({})
