"""Verdicts on published claims, from the numbers of the page "Results"."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import pandas as pd

from moescope.lab.results import (
    ARM_CLAIMS,
    AT_BASELINE_RATE,
    AT_METHOD_RATE,
    BASELINE,
    CONFIRMED,
    EFFECT,
    GIVEN_LOAD,
    METHOD,
    NOT_TESTABLE,
    PREDICTORS,
    RATE,
    REFUTED,
    SET_ASIDE,
    SIMILAR_COST,
    SPACING,
    SPECIALISED,
    UNDECIDED,
    VARIANTS,
    VERDICTS,
    WIDE_BASELINE,
    Estimate,
    Results,
    Tests,
    arm_at,
    arms_by_size,
    axis_values,
    block_milliseconds,
    by_seed,
    consistency_beyond_chance,
    effect_ceiling,
    finished_arms,
    layer_means,
    layer_value,
    layer_values,
    loss_gain,
    on_axis,
    over_seeds,
    paired,
    progress,
    run_value,
    setting,
    study_name,
    tested_predictors,
    trainings,
    worse_than_smaller,
)
from moescope.lab.results_conditions import (
    outlier_text,
    stalled_text,
    wide_and_worse,
    wide_title,
    without_stalled,
)
from moescope.lab.study_statistics import MIN_SEEDS, doubling_slopes
from moescope.plotting.style import counted, listed
from moescope.verb import Tables

DISTINCTNESS = "output_orthogonality"  # metric of study_layers
BOTH_AT = "both at rate"
WORSE = " (worse than smaller models)"
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

    def with_reasons(self, *reasons: str) -> Claim:
        return replace(self, why="; ".join(part for part in (self.why, *reasons) if part))

    def undecided(self) -> Claim:
        """The claim without its verdict, if it was confirmed or refuted."""
        return replace(self, verdict=UNDECIDED) if self.verdict in (CONFIRMED, REFUTED) else self


def hypotheses(results: Results) -> list[Claim]:
    """Return H1 to H7."""
    found, both = results.tests, missing(METHOD, BASELINE)
    main = results.main
    compared = [
        judge(
            "H1",
            "SPECTRA predicts better than Switch Top-2",
            "loss of Switch Top-2 minus SPECTRA (nats per token)",
            found["main", BASELINE],
            both,
        ),
        require_documents(
            judge(
                "H2",
                "Experts of SPECTRA are more distinct",
                f"orthogonality of expert outputs{documents_text(main)}, SPECTRA minus Switch Top-2"
                + levels_text(main),
                found["H2",],
                both,
            ),
            main,
        ),
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
    ]
    rates, others = rates_text(main, METHOD, BASELINE), elsewhere(results)
    return [
        *(
            require_no_reversal(one, others, at).with_reasons(rates) if one.number else one
            for at, one in enumerate(compared)
        ),
        cost(results),
        components(found),
        require_growth(
            judge(
                "H6",
                "The gain grows with the model",
                "change of the gain over Switch Top-2 per doubling of Top-2's active parameters (nats; lab "
                "sizes only)",
                found["H6",],
                "needs both routers at two sizes or more",
            ),
            results.sizes,
        ).with_reasons(size_rates_text(results.sizes), slope_text(results), size_active_text(results.sizes)),
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
            one = require_falling(
                judge(name, claim, measure, found[name, arm, other], ""), tables, arm, other
            )
            rates = rates_text(tables, arm, other), same_rate(results, tables, arm, other)
            outlier = outlier_text(loss_gain(tables, arm, other))
            one = one.with_reasons(outlier, *rates, parameters_text(tables, arm, other))
            claims.append(require_trained(one, tables, arm, other))
        if not compared:
            failed = [
                part for tables in results.others for part in no_better_than_unigram(tables, arm, other)
            ]
            one = judge("", claim, measure, None, "; ".join(failed) or missing(arm, other))
            claims.append(replace(one, counts="no number" if failed else ""))
    return claims


def require_trained(claim: Claim, tables: Tables, arm: str, other: str) -> Claim:
    """Give no number on few seeds where no pair of trainings is left without those that stalled."""
    learned = loss_gain(without_stalled(tables), arm, other).dropna()
    if claim.verdict != NOT_TESTABLE or len(learned):
        return claim
    why = f"{stalled_text(tables, arm, other)} trainings of these arms stalled"
    return replace(claim, number=None, counts="no number", why=why)


def require_falling(claim: Claim, tables: Tables, arm: str, other: str) -> Claim:
    """Leave a claim undecided where a loss rises at the end: where training stops then decides it.

    Adds the difference of the lowest losses on the way, on the rows that are evaluated during training.
    """
    found = {one: run_value(tables, one, "loss_slope") for one in (arm, other)}
    rising = [f"{one} by {interval(slope)}" for one, slope in found.items() if slope and slope.low > 0]
    if claim.number is None or not rising:
        return claim
    lowest = paired(*(lowest_loss(tables, one) for one in (other, arm)))
    return claim.undecided().with_reasons(
        f"at the end losses rise per 1,000 steps: {listed(rising)}",
        f"difference of the lowest losses: {interval(lowest)}" if lowest else "",
    )


def lowest_loss(tables: Tables, arm: str) -> pd.Series:
    """Return the lowest validation loss during training, by seed."""
    rows = tables.get("study_curves", pd.DataFrame(columns=["arm", "seed", "validation_loss"]))
    lowest: pd.Series = rows[rows["arm"] == arm].groupby("seed")["validation_loss"].min()
    return lowest.astype(float)


def same_rate(results: Results, tables: Tables, arm: str, other: str) -> str:
    """Return the difference to the baseline at the arm's own learning rate, where a control has it."""
    rate = setting(tables, arm, RATE)
    if other != BASELINE or tables is not results.main or not rate:
        return ""
    if rate != setting(results.controls, AT_METHOD_RATE, RATE):
        return ""
    found = paired(
        *(by_seed(*one, "validation_loss") for one in ((results.controls, AT_METHOD_RATE), (tables, arm)))
    )
    return f"{other} at that of {arm}: {interval(found)}, {counted(found.seeds, 'seed')}" if found else ""


