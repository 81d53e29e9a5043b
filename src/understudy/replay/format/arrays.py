"""Arrays: names for the array types that the modules of this package exchange."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = np.ndarray[Any, Any]  # shape and dtype are in the comment or in the spec
DType: TypeAlias = np.dtype[Any]
Records: TypeAlias = npt.NDArray[np.void]  # of a structured dtype: spans, or rows that a scan found
