"""Arrays for tests: dtypes by name, conversion between kinds bit for bit, NaN-filled buffers, comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
CACHE_DTYPES: dict[str, np.dtype[Any]] = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(np.uint8),  # two in each
}
EIGHT_BITS = tuple(name for name in CACHE_DTYPES if name != "int4")


def filled(shape: tuple[int, ...], dtype: np.dtype[Any], value: float = np.nan) -> NDArray[Any]:
    """A new array, NaN everywhere unless told otherwise: what is not written shows."""
    return np.full(shape, value, dtype)


def bits(array: Any) -> NDArray[Any]:
    """The array's bits as unsigned integers, so that NaN equals NaN and -0 differs from 0."""
    array = np.ascontiguousarray(to_numpy(array))
    return array.view(f"u{array.itemsize}")


def same_bits(a: Any, b: Any) -> bool:
    """Equal shape, dtype and bits, whatever kinds of arrays they are."""
    a, b = to_numpy(a), to_numpy(b)
    return a.dtype == b.dtype and a.shape == b.shape and bool((bits(a) == bits(b)).all())


def storage_of(array: NDArray[Any]) -> NDArray[Any]:
    """All of the memory that a view is cut from, flat."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    integers = array.view(f"u{array.itemsize}")  # not all of ml_dtypes go through NumPy's array interface
    return np.lib.stride_tricks.as_strided(integers, (array.size,), (array.itemsize,)).view(array.dtype)


def to_torch(array: NDArray[Any], device: str = "cpu") -> torch.Tensor:
    """A torch tensor of the same bits, strides and storage offset.

    On the CPU it shares the array's memory; elsewhere the whole storage under the view is copied.
    """
    import torch

    flat, itemsize = storage_of(array), array.itemsize
    if hasattr(ml_dtypes, flat.dtype.name):  # which torch.from_numpy does not know
        tensor = torch.from_numpy(flat.view(f"i{itemsize}")).view(getattr(torch, flat.dtype.name))
    else:
        tensor = torch.from_numpy(flat)
    offset = (array.ctypes.data - flat.ctypes.data) // itemsize
    strides = [stride // itemsize for stride in array.strides]
    return torch.as_strided(tensor.to(device), array.shape, strides, offset)


def to_numpy(array: Any) -> NDArray[Any]:
    """A numpy array of the same bits: a copy from a device, a view of a tensor on the CPU."""
    if isinstance(array, np.ndarray):
        return array
    if type(array).__module__.startswith("cupy"):
        return array.get()
    import torch

    array = array.detach().cpu()
    name = str(array.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):
        integers = array.view(torch.int16 if array.itemsize == 2 else torch.int8)
        return integers.numpy().view(getattr(ml_dtypes, name))
    return array.numpy()
