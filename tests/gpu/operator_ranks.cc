#include "tests/gpu/operator_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "kernels/comm/shard.h"
#include "tests/gpu/devices.h"

namespace mk::test {
namespace {

using kernels::shard_of;

}  // namespace

Job::Job(const JobSetup& setup) : PlacedRanks(setup.world()), setup_(setup) {
  const Plan plan = make_plan(setup, kMultiprocessors / setup.shares());
  const auto fill_in = [&](JobRank& rank, std::uint32_t r) {
    const std::size_t k = setup.k[r];
    rank.a = device_memory(a_rows_max() * (k + setup.gap) * 2);
    rank.b = device_memory((setup.n + setup.gap) * (k + setup.gap) * 2);
    rank.c = device_memory(std::size_t{c_rows_max()} * (setup.c_columns() + setup.gap) * 2);
    if (setup.result.epilogue.bias) rank.bias = device_memory(setup.n * 2);
    if (setup.gathers) rank.gathered = device_memory(setup.m * k * 2);
  };
  const auto create = [&](std::uint32_t r, const kernels::RankContext& context,
                          kernels::CudaOptions options) {
    if (!setup.stream_groups.empty()) options.stream_groups = setup.stream_groups[r];
    ranks_[r].op = make_operator(setup, plan, r, context, options);
    fill(r, r);
    poison(r);
    delay(1, stream(r));
  };
  place(setup, plan.workspace_bytes, plan.flags, fill_in, create);
}

void Job::fill(std::uint32_t r, std::uint64_t seed) {
  make_current(r);
  const std::int64_t k = setup_.k[r];
  const auto type = kernels::cuda::cuda_type(setup_.dtype);
  const auto fill_matrix = [&](void* matrix, std::int64_t rows, std::int64_t length,
                               std::int64_t gap, std::uint64_t from) {
    fill_normal(matrix, type, rows * (length + gap), from, stream(r));
    poison_gaps(matrix, rows, length, gap, stream(r));
  };
  const bool nk = setup_.options.b_layout == kernels::BLayout::kNK;
  fill_matrix(a(r), a_rows_max(), k, a_gap(), seed * 64 + 2 * r);
  fill_matrix(ranks_[r].b->data(), nk ? setup_.n : k, nk ? k : setup_.n, setup_.gap,
              seed * 64 + 2 * r + 1);
  // The same on all ranks.
  if (ranks_[r].bias != nullptr)
    fill_normal(ranks_[r].bias->data(), type, setup_.n, seed * 64 + 63, stream(r));
}

void Job::poison(std::uint32_t r) {
  make_current(r);
  auto* const matrix = const_cast<void*>(c(r));
  test::poison(matrix, std::int64_t{c_rows_max()} * (setup_.c_columns() + c_gap()), stream(r));
  poison_gaps(matrix, c_rows_max(), setup_.c_columns(), c_gap(), stream(r));
  if (ranks_[r].gathered != nullptr)
    test::poison(ranks_[r].gathered->data(), std::int64_t{setup_.m} * setup_.k[0], stream(r));
}

Status Job::launch(std::uint32_t r, std::uint32_t m, kernels::Mode mode) {
  const JobRank& rank = ranks_[r];
  return rank.op->launch(
      rank.stream, a(r), rank.b->data(), in_workspace(Op::kGemmAr) ? nullptr : rank.c->data(),
      rank.gathered == nullptr ? nullptr : rank.gathered->data(), bias(r), m, mode);
}

void Job::launch_all(std::uint32_t m, std::uint64_t seed, kernels::Mode mode) {
  for (std::uint32_t r = 0; r < world(); ++r) {
    fill(r, seed);
    poison(r);
  }
  for (std::uint32_t r = 0; r < world(); ++r) require(cudaStreamSynchronize(stream(r)), "inputs");
  for (std::uint32_t r = 0; r < world(); ++r) {
    // Ranks are late in turn.
    if (seed % 4 == r % 4) {
      make_current(r);
      delay(seed % 7 * 30'000, stream(r));
    }
    if (auto launched = launch(r, m, mode); !launched) {
      fmt::print(stderr, "{}\n", launched.error().message);
      std::exit(1);
    }
  }
}

std::uint32_t Job::c_rows(std::uint32_t rank, std::uint32_t m) const {
  return setup_.op == Op::kGemmRs ? shard_of(m, world(), rank).count : m;
}

std::int64_t Job::c_elements(std::uint32_t rank, std::uint32_t m) const {
  return std::int64_t{c_rows(rank, m)} * (setup_.c_columns() + c_gap());
}

std::uint32_t Job::a_rows_max() const {
  return setup_.op == Op::kAgGemm ? kernels::shard_rows_max(setup_.m, world()) : setup_.m;
}

std::uint32_t Job::c_rows_max() const {
  return setup_.op == Op::kGemmRs ? kernels::shard_rows_max(setup_.m, world()) : setup_.m;
}

SummedProduct Job::product() const {
  SummedProduct product;
  product.dtype = setup_.dtype;
  product.b_layout = setup_.options.b_layout;
  product.result = setup_.result;
  product.bias = bias(0);
  product.n = static_cast<int>(setup_.n);
  product.nodes = static_cast<int>(setup_.nodes);
  product.locals = static_cast<int>(setup_.locals);
  product.a_gap = static_cast<int>(a_gap());
  product.b_gap = static_cast<int>(setup_.gap);
  for (std::uint32_t r = 0; r < world(); ++r) {
    product.k[r] = static_cast<int>(setup_.k[r]);
    product.a[r] = a(r);
    product.b[r] = b(r);
  }
  return product;
}

Verdict Job::judge_all(std::uint32_t m) {
  std::vector<Verdict> verdicts(world());
  // A thread for each GPU, not for each rank: under compute-sanitizer's racecheck one that frees
  // memory and one that waits for a kernel of the same GPU stand still on the tool's lock.
  std::vector<std::thread> threads;
  for (int on = 0; on < setup_.devices; ++on) {
    threads.emplace_back([&, on] {
      for (std::uint32_t r = 0; r < world(); ++r) {
        if (device(r) != on) continue;
        make_current(r);
        verdicts[r] = judge(r, m);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Verdict all;
  for (const Verdict& verdict : verdicts) all.include(verdict);
  make_current(0);
  if (setup_.gathers) all.bad += count_different_gathered(m);
  return all;
}

/// What the rank answers for: its result; of GEMM+AR a share of the rows, and that it has the same
/// bits as rank 0.
Verdict Job::judge(std::uint32_t r, std::uint32_t m) const {
  Verdict all;
  all.bad += count_touched_gaps(c(r), c_rows(r, m), setup_.c_columns(), c_gap(), stream(r));
  const auto judge_rows = [&](const SummedProduct& product, const void* c, std::uint32_t rows) {
    if (rows == 0) return;
    SummedProduct part = product;
    part.m = static_cast<int>(rows);
    all.include(judge_sum(part, c, static_cast<int>(setup_.c_columns() + c_gap()), stream(r)));
  };
  const auto rows_from = [&](const void* matrix, std::uint32_t row, std::uint32_t columns) {
    return static_cast<const std::byte*>(matrix) + std::size_t{row} * columns * 2;
  };
  const SummedProduct product = this->product();
  if (setup_.op == Op::kAgGemm) {
    for (std::uint32_t origin = 0; origin < world(); ++origin) {
      const auto shard = shard_of(m, world(), origin);
      SummedProduct one = product;
      one.nodes = one.locals = 1;
      one.a[0] = a(origin);
      one.b[0] = b(r);
      one.bias = bias(r);
      judge_rows(one, rows_from(c(r), shard.first, setup_.c_columns() + c_gap()), shard.count);
    }
    return all;
  }
  const auto share = shard_of(m, world(), r);
  SummedProduct part = product;
  for (std::uint32_t source = 0; source < world(); ++source)
    part.a[source] = rows_from(a(source), share.first, setup_.k[source] + a_gap());
  const bool whole = setup_.op == Op::kGemmAr;
  judge_rows(part, whole ? rows_from(c(r), share.first, setup_.c_columns() + c_gap()) : c(r),
             share.count);
  if (whole && r != 0) all.bad += count_different(c(0), c(r), c_elements(r, m), stream(r));
  return all;
}

std::int64_t Job::count_different_gathered(std::uint32_t m) {
  std::int64_t different = 0;
  const std::size_t k = setup_.k[0];
  for (std::uint32_t r = 0; r < world(); ++r) {
    for (std::uint32_t origin = 0; origin < world(); ++origin) {
      const auto shard = shard_of(m, world(), origin);
      if (shard.count == 0) continue;
      const auto* rows =
          static_cast<const std::byte*>(ranks_[r].gathered->data()) + shard.first * k * 2;
      different += count_different_rows(rows, setup_.k[0], a(origin), setup_.k[0] + a_gap(),
                                        shard.count, setup_.k[0], stream(0));
    }
  }
  return different;
}

}  // namespace mk::test
