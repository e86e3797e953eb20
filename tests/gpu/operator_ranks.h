/// \file
/// All ranks of a product in one process (placed_ranks.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/rank_operator.h"
#include "tests/gpu/summed_reference.h"

namespace mk::test {

struct JobRank : PlacedRank<RankOperator> {
  std::unique_ptr<DeviceMemory> a, b, c, gathered, bias;
};

class Job : public PlacedRanks<JobRank> {
 public:
  explicit Job(const JobSetup& setup);

  const JobSetup& setup() const { return setup_; }
  /// JobSetup::in_workspace from now on; what lay elsewhere stays there.
  void set_in_workspace(bool on) { setup_.in_workspace = on; }

  /// On the rank's stream: fresh inputs from the seed, for the largest m.
  void fill(std::uint32_t rank, std::uint64_t seed);
  /// On the rank's stream: NaN into C and the gathered A.
  void poison(std::uint32_t rank);
  Status launch(std::uint32_t rank, std::uint32_t m, kernels::Mode mode = kernels::Mode::kFused);
  /// Fills, poisons and launches all.
  void launch_all(std::uint32_t m, std::uint64_t seed, kernels::Mode mode);

  void* a(std::uint32_t rank) const {
    return in_workspace(Op::kAgGemm) ? ranks_[rank].op->input() : ranks_[rank].a->data();
  }
  /// Null: the operator has none.
  const void* bias(std::uint32_t rank) const {
    return ranks_[rank].bias == nullptr ? nullptr : ranks_[rank].bias->data();
  }
  const void* b(std::uint32_t rank) const { return ranks_[rank].b->data(); }
  const void* c(std::uint32_t rank) const {
    return in_workspace(Op::kGemmAr) ? ranks_[rank].op->output() : ranks_[rank].c->data();
  }
  /// Elements of C, gaps included, that the rank gets in a launch with m.
  std::int64_t c_elements(std::uint32_t rank, std::uint32_t m) const;
  /// Every element of every rank's result; GEMM+AR: of rank 0's, and that all others have the same
  /// bits.
  Verdict judge_all(std::uint32_t m);

 private:
  /// Rows of C that the rank gets in a launch with m.
  std::uint32_t c_rows(std::uint32_t rank, std::uint32_t m) const;
  std::uint32_t a_rows_max() const;
  std::uint32_t c_rows_max() const;
  /// Of what the caller gives; the workspace has none.
  std::uint32_t a_gap() const { return in_workspace(Op::kAgGemm) ? 0 : setup_.gap; }
  std::uint32_t c_gap() const { return in_workspace(Op::kGemmAr) ? 0 : setup_.gap; }
  bool in_workspace(Op op) const { return setup_.op == op && setup_.in_workspace && world() > 1; }
  SummedProduct product() const;
  Verdict judge(std::uint32_t rank, std::uint32_t m) const;
  std::int64_t count_different_gathered(std::uint32_t m);

  JobSetup setup_;
};

}  // namespace mk::test
