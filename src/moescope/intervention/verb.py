"""intervene: change routers and experts of a running model, and measure what happens on judged documents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from moescope.arguments import as_list, choose_device, device_warnings, number_ranges
from moescope.execution.model_names import (
    Dtype,
    check_routed,
    check_token_ids,
    checkpoint_identity,
    short_name,
    step_names,
)
from moescope.execution.texts import ReadSettings, check_not_empty, sources
from moescope.execution.ways import Execution, Way, parse_size
from moescope.intervention.figures import FIGURES
from moescope.intervention.report import experts, guide, joint, measures, sections, summary
from moescope.intervention.tables import TABLES
from moescope.run import Run, open_run, place_run
from moescope.verb import Verb

Sweep = Literal["experts", "layers", "k", "top_k"]


def intervene(
    model: str | Path,
    *,
    set: str | Iterable[str] = (),
    sweep: Sweep | None = None,
    layers: int | str | Iterable[int] | None = None,
    text: str | Path | Iterable[str | Path] = (),
    domain: str | Iterable[str] = (),
    token_ids: str | Path | None = None,
    max_tokens: int | None = None,
    generate: str | Iterable[str] = (),
    max_new_tokens: int = 40,
    out: str | Path | None = None,
    device: str = "auto",
    controls: int = 4,
    dtype: Dtype = "auto",
    batch_size: int = 8,
    chat_template: bool = False,
    trust_remote_code: bool = False,
    execution: Way = "auto",
    memory: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Change routers or experts of a running model, and measure what happens.

    Four documents in five are judged, up to 32,768 tokens: loss, next-token distribution and routing with and
    without the change. The others calibrate. The files of the model are never changed. Give the same command
    again to resume.

    Parameters
    ----------
    model : MODEL
        Model folder or hub id.
    set : CHANGE, repeatable
        What to change, such as "layer=12 expert=3 ablate"; several apply together.
    sweep : FAMILY
        Try the change on every expert, in every layer, over a grid of k, or with 1 to 2k experts per token.
    layers : LIST, default all
        Layers of a sweep, such as 0,3 or 4-7.
    generate : PROMPT, repeatable
        Also continue a prompt with and without the change.
    max_new_tokens : int >= 1, <= 1e6
        Tokens of a continuation.

    Other Parameters
    ----------------
    controls : int >= 2, <= 1e4
        Random draws of each control, of a sweep of k.

    Examples
    --------
    >>> run = moescope.intervene("allenai/OLMoE-1B-7B-0924", set="layer=8 expert=3 ablate", text="docs")
    ... # doctest: +SKIP
    >>> run.table("interventions")  # doctest: +SKIP
    """
    settings, text, domain, generate = as_list(set), as_list(text), as_list(domain), as_list(generate)
    given = VERB.settle({**locals(), "set": settings})
    del given["settings"]
    from moescope.intervention.steps import Request, carry_out

    chosen_layers = () if layers is None else tuple(dict.fromkeys(number_ranges(layers)))
    request = Request.of(settings, sweep, chosen_layers, controls=controls, seed=seed)
    memory_bytes = parse_size("--memory", memory)
    (name,) = step_names([model], ())
    check_routed(name)
    texts = sources(text, domain, token_ids)
    texts.sort(key=lambda source: source.domain)  # the order of --domain changes nothing
    place = choose_device(device)
    parsed = {
        "set": [change.label for change in request.changes] if settings else [],
        "layers": chosen_layers,
        "text": [[source.domain, source.identity] for source in texts],
        "domain": [],
        "token_ids": token_ids is not None,
    }
    identity = {
        "arguments": VERB.identity(given, **parsed),
        "checkpoints": [{"step": 0, **checkpoint_identity(name)}],
    }
    folder, done = place_run(VERB, out, short_name(name), identity, overwrite)
    if done:
        return done
    check_not_empty(texts)
    if token_ids is not None:
        check_token_ids([name], texts)
    reading = ReadSettings(max_tokens, dtype, batch_size, chat_template, trust_remote_code)
    with open_run(folder, VERB, identity, overwrite, VERB.command(given)) as writer:
        writer.save_info(device=place, warnings=device_warnings(device))
        how = Execution.of_run(writer, execution, memory_bytes, quiet)
        return carry_out(writer, request, name, texts, place, reading, how, generate, max_new_tokens, quiet)


VERB = Verb(
    "intervene",
    intervene,
    TABLES,
    FIGURES,
    summary,
    sections,
    guide=guide,
    tab="interventions",
    measures=measures,
    experts=experts,
    joint=joint,
    incidental=frozenset({"execution", "memory"}),
)
