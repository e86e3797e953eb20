"""The unfused MoE layer that moe_bench.py compares with: permute, NCCL's all-to-all, permute, grouped product, and back.

Every rank sorts its tokens' slots by expert, sends each rank the rows of its experts (a token as often as it has experts there),
and what came is sorted by expert again. Between two nodes rows go to the rank of their target's rail first, then over the daemons'
paced rails. The order of rows is made on the GPU, inside the timing. How many rows each rank sends to which is known to the host
without asking: real code waits for the GPU there.
"""
import torch
import torch.nn.functional as F

ALIGN = 128  # DeepGEMM's rows of an expert


class Baseline:
    """`ids`, by rank: [tokens, top_k], none of them -1. `grouped(r, a, weights, ends, experts)` multiplies rows that are sorted by
    expert, of which each one's begin at multiples of `align`. It ends with `kept`."""

    def __init__(self, world, case, tensors, grouped, align, kept):
        self.world, self.case, self.tensors, self.grouped, self.align = world, case, tensors, grouped, align
        size, here = world.size, case.experts // world.size
        self.here = here
        # counts[r][d]: rows of rank r for rank d
        self.counts = [[int((t.ids_host // here == d).sum()) for d in range(size)] for t in tensors]
        self.rows = [sum(counts[d] for counts in self.counts) for d in range(size)]
        self.padded = []
        for d in range(size):
            of_expert = torch.bincount(torch.cat([t.ids_host.flatten() for t in tensors]).long(), minlength=case.experts)
            own = of_expert[d * here:(d + 1) * here]
            self.padded.append(int(((own + align - 1) // align * align).sum()))
        self.routes = Routes(world, self.counts, case.hidden, tensors[0].tokens.dtype, kept)
        self.state = [None] * size

    # Each step goes over all ranks, so that their streams have work alike.

    def plan(self):
        """The order of a rank's slots by expert, and how many each expert has."""
        for r in range(self.world.size):
            with self.world.on(r):
                t = self.tensors[r]
                flat = t.ids.flatten()
                by_expert, order = torch.sort(flat, stable=True)
                edges = torch.arange(self.case.experts + 1, device=flat.device, dtype=flat.dtype)
                counts = torch.searchsorted(by_expert, edges).diff()
                self.state[r] = dict(order=order, counts=counts)

    def arrange(self):
        """Of the rows that came, by source rank and then expert: which of them each row of the grouped product is."""
        for r in range(self.world.size):
            with self.world.on(r):
                state = self.state[r]
                counts = state["came_counts"].view(self.world.size, self.here)
                device = counts.device
                experts = torch.arange(self.here, device=device).repeat(self.world.size)
                expert_of = torch.repeat_interleave(experts, counts.flatten(), output_size=self.rows[r])
                expert, order = torch.sort(expert_of, stable=True)
                of_expert = counts.sum(0)
                room = (of_expert + self.align - 1) // self.align * self.align
                ends = room.cumsum(0)
                if self.align == 1:
                    state.update(order_here=order, place=order.argsort(), expert=expert, ends=ends)
                    continue
                shift = (ends - room) - (of_expert.cumsum(0) - of_expert)
                place = torch.arange(self.rows[r], device=device) + shift[expert]  # of each sorted row
                source = torch.zeros(self.padded[r], device=device, dtype=torch.int64)
                source[place] = order
                wide = torch.full((self.padded[r],), -1, device=device, dtype=torch.int32)
                wide[place] = expert.int()
                back = torch.empty_like(order)
                back[order] = place
                state.update(order_here=source, place=back, expert=wide, ends=ends)

    def dispatch(self):
        """Tokens to their experts, and the first product."""
        self.plan()
        for r in range(self.world.size):
            with self.world.on(r):
                state = self.state[r]
                state["sent"] = self.tensors[r].tokens.index_select(0, state["order"] // self.case.top_k)
        self.send_counts()
        came = self.routes.there([state.pop("sent") for state in self.state])
        self.arrange()
        for r in range(self.world.size):
            with self.world.on(r):
                state, t = self.state[r], self.tensors[r]
                rows = came[r].index_select(0, state["order_here"])
                product = self.grouped(r, rows, t.first, state["ends"], state["expert"])
                t.baseline_y = gated(product) if self.case.gated else product

    def combine(self):
        """The second product, home, and each token's weighted sum."""
        back = []
        for r in range(self.world.size):
            with self.world.on(r):
                state, t = self.state[r], self.tensors[r]
                product = self.grouped(r, t.baseline_y, t.second, state["ends"], state["expert"])
                back.append(product.index_select(0, state["place"]))
        came = self.routes.back(back)
        for r in range(self.world.size):
            with self.world.on(r):
                state, t = self.state[r], self.tensors[r]
                place = torch.empty_like(state["order"])
                place[state["order"]] = torch.arange(place.numel(), device=place.device)
                rows = came[r].index_select(0, place).view(-1, self.case.top_k, self.case.hidden)
                t.baseline_out = torch.bmm(t.weights.to(rows.dtype).unsqueeze(1), rows).squeeze(1)

    def layer(self):
        self.dispatch()
        self.combine()

    def send_counts(self):
        """A few words, over NVLink also between nodes."""
        size, moves = self.world.size, []
        for r in range(size):
            with self.world.on(r):
                self.state[r]["came_counts"] = torch.empty(size * self.here, device=self.tensors[r].tokens.device, dtype=torch.int64)
        for r in range(size):
            for d in range(size):
                moves.append((r, d, self.state[r]["counts"][d * self.here:(d + 1) * self.here],
                              self.state[d]["came_counts"][r * self.here:(r + 1) * self.here]))
        self.world.exchange(moves, self.world.streams)


class Routes:
    """The all-to-all of rows of `hidden` elements, and its way back. counts[r][d]: rows of rank r for rank d."""

    def __init__(self, world, counts, hidden, dtype, kept):
        self.world, self.counts, self.hidden, self.dtype = world, counts, hidden, dtype
        size, count = world.size, world.locals
        self.total = [sum(counts[r][d] for r in range(size)) for d in range(size)]
        self.rails = None
        if world.nodes == 1:
            return
        # A relay, in rail memory: what the ranks of this node have for the rail peer; then what comes of the peer's node.
        self.relayed = [sum(counts[world.mate(r, s)][world.peer(r)] for s in range(count)) for r in range(size)]
        self.room = max(self.relayed) * hidden
        self.rails = world.make_rails(2 * self.room, kept)

    def node(self, r):
        return range(r // self.world.locals * self.world.locals, (r // self.world.locals + 1) * self.world.locals)

    def relay(self, r, half, rows):
        return self.rails.memory[r][half * self.room:half * self.room + rows * self.hidden].view(rows, self.hidden)

    def empty(self, rows):
        """A tensor of so many rows for each rank."""
        made = []
        for r in range(self.world.size):
            with self.world.on(r):
                made.append(torch.empty(rows[r], self.hidden, device=self.world.device(r), dtype=self.dtype))
        return made

    def there(self, sent):
        """`sent[r]`: rows by target rank. Answers for each rank what came, by source rank."""
        came = self.empty(self.total)
        first_here = lambda d, r: sum(self.counts[s][d] for s in range(r))
        first_there = lambda r, d: sum(self.counts[r][t] for t in range(d))
        cut = lambda tensor, first, rows: tensor[first:first + rows]
        ranks, world = range(self.world.size), self.world
        moves, relayed = [], [0] * len(ranks)
        for r in ranks:
            for d in ranks:
                rows = self.counts[r][d]
                piece = cut(sent[r], first_there(r, d), rows)
                if d in self.node(r):
                    moves.append((r, d, piece, cut(came[d], first_here(d, r), rows)))
                else:
                    at = world.peer(d)
                    moves.append((r, at, piece, cut(self.relay(at, 0, self.relayed[at]), relayed[at], rows)))
                    relayed[at] += rows
        world.exchange(moves, world.streams)
        if world.nodes == 1:
            return came
        self.cross([(0, self.room, self.relayed[r] * self.hidden) for r in ranks])
        for d in ranks:
            with world.on(d):
                first = first_here(d, self.node(world.peer(d))[0])
                rows = self.relayed[world.peer(d)]
                cut(came[d], first, rows).copy_(self.relay(d, 1, rows))
        return came

    def back(self, rows):
        """`rows[d]`: what became of what came, in its order. Answers for each rank what it had sent."""
        sent = self.empty([sum(self.counts[r]) for r in range(self.world.size)])
        first_here = lambda d, r: sum(self.counts[s][d] for s in range(r))
        first_there = lambda r, d: sum(self.counts[r][t] for t in range(d))
        cut = lambda tensor, first, count: tensor[first:first + count]
        ranks, world = range(self.world.size), self.world
        moves = []
        for r in ranks:
            for d in self.node(r):
                count = self.counts[r][d]
                moves.append((d, r, cut(rows[d], first_here(d, r), count), cut(sent[r], first_there(r, d), count)))
        if world.nodes == 1:
            world.exchange(moves, world.streams)
            return sent
        for d in ranks:
            with world.on(d):
                count = self.relayed[world.peer(d)]
                self.relay(d, 1, count).copy_(cut(rows[d], first_here(d, self.node(world.peer(d))[0]), count))
        world.exchange(moves, world.streams)
        self.cross([(self.room, 0, self.relayed[world.peer(d)] * self.hidden) for d in ranks])
        moves = []
        for at in ranks:
            first, d = 0, world.peer(at)
            for r in self.node(at):
                count = self.counts[r][d]
                moves.append((at, r, cut(self.relay(at, 0, self.relayed[at]), first, count), cut(sent[r], first_there(r, d), count)))
                first += count
        world.exchange(moves, world.streams)
        return sent

    def cross(self, parcels):
        """One parcel of each rank to its rail peer."""
        parcels = [[parcel] for parcel in parcels]
        self.rails.begin()
        for r in range(self.world.size):
            self.rails.send(r, parcels, self.world.streams[r])
        for r in range(self.world.size):
            self.rails.receive(r, parcels, self.world.streams[r])


def gated(product):
    """silu(gate) * up, of all gates and then all up projections."""
    gate, up = product.chunk(2, dim=-1)
    return F.silu(gate) * up
