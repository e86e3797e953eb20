"""The same job from Python, on PyTorch's tensors, through libmkclient's C ABI: C = sum over all ranks of A_r B_r.

    torchrun --nnodes 2 --nproc-per-node 8 ... gemm_all_reduce.py [M N K]

Every rank compares the whole C with what it computes from everybody's seeds. Elements are -1, 0 and 1, so that every sum is
exact in bf16 while K times the number of ranks is at most 256: the check is for equality."""
import ctypes
import os
import sys

import torch

BF16, KN, AUTO = 1, 0, 2
VOID, U64, U32, SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t


class Shape(ctypes.Structure):  # mk_gemm_shape
    _fields_ = [("struct_bytes", SIZE), ("tuning", VOID), ("m_max", U64), ("n", U64), ("k", U64),
                ("dtype", U32), ("b_layout", U32)]


class Arguments(ctypes.Structure):  # mk_gemm_arguments
    _fields_ = [("struct_bytes", SIZE), ("a", VOID), ("b", VOID), ("c", VOID), ("m", U64), ("gathered", VOID)]


mk = ctypes.CDLL(os.environ.get("MKERNEL_LIBRARY", "libmkclient.so.1"))
mk.mk_last_error.restype = ctypes.c_char_p
mk.mk_session_rank.restype = mk.mk_session_world.restype = U32
mk.mk_session_rank.argtypes = mk.mk_session_world.argtypes = mk.mk_session_detach.argtypes = [VOID]
mk.mk_session_barrier.argtypes = [VOID, U32]
mk.mk_op_create.argtypes = [VOID, ctypes.c_char_p, ctypes.POINTER(Shape), ctypes.POINTER(VOID)]
mk.mk_op_launch.argtypes = [VOID, ctypes.POINTER(Arguments), U32, VOID]
mk.mk_op_destroy.argtypes = [VOID]


def check(status):
    if status != 0:
        sys.exit(mk.mk_last_error().decode())


def inputs(rank, m, n, k):
    random = torch.Generator().manual_seed(rank)
    return [torch.randint(-1, 2, shape, generator=random).to(torch.bfloat16) for shape in ((m, k), (k, n))]


m, n, k = map(int, sys.argv[1:4]) if len(sys.argv) > 3 else (256, 256, 16)
session, op = VOID(), VOID()
check(mk.mk_session_attach_from_environment(None, ctypes.byref(session)))
rank, world = mk.mk_session_rank(session), mk.mk_session_world(session)
if k * world > 256:
    sys.exit("K times the number of ranks may be 256 at most")
shape = Shape(ctypes.sizeof(Shape), None, m, n, k, BF16, KN)
check(mk.mk_op_create(session, b"gemm-ar", ctypes.byref(shape), ctypes.byref(op)))

a, b = inputs(rank, m, n, k)
c = torch.empty(m, n, dtype=torch.bfloat16)
arguments = Arguments(ctypes.sizeof(Arguments), a.data_ptr(), b.data_ptr(), c.data_ptr(), m, None)
check(mk.mk_op_launch(op, ctypes.byref(arguments), AUTO, None))

expected = torch.zeros(m, n, dtype=torch.float64)
for other in range(world):
    a, b = inputs(other, m, n, k)
    expected += a.double() @ b.double()
if not torch.equal(c.double(), expected):
    sys.exit(f"rank {rank}: C differs in {(c.double() != expected).sum()} elements")
# In one piece, with its newline: torchrun's ranks write to the same file, unbuffered.
print(f"rank {rank} of {world}: {c.numel()} elements checked\n", end="", flush=True)

check(mk.mk_session_barrier(session, 60000))
mk.mk_op_destroy(op)
check(mk.mk_session_detach(session))
