"""What the baselines of ring_bench.py move: K and V of all ranks to every rank, at once or shard by shard."""
import torch


class Shards:
    """K and V of all ranks (`own` of each), and where they come on every rank: whole, for a core over all keys (`all_k`,
    `all_v`), and shard by shard (`came`), for a ring. They hold memory until
    `kept` ends."""

    def __init__(self, world, case, keys, values, kept):
        self.world, self.case, self.k, self.v, self.rails = world, case, keys, values, None
        self.rows = keys[0].shape[1]
        self.parts_each = 2 if case.causal and world.size > 1 else 1
        self.part = self.rows // self.parts_each
        self.kv_bytes = 2 * 2 * case.batch * self.rows * case.key_heads * case.dim  # of a rank
        self.make_gathered(kept)

    def positions(self, rank):
        """(first row in the sequence, first row in the rank's tensors) of its parts."""
        parts = [rank] if self.parts_each == 1 else [rank, 2 * self.world.size - 1 - rank]
        return [(part * self.part, half * self.part) for half, part in enumerate(parts)]

    def make_gathered(self, kept):
        """Where K and V of all ranks come: whole, for a core over all keys, and shard by shard (`came`), for a ring."""
        case, size = self.case, self.world.size
        own = (case.batch, self.rows, case.key_heads, case.dim)
        whole = (case.batch, case.seq, case.key_heads, case.dim)
        shards = lambda r, count: [tuple(torch.empty(own, device=f"cuda:{r}", dtype=torch.bfloat16) for _ in range(2))
                                   for _ in range(count)]
        if self.world.nodes == 1:
            self.all_k, self.all_v = ([torch.empty(whole, device=f"cuda:{r}", dtype=torch.bfloat16) for r in range(size)]
                                      for _ in range(2))
            self.own = list(zip(self.k, self.v))
            self.came = [shards(r, size - 1) for r in range(size)]
            return
        # Memory that the rails know has the same places on all ranks: K and V whole, then those of each node's shard.
        of_whole, of_shard = (case.batch * rows * case.key_heads * case.dim for rows in (case.seq, self.rows))
        self.rails = self.world.make_rails(2 * of_whole + 4 * of_shard, kept)
        self.all_k, self.all_v, self.own, self.came, self.parcels, self.shard_parcels = ([] for _ in range(6))
        for r in range(size):
            memory = self.rails.memory[r]
            self.all_k.append(memory[:of_whole].view(whole))
            self.all_v.append(memory[of_whole:2 * of_whole].view(whole))
            first_of = lambda node, tensor: 2 * of_whole + (2 * node + tensor) * of_shard
            of_node = [tuple(memory[first_of(node, t):first_of(node, t) + of_shard].view(own) for t in range(2)) for node in range(2)]
            node = r // self.world.locals
            self.own.append(of_node[node])
            near = shards(r, 2 * (self.world.locals - 1))
            self.came.append([*near[:self.world.locals - 1], of_node[1 - node], *near[self.world.locals - 1:]])
            for tensor, shard in zip((self.k[r], self.v[r]), self.own[r]):
                shard.copy_(tensor)
            for first, row in self.positions(r):  # a shard lies there from the start
                for whole_one, shard in ((self.all_k[r], self.k[r]), (self.all_v[r], self.v[r])):
                    whole_one[:, first:first + self.part] = shard[:, row:row + self.part]
            row = case.key_heads * case.dim
            places = [((tensor * case.batch * case.seq + b * case.seq + first) * row, self.part * row)
                      for tensor in range(2) for b in range(case.batch) for first, _ in self.positions(r)]
            self.parcels.append([(at, at, count) for at, count in places])
            self.shard_parcels.append([(at, at, of_shard) for at in (first_of(node, 0), first_of(node, 1))])

    def origins(self, r):
        """Whose shards come to a rank, in the order of a ring: its node's, its rail peer's, those of the peer's node."""
        count, found = self.world.locals, []
        for one in (r, self.world.peer(r))[:self.world.nodes]:
            found += [one] if one != r else []
            found += [self.world.mate(one, -step) for step in range(1, count)]
        return found

    def gather(self):
        ranks, streams = range(self.world.size), self.world.streams
        if self.world.nodes > 1:
            self.rails.begin()
            for r in ranks:
                self.rails.send(r, self.parcels, streams[r])
            self.spread(ranks)
            for r in ranks:
                self.rails.receive(r, self.parcels, streams[r])
            self.spread([self.world.peer(r) for r in ranks])
        elif self.parts_each == 1:
            self.all_gather()
        else:
            self.spread(ranks)

    def spread(self, origins):
        """Rows of the rank `origins[r]`, which r has, to the ranks of r's node."""
        moves = []
        for own, whole in ((self.k, self.all_k), (self.v, self.all_v)):
            for source, origin in enumerate(origins):
                for first, row in self.positions(origin):
                    for step in range(self.world.locals):
                        target = self.world.mate(source, step)
                        if self.world.nodes > 1 and target == source:
                            continue
                        for b in range(self.case.batch):
                            rows = own[source][b, row:row + self.part] if origin == source else whole[source][b, first:first + self.part]
                            moves.append((source, target, rows, whole[target][b, first:first + self.part]))
        self.world.exchange(moves, self.world.streams)

    def all_gather(self):
        sources, targets = [], []
        for own, whole in ((self.k, self.all_k), (self.v, self.all_v)):
            for b in range(self.case.batch):
                sources += [own[r][b].data_ptr() for r in range(self.world.size)]
                targets += [whole[r][b].data_ptr() for r in range(self.world.size)]
        self.world.all_gather(sources, targets, 2 * self.case.batch, self.kv_bytes // 2 // self.case.batch)

    def ring_step(self, step, arrived):
        """The shard that came at the step before, or the rank's own, goes on to the next rank of the node."""
        moves = []
        for r in range(self.world.size):
            source = self.own[r] if step == 0 else self.came[r][step - 1]
            after = self.world.mate(r, 1)
            moves += [(r, after, one, other) for one, other in zip(source, self.came[after][step])]
        self.world.exchange(moves, self.world.side_streams)
        self.record(arrived[step])

    def record(self, events):
        for r, event in enumerate(events):
            event.record(self.world.side_streams[r])

    def pass_round(self):
        """Queues, on the side streams, the way of all shards as a ring, and returns for each step an event of each rank."""
        size, count, side_streams = self.world.size, self.world.locals, self.world.side_streams
        arrived = [[torch.cuda.Event() for _ in range(size)] for _ in range(size - 1)]
        for r in range(size):
            side_streams[r].wait_stream(self.world.streams[r])
        if self.world.nodes > 1:
            self.rails.begin()
            for r in range(size):
                self.rails.send(r, self.shard_parcels, side_streams[r])
        for step in range(count - 1):
            self.ring_step(step, arrived)
        if self.world.nodes > 1:
            for r in range(size):
                self.rails.receive(r, self.shard_parcels, side_streams[r])
            self.record(arrived[count - 1])
            for step in range(count, size - 1):
                self.ring_step(step, arrived)
        return arrived
