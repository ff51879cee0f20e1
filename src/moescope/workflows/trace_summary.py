"""What a trace says, in a few sentences made from its tables, each with what chance gives beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moescope.run import Run

if TYPE_CHECKING:
    import pandas as pd


def summary(run: Run) -> dict[str, Any]:
    """Everything worth printing of a trace, as plain data."""
    return {
        "run": str(run.path),
        "verb": run.info["verb"],
        "status": run.info["status"],
        "checkpoints": run.info["checkpoints"],
        "coverage": [coverage_line(item) for item in run.info["coverage"]],
        "findings": findings(run),
        "warnings": run.info.get("warnings", []),
        "timings": run.info["timings"],
        "tables": run.tables,
    }


def coverage_line(item: dict[str, Any]) -> str:
    experts = "/".join(str(n) for n in item["experts_per_layer"])
    k = "/".join(str(n) for n in item["k"])
    tokens, documents = sum(item["tokens"].values()), sum(item["domains"].values())
    by_domain = ", ".join(f"{name} {count:,}" for name, count in item["tokens"].items())
    return (
        f"{item['model_type']}: {item['layers']} MoE layers, {experts} experts, {k} a token; {tokens:,} tokens in {documents:,} "
        f"documents" + (f" ({by_domain})" if len(item["tokens"]) > 1 else "")
    )


def findings(run: Run) -> list[str]:
    """The last step's main phase, all domains together: the most uneven layer, unused experts, the least decided layer, domains."""
    rows = run.table("routing_layers")
    rows = rows[(rows["step"] == rows["step"].max()) & (rows["domain"] == "")]
    phase = "prefill" if (rows["phase"] == "prefill").any() else "decode"
    rows = rows[rows["phase"] == phase]
    found = []
    if (uneven := extreme(rows, "cv", largest=True)) is not None:
        found.append(f"Load is most uneven in layer {uneven['layer']}: cv {uneven['value']:.3g}, random routing {uneven['floor']:.3g}, collapse {uneven['collapse']:.3g}.")  # fmt: skip
    if (busiest := extreme(rows, "max_over_mean", largest=True)) is not None:
        found.append(f"The busiest expert, in layer {busiest['layer']}, gets {busiest['value']:.3g} times the mean load, random routing {busiest['floor']:.3g}.")  # fmt: skip
    unused = rows[(rows["metric"] == "unused") & (rows["value"] > 0)]
    if len(unused):
        worst = unused.loc[unused["value"].idxmax()]
        found.append(f"{len(unused)} layers have experts no token chose; most in layer {worst['layer']}: {worst['value']:.0%}, random routing {worst['floor']:.2g}.")  # fmt: skip
    if (sure := extreme(rows, "routing_entropy", largest=False)) is not None:
        found.append(f"The router is most decided in layer {sure['layer']}: entropy {sure['value']:.3g} nats, {sure['floor']:.3g} for one that knows nothing.")  # fmt: skip
    if (told := extreme(rows, "domain_information", largest=True)) is not None:
        found.append(f"Experts tell domains apart best in layer {told['layer']}: {told['value']:.3g} nats, chance 0.")
    if (words := extreme(rows, "token_information", largest=True)) is not None:
        found.append(f"The token itself tells most about its experts in layer {words['layer']}: {words['value']:.3g} nats, {words['floor']:.3g} with tokens shuffled within documents.")  # fmt: skip
    return found


def extreme(rows: pd.DataFrame, metric: str, largest: bool) -> Any:
    mine = rows[(rows["metric"] == metric) & rows["value"].notna()]
    if not len(mine):
        return None
    return mine.loc[mine["value"].idxmax() if largest else mine["value"].idxmin()]
