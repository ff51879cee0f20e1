"""What follows a training's last step: scan, trace and report of what was trained, as parts of its run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moescope.errors import BadInput
from moescope.run import DamagedRun, OtherRun, Run, clear_run, jsonable, write_json

if TYPE_CHECKING:
    from moescope.lab.config import LabConfig

SMALL = (
    20_000_000  # parameters up to which several checkpoints are scanned and traced, and not the last alone
)
MOST_STEPS_SHOWN = 4
TRACED_TOKENS = 40_000
NOT_SCANNED = "the trained weights were not scanned"
NOT_TRACED = "the routing of validation text was not traced"
NO_REPORT = "no report"


def complete(run: Run, config: LabConfig, domains: tuple[str, ...], device: str, quiet: bool) -> None:
    """Scan and trace what was trained, and build the report; each is skipped where it is there already.

    What cannot be made is a warning: the training itself is done, and the same command tries again.
    """
    from moescope.decoder.routers import router_class
    from moescope.reporting.verb import report
    from moescope.routing.trace import trace
    from moescope.weights.verb import scan

    chosen = chosen_checkpoints(run.info["checkpoints"], run.info["parameters_total"])
    states = (run.path / "checkpoints").resolve()  # where they are now: the folder may have been moved since
    shown = [str(states / Path(item["path"]).name) for item in chosen]
    routed, has_keys = is_routed(config), router_class(config.model.router).has_keys
    can_report = find_spec("plotly") is not None  # a machine that only computes need not have it
    warnings = (
        []
        if can_report
        else [f"{NO_REPORT}: plotly is not installed here; make it elsewhere with moescope report {run.path}"]
    )
    place = run.path / "scan"
    try:
        own_part(
            place,
            lambda overwrite: scan(shown[-1], out=place, device=device, overwrite=overwrite, quiet=quiet),
        )
    except BadInput as error:
        warnings.append(f"{NOT_SCANNED}: {error}")
    if routed:
        where = run.path / "trace"
        texts = [f"{domain}={run.path / 'validation' / f'{domain}.jsonl'}" for domain in domains]
        try:
            own_part(
                where,
                lambda overwrite: trace(
                    *shown,
                    domain=texts,
                    out=where,
                    max_tokens=TRACED_TOKENS,
                    device=device,
                    overwrite=overwrite,
                    quiet=quiet,
                ),
            )
        except BadInput as error:
            warnings.append(f"{NOT_TRACED}: {error}")
    keys = {"keys": key_facts(run, config, shown[-1])} if routed and has_keys else {}
    before = [
        said
        for said in run.info.get("warnings", [])
        if not said.startswith((NOT_SCANNED, NOT_TRACED, NO_REPORT))
    ]
    info = {**run.info, **keys, "warnings": [*dict.fromkeys([*before, *warnings])]}
    if info != run.info:
        write_json(run.path / "run.json", info)
    if can_report and report_is_behind(run.path):
        report(Run.load(run.path), quiet=quiet)


def own_part(folder: Path, make: Callable[[bool], Run]) -> Run:
    """The scan or trace in a training's folder, made anew where what lies there is of other arguments, of
    another version, or damaged.

    It is the training's own, so nobody need be asked; files that moescope did not write stay.
    """
    if (
        folder.is_dir() and not (folder / "run.json").exists()
    ):  # a clearing that was killed takes run.json first
        clear_run(folder)
    try:
        return make(False)
    except (OtherRun, DamagedRun):
        return make(True)


def report_is_behind(folder: Path) -> bool:
    """Whether there is no report yet, or a part of the run was made after it."""
    page = folder / "report.html"
    made = [
        file.stat().st_mtime_ns for part in ("scan", "trace") if (file := folder / part / "run.json").exists()
    ]
    return not page.exists() or any(when > page.stat().st_mtime_ns for when in made)


def is_routed(config: LabConfig) -> bool:
    """Whether tokens have any choice: a dense block, or one expert, has all of them."""
    from moescope.decoder.routers import router_class

    return router_class(config.model.router).expert_shape(config.model)[0] > 1


def key_facts(run: Run, config: LabConfig, checkpoint: str) -> dict[str, Any]:
    """What SoME's keys came to in the middle layer.

    Usage in the last stretch of training, and where keys lie.
    """
    from moescope.decoder.saving import load_model
    from moescope.lab.key_metrics import key_cosine, key_map, middle_layer, usage_histogram, usage_metrics

    layer = middle_layer(config.model.layers)
    load = run.table("load")
    counts_E = (
        load[(load["step"] == load["step"].max()) & (load["layer"] == layer)]
        .sort_values("expert")["tokens"]
        .to_numpy(float)
    )
    tokens, k = round(counts_E.sum() / config.model.top_k), config.model.top_k
    router = load_model(checkpoint)[0].routers[layer]
    keys_ED = cast(Any, router).keys_ED.double().numpy()
    places, shown, by_chance = key_map(keys_ED, counts_E)
    cosine, spread = key_cosine(keys_ED)
    return jsonable(
        {
            "layer": layer,
            "metrics": usage_metrics(counts_E, tokens, k).to_dict("records"),
            "histogram": usage_histogram(counts_E, tokens, k).to_dict("records"),
            "map": places.to_dict("records"),
            "shares": {"shown": shown, "by_chance": by_chance},
            "cosine": {"mean": cosine, "random_spread": spread},
        }
    )


def chosen_checkpoints(saved: list[dict[str, Any]], parameters: int) -> list[dict[str, Any]]:
    """The last one.

    Of a small model some before it too, evenly spread, so that one sees how routing came about.
    """
    if parameters > SMALL or len(saved) <= MOST_STEPS_SHOWN:
        return saved if parameters <= SMALL else saved[-1:]
    apart = (len(saved) - 1) / (MOST_STEPS_SHOWN - 1)
    return [saved[round(at * apart)] for at in range(MOST_STEPS_SHOWN)]
