"""All ranks of a job, a GPU each, for benchmarks: world_abi.h."""
import ctypes

import torch


class Setup(ctypes.Structure):
    _fields_ = [("nodes", ctypes.c_uint32), ("locals", ctypes.c_uint32), ("link_bandwidth", ctypes.c_char_p)]


class Move(ctypes.Structure):
    _fields_ = [("source_rank", ctypes.c_uint32), ("target_rank", ctypes.c_uint32), ("source", ctypes.c_void_p),
                ("target", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class Parcel(ctypes.Structure):
    _fields_ = [("source", ctypes.c_uint64), ("target", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


QUEUE = ctypes.CFUNCTYPE(None)


class World:
    """The ranks' streams, and what joins them. The library may have an operator besides: `functions`, by name what each
    returns and takes."""

    def __init__(self, path, nodes, local_ranks, bandwidth, functions):
        self.c = ctypes.CDLL(path)
        pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
        parcels = [pointer, u32, ctypes.POINTER(Parcel), u32, pointer]
        own = {
            "mk_world_create": (pointer, [ctypes.POINTER(Setup)]), "mk_world_stream": (pointer, [pointer, u32]),
            "mk_world_time": (None, [pointer, QUEUE, ctypes.c_int, ctypes.POINTER(ctypes.c_double)]),
            "mk_world_error": (ctypes.c_char_p, []),
            "mk_world_exchange": (None, [pointer, ctypes.POINTER(Move), u32, ctypes.POINTER(pointer)]),
            "mk_world_all_gather": (None, [pointer, ctypes.POINTER(pointer), ctypes.POINTER(pointer), u32, u64,
                                           ctypes.POINTER(pointer)]),
            "mk_rails_create": (pointer, [pointer, u64, ctypes.POINTER(pointer)]), "mk_rails_destroy": (None, [pointer]),
            "mk_rails_begin": (None, [pointer]), "mk_rails_send": (None, parcels), "mk_rails_await": (None, parcels),
            "mk_rails_right": (ctypes.c_int, [pointer])}
        for name, (result, arguments) in {**own, **functions}.items():
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments
        self.nodes, self.locals = nodes, local_ranks
        self.size = nodes * local_ranks
        self.handle = self.c.mk_world_create(ctypes.byref(Setup(nodes, local_ranks, bandwidth.encode())))
        self.streams = [torch.cuda.ExternalStream(self.c.mk_world_stream(self.handle, r), device=f"cuda:{r}")
                        for r in range(self.size)]
        self.side_streams = [torch.cuda.Stream(device=r) for r in range(self.size)]

    def peer(self, r):
        """The rank of r's rail on the other node."""
        return (r + self.locals) % self.size

    def mate(self, r, steps):
        """The rank of r's node that many steps on."""
        return r // self.locals * self.locals + (r + steps) % self.locals

    def device(self, r):
        return f"cuda:{r}"

    def on(self, r):
        """What PyTorch is asked for goes to the rank's stream."""
        return torch.cuda.stream(self.streams[r])

    def make_rails(self, elements, kept):
        return Rails(self, elements, kept)

    def synchronize(self):
        for r in range(self.size):
            torch.cuda.synchronize(r)

    def require(self, wrong):
        if wrong:
            raise RuntimeError(self.c.mk_world_error().decode())

    def time(self, side, held=True):
        """Microseconds of the slowest rank. What goes wrong in the side does so after the launch."""
        errors = []

        def queue():
            try:
                side()
            except Exception as error:  # noqa: BLE001 - it may not pass through C
                errors.append(error)

        us = (ctypes.c_double * self.size)()
        self.c.mk_world_time(self.handle, QUEUE(queue), int(held), us)
        if errors:
            raise errors[0]
        return max(us)

    def exchange(self, moves, streams):
        """Of (rank, rank, tensor there, tensor here), as one group."""
        if moves:
            array = (Move * len(moves))(*(Move(source, target, one.data_ptr(), other.data_ptr(), one.numel() * one.element_size())
                                          for source, target, one, other in moves))
            self.c.mk_world_exchange(self.handle, array, len(moves), handles(streams))

    def all_gather(self, sources, targets, count, bytes_each):
        array = ctypes.c_void_p * len(sources)
        self.c.mk_world_all_gather(self.handle, array(*sources), array(*targets), count, bytes_each, handles(self.streams))


class Memory:
    """Device memory that is not PyTorch's, for torch.as_tensor."""

    def __init__(self, address, count, kind="<i2"):
        self.__cuda_array_interface__ = dict(shape=(count,), typestr=kind, data=(address, False), version=3)


class Rails:
    """The daemons' rails between two nodes, and `elements` of 16 bits on each rank that they reach: `memory[rank]`.
    They end with `kept`, an ExitStack."""

    def __init__(self, world, elements, kept):
        self.world = world
        addresses = (ctypes.c_void_p * world.size)()
        self.handle = world.c.mk_rails_create(world.handle, 2 * elements, addresses)
        kept.callback(world.c.mk_rails_destroy, self.handle)
        self.memory = []
        for r in range(world.size):
            with torch.cuda.device(r):
                self.memory.append(torch.as_tensor(Memory(addresses[r], elements), device=f"cuda:{r}").view(torch.bfloat16))

    def begin(self):
        self.world.c.mk_rails_begin(self.handle)

    # `parcels`, by rank: of (first element here, first element there, elements) what it sends.

    def send(self, r, parcels, stream):
        array = self.array_of(parcels[r])
        self.world.c.mk_rails_send(self.handle, r, array, len(array), stream.cuda_stream)

    def receive(self, r, parcels, stream):
        array = self.array_of(parcels[self.world.peer(r)])
        self.world.c.mk_rails_await(self.handle, r, array, len(array), stream.cuda_stream)

    def right(self):
        return bool(self.world.c.mk_rails_right(self.handle))

    @staticmethod
    def array_of(parcels):
        parcels = [parcel for parcel in parcels if parcel[2]]
        return (Parcel * len(parcels))(*(Parcel(2 * source, 2 * target, 2 * count) for source, target, count in parcels))


def handles(streams):
    return (ctypes.c_void_p * len(streams))(*(stream.cuda_stream for stream in streams))
