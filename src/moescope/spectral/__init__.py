"""Spectral analysis of expert weights: decompositions, alignment with router rows, its nulls, subspaces."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
