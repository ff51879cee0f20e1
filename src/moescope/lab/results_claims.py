"""Verdicts on published claims, from the numbers of the page "Results"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from moescope.lab.results import (
    ARM_CLAIMS,
    BASELINE,
    CONFIRMED,
    EFFECT,
    GIVEN_LOAD,
    METHOD,
    NOT_TESTABLE,
    PREDICTORS,
    REFUTED,
    SIMILAR_COST,
    SPECIALISED,
    UNDECIDED,
    VARIANTS,
    VERDICTS,
    Estimate,
    Results,
    Tests,
    block_milliseconds,
    by_seed,
    compared_arms,
    consistency_beyond_chance,
    effect_ceiling,
    layer_means,
    layer_value,
    loss_gain,
    over_seeds,
    study_name,
    tested_predictors,
)
from moescope.lab.results_conditions import setting
from moescope.lab.study_statistics import MIN_SEEDS
from moescope.plotting.style import counted, listed
from moescope.verb import Tables

FEWEST = 20  # documents for a claim about the outputs of experts


@dataclass(frozen=True)
class Claim:
    """A published claim, its verdict and the number that decides it."""

    name: str
    claim: str
    measure: str  # what the number is
    number: Estimate | None
    why: str = ""
    verdict: str = NOT_TESTABLE
    counts: str = ""  # in place of a number over seeds: what was counted


def hypotheses(results: Results) -> list[Claim]:
    """Return H1 to H7."""
    found, both = results.tests, missing(METHOD, BASELINE)
    main = results.main
    return [
        add_repeated_difference(
            judge(
                "H1",
                "SPECTRA predicts better than Switch routing",
                "loss of Switch Top-2 minus SPECTRA (nats per token)",
                found["main", BASELINE],
                both,
            ),
            results,
        ),
        add_router_values(
            require_documents(
                judge(
                    "H2",
                    "Experts of SPECTRA are more distinct",
                    f"orthogonality of expert outputs{documents_text(main)}, SPECTRA minus Switch Top-2",
                    found["H2",],
                    both,
                ),
                main,
            ),
            main,
            lambda arm: layer_value(main, arm, "output_orthogonality"),
        ),
        add_router_values(
            require_measured_chance(
                judge(
                    "H3",
                    "SPECTRA routes more consistently",
                    "routing consistency of checkpoints, corrected for chance, SPECTRA minus Switch Top-2",
                    found["H3",],
                    both + ", with several checkpoints",
                ),
                main,
            ),
            main,
            lambda arm: over_seeds(consistency_beyond_chance(main, arm)),
        ),
        cost(results),
        components(found),
        judge(
            "H6",
            "The gain grows with the model",
            "change of the gain over Switch Top-2 per doubling of active parameters (nats; lab sizes only)",
            found["H6",],
            "needs both routers at two sizes or more",
        ),
        judge(
            "H7",
            "The gain is larger in specialised domains",
            "gain over Switch Top-2 in specialised minus other domains (nats per token)",
            found["H7",],
            f"needs both routers and domains of both kinds; specialised are {', '.join(SPECIALISED)}",
        ),
    ]


def verdict_counts(claims: list[Claim]) -> str:
    """Return "1 refuted, 5 undecided and 1 not testable"."""
    counts = Counter(one.verdict.split(":")[0] for one in claims)
    return listed([f"{counts[name]} {name}" for name in VERDICTS if counts[name]])


def arm_claims(results: Results, subject: str) -> list[Claim]:
    """Return the claims on pairs of arms, of each study that has them."""
    found, claims = results.tests, []
    for claim, arm, other in ARM_CLAIMS[subject]:
        compared = [name for name in map(study_name, results.others) if found[name, arm, other]]
        measure = f"loss of {other} minus {arm} (nats per token)"
        claims += [
            judge(name, claim, measure, found.get((name, arm, other)), missing(arm, other))
            for name in compared or [""]
        ]
    return claims


def effect_claims(results: Results) -> list[Claim]:
    """Return the claims on what predicts the effect of removing an expert, over all routers with rows."""
    tables, claims = results.effects, []
    needs = "needs a study that removes every expert"
    tested = tested_predictors(tables)
    for metric in tested or [f"{EFFECT}{name}" for name in PREDICTORS]:
        predictor, given, _ = metric.removeprefix(EFFECT).partition(GIVEN_LOAD)
        claim = f"Experts of {'higher' if PREDICTORS[predictor] > 0 else 'lower'} {predictor} matter more"
        claim += ", also at equal load" if given else ""
        arms = tested.get(metric, [])
        measure = (
            f"rank correlation of {'' if PREDICTORS[predictor] > 0 else 'minus '}{predictor} with the effect "
            "of removing the expert, within layers; mean over layers and routers (experts permuted: zero)"
        )
        one = judge("", claim, measure, results.tests.get(("effect", metric)), needs)
        parts = [one.why] if one.why else []
        if one.number:
            sign = PREDICTORS[predictor]
            values = {arm: sign * layer_means(tables, arm, metric).mean() for arm in arms}
            parts.append("by router: " + ", ".join(f"{arm} {value:.2f}" for arm, value in values.items()))
            ceilings = {arm: effect_ceiling(tables, arm) for arm in arms}
            known = [f"{arm} {value:.2f}" for arm, value in ceilings.items() if value == value and not given]
            parts += [f"most that the noise of the effects allows: {', '.join(known)}"] if known else []
        claims.append(replace(one, why="; ".join(parts).replace("-", "−")))
    return claims


def judge(name: str, claim: str, measure: str, found: Estimate | None, needs: str) -> Claim:
    """Confirm or refute by the sign of a number whose Holm-corrected p is at most 0.05, from five seeds.

    An unfinished study decides nothing, and arms with failed trainings confirm nothing: seeds that fail are
    missing from the mean.
    """
    if found is None:
        return Claim(name, claim, measure, None, needs)
    if found.unfinished:
        return Claim(name, claim, measure, found, "", found.unfinished)
    if found.seeds < MIN_SEEDS:
        return Claim(name, claim, measure, found, "too few seeds to claim anything")
    if not found.significant:
        interval = f"95 % interval {found.low:.3f} to {found.high:.3f} (not corrected)".replace("-", "−")
        return Claim(name, claim, measure, found, interval, UNDECIDED)
    if found.mean < 0:
        return Claim(name, claim, measure, found, "", REFUTED)
    if found.failed:
        why = f"{counted(found.failed, 'training')} of these arms failed"
        return Claim(name, claim, measure, found, why, UNDECIDED)
    return Claim(name, claim, measure, found, "", CONFIRMED)


def missing(*arms: str) -> str:
    return f"needs finished trainings of {' and '.join(arms)}"


def documents_text(tables: Tables) -> str:
    """Return " for tokens of N documents", where N is stored, else nothing."""
    counts = by_seed(tables, METHOD, "output_documents")
    return f" for tokens of {counted(int(counts.min()), 'document')}" if len(counts) else ""


def require_documents(claim: Claim, tables: Tables) -> Claim:
    """Leave a claim undecided if the outputs of experts are for tokens of few documents."""
    counts = by_seed(tables, METHOD, "output_documents")
    if claim.verdict not in (CONFIRMED, REFUTED) or not len(counts) or counts.min() >= FEWEST:
        return claim
    return replace(claim, verdict=UNDECIDED, why=f"significant, but {documents_text(tables).strip()} only")


def require_measured_chance(claim: Claim, tables: Tables) -> Claim:
    """Leave H3 undecided where the chance level was not measured, and give the difference without it."""
    estimated = by_seed(tables, METHOD, "consistency_estimated")
    if claim.number is None or not estimated.any():
        return claim
    raw = over_seeds(
        (by_seed(tables, METHOD, "consistency") - by_seed(tables, BASELINE, "consistency")).dropna()
    )
    words = f"{raw.mean:.3f} ± {raw.half:.3f}".replace("-", "−") if raw else ""
    why = f"the chance level is estimated from the loads of the last checkpoint; without correction: {words}"
    return replace(claim, verdict=UNDECIDED, why=why)


def add_repeated_difference(claim: Claim, results: Results) -> Claim:
    """Add the same difference in the study of ablations, which trains both arms again."""
    repeated = over_seeds(loss_gain(results.ablation, METHOD, BASELINE).dropna())
    if claim.number is None or repeated is None or results.ablation is results.main:
        return claim
    found = f"{repeated.mean:.3f} ± {repeated.half:.3f}".replace("-", "−")
    text = f"trained again in {study_name(results.ablation)}: {found} (not corrected)"
    return replace(claim, why="; ".join(part for part in (claim.why, text) if part))


def add_router_values(claim: Claim, tables: Tables, value: Callable[[str], Estimate | None]) -> Claim:
    """Add the values of all routers, and the learning rates of the two that are compared."""
    known = {arm: found.mean for arm in compared_arms(tables) if (found := value(arm))}
    if claim.number is None or not known:
        return claim
    ordered = sorted(known, key=lambda arm: -known[arm])
    parts = [claim.why] if claim.why else []
    parts.append("all routers: " + ", ".join(f"{arm} {known[arm]:.3f}" for arm in ordered))
    rates = {arm: setting(tables, arm, "learning_rate") for arm in (METHOD, BASELINE)}
    if len(set(rates.values())) > 1:
        words = " and ".join(f"{arm} {rate:g}" for arm, rate in rates.items())
        parts.append(f"learning rates differ ({words}): a claim about tuned routers, not the mechanism alone")
    return replace(claim, why="; ".join(parts))


def cost(results: Results) -> Claim:
    """Similar cost: counted FLOPs and the time of a block alone, each over those of the baseline.

    The speed of trainings is no measure: several share a device.
    """
    claim = "SPECTRA costs about as much as Switch routing"
    measure = (
        "FLOPs per token of the whole model (counted) and time of one block alone on the device, not "
        "compiled, each over that of Switch Top-2 (similar: at most a tenth more); counts, no test"
    )
    flops, baseline = (by_seed(results.main, arm, "flops_per_token").mean() for arm in (METHOD, BASELINE))
    if not (flops > 0 and baseline > 0):
        return Claim("H4", claim, measure, None, missing(METHOD, BASELINE))
    ratios, words = [flops / baseline], f"FLOPs {flops / baseline:.2f} times"
    times = block_ratio(results)
    if times is None:
        why = "FLOPs alone decide nothing; no study has timed both blocks"
        return Claim("H4", claim, measure, None, why, UNDECIDED, words)
    ratios.append(times)
    words += f", block time {times:.2f} times"
    verdict = UNDECIDED
    if min(ratios) > SIMILAR_COST:
        verdict = REFUTED
    elif max(ratios) <= SIMILAR_COST:
        verdict = CONFIRMED
    return Claim("H4", claim, measure, None, "", verdict, words)


def block_ratio(results: Results) -> float | None:
    """Return the time of the method's block over that of the baseline, from one table of timings."""
    for tables in (results.main, results.ablation):
        method, baseline = (block_milliseconds(tables, arm) for arm in (METHOD, BASELINE))
        if method and baseline:
            return method / baseline
    return None


