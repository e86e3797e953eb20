"""Matrices of NumPy and of anything with DLPack, as addresses that the C ABI takes.

Element types are f16 and bf16. NumPy has no bf16 of its own: an array of ml_dtypes.bfloat16 is bf16, and so
is an array of uint16, whose elements are the bits. `to_bf16` and `from_bf16` convert.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from typing import Any, Optional

import numpy

from . import _c
from .errors import Error, ErrorCode, invalid


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix in memory. `transposed`: by columns, so that it is the transpose of one by rows. `pitch`: elements from row to row of that one."""

    address: int
    pitch: int
    rows: int
    columns: int
    dtype: int
    transposed: bool
    like: Any  # what results are made like: a NumPy dtype
    owner: Any  # keeps the memory


def to_bf16(values: Any) -> numpy.ndarray:
    """Rounds to bf16, to nearest and to even; the result is the bits, as uint16.

    >>> hex(int(to_bf16([1.0])[0]))
    '0x3f80'
    """
    bits = numpy.ascontiguousarray(values, dtype=numpy.float32).view(numpy.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return numpy.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype(numpy.uint16)


def from_bf16(bits: Any) -> numpy.ndarray:
    """The float32 values of bf16 elements, given as their bits (uint16) or as ml_dtypes.bfloat16.

    >>> from_bf16(to_bf16([1.0, -2.5])).tolist()
    [1.0, -2.5]
    """
    bits = numpy.asarray(bits)
    if bits.dtype != numpy.uint16:
        return bits.astype(numpy.float32)
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def to_float(array: numpy.ndarray) -> numpy.ndarray:
    """A float32 copy of an f16 or bf16 array."""
    return from_bf16(array) if dtype_of(array.dtype) == _c.BF16 else array.astype(numpy.float32)


def to_like(values: numpy.ndarray, like: Any) -> numpy.ndarray:
    """Float values, rounded to the element type of `like`, a NumPy dtype."""
    if like == numpy.uint16:
        return to_bf16(values)
    return values.astype(like)


def dtype_of(dtype: Any) -> int:
    """MK_F16 or MK_BF16 of a NumPy dtype."""
    if dtype == numpy.float16:
        return _c.F16
    if dtype == numpy.uint16 or dtype.name == "bfloat16":
        return _c.BF16
    raise invalid(
        f"elements of type {dtype}: the operators compute in f16 and bf16; use x.astype(numpy.float16), "
        "x.astype(ml_dtypes.bfloat16), or mkernel.to_bf16(x)"
    )


def by_rows(x: Any, what: str) -> Matrix:
    """`x` row after row, perhaps with gaps between them; an array that is not so is copied."""
    array = _array(x, what)
    if pitch_of(array) is None:
        array = numpy.ascontiguousarray(array)
    return _matrix(array, transposed=False)


def either(x: Any, what: str) -> Matrix:
    """`x` by rows or by columns, perhaps with gaps between them; an array that is neither is copied."""
    array = _array(x, what)
    if pitch_of(array) is not None:
        return _matrix(array, transposed=False)
    if pitch_of(array.T) is not None:
        return _matrix(array, transposed=True)
    return _matrix(numpy.ascontiguousarray(array), transposed=False)


def pitch_of(array: numpy.ndarray) -> Optional[int]:
    """Elements from row to row of a matrix whose rows have no gaps; None where they have, or overlap."""
    rows, columns = array.shape
    step, within = (stride // array.itemsize for stride in array.strides)
    if columns > 1 and within != 1:
        return None
    if rows <= 1:
        return columns
    return step if step >= columns and array.strides[0] % array.itemsize == 0 else None


def output(x: Any, what: str, rows: int, columns: int, like: Any) -> tuple[Any, numpy.ndarray]:
    """(what the caller gets, the array to write to): `x` if there is one, else a new array."""
    if x is None:
        made = numpy.empty((rows, columns), dtype=like)
        return made, made
    array = _array(x, what)
    if array.shape != (rows, columns) or dtype_of(array.dtype) != dtype_of(numpy.dtype(like)):
        raise invalid(f"{what} is {array.shape} of {array.dtype}, and the result is {(rows, columns)} of {numpy.dtype(like)}")
    if pitch_of(array) is None or not array.flags.writeable:
        raise invalid(f"{what} must be writable, and its rows without gaps")
    return x, array


def _matrix(array: numpy.ndarray, transposed: bool) -> Matrix:
    rows, columns = array.shape
    pitch = pitch_of(array.T if transposed else array)
    assert pitch is not None
    return Matrix(array.ctypes.data, pitch, rows, columns, dtype_of(array.dtype), transposed, array.dtype, array)


def is_torch(x: Any) -> bool:
    """Whether x is PyTorch's; PyTorch is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def refuse_torch(x: Any, what: str, instead: str) -> None:
    """Raises which function takes PyTorch's tensors, if x is one."""
    if is_torch(x):
        raise invalid(f"{what} of mkernel is for NumPy arrays and DLPack: for PyTorch's tensors call {instead}, which has gradients")


def tensor(x: Any, what: str) -> numpy.ndarray:
    """`x`, of any number of dimensions, without gaps; an array that has gaps is copied."""
    array = _elements(x, what)
    return array if array.flags.c_contiguous else numpy.ascontiguousarray(array)


def rows_of_any(x: Any, what: str) -> tuple[numpy.ndarray, int]:
    """(`x` as a matrix without gaps, its MK_ type), of float32, too; one that has gaps is copied."""
    if isinstance(x, numpy.ndarray) and x.ndim == 2 and x.dtype == numpy.float32:
        return numpy.ascontiguousarray(x), _c.F32
    array = numpy.ascontiguousarray(_array(x, what))
    return array, dtype_of(array.dtype)


def _array(x: Any, what: str) -> numpy.ndarray:
    array = _elements(x, what)
    if array.ndim != 2:
        raise invalid(f"{what} has {array.ndim} dimensions, and must be a matrix: reshape it to 2")
    return array


def _elements(x: Any, what: str) -> numpy.ndarray:
    if isinstance(x, numpy.ndarray):
        array = x
    elif hasattr(x, "__dlpack__"):
        array = _from_dlpack(x, what)
    else:
        raise invalid(f"{what} is a {type(x).__name__}: give a NumPy array, a PyTorch tensor, or anything with DLPack")
    dtype_of(array.dtype)
    return array


# --- DLPack, read by its published struct: NumPy's own reader knows no bf16 -------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_FLOAT, _BFLOAT = 2, 4


def _from_dlpack(x: Any, what: str) -> numpy.ndarray:
    """A view of x's memory. The capsule, which owns it, stays referenced by the view."""
    capsule = x.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(get(capsule, b"dltensor"))
    if tensor.device_type not in _HOST_DEVICES:
        raise Error(
            ErrorCode.UNSUPPORTED,
            f"{what} lies on device {tensor.device_type} of DLPack: tensors on GPUs go through PyTorch "
            "(torch.from_dlpack), whose stream the launch then takes",
        )
    if tensor.lanes != 1 or tensor.bits != 16 or tensor.code not in (_FLOAT, _BFLOAT):
        raise invalid(f"{what} has elements of DLPack's type ({tensor.code}, {tensor.bits} bits): the operators compute in f16 and bf16")
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    strides = [tensor.strides[i] for i in range(tensor.ndim)] if tensor.strides else None
    if strides is None:
        strides = [1] * tensor.ndim
        for i in range(tensor.ndim - 2, -1, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
    if 0 in shape:
        return numpy.empty(shape, dtype=numpy.uint16 if tensor.code == _BFLOAT else numpy.float16)
    if min(strides) < 0:
        raise invalid(f"{what} has negative strides: copy it first")
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    memory = (ctypes.c_uint16 * elements).from_address(tensor.data + tensor.byte_offset)
    memory.owner = capsule  # an array keeps its buffer, and so the capsule
    flat = numpy.frombuffer(memory, dtype=numpy.uint16 if tensor.code == _BFLOAT else numpy.float16)
    return numpy.lib.stride_tricks.as_strided(flat, shape, [2 * stride for stride in strides])
