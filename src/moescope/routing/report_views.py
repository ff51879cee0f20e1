"""Views of a trace (one step and phase each) for the report: their tables, expert cards and text excerpt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moescope.errors import BadInput
from moescope.plotting.style import counted, number, values_of
from moescope.reporting.pack import plain, table_payload
from moescope.reporting.untrusted import plot_words, token_words, visible
from moescope.routing.tables import TABLES, TRACE_TABLES
from moescope.run import Run
from moescope.tables import FEWEST_DOCUMENTS, opened_parquet, wrong_column
from moescope.verb import Section, Tables

SINGLE_TOKENS = ("tokens", "token_text", "ribbon")  # of --save-tokens; the first may be larger than memory
NEEDED = tuple(name for name in TRACE_TABLES if name not in SINGLE_TOKENS)
STEPS_SHOWN = 4  # steps of a run with a view each; figures over steps hold all
LARGE = 2000  # experts in all layers from which on only the first and last step have a view
TOKENS_PER_ROLE = 12
COACTIVATED = 3
CONTEXTS = 5
CONTEXTS_OF_MANY = 3  # per expert where there are so many experts that the page would grow too large
METRIC_TABLE = ["metric", "value", "chance", "collapse", "corrected", "corrected_chance", "low", "high"]
DOCUMENTS = 12
TOKENS_EACH = 300
LONGEST_WORD = 24  # tokens
CHOICES = 600_000  # tokens x layers x k that a page may hold
COLUMNS = ["document", "position", "layer", "token_id", "domain", "experts", "gates"]

# --- views


@dataclass(frozen=True)
class View:
    """The tables of one step and phase of a trace, with domain names made safe for figures."""

    run: Run
    step: int
    phase: str
    main: bool  # the phase for which co-activation, domains, vocabulary and tokens are recorded
    label: str
    tables: Tables

    @property
    def layers(self) -> list[int]:
        return sorted(int(layer) for layer in self.tables["load"]["layer"].unique())

    @property
    def last(self) -> bool:
        """Whether it is the run's last step."""
        return self.step == max(int(setup["step"]) for setup in self.run.info["setup"])

    @property
    def setup(self) -> dict[str, Any]:
        """run.json's entry for this step."""
        return next((dict(setup) for setup in self.run.info["setup"] if setup["step"] == self.step), {})


@dataclass(frozen=True)
class TraceTables:
    """All tables of a trace except single tokens, which may be larger than memory."""

    run: Run
    tables: Tables

    @property
    def steps(self) -> list[int]:
        return sorted(int(step) for step in self.tables["load"]["step"].unique())

    @property
    def n_experts(self) -> int:
        """Number of experts of all layers together."""
        return len(self.tables["load"][["layer", "expert"]].drop_duplicates())

    @property
    def phases(self) -> list[str]:
        return [phase for phase in ("prefill", "decode") if phase in set(self.tables["load"]["phase"])]

    def in_main_phase(self) -> Tables:
        """All steps of the phase for which everything is recorded."""
        phase = self.phases[0]
        return {
            name: frame[frame["phase"] == phase] if "phase" in frame else frame
            for name, frame in self.tables.items()
        }


def load_trace(run: Run) -> TraceTables:
    """Read a trace's tables; a missing one or an empty trace is rejected with an error."""
    if missing := [name for name in NEEDED if name not in run.tables]:
        raise BadInput(f"{run.path}: table {', '.join(missing)} is missing; trace again with --overwrite")
    tables = {name: run.table(name) for name in (*NEEDED, *({"ribbon"} & set(run.tables)))}
    for name, frame in tables.items():
        shown = [column for column in ("domain", "main_domain") if column in frame]
        tables[name] = frame.assign(**{column: frame[column].map(plot_words, "ignore") for column in shown})
    if tables["load"].empty:
        raise BadInput(f"{run.path}: no token was routed; trace a longer text")
    return TraceTables(run, tables)


def shown_steps(steps: list[int], experts: int = 0) -> list[int]:
    """All steps, or the first, the last and some span, which bounds the size of the page."""
    most = 2 if experts >= LARGE else STEPS_SHOWN
    if len(steps) <= most:
        return steps
    return [steps[place] for place in np.linspace(0, len(steps) - 1, most).round().astype(int)]


def skipped_steps(trace: TraceTables) -> list[str]:
    """A sentence on which steps have a view, if not all have one."""
    shown = shown_steps(trace.steps, trace.n_experts)
    if len(shown) == len(trace.steps):
        return []
    named = ", ".join(map(str, shown))
    return [f"Steps {named} of {len(trace.steps)} have their own view; figures over steps hold all."]


