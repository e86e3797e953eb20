/// \file
/// A job's operators that are not alike, in a random order of launches: for tests of the workspace
/// that they share.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "client/tools/numeric/gemm_reference.h"
#include "client/tools/numeric/random_matrix.h"
#include "mkernel/mkernel.h"
#include "shm/host/result.h"
#include "tests/client/any_operator.h"

namespace mk::test {

/// A GEMM+AllReduce of random matrices, with every element against float64.
struct RandomProduct {
  GemmAllReduce op;
  std::uint64_t m, n, k;
  DataType type;

  static Result<RandomProduct> create(Session& session, std::uint64_t m, std::uint64_t n,
                                      std::uint64_t k, DataType type) {
    MK_ASSIGN_OR_RETURN(auto op, GemmAllReduce::create(session, {m, n, k, type}));
    return RandomProduct{std::move(op), m, n, k, type};
  }
  Elements matrix(std::uint64_t launch, std::uint32_t rank, bool b) const {
    const std::uint64_t rows = b ? k : m;
    Elements all(rows * (b ? n : k));
    tools::RandomMatrix{901, launch * 1000 + rank * 2 + b, b ? n : k, type}.rows(0, rows,
                                                                                 all.data());
    return all;
  }
  Status launch(const AttachOptions& at, std::uint64_t number, LaunchMode mode) {
    Elements c(m * n, 0xffff);
    MK_ASSIGN_OR_RETURN([[maybe_unused]] const auto stats,
                        op.launch(matrix(number, at.rank, false).data(),
                                  matrix(number, at.rank, true).data(), c.data(), m, mode));
    tools::GemmReference reference(m, n, at.nodes, at.local_size, type);
    for (std::uint32_t rank = 0; rank < at.world; ++rank) {
      reference.add_rank(matrix(number, rank, false).data(), matrix(number, rank, true).data(), k,
                         1, 1);
    }
    const auto wrong = reference.compare(c.data()).wrong;
    if (wrong == 0) return {};
    return fail(ErrorCode::kInternal, "{} wrong elements of {}", wrong, c.size());
  }
};

/// Every kind, some in two shapes, and products of several sizes, in random order. Ranks are late
/// at random. Some operators go and others come meanwhile. The first wrong element is an error.
/// Collective: `seed` says what happens.
inline Status run_unlike_operators(Session& session, DataType type, std::uint64_t seed,
                                   std::uint32_t launches) {
  const AttachOptions& at = session.options();
  std::mt19937_64 random(seed);  // the same on all ranks
  std::mt19937_64 lateness(seed + 1 + at.rank);
  std::vector<AnyOperator> operators;
  std::vector<RandomProduct> products;
  std::uint32_t made = 0;
  const auto add_operator = [&]() -> Status {
    constexpr auto kCount = static_cast<std::uint32_t>(kKinds.size());
    MK_ASSIGN_OR_RETURN(auto op,
                        AnyOperator::create(session, kKinds[made % kCount], made / kCount));
    operators.push_back(std::move(op));
    ++made;
    return {};
  };
  const auto add_product = [&](std::uint64_t m, std::uint64_t n, std::uint64_t k) -> Status {
    MK_ASSIGN_OR_RETURN(auto product, RandomProduct::create(session, m, n, k, type));
    products.push_back(std::move(product));
    return {};
  };
  const auto launch_one = [&](std::uint32_t number) -> Status {
    const std::uint64_t dice = random();
    if (lateness() % 16 == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(lateness() % 30));
    if (number % 20 == 13) {
      operators.erase(operators.begin() + static_cast<std::ptrdiff_t>(dice / 7 % operators.size()));
      MK_RETURN_IF_ERROR(add_operator());
      MK_RETURN_IF_ERROR(add_product(160 + 10 * number, 72, 40));
    }
    const std::uint64_t which = dice % (operators.size() + 2 * products.size());
    if (which < operators.size())
      return operators[which].launch(static_cast<std::uint32_t>(1 + dice / 64 % 4));
    return products[which % products.size()].launch(
        at, number, dice / 64 % 4 == 0 ? LaunchMode::kUnfused : LaunchMode::kFused);
  };
  for (std::size_t i = 0; i < kKinds.size() + 3; ++i) MK_RETURN_IF_ERROR(add_operator());
  MK_RETURN_IF_ERROR(add_product(33, 40, 24));
  MK_RETURN_IF_ERROR(add_product(150, 136, 72));
  for (std::uint32_t number = 0; number < launches; ++number) {
    if (const Status right = launch_one(number); !right) {
      return fail(right.error().code, "seed {}, launch {}: {}", seed, number,
                  right.error().message);
    }
  }
  return session.barrier();
}

}  // namespace mk::test
