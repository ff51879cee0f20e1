"""compress: fewer experts.

A plan from weights or text, what it will cost, and, where asked, the checkpoint and what it did cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from moescope.arguments import choose_device, one_of
from moescope.checkpoint import open_checkpoint
from moescope.compression.loading import check_lab_router
from moescope.errors import BadInput
from moescope.execution.model_names import Dtype, step_names
from moescope.execution.texts import ReadSettings, sources
from moescope.families import MoeCheckpoint, read_moe
from moescope.progress import progress
from moescope.run import Run, RunWriter, default_folder, finished_run, open_run
from moescope.storage import check_target

if TYPE_CHECKING:
    from moescope.compression.calibration_text import Calibration, Earlier, TextReader
    from moescope.compression.methods import Decided, Evidence, Method, PlanSettings
    from moescope.compression.plan import Fits
    from moescope.types import Plan

CALIBRATION_FILE = "calibration.safetensors"
SMALL = (
    2 * 2**30
)  # bytes of a checkpoint up to which three random controls are written and judged, beyond it one
DEFAULT_METHOD = "reap"


@dataclass(frozen=True)
class Work:
    """One call's work, with all that could be refused already refused."""

    moe: MoeCheckpoint
    method: Method
    keep: dict[int, int]
    settings: PlanSettings
    said: dict[str, str | int | float | bool | None]  # what plan.json keeps of how it was made
    given: tuple[Plan, Fits] | None  # a plan that was handed in
    apply: Path | None
    judge: bool
    controls: int
    earlier: tuple[Earlier, ...] = ()  # sums of other texts, to be added

    @property
    def layer_names(self) -> dict[int, str]:
        return {layer: weights.layer_name for layer, weights in self.moe.layers.items()}

    def controlled(self) -> list[tuple[str, int]]:
        """(name, seed) of every control: none has the seed of the plan itself."""
        return [
            (control_name(self.settings.seed + n), self.settings.seed + n)
            for n in range(1, self.controls + 1)
        ]


