"""The C ABI (client/include/mkernel/mkernel_c.h) through ctypes: the library, its structs, its functions.

Nothing outside this file names a C function's types. `call` turns a status into an exception.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Optional

from .errors import Error, ErrorCode

BF16, F16, F32 = 1, 2, 3  # F32: of the collectives only
KN, NK = 0, 1
CPU, CUDA = 0, 1
FUSED, UNFUSED, AUTO = 0, 1, 2
PARTIALS_ELEMENT, PARTIALS_F32 = 0, 1


class _Sized(Structure):
    """A struct of the C ABI: it begins with its own size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_bytes=ctypes.sizeof(type(self)), **fields)


class AttachOptions(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("socket", c_char_p),
        ("job", c_char_p),
        ("rank", c_uint32),
        ("world", c_uint32),
        ("node_rank", c_uint32),
        ("nodes", c_uint32),
        ("local_rank", c_uint32),
        ("local_size", c_uint32),
        ("lanes", c_uint32),
        ("timeout_ms", c_uint32),
        ("job_secret", c_void_p),
        ("job_secret_bytes", c_uint64),
        ("arrival_flags", c_uint32),
        ("heartbeat_timeout_ms", c_uint32),
        ("gpu", c_char_p),
        ("rail", c_uint32),
    ]


class Place(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("rank", c_uint32),
        ("world", c_uint32),
        ("node_rank", c_uint32),
        ("nodes", c_uint32),
        ("local_rank", c_uint32),
        ("local_size", c_uint32),
    ]


class Tuning(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("executor", c_uint32),
        ("tile_m", c_uint32),
        ("tile_n", c_uint32),
        ("chunk_bytes", c_uint32),
        ("compute_sms", c_uint32),
        ("reduce_sms", c_uint32),
        ("send_sms", c_uint32),
        ("receive_sms", c_uint32),
        ("share_sms", c_uint32),
        ("pull_sms", c_uint32),
        ("wait_timeout_ms", c_uint32),
        ("count_nonfinite", c_uint32),
        ("flops_per_s", c_double),
        ("local_bytes_per_s", c_double),
        ("network_bytes_per_s", c_double),
        ("command_ns", c_double),
        ("step_ns", c_double),
        ("batch_invariant", c_uint32),
        ("own_workspace", c_uint32),
        ("machine_file", c_char_p),
        ("tuned_file", c_char_p),
        ("exchange", c_uint32),
        ("partition", c_uint64),
        ("transport", c_uint64),
    ]


class LaunchStats(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("epoch", c_uint32),
        ("mode", c_uint32),
        ("total_ns", c_uint64),
        ("compute_ns", c_uint64),
        ("compute_wait_ns", c_uint64),
        ("network_bytes", c_uint64),
        ("network_commands", c_uint64),
        ("estimated_fused_ns", c_uint64),
        ("estimated_unfused_ns", c_uint64),
        ("nonfinite_partials", c_uint64),
        ("partition_first", c_uint32),
        ("partition_last", c_uint32),
        ("partition_moves", c_uint64),
        ("partition_turns", c_uint64),
    ]


class GemmShape(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("tuning", POINTER(Tuning)),
        ("m_max", c_uint64),
        ("n", c_uint64),
        ("k", c_uint64),
        ("dtype", c_uint32),
        ("b_layout", c_uint32),
        ("activation", c_uint32),
        ("bias", c_uint32),
        ("partials", c_uint32),
    ]


