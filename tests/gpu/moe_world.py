"""A MoE layer of all ranks, through moe_abi.h, and the routings that it is measured with."""
import ctypes
import dataclasses

import torch

from gpu_world import Memory

POINTER, U32 = ctypes.c_void_p, ctypes.c_uint32
GATED_SILU = 1  # MoeEpilogue: all gates, then all up projections


class Shape(ctypes.Structure):
    _fields_ = ([("dtype", ctypes.c_int), ("epilogue", ctypes.c_int)]
                + [(name, U32) for name in ("hidden", "features", "experts", "top_k", "tokens_max", "rows_max")]
                + [("f32_partials", ctypes.c_int)] + [(name, U32) for name in ("stream_groups", "transport", "dma_bytes")]
                + [("first_only", ctypes.c_int)])


class Tensors(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("tokens", "ids", "weights", "first", "second", "y", "out")] + [("count", U32)]


class Stats(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("total_ns", "compute_end_ns", "wait_ns", "waits")] + [("compute_sms", U32), ("stream_groups", U32)]


FUNCTIONS = {
    "mk_moe_create": (POINTER, [POINTER, ctypes.POINTER(Shape)]), "mk_moe_destroy": (None, [POINTER]),
    "mk_moe_engines": (ctypes.c_int, [POINTER]),
    "mk_moe_launch": (ctypes.c_int, [POINTER, ctypes.POINTER(Tensors), ctypes.c_int, ctypes.c_int, ctypes.c_int]),
    "mk_moe_finish": (ctypes.c_int, [POINTER, ctypes.c_int, ctypes.POINTER(Stats)]),
    "mk_moe_output": (None, [POINTER, U32, ctypes.POINTER(POINTER), ctypes.POINTER(POINTER)])}


@dataclasses.dataclass(frozen=True)
class Case:
    """`tokens` of each rank; `features`: of an expert's inner rows."""

    model: str
    tokens: int
    hidden: int
    features: int
    experts: int
    top_k: int
    routing: str = "uniform"
    gated: bool = True

    def __str__(self):
        return (f"{self.model} T{self.tokens} H{self.hidden} {'gated ' if self.gated else ''}I{self.features} E{self.experts} "
                f"top{self.top_k} {self.routing}")


