"""Ring Attention of all ranks, through ring_abi.h."""
import ctypes


class Shape(ctypes.Structure):
    _fields_ = ([("dtype", ctypes.c_int)]
                + [(name, ctypes.c_uint32) for name in ("batch", "query_heads", "key_heads", "head_dim", "causal")]
                + [("seq", ctypes.c_uint64)]
                + [(name, ctypes.c_uint32) for name in ("stream_groups", "transport", "heads_together", "window_pairs")])


class Tensors(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")] + [("strides", ctypes.c_int64 * 3 * 5)]


class Stats(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("total_ns", "compute_end_ns", "share_end_ns", "wait_ns", "waits")]


class Span(ctypes.Structure):
    _fields_ = ([(name, ctypes.c_uint64) for name in ("begin_ns", "end_ns")]
                + [(name, ctypes.c_uint32) for name in ("role", "block", "kind", "index", "rank")])


class Partial(ctypes.Structure):
    _fields_ = [("o", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("first", ctypes.c_int64), ("rows", ctypes.c_int64)]


POINTER, U32 = ctypes.c_void_p, ctypes.c_uint32
FUNCTIONS = {
    "mk_ring_create": (POINTER, [POINTER, ctypes.POINTER(Shape)]), "mk_ring_destroy": (None, [POINTER]),
    "mk_ring_tile_keys": (ctypes.c_int, [POINTER]),
    "mk_ring_engines": (ctypes.c_int, [POINTER, ctypes.POINTER(U32)]),
    "mk_ring_blocks": (None, [POINTER, ctypes.POINTER(U32), ctypes.POINTER(U32)]),
    "mk_ring_launch": (ctypes.c_int, [POINTER, ctypes.POINTER(Tensors), ctypes.c_int]),
    "mk_ring_finish": (ctypes.c_int, [POINTER, ctypes.POINTER(Stats)]), "mk_ring_set_trace": (None, [POINTER, ctypes.c_int]),
    "mk_ring_trace": (U32, [POINTER, U32, ctypes.POINTER(Span), U32]),
    "mk_ring_merge": (None, [POINTER, U32, POINTER, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int,
                             ctypes.POINTER(Partial), ctypes.c_int, POINTER])}
