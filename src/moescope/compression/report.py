"""The report's part on a compression.

What it costs, beside the original and random controls, and which experts it takes.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

import pandas as pd

from moescope.comparison.report import chart_section
from moescope.compression.figures import (
    COST,
    SALIENCY,
    can_draw,
    cut_by_score,
    layer_rows,
    of_controls,
    of_plan,
    score_column,
    whole_rows,
)
from moescope.compression.figures_dendrogram import GROUPS
from moescope.plotting.style import Tables, byte_size, counted, number
from moescope.reporting.pack import table_payload
from moescope.reporting.run_kind import RunKind, Section
from moescope.reporting.untrusted import plot_words
from moescope.routing.report import paths_of
from moescope.run import Run
from moescope.tables import COMPRESSION_TABLES, GEOMETRY_TABLES
from moescope.types import Coverage

ALL_TABLES = (*COMPRESSION_TABLES, *GEOMETRY_TABLES)
LAYER_COLUMNS = ["method", "layer", "predicted_error", "measured_error", "router_kl"]
MERGE_COLUMNS = ["layer", "merge", "left", "right", "height", "chance_height", "size", "done"]
WHOLE_COLUMNS = ["method", "perplexity", "perplexity_original", "js_divergence", "bytes", "bytes_original"]
USUAL_CONTROLS = 3  # of small models
VIEW = (
    "A compression is read between two marks: the original, and random controls that drop or "
    "merge as many experts without looking. What a method saves over the "
    "controls is what its choice is worth. Perplexity and divergence are of text that took no "
    "part in choosing."
)


def tables_of(run: Run) -> Tables:
    return {name: run.table(name) for name in ALL_TABLES if name in run.tables}


# --- findings


def compression_findings(run: Run) -> list[str]:
    """What was done and what it costs; each number with what the original and chance give."""
    tables = tables_of(run)
    found = [done_words(run, tables)]
    whole = whole_rows(tables)
    own, others = of_plan(tables, whole).iloc[0], of_controls(tables, whole)
    if pd.notna(own["bytes"]):
        saved = 1 - own["bytes"] / own["bytes_original"]
        word = "is" if run.info.get("applied") else "would be"
        found.append(
            f"The checkpoint {word} {byte_size(own['bytes'])}, {number(100 * saved)} % less than "
            f"the original's {byte_size(own['bytes_original'])}"
        )
    if pd.notna(own["perplexity"]):
        at_random = spread(others["perplexity"])
        found.append(
            (
                f"Perplexity on held-out text {number(own['perplexity'])}, original "
                f"{number(own['perplexity_original'])}"
            )
            + (f", random controls {at_random}" if at_random else "")
            + (
                "; no better than choosing at random"
                if own["perplexity"] >= others["perplexity"].min()
                else ""
            )
        )
        at_random = spread(others["js_divergence"])
        found.append(
            (
                "Next-token distributions diverge from the original's by "
                f"{number(own['js_divergence'])} nats (at most {number(math.log(2))})"
            )
            + (f", random controls {at_random}" if at_random else "")
        )
    for column, word in (("measured_error", "Measured"), ("predicted_error", "Predicted")):
        layers = of_plan(tables, layer_rows(tables))
        if layers[column].notna().any():
            worst = layers.loc[layers[column].idxmax()]
            random = of_controls(tables, layer_rows(tables))
            at_random = spread(random[random["layer"] == worst["layer"]][column])
            found.append(
                (
                    f"{word} error of a layer's routed output: largest in layer {worst['layer']}, "
                    f"{number(worst[column])}"
                )
                + (f", random controls {at_random} there" if at_random else "")
            )
            break
    if sure := rank_finding(tables):
        found.append(sure)
    return found


def done_words(run: Run, tables: Tables) -> str:
    clusters = tables["clusters"]
    method = clusters["method"].iloc[0]
    after = clusters[clusters["kept"].astype(bool)].groupby("layer")["cluster"].nunique()
    before = clusters.groupby("layer")["expert"].nunique()
    sizes = clusters[clusters["cluster"].notna()].groupby(["layer", "cluster"]).size()
    merged, dropped = int((sizes > 1).sum()), int((~clusters["kept"].astype(bool)).sum())
    what = [f"{counted(dropped, 'expert')} dropped"] if dropped else []
    what += [f"{counted(int(sizes[sizes > 1].sum()), 'expert')} merged into {merged}"] if merged else []
    return (
        f"{method}: {one_or_span(before)} experts a layer become {one_or_span(after)}, in "
        f"{counted(len(before), 'layer')}"
        f" ({', '.join(what) or 'nothing changes'})"
    )


def one_or_span(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return str(low) if low == high else f"{low} to {high}"


def spread(values: pd.Series) -> str:
    """The controls' numbers: one, or from the least to the most."""
    known = values.dropna()
    if known.empty:
        return ""
    low, high = number(known.min()), number(known.max())
    return low if low == high else f"{low} to {high}"