def routing_views(trace: TraceTables) -> list[View]:
    """The views of a trace; the last one is the last step in the main phase, with which the page opens."""
    views = []
    for phase in reversed(trace.phases):
        for step in shown_steps(trace.steps, trace.n_experts):
            parts = [f"step {step}"] if len(trace.steps) > 1 else []
            parts += [phase] if len(trace.phases) > 1 else []
            main = phase == trace.phases[0]
            tables = {
                name: select_rows(frame, step, phase)
                for name, frame in trace.tables.items()
                if main or name in ("load", "load_totals", "routing_layers")
            }
            views.append(View(trace.run, step, phase, main, ", ".join(parts) or "all tokens", tables))
    return views


def missing_interval(view: View) -> str:
    """Why affinities have no interval: a domain has too few documents, or too few use the expert."""
    read = view.setup.get("coverage", {}).get("domains", {})
    domain = min(read, key=lambda name: read[name], default="")
    if domain and read[domain] < FEWEST_DOCUMENTS:
        words = f"{plot_words(domain)} has {counted(read[domain], 'document')}, {FEWEST_DOCUMENTS} are needed"
        return f"no interval: {words}"
    return "no interval: too few documents use the expert"


def select_rows(frame: pd.DataFrame, step: int, phase: str) -> pd.DataFrame:
    mask = pd.Series(True, index=frame.index)
    for key, value in (("step", step), ("phase", phase)):
        if key in frame.columns:
            mask &= frame[key] == value
    return frame[mask]


# --- experts


def layer_sections(view: View) -> list[Section]:
    """One section per layer with every metric."""
    metrics = {name: values_of(view.tables, name).set_index("layer") for name in ("cv", "routing_entropy")}
    rows = view.tables["routing_layers"]
    by_layer = dict(tuple(rows[rows["domain"] == ""].groupby("layer")))
    sections = []
    for layer in view.layers:
        line = [
            f"{TABLES['routing_layers'].label(name)} {number(frame.loc[layer, 'value'])} "
            f"(chance {number(frame.loc[layer, 'chance'])})"
            for name, frame in metrics.items()
            if layer in frame.index
        ]
        title = f"Every metric of layer {layer}"
        overall = by_layer.get(layer, rows.iloc[:0])
        table = table_payload(TRACE_TABLES["routing_layers"], overall, METRIC_TABLE, title)
        sections.append(
            Section(
                f"layer-{layer}",
                f"Layer {layer}",
                tables=[table],
                layer=layer,
                view=view.label,
                line=", ".join(line),
            )
        )
    return sections


def rows_by(frame: pd.DataFrame, keys: list[str], columns: list[str]) -> dict[Any, list[list[Any]]]:
    """Return key (several: a tuple) -> its rows' cells, in the frame's order."""
    entries: dict[Any, list[list[Any]]] = {}
    cells = (plain(frame[name].tolist()) for name in columns)
    for key, *row in zip(frame.set_index(keys).index, *cells, strict=True):
        entries.setdefault(key, []).append(row)
    return entries


def tokens_by_expert(frame: pd.DataFrame) -> dict[tuple[int, str], list[list[Any]]]:
    """(expert, role) -> [token, count, lift] of its most characteristic tokens, by count times log lift."""
    weight = frame["count"] * np.log(frame["lift"].clip(lower=1e-12))
    frame = frame.loc[weight.sort_values(ascending=False, kind="stable").index]
    top = frame.groupby(["expert", "role"], sort=False).head(TOKENS_PER_ROLE)
    words = map(token_words, top["token"].tolist(), top["token_id"].tolist())
    return rows_by(top.assign(token=list(words)), ["expert", "role"], ["token", "count", "lift"])


def contexts_by_expert(frame: pd.DataFrame, most: int) -> dict[int, list[list[Any]]]:
    """expert -> [before, token, after, gate, document, position, domain] of its largest gates."""
    top = frame[frame["rank"] <= most].sort_values(["expert", "rank"])
    texts = {
        side: [visible(words) if isinstance(words, str) else "" for words in top[side]]
        for side in ("before", "after")
    }
    texts["token"] = list(map(token_words, top["token"].tolist(), top["token_id"].tolist()))
    columns = ["before", "token", "after", "gate", "document", "position", "domain"]
    return rows_by(top.assign(**texts), ["expert"], columns)


# --- text


