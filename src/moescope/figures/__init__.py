"""Tables in, figures out.

Each list below is one part of the report; a figure that cannot be drawn fails the report.
"""

from moescope.comparison.figures import DRIFT, EXPERT_DISTANCE
from moescope.plotting.style import Figure, FigureSpec
from moescope.reporting.joint_figures import TOGETHER
from moescope.routing.figures_decisions import DECISIONS, VOCABULARY
from moescope.routing.figures_experts import DOMAINS, MAPS, SEPARATION
from moescope.routing.figures_load import LOAD
from moescope.routing.figures_steps import OVER_STEPS

ROUTING = [*LOAD, *DECISIONS, *SEPARATION, *DOMAINS, *VOCABULARY]  # and maps
FIGURES: list[FigureSpec] = [
    *ROUTING,
    *MAPS,
    *OVER_STEPS,
    *TOGETHER,
    *EXPERT_DISTANCE,
    *DRIFT,
]

__all__ = [
    "DECISIONS",
    "DOMAINS",
    "DRIFT",
    "EXPERT_DISTANCE",
    "FIGURES",
    "LOAD",
    "MAPS",
    "OVER_STEPS",
    "ROUTING",
    "SEPARATION",
    "TOGETHER",
    "VOCABULARY",
    "Figure",
    "FigureSpec",
]
