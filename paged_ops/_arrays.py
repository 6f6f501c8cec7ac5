"""What the native module asks Python to do with a caller's tensors: allocate, find the stream, name a dtype.

The hot path does not come here: it reads tensors through the DLPack C exchange API or as NumPy arrays.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np


def is_immutable(array: Any) -> bool:
    """JAX's arrays must never change: others hold the same memory by the same value."""
    return _module_of(array) in ("jax", "jaxlib")


def _module_of(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; ``bfloat16`` and ``float8`` come from ``ml_dtypes``."""
    if name == "bfloat16" or name.startswith("float8"):
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(f"{name} in NumPy needs the package ml_dtypes: pip install ml_dtypes") from None
        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def dtype_name(dtype: Any) -> str:
    """``"bfloat16"`` for a torch, NumPy or ml_dtypes dtype, or for its name."""
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    if dtype is None:  # which to NumPy means float64
        return "None"
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise TypeError(f"dtype: is {dtype!r}, wanted one of float32, float16, bfloat16") from None


def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised array of the kind of ``like`` and on its device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        wanted = getattr(torch, dtype)
        if type(like) is torch.Tensor and like.dtype is wanted:
            return like.new_empty(shape)
        return torch.empty(shape, dtype=wanted, device=like.device)
    if isinstance(like, np.ndarray):
        return np.empty(shape, numpy_dtype(dtype))
    kind = _module_of(like)
    if kind == "cupy":
        cupy = sys.modules["cupy"]
        with like.device:
            return cupy.empty(shape, numpy_dtype(dtype))
    if is_immutable(like):
        raise ValueError("out: JAX arrays are immutable; convert the inputs with numpy.asarray first")
    raise ValueError(
        f"out: cannot allocate a {type(like).__name__}; pass out= (and lse=, workspace= where needed)"
    )


@functools.cache
def _increment_version() -> Any:
    return sys.modules["torch"].autograd.graph.increment_version


def count_writes(*tensors: Any) -> None:
    """Bump the version counters of torch tensors that an op has written, where torch keeps them."""
    increment = _increment_version()
    try:
        increment(tensors)
    except RuntimeError:  # inference tensors among them, which keep none
        increment([tensor for tensor in tensors if not tensor.is_inference()])


def dlpack_capsule(array: Any) -> Any:
    """The array's DLPack capsule, without a synchronisation and without a copy."""
    # -1 asks a CUDA producer not to synchronise: work is issued on its own current stream.
    options: dict[str, Any] = {"stream": -1} if array.__dlpack_device__()[0] in (2, 13) else {}
    try:
        return array.__dlpack__(max_version=(1, 1), **options)
    except TypeError:  # a producer from before DLPack 1.0
        return array.__dlpack__(**options)


def current_stream(array: Any, device: int) -> int:
    """The address of the caller's current CUDA stream, for types without the exchange API."""
    kind = _module_of(array)
    if kind == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)
    if kind == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    return 0


def int32_range(like: Any, start: int, stop: int, step: int) -> Any:
    """`arange` where ``like`` lies, made there: no copy from the host to wait for."""
    if on_host(like):
        return np.arange(start, stop, step, dtype=np.int32)
    if _module_of(like) == "cupy":
        cupy = sys.modules["cupy"]
        with like.device:
            return cupy.arange(start, stop, step, dtype=np.int32)
    torch = sys.modules["torch"]
    return torch.arange(start, stop, step, dtype=torch.int32, device=like.device)


def on_host(array: Any) -> bool:
    """Whether the array's numbers can be read without asking a device."""
    if isinstance(array, np.ndarray):
        return True
    device = getattr(array, "device", None)
    return str(getattr(device, "type", device)) == "cpu"


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """The array's numbers in NumPy; of a device's they are fetched, which waits for it."""
    if not on_host(array):
        array = array.get() if hasattr(array, "get") else array.cpu()
    return np.asarray(array)


def host_values(name: str, array: Any) -> np.ndarray[Any, Any]:
    """A tensor in host memory as a NumPy array of integers."""
    if not hasattr(array, "shape"):
        raise TypeError(f"{name}: is a {type(array).__name__}, wanted a tensor")
    if not on_host(array):
        raise ValueError(f"{name}: is on {array.device}, wanted cpu: it is read by the host")
    values = np.asarray(array)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name}: dtype is {values.dtype}, wanted integers")
    return values


def beside(like: Any, values: np.ndarray[Any, Any]) -> Any:
    """Values of the host where ``like`` lies: themselves on the CPU, else a copy that is not waited for."""
    if on_host(like):
        return values
    if _module_of(like) == "cupy":
        cupy = sys.modules["cupy"]
        with like.device:
            return cupy.asarray(values)
    return sys.modules["torch"].from_numpy(values).to(like.device, non_blocking=True)


def empty_like(like: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised array of the kind and dtype of ``like``, whatever that is, and on its device."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype)
    return empty(like, shape, dtype_name(like.dtype))
