"""What every column means.

One text, used by the tables' schema, the figures' captions and the report's glossary.
"""

from moescope.glossary.column import Column
from moescope.glossary.experts import EXPERTS
from moescope.glossary.routing import ROUTING
from moescope.glossary.study import STUDY
from moescope.glossary.training import TRAINING
from moescope.glossary.weights import WEIGHTS

COLUMNS: dict[str, Column] = {**WEIGHTS, **EXPERTS, **ROUTING, **TRAINING, **STUDY}

__all__ = ["COLUMNS", "Column"]