def rank_finding(tables: Tables) -> str | None:
    """How many experts might be on the other side of the cut with another sample of documents."""
    if not cut_by_score(tables) or "saliency" not in tables or tables["saliency"]["rank_low"].isna().all():
        return None
    both = tables["saliency"].merge(tables["clusters"], on=["layer", "expert"])
    kept = both.groupby("layer")["kept"].transform("sum")
    if (kept == both.groupby("layer")["kept"].transform("size")).all():
        return None
    unsure = (both["rank_low"] < kept + 0.5) & (both["rank_high"] > kept + 0.5)
    return (
        f"{int(unsure.sum())} of {len(both)} experts could be on either side of the cut with "
        "other documents of the kind "
        f"(95 % intervals of their rank by {score_column(tables).replace('_', ' ')}); all of "
        "them, were the score chance"
    )


# --- sections


def compression_sections(run: Run) -> list[Section]:
    tables = tables_of(run)
    facts = run.info["setup"]
    sections = [cost_section(tables, facts)]
    if "saliency" in tables:
        sections.append(saliency_section(tables, facts))
    sections.append(cluster_section(tables, facts))
    if "geometry_layers" in tables:
        sections.append(chart_section(tables))
    return sections


def cost_section(tables: Tables, facts: dict[str, Any]) -> Section:
    whole, layers = whole_rows(tables), layer_rows(tables)
    payloads = []
    if whole["bytes"].notna().any() or whole["perplexity"].notna().any():
        payloads.append(table_payload("damage", whole, WHOLE_COLUMNS, "The whole model, and every control"))
    if layers[LAYER_COLUMNS[2:]].notna().any(axis=None):
        payloads.append(table_payload("damage", layers, LAYER_COLUMNS, "Every layer, and every control"))
    words = []
    if facts.get("judged_tokens"):
        words.append(
            f"Judged on {counted(facts['judged_tokens'], 'token')} of "
            f"{counted(facts['judged_documents'], 'document')} that took no part in choosing; "
            f"whole distributions compared at {counted(facts['compared_tokens'], 'position')}."
        )
    else:
        words.append(
            "Nothing was judged: what is shown is foretold from the calibration text, or from headers alone."
        )
    ways = sorted(set(facts.get("gating", {}).values()))
    if ways:
        words.append(f"How the routers choose, found from what they did: {plot_words('; '.join(ways))}.")
    figures = [(spec, tables) for spec in COST if can_draw(spec, tables)]
    return Section("cost", "What compressing costs", " ".join(words), figures, payloads)


def saliency_section(tables: Tables, facts: dict[str, Any]) -> Section:
    rows = tables["saliency"]
    columns = ["layer", "expert", "tokens", "gate_weight", "ean", "reap", "rank_low", "rank_high"]
    words = (
        f"What each expert did on {counted(facts['calibration_tokens'], 'token')} of "
        f"{counted(facts['calibration_documents'], 'document')}: its tokens, gates and output "
        "norms, as the model's own call gave them."
    )
    figures = [(spec, tables) for spec in SALIENCY if can_draw(spec, tables)]
    return Section(
        "saliency",
        "Which experts matter",
        words,
        figures,
        [table_payload("saliency", rows, columns, "Every expert's scores")],
    )


