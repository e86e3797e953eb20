#include "tests/gpu/unfused.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "tests/gpu/exchange.h"

namespace mk::test {
namespace {

constexpr std::uint64_t kBytes = 2;            ///< of an element
constexpr std::uint64_t kFirstByte = 1 << 16;  ///< of a workspace; before it lies its head

}  // namespace

Unfused::Unfused(Job& job) : job_(job) {
  const JobSetup& setup = job.setup();
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    job.make_current(r);
    cublas_.push_back(std::make_unique<Cublas>(job.stream(r)));
    const std::size_t side = setup.op == Op::kAgGemm ? setup.k[0] : setup.n;
    whole_.push_back(allocate(r, std::size_t{setup.m} * side * kBytes));
    out_.push_back(allocate(r, std::size_t{setup.m} * setup.n * kBytes));
  }
}

Unfused::~Unfused() = default;

void* Unfused::allocate(std::uint32_t rank, std::uint64_t bytes) {
  job_.make_current(rank);
  memory_.emplace_back(bytes);
  return memory_.back().data();
}

void Unfused::products() {
  const JobSetup& setup = job_.setup();
  for (std::uint32_t r = 0; r < job_.world(); ++r) {
    job_.make_current(r);
    const bool ag = setup.op == Op::kAgGemm;
    const Shape shape{static_cast<int>(setup.m), static_cast<int>(setup.n),
                      static_cast<int>(setup.k[r])};
    cublas_[r]->multiply(shape, ag ? whole_[r] : job_.a(r), job_.b(r), ag ? out_[r] : whole_[r]);
  }
}

void Unfused::both() {
  if (job_.setup().op == Op::kAgGemm) {
    collective();
    products();
  } else {
    products();
    collective();
  }
}

void UnfusedOverNccl::collective() {
  const JobSetup& setup = job_.setup();
  const std::size_t world = job_.world();
  std::vector<Nccl::Call> calls;
  for (std::uint32_t r = 0; r < world; ++r) {
    if (setup.op == Op::kAgGemm) {
      calls.push_back({job_.a(r), whole_[r], job_.stream(r)});
    } else {
      calls.push_back({whole_[r], out_[r], job_.stream(r)});
    }
  }
  const std::size_t elements =
      std::size_t{setup.m} * (setup.op == Op::kAgGemm ? setup.k[0] : setup.n);
  switch (setup.op) {
    case Op::kAgGemm:
      return nccl_.all_gather(calls, elements / world);
    case Op::kGemmRs:
      return nccl_.reduce_scatter(calls, elements / world);
    case Op::kGemmAr:
      return nccl_.all_reduce(calls, elements);
  }
}

UnfusedOverNodes::UnfusedOverNodes(Job& job, DaemonNodes& daemons, const std::vector<Nccl*>& nccl,
                                   std::uint64_t piece_bytes)
    : Unfused(job), nccl_(nccl), locals_(job.setup().locals) {
  const JobSetup& setup = job.setup();
  const bool gathers = setup.op == Op::kAgGemm;
  const std::uint32_t parts = setup.op == Op::kGemmAr ? locals_ : job.world();
  const std::uint64_t elements = std::uint64_t{setup.m} * (gathers ? setup.k[0] : setup.n);
  part_ = elements / parts;
  while (pieces_ < kPiecesMax && part_ * kBytes / (2 * pieces_) >= piece_bytes) pieces_ *= 2;
  piece_ = part_ / pieces_;
  if (setup.nodes != 2 || elements % parts != 0 || part_ % (8 * pieces_) != 0) {
    fmt::print(stderr, "the unfused form is for two nodes and sizes that divide evenly\n");
    std::exit(1);
  }
  // A gather: the whole. Otherwise what is sent, then what comes.
  const std::uint64_t bytes = gathers ? elements * kBytes : 2 * part_ * kBytes;
  const std::uint32_t flags = pieces_ * chunks_of(piece_ * kBytes);
  contexts_ = daemons.memory(kFirstByte + bytes, (flags + 63) / 64 * 64);
  for (std::uint32_t r = 0; r < job.world(); ++r) {
    missed_.push_back(static_cast<std::uint32_t*>(allocate(r, sizeof(std::uint32_t))));
    require(cudaMemset(missed_[r], 0, sizeof(std::uint32_t)), "missed");
    kept_.push_back(gathers ? nullptr : allocate(r, part_ * kBytes));
    if (!gathers) continue;
    whole_[r] = at(r, 0);
    require(cudaMemcpy(at(r, r * part_), job.a(r), part_ * kBytes, cudaMemcpyDeviceToDevice),
            "shard");
  }
}

bool UnfusedOverNodes::right() const {
  std::uint32_t any = 0;
  for (const std::uint32_t* missed : missed_) {
    std::uint32_t one = 0;
    require(cudaMemcpy(&one, missed, sizeof one, cudaMemcpyDeviceToHost), "missed");
    any |= one;
  }
  return any == 0;
}

/// Element `offset` of the rank's memory that the daemons know.
std::byte* UnfusedOverNodes::at(std::uint32_t rank, std::uint64_t offset) const {
  return contexts_[rank].workspaces[rank % locals_] + kFirstByte + offset * kBytes;
}

/// A piece, from element `source` of the rank's memory to `target` of its rail peer's.
void UnfusedOverNodes::send(std::uint32_t rank, std::uint32_t piece, std::uint64_t source,
                            std::uint64_t target) {
  job_.make_current(rank);
  const std::uint32_t other = 1 - rank / locals_;
  post(contexts_[rank], other,
       {kFirstByte + source * kBytes, kFirstByte + target * kBytes, piece_ * kBytes,
        piece * chunks_of(piece_ * kBytes)},
       epoch_, job_.stream(rank));
}

