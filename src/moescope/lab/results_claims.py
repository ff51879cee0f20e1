"""Verdicts on published claims, from the numbers of the page "Results"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from moescope.lab.results import (
    ARM_CLAIMS,
    AT_BASELINE_RATE,
    BASELINE,
    CONFIRMED,
    EFFECT,
    GIVEN_LOAD,
    METHOD,
    NOT_TESTABLE,
    PREDICTORS,
    REFUTED,
    SET_ASIDE,
    SIMILAR_COST,
    SPECIALISED,
    UNDECIDED,
    VARIANTS,
    VERDICTS,
    Estimate,
    Results,
    Tests,
    arm_at,
    axis_values,
    block_milliseconds,
    by_seed,
    consistency_beyond_chance,
    effect_ceiling,
    finished_arms,
    layer_means,
    loss_gain,
    over_seeds,
    paired,
    study_name,
    tested_predictors,
    trainings,
    worse_than_smaller,
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
        add_checks(
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
            results,
            lambda tables, arm: -by_seed(tables, arm, "validation_loss"),
        ),
        add_checks(
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
            results,
            lambda tables, arm: layer_means(tables, arm, "output_orthogonality"),
        ),
        add_checks(
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
            results,
            consistency_beyond_chance,
        ),
        cost(results),
        components(found),
        require_growth(
            judge(
                "H6",
                "The gain grows with the model",
                "change of the gain over Switch Top-2 per doubling of active parameters (nats; lab sizes "
                "only)",
                found["H6",],
                "needs both routers at two sizes or more",
            ),
            results.sizes,
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
        measure = f"loss of {other} minus {arm} (nats per token)"
        studies = {study_name(tables): tables for tables in results.others}
        compared = {name: tables for name, tables in studies.items() if found[name, arm, other]}
        for name, tables in compared.items():
            one = judge(name, claim, measure, found[name, arm, other], "")
            parts = [one.why, *training_differences(tables, arm, other)]
            claims.append(replace(one, why="; ".join(part for part in parts if part)))
        if not compared:
            failed = [
                part for tables in results.others for part in no_better_than_unigram(tables, arm, other)
            ]
            claims.append(judge("", claim, measure, None, "; ".join(failed) or missing(arm, other)))
    return claims


def training_differences(tables: Tables, *arms: str) -> list[str]:
    """Say where the arms' learning rates differ, and where a loss rises at the end of training."""
    rates = [f"{arm} {rate:g}" for arm in arms if (rate := setting(tables, arm, "learning_rate"))]
    slopes = {arm: by_seed(tables, arm, "loss_slope").mean() for arm in arms}
    rising = [f"{arm} by {slope:.2f}" for arm, slope in slopes.items() if slope > 0]
    parts = [f"learning rates: {listed(rates)}"] if len({rate.split()[-1] for rate in rates}) > 1 else []
    return parts + ([f"at the end losses rise per 1,000 steps: {listed(rising)}"] if rising else [])


def no_better_than_unigram(tables: Tables, *arms: str) -> list[str]:
    """Say which arms were trained and yet are no better than the unigram baseline: they enter no claim."""
    done = trainings(tables)
    done = set(done.loc[done["status"].isin(["done", SET_ASIDE]), "arm"]) - finished_arms(tables)
    return [
        f"{arm} in {study_name(tables)} is no better than the unigram baseline" for arm in arms if arm in done
    ]


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
        limits = f"95 % interval {found.low:.3f} to {found.high:.3f} (not corrected)".replace("-", "−")
        return Claim(name, claim, measure, found, limits, UNDECIDED)
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
    words = interval(raw) if raw else ""
    why = f"the chance level is estimated from the loads of the last checkpoint; without correction: {words}"
    return replace(claim, verdict=UNDECIDED, why=why)


def add_repeated_difference(claim: Claim, results: Results) -> Claim:
    """Add the same difference in the study of ablations, which trains both arms again."""
    repeated = over_seeds(loss_gain(results.ablation, METHOD, BASELINE).dropna())
    if claim.number is None or repeated is None or results.ablation is results.main:
        return claim
    text = f"trained again in {study_name(results.ablation)}: {interval(repeated)} (not corrected)"
    return replace(claim, why="; ".join(part for part in (claim.why, text) if part))


def require_growth(claim: Claim, tables: Tables) -> Claim:
    """Leave H6 undecided where a model predicts worse than a smaller one: its learning rate does not fit."""
    arm = worse_than_smaller(tables)
    if claim.number is None or not arm:
        return claim
    verdict = UNDECIDED if claim.verdict in (CONFIRMED, REFUTED) else claim.verdict
    why = f"{arm} predicts worse than a smaller model: learning rates were tuned at one size"
    return replace(claim, verdict=verdict, why=why)


def add_checks(claim: Claim, results: Results, value: Callable[[Tables, str], pd.Series]) -> Claim:
    """Add the same difference at one learning rate, by number of experts and by size; no test."""
    if claim.number is None:
        return claim
    parts = [claim.why] if claim.why else []
    rates = {arm: setting(results.main, arm, "learning_rate") for arm in (METHOD, BASELINE)}
    if len(set(rates.values())) > 1:
        text = f"learning rates differ ({listed([f'{arm} {rate:g}' for arm, rate in rates.items()])})"
        same = paired(value(results.controls, AT_BASELINE_RATE), value(results.controls, BASELINE))
        text += (
            f"; both at that of {BASELINE}: {interval(same)}, {counted(same.seeds, 'seed')}" if same else ""
        )
        parts.append(text)
    misfit = (
        " (learning rates of larger ones do not fit, see H6)" if worse_than_smaller(results.sizes) else ""
    )
    for tables, axis, title in (
        (results.experts, "experts", "experts"),
        (results.sizes, "size", f"size{misfit}"),
    ):
        found = {
            place: paired(*(value(tables, arm_at(tables, arm, axis, place) or "") for arm in rates))
            for place in axis_values(tables, axis)
        }
        known = [f"{place:g}" if isinstance(place, float) else str(place) for place in found]
        values = [f"{name}: {one.mean:.3f}" for name, one in zip(known, found.values(), strict=True) if one]
        parts += [f"by {title}: {', '.join(values)}"] if len(values) > 1 else []
    return replace(claim, why="; ".join(parts).replace(" -", " −"))


def interval(found: Estimate) -> str:
    return f"{found.mean:.3f} ± {found.half:.3f}".replace("-", "−")


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