def cluster_section(tables: Tables, facts: dict[str, Any]) -> Section:
    rows = tables["clusters"]
    columns = ["layer", "expert", "kept", "cluster", "dominant", "weight"]
    router = {
        "slice": "What the router holds of the experts that go is taken out of it.",
        "fold": "Router rows are fitted anew, one for each merged expert.",
        "join": "A merged expert takes over its dominant member's part of the router, unchanged.",
        "tie": (
            "Every old router row is kept and points at the merged expert: a plan to measure, which "
            "no file format holds."
        ),
    }[facts["router"]]
    special = facts.get("router_effects", {}).get(facts["router"])  # of a lab checkpoint's router
    if special is not None:
        router = special if facts["router"] == "join" else f"{router} {special}"
    router += fold_words(facts.get("plan_settings", {}))
    before, after = facts.get("top_k_before"), facts.get("top_k")
    chosen = (
        f" A token goes to {after} experts, {before} before." if after is not None and after != before else ""
    )
    sizes = rows[rows["cluster"].notna()].groupby(["layer", "cluster"]).size()
    merged = sizes[sizes > 1]
    said = (
        (
            f" {counted(len(merged), 'group')} of {one_or_span(merged)} members, "
            f"{counted(int((sizes == 1).sum()), 'expert')} alone."
        )
        if len(merged)
        else ""
    )
    return Section(
        "experts-after",
        "What becomes of every expert",
        router + chosen + said,
        [(spec, tables) for spec in GROUPS if len(merged) and all(name in tables for name in spec.needs)],
        [
            table_payload("clusters", rows, columns, "Every expert"),
            *(
                [table_payload("merges", tables["merges"], MERGE_COLUMNS, "Every step")]
                if "merges" in tables
                else []
            ),
        ],
    )


def fold_words(settings: dict[str, Any]) -> str:
    """What fitting the router's rows brought, beside the rows it started from."""
    if settings.get("router_kl_of_mean_rows") is None:
        return ""
    said = (
        " Mean divergence from the groups' joint probabilities, over layers: "
        f"{number(settings['router_kl_of_mean_rows'])} nats for the members' mean rows, "
    )
    said += f"{number(settings['router_kl'])} for those taken"
    held_out = settings.get("router_kl_held_out")
    return said + (
        f", {number(held_out)} on states that the fit did not see." if held_out is not None else "."
    )


# --- the rest of the page


def compression_command(run: Run) -> str:
    """The command that does it again; texts are named by their files."""
    arguments = run.info["arguments"]
    words = ["moescope", "compress", run.info["checkpoints"][0]["path"]]
    if arguments["plan"]:
        words += ["--plan", arguments["plan"][0]]
    else:
        words += ["--method", arguments["method"], "--keep", arguments["keep"]]
    many = len(arguments["text"]) > 1 or any(domain != "text" for domain, _ in arguments["text"])
    plain = "--token-ids" if arguments.get("token_ids") else "--text"
    for domain, files in arguments["text"]:
        for path in paths_of(files):
            words += ["--domain", f"{domain}={path}"] if many else [plain, path]
    words += [word for mark in arguments["add"] for word in ("--add", mark[0])]
    defaults = {
        "max_tokens": None,
        "dtype": "auto",
        "batch_size": 8,
        "seed": 0,
        "merge_weights": "usage",
        "distance": "default",
        "router": "fold",
    }
    for name, default in defaults.items():
        if arguments[name] != default:
            words += [f"--{name.replace('_', '-')}", str(arguments[name])]
    switches = {"chat_template": "--chat-template", "adaptive": "--adaptive", "sequential": "--sequential"}
    words += [flag for name, flag in switches.items() if arguments[name]]
    words += [] if arguments["signed"] else ["--unsigned"]
    words += [] if arguments["judge"] else ["--no-judge"]
    words += [] if arguments["controls"] == USUAL_CONTROLS else ["--controls", str(arguments["controls"])]
    return shlex.join([*words, *(["--apply", arguments["apply"]] if arguments["apply"] else [])])


def compression_coverage(run: Run) -> list[str]:
    item = run.info["coverage"][0]
    lines = [Coverage(**{**item, "experts_per_layer": tuple(item["experts_per_layer"])}).line()]
    facts = run.info["setup"]
    if facts.get("calibration_tokens"):
        lines.append(
            (
                f"calibrated on {counted(facts['calibration_tokens'], 'token')} of "
                f"{counted(facts['calibration_documents'], 'document')}"
            )
            + (
                f", judged on {counted(facts['judged_tokens'], 'token')} held out"
                if facts.get("judged_tokens")
                else ""
            )
        )
    if run.info.get("applied"):
        lines.append(f"written: {run.info['applied']}")
    return lines


COMPRESSION = RunKind(
    "compress",
    ALL_TABLES,
    compression_findings,
    compression_sections,
    compression_command,
    compression_coverage,
    VIEW,
)
