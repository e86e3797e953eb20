"""The ranks of ring_bench.py, through ring_abi.h."""
import ctypes

import torch


class Setup(ctypes.Structure):
    _fields_ = [("nodes", ctypes.c_uint32), ("locals", ctypes.c_uint32), ("link_bandwidth", ctypes.c_char_p)]


class Shape(ctypes.Structure):
    _fields_ = ([("dtype", ctypes.c_int)]
                + [(name, ctypes.c_uint32) for name in ("batch", "query_heads", "key_heads", "head_dim", "causal")]
                + [("seq", ctypes.c_uint64), ("stream_groups", ctypes.c_uint32)])


class Tensors(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")] + [("strides", ctypes.c_int64 * 3 * 5)]


class Stats(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("total_ns", "compute_end_ns", "share_end_ns", "wait_ns", "waits")]


class Move(ctypes.Structure):
    _fields_ = [("source_rank", ctypes.c_uint32), ("target_rank", ctypes.c_uint32), ("source", ctypes.c_void_p),
                ("target", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class Parcel(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


class Span(ctypes.Structure):
    _fields_ = ([(name, ctypes.c_uint64) for name in ("begin_ns", "end_ns")]
                + [(name, ctypes.c_uint32) for name in ("role", "block", "kind", "index", "rank")])


class Partial(ctypes.Structure):
    _fields_ = [("o", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("first", ctypes.c_int64), ("rows", ctypes.c_int64)]


QUEUE = ctypes.CFUNCTYPE(None)


class World:
    """The ranks' streams, and what joins them (ring_abi.h)."""

    def __init__(self, path, nodes, local_ranks, bandwidth):
        self.c = ctypes.CDLL(path)
        pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
        for name, result, arguments in (
                ("world", pointer, [ctypes.POINTER(Setup)]), ("end", None, [pointer]), ("stream", pointer, [pointer, u32]),
                ("time", None, [pointer, QUEUE, ctypes.c_int, ctypes.POINTER(ctypes.c_double)]),
                ("create", pointer, [pointer, ctypes.POINTER(Shape)]), ("destroy", None, [pointer]),
                ("tile_keys", ctypes.c_int, [pointer]), ("blocks", None, [pointer, ctypes.POINTER(u32), ctypes.POINTER(u32)]),
                ("launch", ctypes.c_int, [pointer, ctypes.POINTER(Tensors), ctypes.c_int]),
                ("finish", ctypes.c_int, [pointer, ctypes.POINTER(Stats)]), ("error", ctypes.c_char_p, []),
                ("exchange", None, [pointer, ctypes.POINTER(Move), u32, ctypes.POINTER(pointer)]),
                ("all_gather", None, [pointer, ctypes.POINTER(pointer), ctypes.POINTER(pointer), u32, u64,
                                      ctypes.POINTER(pointer)]),
                ("rail_memory", None, [pointer, u64, ctypes.POINTER(pointer)]), ("rail_begin", None, [pointer]),
                ("rail_send", None, [pointer, u32, ctypes.POINTER(Parcel), u32, pointer]),
                ("rail_await", None, [pointer, u32, ctypes.POINTER(Parcel), u32, pointer]),
                ("rail_right", ctypes.c_int, [pointer]), ("set_trace", None, [pointer, ctypes.c_int]),
                ("trace", u32, [pointer, u32, ctypes.POINTER(Span), u32]),
                ("merge", None, [pointer, u32, pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int,
                                 ctypes.POINTER(Partial), ctypes.c_int, pointer])):
            function = getattr(self.c, f"mk_ring_{name}")
            function.restype, function.argtypes = result, arguments
        self.nodes, self.locals = nodes, local_ranks
        self.size = nodes * local_ranks
        self.handle = self.c.mk_ring_world(ctypes.byref(Setup(nodes, local_ranks, bandwidth.encode())))
        self.streams = [torch.cuda.ExternalStream(self.c.mk_ring_stream(self.handle, r), device=f"cuda:{r}")
                        for r in range(self.size)]
        self.side_streams = [torch.cuda.Stream(device=r) for r in range(self.size)]

    def require(self, wrong):
        if wrong:
            raise RuntimeError(self.c.mk_ring_error().decode())

    def time(self, side, held=True):
        """Microseconds of the slowest rank. What goes wrong in the side does so after the launch."""
        errors = []

        def queue():
            try:
                side()
            except Exception as error:  # noqa: BLE001 - it may not pass through C
                errors.append(error)

        us = (ctypes.c_double * self.size)()
        self.c.mk_ring_time(self.handle, QUEUE(queue), int(held), us)
        if errors:
            raise errors[0]
        return max(us)


def handles(streams):
    return (ctypes.c_void_p * len(streams))(*(stream.cuda_stream for stream in streams))
