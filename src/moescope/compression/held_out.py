"""A written checkpoint judged.

The original, it, and the random controls read the same held-out text, one model after the other.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from moescope.compression.loading import load_to_compress
from moescope.progress import progress
from moescope.run import RunWriter

if TYPE_CHECKING:
    from moescope.compression.calibration_text import TextReader
    from moescope.compression.plan import Fits
    from moescope.compression.verb import Work
    from moescope.types import Plan


def judge_models(
    writer: RunWriter, work: Work, reader: TextReader, controls: list[tuple[str, Plan, Fits]], quiet: bool
) -> None:
    """Only one model is in memory at a time.

    A control is written into the run folder, judged, and removed.
    """
    from moescope.compression.applying import apply_plan
    from moescope.compression.calibration import calibrate
    from moescope.compression.damage import HeldOutStates, measured_errors, original_outputs
    from moescope.compression.judging import Reference, judge, judge_original
    from moescope.compression.states import StateSample

    assert work.apply is not None
    size = reader.settings.batch_size
    documents = reader.judging()
    scratch = writer.path / "parts" / "controls.tmp"
    with progress(None, 0, "tokens", quiet) as advance:
        sample = StateSample(work.settings.seed, layers=len(work.moe.layers))
        calibrate(reader.traced, documents, [sample], size)
        held_out: HeldOutStates = original_outputs(reader.traced, sample.states())
        reference: Reference = judge_original(
            reader.traced, documents, size, partial(advance, "the original")
        )
        reader.let_go()

        def judged(name: str, folder: Any) -> dict[str, Any]:
            traced = load_to_compress(str(folder), reader.settings.dtype, reader.device)
            found = judge(traced, documents, reference, size, partial(advance, name))
            errors = measured_errors(traced, held_out)
            return {"perplexity": found.perplexity, "js_divergence": found.js_divergence, "errors": errors}

        results = {work.method.name: judged("compressed", work.apply)}
        for name, plan, fits in controls:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            try:
                apply_plan(work.moe, plan, fits, scratch / "model")
                results[name] = judged(name, scratch / "model")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    unmeasured = sorted(set(sample.states()) - set(held_out.reads))
    warnings = (
        []
        if not unmeasured
        else [
            (
                f"no measured error in layers {', '.join(map(str, unmeasured))}: their blocks read "
                "more than the experts' input"
            )
        ]
    )
    facts = {
        "judged_documents": len(documents),
        "judged_tokens": reference.tokens,
        "compared_tokens": reference.compared,
    }
    writer.flush_task(
        "judged",
        {},
        {
            "models": results,
            "perplexity_original": reference.perplexity,
            "facts": facts,
            "warnings": warnings,
        },
    )
    writer.save_info()