def no_better_than_unigram(tables: Tables, *arms: str) -> list[str]:
    """Say of which arms no training is better than the unigram baseline: they enter no claim."""
    runs = trainings(tables)
    runs = runs[runs["status"].isin(["done", SET_ASIDE])]
    if "unigram_loss" not in runs:
        return []
    above = runs.assign(above=runs["validation_loss"] >= runs["unigram_loss"]).groupby("arm")["above"]
    return [
        f"{arm}: no better than the unigram baseline in {counted(int(above.size()[arm]), 'training')}"
        for arm in arms
        if above.all().get(arm, False)
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

    An unfinished study decides nothing. Seeds that fail are missing from the mean, so arms with failed
    trainings confirm nothing, and refute nothing unless it is the claim's own arm that failed.
    """
    if found is None:
        return Claim(name, claim, measure, None, needs)
    failed = failed_text(found.failed)
    if found.unfinished:
        return Claim(name, claim, measure, found, failed, found.unfinished)
    if found.seeds < MIN_SEEDS:
        return Claim(name, claim, measure, found, "too few seeds to claim anything").with_reasons(failed)
    if not found.significant:
        limits = f"95 % interval {found.low:.3f} to {found.high:.3f} (not corrected)".replace("-", "−")
        return Claim(name, claim, measure, found, limits, UNDECIDED).with_reasons(failed)
    if found.failed_others if found.mean < 0 else found.failed:
        return Claim(name, claim, measure, found, failed, UNDECIDED)
    return Claim(name, claim, measure, found, failed, REFUTED if found.mean < 0 else CONFIRMED)


def failed_text(trainings: int) -> str:
    words = f"{counted(trainings, 'training')} of these arms failed or did not beat the unigram baseline"
    return words if trainings else ""


def missing(*arms: str) -> str:
    return f"needs finished trainings of {' and '.join(arms)}"


def documents_text(tables: Tables) -> str:
    """Return " for tokens of N documents", where N is stored, else nothing; of the arm that has fewer."""
    fewest = fewest_documents(tables)
    return f" for tokens of {counted(int(fewest), 'document')}" if fewest < math.inf else ""


def fewest_documents(tables: Tables) -> float:
    """Return how many documents outputs are compared on, of both routers the fewer; inf if not stored."""
    counts = pd.concat([by_seed(tables, arm, "output_documents") for arm in (METHOD, BASELINE)])
    return float(counts.min()) if len(counts) else math.inf


def levels_text(tables: Tables) -> str:
    """Return both routers' orthogonality and that of random outputs, in brackets, where they are known."""
    both = {arm: layer_value(tables, arm, DISTINCTNESS) for arm in (METHOD, BASELINE)}
    words = [f"{arm} {one.mean:.3f}" for arm, one in both.items() if one]
    words += [
        f"random outputs {one.chance:.3f}" for one in both.values() if one and one.chance == one.chance
    ][:1]
    return f" ({', '.join(words)})" if words else ""


def require_documents(claim: Claim, tables: Tables) -> Claim:
    """Leave a claim undecided if the outputs of experts are for tokens of few documents."""
    if claim.verdict not in (CONFIRMED, REFUTED) or fewest_documents(tables) >= FEWEST:
        return claim
    return replace(claim, verdict=UNDECIDED, why=f"significant, but {documents_text(tables).strip()} only")


def require_measured_chance(claim: Claim, tables: Tables) -> Claim:
    """Leave H3 undecided where the chance level was not measured, and give the difference without it."""
    estimated = [by_seed(tables, arm, "consistency_estimated").any() for arm in (METHOD, BASELINE)]
    if claim.number is None or not any(estimated):
        return claim
    raw = over_seeds(
        (by_seed(tables, METHOD, "consistency") - by_seed(tables, BASELINE, "consistency")).dropna()
    )
    words = interval(raw) if raw else ""
    why = f"the chance level is estimated from the loads of the last checkpoint; without correction: {words}"
    return replace(claim, verdict=UNDECIDED, why=why)


def require_growth(claim: Claim, tables: Tables) -> Claim:
    """Leave H6 undecided where a model predicts worse than a smaller one: it was not trained well."""
    arms = worse_than_smaller(tables)
    if claim.number is None or not arms:
        return claim
    return claim.undecided().with_reasons(f"worse than a smaller model: {listed(arms)}")


def rates_text(tables: Tables, *arms: str) -> str:
    """Return the learning rates where they differ, else nothing."""
    rates = {arm: rate for arm in arms if (rate := setting(tables, arm, RATE))}
    if len(set(rates.values())) < 2:
        return ""
    return f"learning rates: {listed([f'{arm} {rate:g}' for arm, rate in rates.items()])}"


def parameters_text(tables: Tables, *arms: str) -> str:
    """Return the active and the trained parameters where they differ by more than a twentieth."""
    parts = []
    for kind, column in (("active", "parameters_active"), ("trained", "parameters_trainable")):
        counts = {arm: by_seed(tables, arm, column).mean() for arm in arms}
        if max(counts.values()) > 1.05 * min(counts.values()):
            parts.append(
                f"{kind} parameters: {listed([f'{arm} {n / 1e6:.1f} M' for arm, n in counts.items()])}"
            )
    return "; ".join(parts)


def size_rates_text(tables: Tables) -> str:
    """Return the learning rates of both routers by size, the smallest first, where they differ."""
    rates = {
        router: [rate for arm in arms_by_size(tables, router) if (rate := setting(tables, arm, RATE))]
        for router in (METHOD, BASELINE)
    }
    if not all(rates.values()) or rates[METHOD] == rates[BASELINE]:
        return ""
    words = [f"{router} {', '.join(f'{rate:g}' for rate in found)}" for router, found in rates.items()]
    return f"learning rates, the smallest model first: {' and '.join(words)}"


def size_active_text(tables: Tables) -> str:
    """Return the method's active parameters over those of the baseline, by size, where they differ."""
    method, baseline = (
        [by_seed(tables, arm, "parameters_active").mean() for arm in arms_by_size(tables, router)]
        for router in (METHOD, BASELINE)
    )
    ratios = [one / other for one, other in zip(method, baseline, strict=False)]
    if len(method) != len(baseline) or not max(ratios, default=1.0) > 1.05:
        return ""
    return f"active parameters of {METHOD} over those of {BASELINE}: {', '.join(f'{r:.2f}' for r in ratios)}"


def slope_text(results: Results) -> str:
    """Return H6's number with the rates of the baseline for both routers, where rates differ.

    Nothing unless every size was trained so.
    """
    if not size_rates_text(results.sizes):
        return ""
    gains = [
        (
            by_seed(*other, "parameters_active").iloc[0],
            by_seed(*other, "validation_loss") - by_seed(*one, "validation_loss"),
        )
        for _, one, other in at_baseline_rates(results)
    ]
    found = over_seeds(doubling_slopes(gains))
    if found is None or found.seeds < MIN_SEEDS or len(gains) < len(axis_values(results.sizes, "size")):
        return ""
    return f"both at those of {BASELINE}: {interval(found, 4)}, {counted(found.seeds, 'seed')}"


Arm = tuple[Tables, str]


def at_baseline_rates(results: Results) -> list[tuple[str, Arm, Arm]]:
    """Return size and arms of both routers at the learning rate of the baseline, of finished studies.

    The controls are of the size that has as many active parameters, trained for as many steps.
    """
    found: list[tuple[str, Arm, Arm]] = []
    others, of_controls = (
        {} if one and progress(one, 0) else one for one in (results.size_rates, results.controls)
    )
    controls = [(of_controls, arm) for arm in (AT_BASELINE_RATE, BASELINE)]
    for size in axis_values(results.sizes, "size"):
        baseline = results.sizes, arm_at(results.sizes, BASELINE, "size", size) or ""
        pairs = equal_rates([results.sizes, others], size)
        same_size = [
            (by_seed(*arm, "parameters_active").mean(), setting(*arm, "steps"))
            for arm in (baseline, controls[1])
        ]
        if same_size[0] == same_size[1]:
            pairs.append((setting(*controls[1], RATE) or 0.0, controls[0], controls[1]))
        same = [(one, other) for rate, one, other in pairs if rate == setting(*baseline, RATE)]
        found += [(size, *both) for both in same[:1]]
    return found


def equal_rates(studies: list[Tables], size: str) -> list[tuple[float, Arm, Arm]]:
    """Return rate and arms of both routers of that size which share a learning rate, highest first."""
    rates = [
        ((tables, arm), setting(tables, arm, RATE))
        for tables in studies
        for arm, label in on_axis(tables, "size")[["arm", "label"]].itertuples(index=False)
        if label == size and arm in finished_arms(tables)
    ]
    pairs = [
        (rate, one, other)
        for one, rate in rates
        for other, same in rates
        if rate and rate == same and [arm.split(" ")[0] for _, arm in (one, other)] == [METHOD, BASELINE]
    ]
    return sorted(pairs, key=lambda pair: -pair[0])


Check = tuple[str, list[Estimate | None]]  # where, and the numbers of H1 to H3


def checks(results: Results) -> list[Check]:
    """Return what the numbers of H1 to H3 are in the main study, elsewhere, and in its layers."""
    main = results.main
    layers = sorted(layer_values(main, METHOD, DISTINCTNESS)["layer"].unique())
    by_layer = [paired(*(distinctness(main, arm, layer) for arm in (METHOD, BASELINE))) for layer in layers]
    own = [check(study_name(main), main, METHOD, main, BASELINE)] if main else []
    rows = [
        *own,
        *elsewhere(results),
        *((f"layer {layer}", [None, found, None]) for layer, found in zip(layers, by_layer, strict=True)),
    ]
    return [(title, found) for title, found in rows if any(found)]


def elsewhere(results: Results) -> list[Check]:
    """Return the numbers of H1 to H3 in other studies: at one learning rate, by experts, size and width.

    Of studies of which trainings are still to come nothing is returned.
    """
    main = results.main
    ablation, controls, experts, sizes, other_rates, wide = (
        {} if one and progress(one, 0) else one
        for one in (
            *(results.ablation, results.controls, results.experts),
            *(results.sizes, results.size_rates, results.wide),
        )
    )
    rows = []
    if ablation is not main:
        rows.append(check(study_name(ablation), ablation, METHOD, ablation, BASELINE))
    rate = f"both at the learning rate of {BASELINE}"
    rows.append(check(rate, controls, AT_BASELINE_RATE, controls, BASELINE))
    rows.append(check(f"both at the learning rate of {METHOD}", main, METHOD, controls, AT_METHOD_RATE))
    for tables, axis in ((experts, "experts"), (sizes, "size")):
        for place in axis_values(tables, axis):
            title = f"{place:g} experts" if axis == "experts" else f"size {place}"
            arms = [arm_at(tables, router, axis, place) for router in (METHOD, BASELINE)]
            worse = axis == "size" and any(arm in worse_than_smaller(tables) for arm in arms)
            rows.append(check(title + (WORSE if worse else ""), tables, arms[0], tables, arms[1]))
            pairs = equal_rates([sizes, other_rates], place) if axis == "size" else []
            rows += [
                check(f"{title}, {BOTH_AT} {rate:g}", *one, *other)
                for rate, one, other in pairs
                if one[0] is not sizes or [one[1], other[1]] != arms
            ]
    if wide:
        title = f"{wide_title(wide, METHOD)} against {WIDE_BASELINE}"
        title += WORSE if wide_and_worse(results) else ""
        title, found = check(title, wide, METHOD, wide, WIDE_BASELINE)
        spacing = {setting(one, METHOD, SPACING) for one in (wide, main)}
        rows.append((title, found if len(spacing) == 1 else [*found[:2], None]))  # else not comparable
    return rows


def check(title: str, tables: Tables, arm: str | None, others: Tables, other: str | None) -> Check:
    pairs = [
        (by_seed(others, other, "validation_loss"), by_seed(tables, arm, "validation_loss")),
        (distinctness(tables, arm), distinctness(others, other)),
        (measured_consistency(tables, arm), measured_consistency(others, other)),
    ]
    return title, [paired(*pair) for pair in pairs]


def require_no_reversal(claim: Claim, others: list[Check], at: int) -> Claim:
    """Leave a claim undecided where another study has the other sign, both beyond their intervals.

    Adds what the number is there with one learning rate for both routers.
    """
    own = claim.number
    if own is None or not abs(own.mean) > own.half:
        return claim
    sign = math.copysign(1.0, own.mean)
    places = []
    for title, found in others:
        one, place = found[at], title.removesuffix(WORSE)
        if one and one.seeds >= MIN_SEEDS and sign * one.mean + one.half < 0:
            equal = [
                f"{name.removeprefix(place + ', ')}: {interval(number)}"
                for name, numbers in others
                if name.startswith(f"{place}, {BOTH_AT}") and (number := numbers[at])
            ]
            places.append(title + (f" ({'; '.join(equal)})" if equal else ""))
    return claim.undecided().with_reasons(f"other sign elsewhere: {', '.join(places)}") if places else claim


def distinctness(tables: Tables, arm: str | None, layer: int | None = None) -> pd.Series:
    """Return the orthogonality of outputs by seed, the mean over layers or that of one.

    Nothing where few documents were read.
    """
    counts = by_seed(tables, arm, "output_documents")
    rows = layer_values(tables, arm, DISTINCTNESS)
    if layer is not None:
        rows = rows[rows["layer"] == layer]
    if rows.empty or (len(counts) and counts.min() < FEWEST):
        return pd.Series(dtype=float)
    values: pd.Series = rows.groupby("seed")["value"].mean()
    return values.astype(float)


def measured_consistency(tables: Tables, arm: str | None) -> pd.Series:
    """Return the consistency corrected for chance, by seed; nothing where chance was estimated."""
    if arm is None or by_seed(tables, arm, "consistency_estimated").any():
        return pd.Series(dtype=float)
    return consistency_beyond_chance(tables, arm)


def interval(found: Estimate, decimals: int = 3) -> str:
    half = f" ± {found.half:.{decimals}f}" if math.isfinite(found.half) else ""
    return f"{found.mean:.{decimals}f}{half}".replace("-", "−")


def cost(results: Results) -> Claim:
    """Similar cost: counted FLOPs and the time of a block alone, each over those of the baseline.

    The speed of trainings is no measure: several share a device.
    """
    claim = "SPECTRA costs about as much as Switch Top-2"
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
        return Claim("H5", claim, measure, smallest, f"smallest gain: {title[1:]}", smallest.unfinished)
    worse = sum(one.mean > 0 and one.significant for one in known.values())
    why = f"{worse} of {len(known)} removals make it significantly worse; smallest gain: {title[1:]}"
    if any(one.seeds < MIN_SEEDS for one in known.values()):
        return Claim("H5", claim, measure, smallest, f"{why}; too few seeds to claim anything")
    if any(one.mean < 0 and one.significant for one in known.values()):
        return Claim("H5", claim, measure, smallest, why, REFUTED)
    if any(one.failed for one in known.values()):
        return Claim("H5", claim, measure, smallest, f"{why}; trainings failed", UNDECIDED)
    verdict = CONFIRMED if worse == len(known) else UNDECIDED
    return Claim("H5", claim, measure, smallest, why, verdict)
