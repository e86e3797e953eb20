#!/usr/bin/env python3
"""The way of K and V in ring_bench.py's baselines, without PyTorch: every rank gets every other rank's shard, at the step that
origins() says, and nothing crosses between nodes but on rails."""
import pathlib
import sys
import types
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(Event=object))

from ring_shards import Shards  # pylint: disable=wrong-import-position


class Place:
    def __init__(self, content=None):
        self.content = content


class Stream:
    def wait_stream(self, other):
        pass


class Whole(Shards):
    """Its tensors are Places, and what NCCL and the rails are asked for is done at once."""

    def __init__(self, nodes, local_ranks):  # pylint: disable=super-init-not-called
        size = nodes * local_ranks
        streams = [Stream() for _ in range(size)]
        library = types.SimpleNamespace(mk_ring_rail_begin=lambda ring: None)
        self.world = types.SimpleNamespace(nodes=nodes, locals=local_ranks, size=size, streams=streams, side_streams=streams, c=library)
        self.ring = None
        self.own = [(Place(("k", r)), Place(("v", r))) for r in range(size)]
        self.came = [[(Place(), Place()) for _ in range(size - 1)] for _ in range(size)]
        self.shard_parcels, self.sent = "shards", set()

    def exchange(self, moves, streams):
        for source, target, one, other in moves:
            assert source != target and source // self.world.locals == target // self.world.locals
            assert one.content is not None and other.content is None
            other.content = one.content

    def record(self, events):
        pass

    def send(self, r, parcels, stream):
        self.sent.add(r)

    def receive(self, r, parcels, stream):
        assert self.peer(r) in self.sent and self.peer(self.peer(r)) == r
        for one, other in zip(self.own[self.peer(r)], self.came[r][self.world.locals - 1]):
            other.content = one.content


class RingShards(unittest.TestCase):
    def test_every_shard_comes_to_every_rank(self):
        for nodes, local_ranks in ((1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 1), (2, 2), (2, 3), (2, 4)):
            with self.subTest(nodes=nodes, locals=local_ranks):
                whole = Whole(nodes, local_ranks)
                size = nodes * local_ranks
                self.assertEqual(len(whole.pass_round()), size - 1)
                for r in range(size):
                    self.assertEqual(sorted([r, *whole.origins(r)]), list(range(size)))
                    for step, origin in enumerate(whole.origins(r)):
                        self.assertEqual([place.content for place in whole.came[r][step]], [("k", origin), ("v", origin)])


if __name__ == "__main__":
    unittest.main()