class GemmArguments(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("a", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("m", c_uint64),
        ("gathered", c_void_p),
        ("bias", c_void_p),
        ("lda", c_uint64),
        ("ldb", c_uint64),
        ("ldc", c_uint64),
        ("tag", c_uint64),
    ]


class CollectiveShape(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("tuning", POINTER(Tuning)),
        ("m_max", c_uint64),
        ("n", c_uint64),
        ("dtype", c_uint32),
        ("partials", c_uint32),
    ]


class CollectiveArguments(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("input", c_void_p),
        ("output", c_void_p),
        ("m", c_uint64),
        ("tag", c_uint64),
    ]


class MoeShape(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("tuning", POINTER(Tuning)),
        ("tokens_max", c_uint64),
        ("hidden", c_uint64),
        ("features", c_uint64),
        ("rows_max", c_uint64),
        ("experts", c_uint32),
        ("top_k", c_uint32),
        ("dtype", c_uint32),
        ("b_layout", c_uint32),
        ("epilogue", c_uint32),
        ("unused", c_uint32),
        ("bias", c_uint32),
    ]


class MoeArguments(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("tokens", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("count", c_uint64),
        ("expert_weights", c_void_p),
        ("y", c_void_p),
        ("capacity", c_uint64),
        ("tag", c_uint64),
        ("bias", c_void_p),
    ]


class MoeRow(Structure):
    _fields_ = [("rank", c_uint32), ("token", c_uint32), ("slot", c_uint32), ("weight", c_float)]


class CombineShape(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("tuning", POINTER(Tuning)),
        ("tokens_max", c_uint64),
        ("hidden", c_uint64),
        ("features", c_uint64),
        ("experts", c_uint32),
        ("top_k", c_uint32),
        ("dtype", c_uint32),
        ("b_layout", c_uint32),
        ("partials", c_uint32),
    ]


class CombineArguments(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("y", c_void_p),
        ("rows", c_void_p),
        ("row_count", c_uint64),
        ("expert_offsets", c_void_p),
        ("expert_offset_count", c_uint64),
        ("expert_weights", c_void_p),
        ("ids", c_void_p),
        ("count", c_uint64),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("tag", c_uint64),
    ]


class RingShape(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("tuning", POINTER(Tuning)),
        ("seq_max", c_uint64),
        ("query_heads", c_uint32),
        ("key_heads", c_uint32),
        ("head_dim", c_uint32),
        ("causal", c_uint32),
        ("dtype", c_uint32),
        ("remote_passes", c_uint32),
        ("batch", c_uint32),
        ("sequences_max", c_uint32),
    ]


class RingArguments(_Sized):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("seq", c_uint64),
        ("q_stride", c_uint64),
        ("k_stride", c_uint64),
        ("v_stride", c_uint64),
        ("out_stride", c_uint64),
        ("scale", c_double),
        ("q_head_stride", c_uint64),
        ("k_head_stride", c_uint64),
        ("v_head_stride", c_uint64),
        ("out_head_stride", c_uint64),
        ("q_batch_stride", c_uint64),
        ("k_batch_stride", c_uint64),
        ("v_batch_stride", c_uint64),
        ("out_batch_stride", c_uint64),
        ("lse_stride", c_uint64),
        ("lse_head_stride", c_uint64),
        ("lse_batch_stride", c_uint64),
        ("sequence_starts", c_void_p),
        ("sequences", c_uint64),
        ("rows", c_uint64),
        ("tag", c_uint64),
    ]


#: By the operator's name: its shape, and the field of it that says for how much it makes room.
SHAPES: dict[str, tuple[Any, str]] = {
    "ag-gemm": (GemmShape, "m_max"),
    "gemm-rs": (GemmShape, "m_max"),
    "gemm-ar": (GemmShape, "m_max"),
    "moe": (MoeShape, "tokens_max"),
    "combine": (CombineShape, "tokens_max"),
    "ring": (RingShape, "seq_max"),
    "all-gather": (CollectiveShape, "m_max"),
    "reduce-scatter": (CollectiveShape, "m_max"),
}
ROWS, EXPERT_OFFSETS, FIRST_EXPERT = 3, 4, 5

_HANDLE = POINTER(c_void_p)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "mk_version": (c_char_p, []),
    "mk_last_error": (c_char_p, []),
    "mk_session_attach": (c_int32, [POINTER(AttachOptions), _HANDLE]),
    "mk_session_attach_from_environment": (c_int32, [POINTER(AttachOptions), _HANDLE]),
    "mk_session_attach_group": (
        c_int32,
        [POINTER(AttachOptions), c_uint32, POINTER(c_uint32), c_uint64, c_char_p, _HANDLE],
    ),
    "mk_session_status": (c_int32, [c_void_p]),
    "mk_session_barrier": (c_int32, [c_void_p, c_uint32]),
    "mk_session_place": (c_int32, [c_void_p, POINTER(Place)]),
    "mk_session_fabric": (c_char_p, [c_void_p]),
    "mk_session_detach": (c_int32, [c_void_p]),
    "mk_session_exchange": (c_int32, [c_void_p, c_char_p, c_void_p, c_uint64, c_uint32, _HANDLE]),
    "mk_blobs_at": (c_void_p, [c_void_p, c_uint32, POINTER(c_uint64)]),
    "mk_blobs_free": (None, [c_void_p]),
    "mk_op_create": (c_int32, [c_void_p, c_char_p, c_void_p, _HANDLE]),
    "mk_op_workspace_bytes": (c_int32, [c_void_p, c_char_p, c_void_p, POINTER(c_uint64)]),
    "mk_op_launch": (c_int32, [c_void_p, c_void_p, c_uint32, POINTER(LaunchStats)]),
    "mk_op_launch_on": (c_int32, [c_void_p, c_void_p, c_void_p, c_uint32]),
    "mk_op_status": (c_int32, [c_void_p]),
    "mk_op_finish": (c_int32, [c_void_p, c_void_p, POINTER(LaunchStats)]),
    "mk_op_query": (c_int32, [c_void_p, c_uint32, _HANDLE, POINTER(c_uint64)]),
    "mk_op_destroy": (None, [c_void_p]),
    "mk_rows_of_rank": (None, [c_uint64, c_uint32, c_uint32, POINTER(c_uint64), POINTER(c_uint64)]),
    "mk_sequence_rows_of_rank": (None, [c_uint64, c_uint32, c_uint32, c_uint32, c_uint64 * 2, c_uint64 * 2]),
}


