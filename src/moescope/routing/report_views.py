"""A view: one step and phase of one trace.

A report shows one view at a time, and all steps against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moescope.errors import BadInput
from moescope.reporting.untrusted import plot_words
from moescope.run import Run
from moescope.tables import ROUTING_TABLES, TABLES

SINGLE_TOKENS = ("tokens", "token_text")  # may be larger than memory; only what is shown of them is read
ADDED = ("contexts", "expert_cosines")  # older traces have none
NEEDED = tuple(name for name in ROUTING_TABLES if name not in SINGLE_TOKENS + ADDED)
STEPS_SHOWN = 4  # so many steps of a run are shown closely; figures over steps hold them all
LARGE = 2000  # experts in all layers, from which on only the first and the last step are


@dataclass(frozen=True)
class View:
    """The tables of one step and phase, domain names made safe for figures.

    And the words that tell it from other views.
    """

    run: Run
    step: int
    phase: str
    main: bool  # the phase of which co-activation, domains, vocabulary and tokens were kept
    label: str
    tables: dict[str, pd.DataFrame]

    @property
    def layers(self) -> list[int]:
        return sorted(int(layer) for layer in self.tables["load"]["layer"].unique())

    @property
    def last(self) -> bool:
        """Whether it is of the run's last step."""
        return self.step == max(int(setup["step"]) for setup in self.run.info["setup"])

    @property
    def setup(self) -> dict[str, Any]:
        """What run.json says of this step."""
        return next((dict(setup) for setup in self.run.info["setup"] if setup["step"] == self.step), {})

    @property
    def checkpoint(self) -> dict[str, Any]:
        """Which checkpoint it is of; empty for a trace imported without a model."""
        return next((dict(item) for item in self.run.info["checkpoints"] if item["step"] == self.step), {})


@dataclass(frozen=True)
class TraceTables:
    """All tables of a trace but the single tokens, which may be larger than memory."""

    run: Run
    tables: dict[str, pd.DataFrame]

    @property
    def steps(self) -> list[int]:
        return sorted(int(step) for step in self.tables["load"]["step"].unique())

    @property
    def n_experts(self) -> int:
        """Of all layers together."""
        return len(self.tables["load"][["layer", "expert"]].drop_duplicates())

    @property
    def phases(self) -> list[str]:
        found = set(self.tables["load"]["phase"])
        return [phase for phase in ("prefill", "decode") if phase in found]

    def in_main_phase(self) -> dict[str, pd.DataFrame]:
        """All steps, of the phase that everything was kept of."""
        phase = self.phases[0]
        return {
            name: frame[frame["phase"] == phase] if "phase" in frame else frame
            for name, frame in self.tables.items()
        }


def load_trace(run: Run) -> TraceTables:
    if missing := [name for name in NEEDED if name not in run.tables]:
        raise BadInput(f"{run.path}: table {', '.join(missing)} is missing; trace again with --overwrite")
    tables = {name: run.table(name) for name in NEEDED}
    for name in ADDED:
        tables[name] = (
            run.table(name) if name in run.tables else pd.DataFrame(columns=list(TABLES[name].columns))
        )
    for name, frame in tables.items():
        if "domain" in frame:
            tables[name] = frame.assign(domain=frame["domain"].map(plot_words))
    if tables["load"].empty:
        raise BadInput(f"{run.path}: no token was routed; trace a longer text")
    return TraceTables(run, tables)


def shown_steps(steps: list[int], experts: int = 0) -> list[int]:
    """All of them, or the first, the last and some between: a page has to stay of a size that opens."""
    most = 2 if experts >= LARGE else STEPS_SHOWN
    if len(steps) <= most:
        return steps
    return [steps[place] for place in np.linspace(0, len(steps) - 1, most).round().astype(int)]


def steps_left_out(trace: TraceTables) -> list[str]:
    """Which steps have views of their own, where not all have."""
    shown = shown_steps(trace.steps, trace.n_experts)
    if len(shown) == len(trace.steps):
        return []
    named = ", ".join(map(str, shown))
    return [f"Shown closely are steps {named} of {len(trace.steps)}; figures over steps hold all of them."]


def routing_views(traces: list[TraceTables], names: dict[Any, str]) -> list[View]:
    """The views of every trace, in the order given; `names` are the runs' short names."""
    found = []
    for trace in traces:
        for phase in trace.phases:
            for step in shown_steps(trace.steps, trace.n_experts):
                parts = [plot_words(names[trace.run.path])] if len(traces) > 1 else []
                parts += [f"step {step}"] if len(trace.steps) > 1 else []
                parts += [phase] if len(trace.phases) > 1 else []
                main = phase == trace.phases[0]
                tables = {name: select(frame, step, phase) for name, frame in trace.tables.items()}
                if not main:
                    tables = {
                        name: frame for name, frame in tables.items() if name in ("load", "routing_layers")
                    }
                found.append(View(trace.run, step, phase, main, " · ".join(parts) or "routing", tables))
    return found


def first_shown(views: list[View]) -> int:
    """The view the page opens with: the first run's last step, in its main phase."""
    own = [index for index, view in enumerate(views) if view.run is views[0].run and view.main]
    return max(own, key=lambda index: views[index].step)


def select(frame: pd.DataFrame, step: int, phase: str) -> pd.DataFrame:
    mask = pd.Series(True, index=frame.index)
    for key, value in (("step", step), ("phase", phase)):
        if key in frame.columns:
            mask &= frame[key] == value
    return frame[mask]