def route(case, world, generator):
    """Experts of each token of each rank, all different."""
    size, here = world, case.experts // world
    ranks = []
    weights = torch.ones(case.experts, dtype=torch.float64)
    if case.routing == "zipf":  # exponent 1.0, over experts in an order drawn once
        weights = 1.0 / (torch.randperm(case.experts, generator=generator) + 1).double()
    centres = torch.rand(64, case.experts, generator=generator, dtype=torch.float64) ** 8 + 1e-3
    for _ in range(size):
        likely = weights.expand(case.tokens, -1).clone()
        if case.routing == "correlated":
            # Tokens of one document, 256 in a row, prefer the same experts.
            of_document = torch.randint(64, ((case.tokens + 255) // 256,), generator=generator)
            likely = centres[of_document.repeat_interleave(256)[:case.tokens]]
        ids = torch.multinomial(likely, case.top_k, generator=generator)
        if case.routing == "hot_expert":  # everybody's first
            ids = torch.where(ids == 0, ids[:, :1], ids)
            ids[:, 0] = 0
        if case.routing == "hot_rank":  # half of each token's experts are one rank's
            most = min(here, max(1, case.top_k // 2))
            hot = torch.multinomial(torch.ones(case.tokens, here), most, generator=generator)
            others = torch.multinomial(torch.ones(case.tokens, case.experts - here), case.top_k - most, generator=generator) + here
            ids = torch.cat([hot, others], 1) if case.top_k > most else hot
        ranks.append(ids.int())
    return ranks


def transport_of(name):
    """MkMoeShape's transport and dma_bytes."""
    if name is None:
        return 0, 0
    return (2, 0) if name == "warpgroups" else (1, int(name.removeprefix("engines") or 0) << 20)


class Layer:
    """Its tensors on all ranks (`tensors`), which may be those of another layer of the case, and our launches, until `kept` ends.

    `transport`: how tokens come within a node, as --transports has it; then the layer has its first half only."""

    def __init__(self, world, case, stream_groups=0, like=None, *, transport=None, kept):
        self.world, self.case, self.here = world, case, case.experts // world.size
        if like is None:
            self.draw()
        else:
            self.rows, self.rows_max, self.tensors = like.rows, like.rows_max, like.tensors
        shape = Shape(0, GATED_SILU if case.gated else 0, case.hidden, case.features, case.experts, case.top_k, case.tokens,
                      self.rows_max, 0, stream_groups, *transport_of(transport), int(transport is not None))
        self.handle = world.c.mk_moe_create(world.handle, ctypes.byref(shape))
        world.require(not self.handle)
        kept.callback(world.c.mk_moe_destroy, self.handle)
        self.arguments = (Tensors * world.size)(*(
            Tensors(*(tensor.data_ptr() for tensor in (t.tokens, t.ids, t.weights, t.first, t.second, t.y, t.out)), case.tokens)
            for t in self.tensors))

    def draw(self):
        world, case, size, here = self.world, self.case, self.world.size, self.here
        generator = torch.Generator().manual_seed(torch.randint(1 << 30, (1,)).item())
        routing = route(case, size, generator)
        self.rows = [sum(int((ids // here == d).sum()) for ids in routing) for d in range(size)]
        self.rows_max = max(self.rows)
        self.tensors = []
        columns = case.features * (2 if case.gated else 1)
        for r in range(size):
            normal = lambda *shape, r=r: torch.randn(*shape, device=world.device(r), dtype=torch.bfloat16)
            its = type("Tensors", (), {})()
            its.ids_host = routing[r]
            its.ids = routing[r].to(world.device(r))
            its.tokens = normal(case.tokens, case.hidden)
            its.weights = torch.rand(case.tokens, case.top_k, device=world.device(r))
            # Small, so that what is squashed by SiLU, and what is summed, stays of order 1.
            its.first = normal(here, columns, case.hidden) * case.hidden ** -0.5
            its.second = normal(here, case.hidden, case.features) * case.features ** -0.5
            its.y = torch.empty(self.rows_max, case.features, device=world.device(r), dtype=torch.bfloat16)
            its.out = torch.empty(case.tokens, case.hidden, device=world.device(r), dtype=torch.bfloat16)
            self.tensors.append(its)
        world.synchronize()

    def by_engines(self):
        return bool(self.world.c.mk_moe_engines(self.handle))

    def launch(self, first, second, unfused=False):
        self.world.require(self.world.c.mk_moe_launch(self.handle, self.arguments, int(first), int(second), int(unfused)))

    def finish(self, second):
        stats = (Stats * self.world.size)()
        self.world.require(self.world.c.mk_moe_finish(self.handle, int(second), stats))
        return max(stats, key=lambda one: one.total_ns)

    def poison(self):
        for t in self.tensors:
            t.y.fill_(float("nan"))
            t.out.fill_(float("nan"))
        self.world.synchronize()

    def left(self, r):
        """Of rank r: offsets [experts here + 1], and each row's (rank, token, slot) and weight, as the first half left them."""
        offsets, rows = ctypes.c_void_p(), ctypes.c_void_p()
        self.world.c.mk_moe_output(self.handle, r, ctypes.byref(offsets), ctypes.byref(rows))
        with torch.cuda.device(r):
            at = lambda address, count: torch.as_tensor(Memory(address.value, count, "<i4"), device=self.world.device(r)).clone()
            table = at(rows, 4 * self.rows[r]).view(self.rows[r], 4)
            return at(offsets, self.here + 1).long(), table[:, :3].long(), table[:, 3].contiguous().view(torch.float32)

    # What a rank must get at least: each token once, where it is not already.

    def bytes_needed(self):
        """Of the busiest rank and rail: (from its node, over its rail)."""
        case, world, here = self.case, self.world, self.here
        wanted = [[(t.ids_host // here == d).any(1) for d in range(world.size)] for t in self.tensors]
        token = 2 * case.hidden
        local = max(sum(int(wanted[s][d].sum()) for s in range(world.size) if s != d
                        and s // world.locals == d // world.locals) for d in range(world.size))
        if world.nodes == 1:
            return local * token, 0
        rail = 0
        for r in range(world.size):
            theirs = [wanted[r][d] for d in range(world.size) if d // world.locals != r // world.locals]
            rail = max(rail, int(torch.stack(theirs).any(0).sum()))
        return local * token, rail * token