void UnfusedOverNodes::await(std::uint32_t rank, std::uint32_t piece) {
  job_.make_current(rank);
  const std::uint32_t count = chunks_of(piece_ * kBytes);
  await_flags(contexts_[rank], piece * count, count, epoch_, missed_[rank], job_.stream(rank));
}

void UnfusedOverNodes::collective() {
  ++epoch_;
  switch (job_.setup().op) {
    case Op::kAgGemm:
      return gather();
    case Op::kGemmRs:
      return reduce_scatter();
    case Op::kGemmAr:
      return all_reduce();
  }
}

void UnfusedOverNodes::gather() {
  const std::uint32_t world = job_.world();
  for (std::uint32_t piece = 0; piece < pieces_; ++piece) {
    for (std::uint32_t r = 0; r < world; ++r) {
      const std::uint64_t from = r * part_ + piece * piece_;
      send(r, piece, from, from);
    }
  }
  for (std::uint32_t node = 0; node < nccl_.size(); ++node) {
    std::vector<Nccl::Call> calls;
    for (std::uint32_t r = node * locals_; r < (node + 1) * locals_; ++r)
      calls.push_back({at(r, r * part_), at(r, node * locals_ * part_), job_.stream(r)});
    nccl_[node]->all_gather(calls, part_);
  }
  for (std::uint32_t piece = 0; piece < pieces_; ++piece) {
    for (std::uint32_t r = 0; r < world; ++r) await(r, piece);
    for (std::uint32_t node = 0; node < nccl_.size(); ++node) {
      Nccl& nccl = *nccl_[node];
      const std::uint32_t first = node * locals_;
      const std::uint32_t other = (1 - node) * locals_;
      nccl.begin();
      for (std::uint32_t to = 0; to < locals_; ++to) {
        for (std::uint32_t from = 0; from < locals_; ++from) {
          if (to == from) continue;
          const std::uint64_t place = (other + from) * part_ + piece * piece_;
          nccl.send(from, to, at(first + from, place), piece_, job_.stream(first + from));
          nccl.receive(to, from, at(first + to, place), piece_, job_.stream(first + to));
        }
      }
      nccl.end();
    }
  }
}

void UnfusedOverNodes::reduce_scatter() {
  const std::uint32_t world = job_.world();
  const auto partial = [&](std::uint32_t rank, std::uint32_t shard, std::uint32_t piece) {
    return static_cast<std::byte*>(whole_[rank]) + (shard * part_ + piece * piece_) * kBytes;
  };
  for (std::uint32_t piece = 0; piece < pieces_; ++piece) {
    for (std::uint32_t node = 0; node < nccl_.size(); ++node) {
      const std::uint32_t first = node * locals_;
      const std::uint32_t other = (1 - node) * locals_;
      nccl_[node]->begin();
      for (std::uint32_t root = 0; root < locals_; ++root) {
        for (std::uint32_t l = 0; l < locals_; ++l) {
          nccl_[node]->reduce(l, root, partial(first + l, other + root, piece),
                              at(first + root, piece * piece_), piece_, job_.stream(first + l));
        }
      }
      nccl_[node]->end();
    }
    for (std::uint32_t r = 0; r < world; ++r)
      send(r, piece, piece * piece_, part_ + piece * piece_);
  }
  for (std::uint32_t node = 0; node < nccl_.size(); ++node) {
    std::vector<Nccl::Call> calls;
    for (std::uint32_t r = node * locals_; r < (node + 1) * locals_; ++r)
      calls.push_back({partial(r, node * locals_, 0), kept_[r], job_.stream(r)});
    nccl_[node]->reduce_scatter(calls, part_);
  }
  for (std::uint32_t piece = 0; piece < pieces_; ++piece) {
    for (std::uint32_t r = 0; r < world; ++r) {
      await(r, piece);
      const std::uint64_t from = piece * piece_;
      add(static_cast<std::byte*>(kept_[r]) + from * kBytes, at(r, part_ + from),
          static_cast<std::byte*>(out_[r]) + from * kBytes, piece_, job_.stream(r));
    }
  }
}

void UnfusedOverNodes::all_reduce() {
  const std::uint32_t world = job_.world();
  const auto piece_of = [&](void* matrix, std::uint32_t piece) {
    return static_cast<std::byte*>(matrix) + piece * locals_ * piece_ * kBytes;
  };
  for (std::uint32_t piece = 0; piece < pieces_; ++piece) {
    for (std::uint32_t node = 0; node < nccl_.size(); ++node) {
      std::vector<Nccl::Call> calls;
      for (std::uint32_t r = node * locals_; r < (node + 1) * locals_; ++r)
        calls.push_back({piece_of(whole_[r], piece), at(r, piece * piece_), job_.stream(r)});
      nccl_[node]->reduce_scatter(calls, piece_);
    }
    for (std::uint32_t r = 0; r < world; ++r)
      send(r, piece, piece * piece_, part_ + piece * piece_);
  }
  for (std::uint32_t piece = 0; piece < pieces_; ++piece) {
    for (std::uint32_t r = 0; r < world; ++r) {
      await(r, piece);
      add(at(r, piece * piece_), at(r, part_ + piece * piece_),
          piece_of(out_[r], piece) + (r % locals_) * piece_ * kBytes, piece_, job_.stream(r));
    }
    for (std::uint32_t node = 0; node < nccl_.size(); ++node) {
      std::vector<Nccl::Call> calls;
      for (std::uint32_t r = node * locals_; r < (node + 1) * locals_; ++r) {
        calls.push_back({piece_of(out_[r], piece) + (r % locals_) * piece_ * kBytes,
                         piece_of(out_[r], piece), job_.stream(r)});
      }
      nccl_[node]->all_gather(calls, piece_);
    }
  }
}

}  // namespace mk::test