def compress(
    model: str | Path,
    *,
    method: str | None = None,
    keep: str | int | float | None = None,
    text: str | Path | Iterable[str | Path] = (),
    domain: str | Iterable[str] = (),
    token_ids: str | Path | None = None,
    plan: str | Path | None = None,
    apply: str | Path | None = None,
    add: str | Path | Iterable[str | Path] = (),
    judge: bool = True,
    controls: int | None = None,
    out: str | Path | None = None,
    max_tokens: int | None = None,
    merge_weights: str = "usage",
    distance: str = "default",
    signed: bool = True,
    router: str = "fold",
    adaptive: bool = False,
    sequential: bool = False,
    dtype: str = "auto",
    batch_size: int = 8,
    chat_template: bool = False,
    device: str = "auto",
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Plan which experts to merge or drop (`method`, `keep`), or take a `plan`; with `apply` write the
    compressed checkpoint there.

    `keep` is a share of each layer's experts (0.5) or a number of them (4). `add` names earlier runs on other
    texts, whose sums count too. One document in five of the text is held out; a
    checkpoint that was written is judged on it beside the original and beside controls that do as much at
    random.
    """
    from moescope.compression.methods import PlanSettings

    reading_settings = ReadSettings(
        max_tokens, one_of("dtype", dtype, get_args(Dtype)), batch_size, chat_template
    )
    for name, value, least in (
        ("max_tokens", max_tokens, 1),
        ("batch_size", batch_size, 1),
        ("seed", seed, 0),
        ("controls", controls, 0),
    ):
        if value is not None and value < least:
            raise BadInput(f"{name} {value}: must be at least {least}")
    with_text = bool(text) or bool(domain) or token_ids is not None
    reading = (
        sources(
            [text] if isinstance(text, str | Path) else text,
            [domain] if isinstance(domain, str) else domain,
            token_ids,
        )
        if with_text
        else []
    )
    settings = PlanSettings(seed, merge_weights, distance, signed, router, adaptive, sequential)
    moe = read_moe(open_checkpoint(model))
    check_lab_router(moe)
    work = planned_work(moe, method, keep, plan, apply, settings, judge and with_text, controls)
    check_lab_router(moe, work.method, sequential)
    work = replace(work, earlier=earlier_sums(moe, add, work.method, with_text))
    if work.method.needs_text and not with_text and not work.earlier and plan is None:
        raise BadInput(
            f"method {work.method.name} {work.method.words}, so it needs a text; give --text "
            "PATH, or --method random"
        )
    for wanted, word in (
        (sequential, "sequential"),
        (merge_weights == "saliency", "merge weights by saliency"),
    ):
        if wanted and not with_text and plan is None:
            raise BadInput(
                f"{word}: goes by what a text does in the model; give --text PATH, or leave it out"
            )
    if with_text:
        step_names([model], ())
    place = choose_device(device)
    identity = {
        "arguments": {
            **asdict(settings),
            **asdict(reading_settings),
            "method": work.method.name,
            "keep": None if keep is None else str(keep),
            "plan": plan_identity(plan),
            "judge": judge,
            "apply": None if work.apply is None else str(work.apply),
            "controls": work.controls,
            "text": [[source.domain, source.identity] for source in reading],
            "token_ids": token_ids is not None,
            "add": [earlier.mark for earlier in work.earlier],
        },
        "checkpoints": [{"step": 0, **asdict_mark(moe)}],
    }
    folder = Path(out) if out is not None else default_folder("compress", moe.checkpoint.name, identity)
    if not overwrite and (done := finished_run(folder, identity)):
        return done
    with open_run(folder, "compress", identity, overwrite) as writer:
        if work.apply is not None and "applied" not in writer.done_tasks():
            check_target(work.apply)
        writer.save_info(device=place, coverage=[asdict(moe.coverage)])
        reader = text_reader(model, reading, reading_settings, place, judge) if with_text else None
        return carry_out(writer, work, reader, place, quiet)


def planned_work(
    moe: MoeCheckpoint,
    method: str | None,
    keep: str | int | float | None,
    plan: str | Path | None,
    apply: str | Path | None,
    settings: PlanSettings,
    judge: bool,
    controls: int | None,
) -> Work:
    """What is to be done; everything that headers can refuse is refused here."""
    from moescope.compression.applying import planned_bytes
    from moescope.compression.merging import check_adaptive
    from moescope.compression.methods import check_settings, method_named
    from moescope.compression.plan import check_same_checkpoint, read_plan
    from moescope.compression.pruning import keep_counts
    from moescope.families.writing import NewLayer, plan_moe

    target = None if apply is None else Path(apply).expanduser().resolve()
    if plan is not None:
        if method is not None or keep is not None:
            raise BadInput("--plan says what to do, so --method and --keep are left out; or leave --plan out")
        if target is None:
            raise BadInput(f"{plan}: a plan is carried out into a folder; give --apply DIR")
        given = read_plan(plan)
        check_same_checkpoint(given[0], moe.checkpoint)
        planned_bytes(moe, *given)
        chosen = method_named(given[0].method)
        counts = {layer.layer: len(layer.groups) for layer in given[0].layers}
        own: Any = {name: value for name, value in given[0].settings.items() if name in asdict(settings)}
        settings = replace(settings, **own)
        said = dict(given[0].settings)
    else:
        if keep is None:
            raise BadInput(
                "nothing says how many experts to keep; give --keep 0.5, or a number such as --keep 4"
            )
        chosen, given = method_named(method or DEFAULT_METHOD), None
        check_settings(chosen, settings, target is not None)
        if settings.adaptive:
            check_adaptive(moe)
        counts = keep_counts(moe, keep, chosen.merges)
        said = {"keep": str(keep), **(asdict(settings) if chosen.merges else {"seed": settings.seed})}
        if target is not None:
            top_k = min(counts.values()) if chosen.merges else None
            least = [weights.top_k for weights in moe.layers.values() if weights.top_k is not None]
            lowered = top_k if top_k is not None and least and top_k < max(least) else None
            plan_moe(moe, {layer: NewLayer(range(count)) for layer, count in counts.items()}, lowered)
    if controls is None:
        controls = 3 if moe.checkpoint.bytes() <= SMALL else 1
    return Work(moe, chosen, counts, settings, said, given, target, judge and target is not None, controls)


def asdict_mark(moe: MoeCheckpoint) -> dict[str, str | None]:
    from moescope.compression.plan import checkpoint_mark

    return checkpoint_mark(moe.checkpoint)


def earlier_sums(
    moe: MoeCheckpoint, add: str | Path | Iterable[str | Path], method: Method, with_text: bool
) -> tuple[Earlier, ...]:
    from moescope.compression.calibration_text import read_earlier

    given = [add] if isinstance(add, str | Path) else list(add)
    if given and method.merges and not with_text:
        raise BadInput(
            f"method {method.name} needs states of a text, not sums alone; give --text beside --add"
        )
    return tuple(read_earlier(Path(place), moe) for place in given)


def plan_identity(plan: str | Path | None) -> list[Any] | None:
    if plan is None:
        return None
    path = Path(plan)
    path = path / "plan.json" if path.is_dir() else path
    return [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]


def text_reader(
    model: str | Path, reading: Any, settings: ReadSettings, device: str, hold_out: bool
) -> TextReader:
    from moescope.compression.calibration_text import TextReader

    return TextReader(str(model), reading, settings, device, hold_out)


# --- the work, piece by piece


def carry_out(writer: RunWriter, work: Work, reader: TextReader | None, device: str, quiet: bool) -> Run:
    """Calibrate, plan, write, judge: each a piece that a later attempt takes over."""
    from moescope.compression.held_out import judge_models
    from moescope.compression.plan import read_plan
    from moescope.compression.rows import finish

    done = writer.done_tasks()
    calibration = calibrated(writer, work, reader, quiet) if reader is not None else None
    evidence = evidence_of(work, calibration, reader, quiet)
    made: dict[int, tuple[Plan, Fits]] = {}

    def control(seed: int, plan: Plan) -> tuple[Plan, Fits]:
        """Made once, for foretelling and for judging alike."""
        if seed not in made:
            made[seed] = control_plan(work, evidence, seed, plan)
        return made[seed]

    if "plan" not in done:
        make_plan(writer, work, evidence, calibration, reader, control, device)
    plan, fits = read_plan(writer.path)
    if work.apply is not None and "applied" not in done:
        apply_to(writer, work, plan, fits, quiet)
    if work.judge and reader is not None and "judged" not in done:
        controls = [(name, *control(seed, plan)) for name, seed in work.controlled()]
        with writer.timed("judge"):
            judge_models(writer, work, reader, controls, quiet)
    return finish(writer, work, plan, calibration)


def calibrated(writer: RunWriter, work: Work, reader: TextReader, quiet: bool) -> Calibration:
    from moescope.compression.calibration_text import calibrate_text, load_calibration
    from moescope.compression.judging import check_judgeable

    if "calibration" not in writer.done_tasks():
        with writer.timed("load"):
            traced = reader.traced
        if work.judge:
            check_judgeable(traced)  # now, and not when all else is done
            if not any(len(document.ids) > 1 for document in reader.judging()):
                raise BadInput("the held-out text has no token to predict; give a longer text, or --no-judge")
        collectors = work.method.collectors(work.settings)
        (writer.path / "parts").mkdir(exist_ok=True)
        partial_file = writer.path / "parts" / "calibration-file.tmp"
        with writer.timed("calibrate"), progress(reader.settings.max_tokens, 0, "tokens", quiet) as advance:
            calibrate_text(
                reader,
                work.moe,
                collectors,
                work.settings.seed,
                partial_file,
                partial(advance, "calibrating"),
            )
        writer.flush_task("calibration", {}, {}, files={CALIBRATION_FILE: partial_file})
        writer.save_info()
    return load_calibration(writer.path / "parts" / "calibration" / CALIBRATION_FILE)


def evidence_of(
    work: Work, calibration: Calibration | None, reader: TextReader | None, quiet: bool
) -> Evidence:
    from moescope.compression.calibration_text import all_sums
    from moescope.compression.methods import Evidence

    sums = all_sums(calibration, work.earlier)
    if calibration is None or reader is None:
        return Evidence(work.moe, work.keep, work.settings, sums)
    return Evidence(
        work.moe,
        work.keep,
        work.settings,
        sums,
        calibration.states,
        calibration.gating,
        lambda: reader.traced,
        lambda collectors: reader.calibrate(collectors, lambda tokens: None),
    )


def make_plan(
    writer: RunWriter,
    work: Work,
    evidence: Evidence,
    calibration: Calibration | None,
    reader: TextReader | None,
    control: Callable[[int, Plan], tuple[Plan, Fits]],
    device: str,
) -> None:
    """Decide, foretell the damage of the plan and of its controls, and write plan.json."""
    from moescope.compression.applying import planned_bytes
    from moescope.compression.clusters import cluster_geometry, merge_rows
    from moescope.compression.method import rescaling_words
    from moescope.compression.plan import write_plan

    warnings: list[str] = []
    frames: dict[str, Any] = {}
    with writer.timed("plan"):
        if work.given is not None:
            plan, fits = work.given
        else:
            decided = work.method.decide(evidence)
            plan, fits = as_plan(
                work, work.method, decided, {**work.said, **(calibration.facts() if calibration else {})}
            )
            warnings += decided.warnings
            if (steps := merge_rows(plan.method, decided.groupings, work.layer_names)) is not None:
                frames["merges"] = steps
    with writer.timed("distances"):
        frames |= cluster_geometry(work.moe, plan, device, work.settings.seed)
    predicted: dict[str, Any] = {}
    if calibration is not None and reader is not None:
        with writer.timed("predict"):
            predicted[plan.method], scales = foretold(work, plan, fits, calibration, reader)
            if plan.router != "fold":  # folding has told already
                warnings += rescaling_words("merging" if work.method.merges else "pruning", scales)
            for name, seed in work.controlled():
                predicted[name], _ = foretold(work, *control(seed, plan), calibration, reader)
    bytes_: tuple[int | None, int | None] = (None, None)
    if plan.router != "tie":
        try:
            bytes_ = planned_bytes(work.moe, plan, fits)
        except (
            BadInput
        ) as refused:  # a plan may be made of what cannot be rewritten here, such as a model on the hub
            if work.apply is not None:
                raise
            warnings.append(f"size not known: {refused}")
    write_plan(writer.path, plan, fits)
    writer.flush_task("plan", frames, {"predicted": predicted, "bytes": bytes_, "warnings": warnings})
    writer.save_info()


def as_plan(work: Work, method: Method, decided: Decided, said: dict[str, Any]) -> tuple[Plan, Fits]:
    from moescope.types import Plan

    plan = Plan(
        method.name,
        asdict_mark(work.moe),
        decided.layers,
        decided.matching,
        decided.router,
        decided.top_k,
        {**said, **decided.notes},
    )
    return plan, decided.fits


def control_name(seed: int) -> str:
    return f"random (seed {seed})"


def control_plan(work: Work, evidence: Evidence, seed: int, plan: Plan) -> tuple[Plan, Fits]:
    """A plan that leaves as many experts in every layer, chosen at random.

    Merged ones in groups of the same sizes, matched or not as the plan's.
    """
    from moescope.compression.methods import method_named

    method = method_named(work.method.control)
    settings = replace(work.settings, seed=seed, sequential=False)
    like = {layer.layer: layer for layer in plan.layers}
    given = replace(evidence, settings=settings, like=like, like_matching=plan.matching)
    return as_plan(work, method, method.decide(given), {"seed": seed})


def foretold(
    work: Work, plan: Plan, fits: Fits, calibration: Calibration, reader: TextReader
) -> tuple[dict[str, list[float | None]], list[float]]:
    """Layer -> error and router KL.

    And the change of the gates' sum in layers whose way of choosing only the model itself knows.
    """
    from moescope.compression.damage import predict
    from moescope.execution.adapters import find_blocks

    blocks = {block.layer: block for block in find_blocks(reader.traced.model)}
    found = predict(reader.traced, plan, fits, calibration.states, calibration.gating, blocks, work.moe)
    gating = calibration.gating
    scales = [
        damage.gate_scale
        for layer, damage in found.items()
        if damage.gate_scale is not None and not (layer in gating and gating[layer].explains)
    ]
    return {str(layer): [damage.error, damage.router_kl] for layer, damage in found.items()}, scales


def apply_to(writer: RunWriter, work: Work, plan: Plan, fits: Fits, quiet: bool) -> None:
    from moescope.compression.applying import apply_plan

    assert work.apply is not None
    written_so_far = 0
    with writer.timed("write"), progress(None, 0, "bytes", quiet) as advance:

        def told(done: int, total: int) -> None:
            nonlocal written_so_far
            advance(f"writing, {total:,} bytes in all", done - written_so_far)
            written_so_far = done

        written = apply_plan(work.moe, plan, fits, work.apply, told)
    writer.flush_task("applied", {}, {"folder": str(written.path), "written_bytes": written.total_bytes})
    writer.save_info()
