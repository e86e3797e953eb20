#!/usr/bin/env python3
"""moe_bench.py's baseline on the CPU: in every world its layer is what each token's experts make of it, computed one by one."""
import contextlib
import json
import os
import pathlib
import sys
import tempfile
import types
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

try:
    import torch
except ImportError:
    print("skipped: no PyTorch")
    sys.exit(77)

# pylint: disable=wrong-import-position
import torch.nn.functional as F

import world_bench
from gpu_world import World
from moe_baseline import Baseline
from moe_world import Case, Layer, route


class HostRails:
    def __init__(self, world, elements):
        self.world = world
        self.memory = [torch.full((elements,), float("nan"), dtype=torch.float64) for _ in range(world.size)]

    def begin(self):
        self.sent = {}

    def send(self, r, parcels, stream):
        self.sent[r] = [(target, self.memory[r][source:source + count].clone()) for source, target, count in parcels[r]]

    def receive(self, r, parcels, stream):
        assert len(self.sent) == self.world.size
        for target, data in self.sent[self.world.peer(r)]:
            self.memory[r][target:target + data.numel()] = data


class HostWorld(World):
    def __init__(self, nodes, local_ranks):  # pylint: disable=super-init-not-called
        self.nodes, self.locals, self.size = nodes, local_ranks, nodes * local_ranks
        self.streams = [None] * self.size

    def device(self, r):
        return "cpu"

    def on(self, r):
        return contextlib.nullcontext()

    def make_rails(self, elements, kept):
        return HostRails(self, elements)

    def exchange(self, moves, streams):
        for source, target, one, other in moves:
            assert one.dtype == torch.int64 or source // self.locals == target // self.locals
            assert one.is_contiguous() and other.is_contiguous() and one.shape == other.shape
            other.copy_(one)


def grouped(r, a, weights, ends, experts):
    """Rows up to ends[e] are of experts e and before; where the last rows of one mean nothing, `experts` says -1."""
    c = torch.full((a.shape[0], weights.shape[1]), float("nan"), dtype=a.dtype)
    begin = 0
    for e, end in enumerate(ends.tolist()):
        mine = experts[begin:end] >= 0
        assert (experts[begin:end][mine] == e).all()
        c[begin:end][mine] = a[begin:end][mine] @ weights[e].T
        begin = end
    assert begin == a.shape[0]
    return c


class MoeBaseline(unittest.TestCase):
    def test_the_layer_in_every_world(self):
        for nodes, local_ranks in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 3)):
            for align in (1, 4):
                for gate in (False, True):
                    for skew in (False, True):
                        with self.subTest(nodes=nodes, locals=local_ranks, align=align, gate=gate, skew=skew):
                            self.layer_is_right(HostWorld(nodes, local_ranks), align, gate, skew)

    def layer_is_right(self, world, align, gate, skew):
        case = types.SimpleNamespace(experts=3 * world.size, top_k=2, hidden=8, features=4, gated=gate)
        normal = lambda *shape: torch.randn(*shape, dtype=torch.float64)
        tensors = []
        for r in range(world.size):
            count = 5 + r
            # Skewed: nobody goes to the last rank.
            below = case.experts - (3 if skew and world.size > 1 else 0)
            ids = torch.stack([torch.randperm(below)[:case.top_k] for _ in range(count)]).int()
            tensors.append(types.SimpleNamespace(
                tokens=normal(count, case.hidden), ids=ids, ids_host=ids, weights=torch.rand(count, case.top_k, dtype=torch.float64),
                first=normal(3, case.features * (2 if gate else 1), case.hidden), second=normal(3, case.hidden, case.features)))
        baseline = Baseline(world, case, tensors, grouped, align, contextlib.ExitStack())
        for _ in range(2):
            baseline.layer()
            for t in tensors:
                for token in range(t.tokens.shape[0]):
                    exact = torch.zeros(case.hidden, dtype=torch.float64)
                    for slot in range(case.top_k):
                        expert = int(t.ids[token, slot])
                        owner = tensors[expert // 3]
                        x = owner.first[expert % 3] @ t.tokens[token]
                        x = F.silu(x[:case.features]) * x[case.features:] if gate else x
                        exact += t.weights[token, slot] * (owner.second[expert % 3] @ x)
                    torch.testing.assert_close(t.baseline_out[token], exact)

    def test_routings(self):
        tokens, world = 2048, 4
        for name in ("uniform", "zipf", "hot_expert", "hot_rank", "correlated"):
            for experts, top_k in ((64, 8), (8, 2)):
                with self.subTest(name=name, experts=experts):
                    ranks = route(Case("", tokens, 8, 8, experts, top_k, name), world, torch.Generator().manual_seed(7))
                    ids = torch.cat(ranks).long()
                    self.assertEqual(ids.shape, (tokens * world, top_k))
                    self.assertTrue(((ids >= 0) & (ids < experts)).all())
                    self.assertTrue((ids.sort(1).values.diff(dim=1) > 0).all(), "an expert twice")
                    share = torch.bincount(ids.flatten(), minlength=experts) / (tokens * world)
                    if name == "uniform":
                        self.assertLess(share.max(), 1.2 * top_k / experts)
                    elif name == "hot_expert":
                        self.assertEqual(share[0], 1)
                    elif name == "hot_rank":
                        self.assertAlmostEqual(share[:experts // world].sum().item(), top_k / 2, places=5)
                    else:
                        self.assertGreater(share.max(), 1.5 * share.mean())

    def test_each_token_is_needed_once(self):
        # Two nodes of two ranks, an expert each.
        ids = ([[0, 1], [2, 3]], [[2, 0]], [[0, 1], [0, 2], [1, 3]], [[3, 2]])
        layer = Layer.__new__(Layer)
        layer.world, layer.here, layer.case = HostWorld(2, 2), 1, types.SimpleNamespace(hidden=10)
        layer.tensors = [types.SimpleNamespace(ids_host=torch.tensor(its)) for its in ids]
        # Within nodes: 1 token of rank 1 comes to 0, 1 of rank 0 to 1; 1 of 3 to 2, 1 of 2 to 3. Rails: 1, 1, 3, 0.
        self.assertEqual(layer.bytes_needed(), (20, 60))

    def test_the_loop_over_cases_says_what_was_wrong(self):
        memory = []

        def measure(case, kept):
            self.assertEqual(memory, [], "what the case before has made")
            memory.append(case)
            kept.callback(memory.clear)
            if case == "breaks":
                raise RuntimeError("no memory")
            return {"case": case}

        for cases, status in ((["good", "left out"], 0), (["good", "wrong"], 1), (["breaks", "good"], 1)):
            with self.subTest(cases=cases), tempfile.TemporaryDirectory() as folder:
                arguments = types.SimpleNamespace(only="", json=f"{folder}/r.json", nodes=1, locals=2, link_bandwidth="")
                arguments.only = "good" if status == 0 else ""
                child = os.fork()
                if child == 0:
                    sys.stdout = open(os.devnull, "w", encoding="utf-8")
                    world_bench.run(arguments, cases, measure=measure, right=lambda row: row["case"] != "wrong", text_of=str, machine=dict)
                self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), status)
                with open(arguments.json, encoding="utf-8") as file:
                    self.assertEqual([row["case"] for row in json.load(file)["cases"]], [case for case in cases if case in ("good", "wrong")])


if __name__ == "__main__":
    unittest.main()
