#!/usr/bin/env python3
"""The way of K and V in ring_bench.py's baselines, without PyTorch: every rank gets every other rank's shard, at the step that
origins() says, and nothing crosses between nodes but on rails."""
import pathlib
import sys
import types
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(Event=object))

from gpu_world import World  # pylint: disable=wrong-import-position
from ring_shards import Shards  # pylint: disable=wrong-import-position


class Place:
    def __init__(self, content=None):
        self.content = content


class Stream:
    def wait_stream(self, other):
        pass


class HostWorld(World):
    """What NCCL is asked for is done at once."""

    def __init__(self, nodes, local_ranks):  # pylint: disable=super-init-not-called
        self.nodes, self.locals, self.size = nodes, local_ranks, nodes * local_ranks
        self.streams = self.side_streams = [Stream() for _ in range(self.size)]

    def exchange(self, moves, streams):
        for source, target, one, other in moves:
            assert source != target and source // self.locals == target // self.locals
            assert one.content is not None and other.content is None
            other.content = one.content


class HostRails:
    """A parcel names its shard, and arrives at once."""

    def __init__(self, shards):
        self.shards, self.sent = shards, set()

    def begin(self):
        self.sent.clear()

    def send(self, r, parcels, stream):
        self.sent.add(r)

    def receive(self, r, parcels, stream):
        peer = self.shards.world.peer(r)
        assert peer in self.sent and self.shards.world.peer(peer) == r
        for one, other in zip(self.shards.own[peer], self.shards.came[r][self.shards.world.locals - 1]):
            other.content = one.content


class Whole(Shards):
    """Its tensors are Places."""

    def __init__(self, nodes, local_ranks):  # pylint: disable=super-init-not-called
        self.world = HostWorld(nodes, local_ranks)
        size = self.world.size
        self.own = [(Place(("k", r)), Place(("v", r))) for r in range(size)]
        self.came = [[(Place(), Place()) for _ in range(size - 1)] for _ in range(size)]
        self.shard_parcels, self.rails = None, HostRails(self)

    def record(self, events):
        pass


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