def shown_documents(documents: dict[str, int]) -> list[int]:
    """Numbers of the documents to show, equally many per domain; documents are numbered domain by domain."""
    each = max(1, DOCUMENTS // max(len(documents), 1))
    shown, start = [], 0
    for count in documents.values():
        shown += list(range(start, start + min(each, count)))
        start += count
    return shown[:DOCUMENTS]


def text_payload(view: View) -> dict[str, Any] | None:
    """The first tokens of some documents of every domain, and each layer's experts and gates.

    None without a tokens table, and for a recorded trace without token ids or whose layers skip tokens.
    """
    if "tokens" not in view.run.tables or not view.main:
        return None
    frame, lengths = read_tokens(view)
    by_layer = dict(tuple(frame.groupby("layer")))
    if frame.empty or frame["token_id"].isna().any() or len({len(rows) for rows in by_layer.values()}) > 1:
        return None
    first, k = by_layer[min(by_layer)], max(int(frame["experts"].map(len).max()), 1)
    text = view.run.table("token_text").dropna() if "token_text" in view.run.tables else pd.DataFrame()
    known = dict(zip(text["token_id"], text["token"], strict=True)) if len(text) else {}
    words = [token_words(known.get(token_id), token_id) for token_id in first["token_id"].tolist()]
    documents, place = [], 0
    for document, rows in first.groupby("document"):
        end = place + len(rows)
        documents.append(
            {
                "number": int(document),
                "domain": plot_words(str(rows["domain"].iloc[0])),
                "from": place,
                "to": word_end(words, place, end) if lengths[document] > len(rows) else end,
                "tokens": lengths[document],
            }
        )
        place = end
    n_experts = view.tables["load"].groupby("layer")["expert"].max() + 1
    layers = []
    for layer, rows in sorted(by_layer.items()):
        experts = padded(rows["experts"], k, -1).astype(int)
        layers.append(
            {
                "layer": int(layer),
                "n": int(n_experts[layer]),
                "experts": experts.tolist(),
                "gates": plain(padded(rows["gates"], k, np.nan).tolist()),
                "same": agreement(experts[:, 0], rows["document"].to_numpy()),
            }
        )
    unnamed = sum(word.startswith("#") and word[1:].isdigit() for word in words)
    return {"words": words, "unnamed": unnamed, "documents": documents, "layers": layers}


def read_tokens(view: View) -> tuple[pd.DataFrame, dict[int, int]]:
    """Rows of the tokens table to show, in order, and the number of tokens of each of their documents."""
    import pyarrow.parquet as pq

    coverage = view.setup["coverage"]
    wanted = shown_documents(coverage["domains"])
    most = max(int(CHOICES / (len(view.layers) * max(coverage["k"]) * max(len(wanted), 1))), 20)
    every = [("step", "=", view.step), ("document", "in", wanted), ("phase", "=", view.phase)]
    path = view.run.intact_files("tokens")[0].absolute()
    with opened_parquet(path):  # reads only the parts of the file that are needed
        places = pq.read_table(path, columns=["document", "position"], filters=every).to_pandas()
        few = [*every, ("position", "<", min(TOKENS_EACH, most))]
        frame = pq.read_table(path, columns=COLUMNS, filters=few).to_pandas()
        wrong = wrong_column(pq.read_schema(path), TRACE_TABLES["tokens"])
    if wrong:
        raise BadInput(f"{path}: damaged parquet file ({wrong}); run its command again with --overwrite")
    lengths = places.groupby("document")["position"].max() + 1
    return frame.sort_values(["document", "position", "layer"]), lengths.to_dict()


def padded(lists: pd.Series, k: int, filler: float) -> np.ndarray:
    rectangle = np.full((len(lists), k), float(filler))
    for row, values in zip(rectangle, lists, strict=True):
        if values is not None:
            row[: len(values)] = values
    return rectangle


def word_end(words: list[str], start: int, stop: int) -> int:
    """Return where to cut a text at `stop` or a few tokens before it, so that no word is cut in two.

    A word begins with a token that begins with white space; without one nearby, cut at `stop`.
    """
    near = range(stop - 1, max(start, stop - LONGEST_WORD), -1)
    return next((place for place in near if words[place][:1].isspace()), stop)


def agreement(first: np.ndarray, document: np.ndarray) -> float | None:
    """How often a token's top expert is that of the previous token, within documents of the excerpt."""
    inside = (document[1:] == document[:-1]) & (first[1:] >= 0) & (first[:-1] >= 0)
    same = (first[1:] == first[:-1])[inside]
    return float(f"{same.mean():.4g}") if len(same) else None