def components(found: Tests) -> Claim:
    """Each component that the hypothesis names: its removal makes the loss worse."""
    named = {title: found["ablation", arm] for title, arm, component in VARIANTS if component}
    measure = "smallest gain of a component that H5 names: loss without minus loss with it (nats per token)"
    claim = "Each component lowers the loss"
    known = {title: one for title, one in named.items() if one}
    if len(known) < len(named):
        lacking = ", ".join(title for title in named if title not in known)
        return Claim("H5", claim, measure, None, f"not run: {lacking}")
    title, smallest = min(known.items(), key=lambda pair: pair[1].mean)
    if smallest.unfinished:
        return Claim("H5", claim, measure, smallest, f"smallest gain: {title}", smallest.unfinished)
    worse = sum(one.mean > 0 and one.significant for one in known.values())
    why = f"{worse} of {len(known)} removals make it significantly worse; smallest gain: {title}"
    if any(one.seeds < MIN_SEEDS for one in known.values()):
        return Claim("H5", claim, measure, smallest, f"{why}; too few seeds to claim anything")
    if any(one.mean < 0 and one.significant for one in known.values()):
        return Claim("H5", claim, measure, smallest, why, REFUTED)
    if any(one.failed for one in known.values()):
        return Claim("H5", claim, measure, smallest, f"{why}; trainings failed", UNDECIDED)
    verdict = CONFIRMED if worse == len(known) else UNDECIDED
    return Claim("H5", claim, measure, smallest, why, verdict)
