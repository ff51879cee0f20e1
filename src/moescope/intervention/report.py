"""Report on intervene: key numbers, findings, map, expert pages, sections of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from moescope.intervention.estimates import FEWEST
from moescope.intervention.figures import (
    CHANGES,
    CLAIMED,
    EXPERTS,
    GRIDS,
    NATS,
    PROJECTION,
    TOP_K,
    changes,
    claimed,
    control_words,
    grid_rows,
    interval_words,
    most_words,
    place_words,
    projection_layers,
    projection_words,
    single_changes,
    top_k_words,
    whole,
)
from moescope.intervention.tables import ALL, TABLES
from moescope.plotting.style import counted, listed, number
from moescope.reporting.pack import plain, table_payload
from moescope.run import Run
from moescope.verb import (
    FigureSpec,
    Finding,
    KeyNumber,
    LayerCards,
    Measure,
    Payload,
    Section,
    Selection,
    Summary,
    Tables,
    all_rows,
)

TAB = "interventions"
NAMED = 3  # changes or domains that a finding names
MEASURE = "loss_when_removed"
SHOWN = 20  # rows of a table of experts


def summary(run: Run) -> Summary:
    """Key numbers and findings: experts, projections, experts per token, single changes, text."""
    facts, tables = run.info["setup"], all_rows(run, Selection())
    rows = tables["interventions"]
    asked = whole(changes(rows))
    coverage = [
        f"{counted(len(asked), 'intervention')} judged on {counted(int(asked['tokens'].iloc[0]), 'token')} "
        f"of {counted(int(facts['documents']), 'document')}"
    ]
    if (documents := int(facts["documents"])) < FEWEST:
        coverage.append(f"no intervals: they need {FEWEST} judged documents, not {documents}")
    keys = [KeyNumber("Loss of the untouched model", float(asked["loss"].iloc[0]), unit=NATS)]
    findings: list[str] = []
    parts = (expert_summary, projection_summary, top_k_summary, change_summary, text_summary)
    for part in parts:
        more_keys, more_findings = part(tables)
        keys, findings = keys + more_keys, findings + more_findings
    return Summary(coverage, findings, keys)


Found = tuple[list[KeyNumber], list[str]]


def expert_summary(tables: Tables) -> Found:
    """Experts that cost more than their controls, overall and per domain."""
    if "intervention_experts" not in tables or tables["intervention_experts"].empty:
        return [], []
    rows = tables["intervention_experts"]
    found = rows[claimed(rows)]
    top = (found if len(found) else rows).nlargest(1, "loss_difference").iloc[0]
    place = {"tab": TAB, "colour": MEASURE, "layer": int(top["layer"]), "expert": int(top["expert"])}
    beyond = f", {interval_words(top, 'excess')} more than these" if len(found) else ""
    findings: list[str] = [Finding(f"Experts on all documents: {most_words(rows)}{beyond}.", **place)]
    worst = rows.loc[rows["loss_difference"].idxmax()]
    value, where = float(worst["loss_difference"]), place_words(worst)
    keys = [KeyNumber("Largest loss from one expert", value, 0.0, NATS, where, "no effect")]
    if rows["q"].notna().any():
        key = KeyNumber("Experts above controls", len(found), unit=f"of {len(rows):,}", most=float(len(rows)))
        keys.append(key)
    by_domain = changes(tables["interventions"])
    by_domain = by_domain[(by_domain["domain"] != ALL) & by_domain["expert"].notna()]
    return keys, findings + domain_findings(by_domain)


def domain_findings(rows: pd.DataFrame) -> list[str]:
    """The expert that each domain depends on most, of those beyond controls; domains without a test."""
    found = rows[claimed(rows)].sort_values("loss_difference", ascending=False).drop_duplicates("domain")
    controls = control_words(rows)
    untested = sorted(rows.groupby("domain")["q"].count().loc[lambda count: count == 0].index)
    sentences: list[str] = [
        Finding(
            f"Domain {row['domain']}: {place_words(row)} matters most; changing it costs "
            f"{interval_words(row, 'loss_difference')} {NATS}, {interval_words(row, 'excess')} more than "
            f"{controls} (q = {number(float(row['q']))}).",
            tab=TAB,
            colour=MEASURE,
            layer=int(row["layer"]),
            expert=int(row["expert"]),
        )
        for _, row in found.iterrows()
    ]
    tested = sorted(set(rows["domain"]) - set(untested))
    if silent := [domain for domain in tested if domain not in set(found["domain"])]:
        sentences.append(
            Finding(
                f"No single expert stands out for {listed(silent)}: none costs more than "
                f"{controls} (q < {CLAIMED}).",
                tab=TAB,
                figure="effect_by_domain",
            )
        )
    if untested:
        text = f"Not tested: {listed(untested)}, with fewer than 10 judged documents."
        sentences.append(Finding(text, tab=TAB, figure="effect_by_domain"))
    return sentences


def projection_summary(tables: Tables) -> Found:
    """Whether removing the aligned component costs more than removing random directions."""
    rows = tables["interventions"]
    asked = whole(changes(grid_rows(rows, PROJECTION)))
    if asked.empty:
        return [], []
    keys = []
    if asked["q"].notna().any():
        count = float(claimed(asked).sum())
        keys.append(
            KeyNumber("Projections above both controls", count, unit=f"of {len(asked)}", most=len(asked))
        )
    findings: list[str] = []
    for name, part in projection_layers(rows):
        where = f" of layer {name}" if name.isdigit() else ""
        place = {"layer": int(name)} if name.isdigit() else {}
        text = f"Removing the aligned component{where}: {first_lower(projection_words(part))}"
        findings.append(Finding(text, tab=TAB, figure="projection_curve", **place))
    if len(findings) > NAMED:
        largest = asked.loc[asked["loss_difference"].idxmax()]
        text = (
            "Removing the aligned component costs more than both random controls in "
            f"{int(claimed(asked).sum())} of {len(asked)} layers and ks (q < {CLAIMED}); largest loss "
            f"difference: layer {int(largest['layer'])}, k = {int(largest['k'])}, "
            f"{interval_words(largest, 'loss_difference')} {NATS}."
        )
        findings = [Finding(text, tab=TAB, figure="projection_curve", layer=int(largest["layer"]))]
    return keys, findings


def first_lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def top_k_summary(tables: Tables) -> Found:
    rows = changes(grid_rows(tables["interventions"], TOP_K))
    if rows.empty:
        return [], []
    text = f"Experts per token: {first_lower(top_k_words(rows))}"
    return [], [Finding(text, tab=TAB, figure="top_k_curve")]


def change_summary(tables: Tables) -> Found:
    """What single changes do to loss, predictions and routing, largest first."""
    rows = single_changes(tables["interventions"])
    if rows.empty:
        return [], []
    findings: list[str] = []
    for _, row in rows.nlargest(NAMED, "loss_difference").iterrows():
        routing = row["choices_changed"]
        later = f", {number(100 * routing)} % of later choices of experts" if pd.notna(routing) else ""
        text = (
            f"{row['change']}: loss {number(row['loss'])} changes by "
            f"{interval_words(row, 'loss_difference')} {NATS}; "
            f"{number(100 * row['predictions_changed'])} % of predictions{later} change, KL "
            f"{interval_words(row, 'kl')} nats."
        )
        place = {"layer": int(row["layer"])} if pd.notna(row["layer"]) else {}
        findings.append(Finding(text, tab=TAB, figure="effects_compared", **place))
    top = rows.loc[rows["loss_difference"].idxmax()]
    key = KeyNumber("Largest loss difference", float(top["loss_difference"]), 0.0, NATS, "", "no effect")
    return [key], findings


def text_summary(tables: Tables) -> Found:
    """Where continuations begin to differ."""
    rows = tables.get("intervention_text")
    if rows is None or rows.empty:
        return [], []
    differing = [first_difference(part) for _, part in rows.groupby(["intervention", "prompt"], sort=False)]
    known = [place for place in differing if place is not None]
    words = f"{len(known)} of {counted(len(differing), 'continuation')} with a difference"
    words += f", the earliest at token {min(known)}" if known else ""
    return [], [Finding(f"Generated text: {words}.", tab=TAB, section="continuations")]


def first_difference(rows: pd.DataFrame) -> int | None:
    """Position of the first token that differs; None where none does."""
    ordered = rows.sort_values("position")
    differs = ordered["token"].fillna("") != ordered["token_changed"].fillna("")
    return int(ordered.loc[differs, "position"].iloc[0]) if differs.any() else None


# --- map and expert pages


def measures(run: Run) -> list[Measure]:
    """Loss when an expert is removed; outlined where it costs more than its controls."""
    if "intervention_experts" not in run.tables:
        return []
    rows = run.table("intervention_experts")
    frame = rows[["layer", "expert"]].assign(
        value=rows["loss_difference"],
        low=rows["loss_difference_low"],
        high=rows["loss_difference_high"],
        chance=0.0,
        beyond=claimed(rows).astype(float).where(rows["q"].notna()),
    )
    reach = float(rows["loss_difference"].abs().max()) or 1.0
    tested = (
        f" Above controls: more than {control_words(rows)}, q < {CLAIMED}." if rows["q"].notna().any() else ""
    )
    return [
        Measure(
            MEASURE,
            "Loss when removed",
            frame,
            NATS,
            f"Loss with the expert changed minus loss without; 0: no effect.{tested}",
            0.0,
            limits=(-reach, reach),
            outline=("above controls", "not above controls"),
        )
    ]


def experts(run: Run) -> Iterator[LayerCards]:
    """The effect of every expert by domain."""
    if "intervention_experts" not in run.tables:
        return
    rows = changes(run.table("interventions"))
    rows = rows[rows["layer"].notna() & rows["expert"].notna() & (rows["domain"] != ALL)]
    for layer, of_layer in rows.groupby("layer"):
        cards: dict[int, list[Payload]] = {}
        for expert, part in of_layer.groupby("expert"):
            numbers = part[[f"loss_difference{end}" for end in ("", "_low", "_high")]].to_numpy(float)
            bars = [
                [str(domain), *plain(row.tolist())]
                for domain, row in zip(part["domain"], numbers, strict=True)
            ]
            note = f"{NATS}, with 95 % intervals over documents where there are 10; 0: no effect"
            block = {"kind": "bars", "title": "Loss when removed, by domain", "rows": bars, "note": note}
            cards[int(expert)] = [block]
        yield LayerCards(int(layer), cards)


# --- sections


def drawable(specs: Sequence[FigureSpec], tables: Tables) -> list[tuple[FigureSpec, Tables]]:
    return [(spec, tables) for spec in specs if spec.can_draw(tables)]


def sections(run: Run, selection: Selection) -> list[Section]:
    tables = all_rows(run, selection)
    parts = [experts_section(tables), grids_section(tables), changes_section(tables), text_section(tables)]
    return [part for part in parts if part is not None]


def experts_section(tables: Tables) -> Section | None:
    if "intervention_experts" not in tables or tables["intervention_experts"].empty:
        return None
    table, rows = TABLES["intervention_experts"], tables["intervention_experts"]
    top = rows.nlargest(SHOWN, "loss_difference")
    columns = [name for name in table.columns if name != "layer_name" and top[name].notna().any()]
    return Section(
        "experts",
        "Effect of each expert",
        "Every expert is changed alone. An ablation is never quite without effect, so an expert is compared, "
        "document by document, with the 4 experts of its layer nearest in load on other documents; in a "
        "layer of fewer than 16, with all others.",
        drawable(EXPERTS, tables),
        [table_payload(table, top, columns, f"The {len(top)} experts with the largest loss difference")],
    )


def grids_section(tables: Tables) -> Section | None:
    figures = drawable(GRIDS, tables)
    if not figures:
        return None
    rows = tables["interventions"]
    grid = pd.concat([grid_rows(rows, name) for name in (PROJECTION, TOP_K)])
    return Section(
        "grids",
        "Effect over k",
        "Directions removed from router rows, or experts per token.",
        figures,
        [effects_table(whole(grid), "Every k")],
    )


def changes_section(tables: Tables) -> Section | None:
    rows = single_changes(tables["interventions"])
    if rows.empty:
        return None
    figures = drawable(CHANGES, tables)
    if "intervention_experts" not in tables or tables["intervention_experts"].empty:
        figures += drawable([spec for spec in EXPERTS if spec.name == "effect_by_domain"], tables)
    every = changes(tables["interventions"])
    return Section(
        "changes",
        "Effect of the changes",
        "Loss, next-token distribution and routing with and without each change, on the same documents.",
        figures,
        [effects_table(every[every["intervention"].isin(rows["intervention"])], "Every change and domain")],
    )


def effects_table(rows: pd.DataFrame, title: str) -> Payload:
    table = TABLES["interventions"]
    hidden = (
        {"intervention", "layer_name", "change", "name", "of"}
        if rows["k"].notna().any()
        else {"intervention", "layer", "layer_name", "expert", "k", "draw", "name", "of", "role"}
    )
    columns = [name for name in table.columns if name not in hidden and rows[name].notna().any()]
    return table_payload(table, rows, columns, title)


def text_section(tables: Tables) -> Section | None:
    """Continuations with and without the change, side by side."""
    rows = tables.get("intervention_text")
    if rows is None or rows.empty:
        return None
    labels = tables["interventions"].drop_duplicates("intervention").set_index("intervention")["change"]
    pairs = []
    for (intervention, prompt), part in rows.groupby(["intervention", "prompt"], sort=False):
        ordered = part.sort_values("position")
        before, after = (
            [None if pd.isna(token) else str(token) for token in ordered[name]]
            for name in ("token", "token_changed")
        )
        pairs.append(
            {"change": str(labels[intervention]), "prompt": str(prompt), "before": before, "after": after}
        )
    text = "The most likely token is taken at every place. Marked: tokens that differ at their place."
    return Section("continuations", "Generated text before and after", text, widget=("continuations", pairs))


def guide(run: Run) -> list[str]:
    return [
        "Intervene changes a model in memory and compares it with the untouched one on the same documents. "
        "The loss difference is what the change costs per token; 0 is no effect. Its excess is what it costs "
        "beyond controls: other experts of the layer, or random directions. Claimed is what costs something "
        "and exceeds controls, corrected for the number of changes tried (q, Benjamini-Hochberg).",
    ]
