"""The array type of the metrics; torch tensors stay in capture and tally."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]
