"""The array type of the statistics: fp64 numpy."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