def build_folders() -> list[pathlib.Path]:
    """The build folders of the checkout that this package lies in; none where it is installed."""
    root = pathlib.Path(__file__).resolve().parents[3]
    if not (root / "client/include/mkernel/mkernel_c.h").exists():
        return []
    return [folder for name in ("release", "dev") if (folder := root / "build" / name).is_dir()]


def _candidates() -> list[str]:
    """Where libmkclient may be, the first choice first."""
    chosen = os.environ.get("MKERNEL_LIBRARY")
    if chosen:
        return [chosen]
    shipped = pathlib.Path(__file__).parent / "lib/libmkclient.so.1"
    built = [folder / "client/libmkclient.so.1" for folder in build_folders()]
    return [*(str(path) for path in (shipped, *built) if path.exists()), "libmkclient.so.1"]


def _load_one_dnn() -> None:
    """The wheel's oneDNN, which the CPU executor then finds under its name; its symbols stay its own."""
    shipped = pathlib.Path(__file__).parent / "lib/libdnnl.so.2"
    if shipped.exists():
        ctypes.CDLL(str(shipped))


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """The loaded library; Error with what to do when there is none, or one without these functions."""
    troubles = []
    for path in _candidates():
        try:
            loaded = ctypes.CDLL(path)
        except OSError as error:
            troubles.append(str(error))
            continue
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(loaded, name)
            except AttributeError:
                raise Error(
                    ErrorCode.ABI_MISMATCH,
                    f"{path} has no function {name}, so it is older than this package: install the "
                    "libmkclient of the package's version, or point MKERNEL_LIBRARY at it",
                ) from None
            function.restype, function.argtypes = result, arguments
        _load_one_dnn()
        return loaded
    raise Error(
        ErrorCode.UNAVAILABLE,
        f"libmkclient.so.1 is not to be had ({'; '.join(troubles)}): install the wheel for this machine or the "
        "Debian package libmkclient1, or point MKERNEL_LIBRARY at the file",
    )


def call(name: str, *arguments: Any, rank: Optional[int] = None) -> None:
    """Calls a function that answers a status; a failure becomes an Error."""
    loaded = library()
    status = getattr(loaded, name)(*arguments)
    if status != 0:
        raise Error(status, loaded.mk_last_error().decode(errors="replace"), rank)


def version() -> str:
    """The library's version, "0.1.0" or with a revision, "0.1.0+..."."""
    return library().mk_version().decode()


def rows_of_rank(rows: int, world: int, rank: int) -> tuple[int, int]:
    """(first, count): the rows that a rank has when `rows` rows are dealt out over the job."""
    first, count = c_uint64(), c_uint64()
    library().mk_rows_of_rank(rows, world, rank, ctypes.byref(first), ctypes.byref(count))
    return first.value, count.value


def sequence_rows_of_rank(rows: int, causal: bool, world: int, rank: int) -> list[tuple[int, int]]:
    """[(first, count), ...]: the parts of a sequence that a rank has, one after the other in its tensors."""
    first, count = (c_uint64 * 2)(), (c_uint64 * 2)()
    library().mk_sequence_rows_of_rank(rows, causal, world, rank, first, count)
    return [(first[i], count[i]) for i in range(2 if causal else 1)]
