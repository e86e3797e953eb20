/// \file
/// The routing of the MoE cases: which experts a token has, and with which weights. Any rank can
/// draw any rank's.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "client/tools/numeric/moe_reference.h"
#include "tests/bench/mkbench/spec.h"

namespace mk::bench {

/// How tokens choose their experts, all different:
///  - uniform: each expert is as likely as any other;
///  - zipf: the n-th expert of an order drawn by the seed is likely as 1 / n;
///  - hot: expert 0 is always the first; one in sixteen of the others is nowhere;
///  - hot-rank: half of them, one at least, are of rank 0 (as many as it has);
///  - correlated: 256 tokens in a row are of one document, and three of four experts are of the
///    2 k that it prefers.
class MoeRouting {
 public:
  static const std::vector<std::string>& names();
  /// For the option of a command.
  static constexpr const char* kHelp =
      "zipf: experts likely as 1, 1/2, 1/3, ...; hot: every token to expert 0 as well; hot-rank: "
      "half of the experts are rank 0's; correlated: 256 tokens in a row prefer the same ones";

  /// `name`: one of names().
  MoeRouting(std::string_view name, std::uint64_t tokens, std::uint32_t experts,
             std::uint32_t top_k, std::uint32_t ranks, std::uint64_t seed);

  /// How many tokens `rank` has in that launch, where they go and with which weights; their values
  /// are left empty. With varying sizes ranks differ, and a rank may have none.
  void draw(const BenchSpec& spec, std::uint32_t launch, std::uint32_t rank,
            tools::MoeSource* source) const;

 private:
  enum class Kind { kUniform, kZipf, kHot, kHotRank, kCorrelated };
  /// Of the token with the key, in the document with that key.
  void route(std::uint64_t key, std::uint64_t document, std::int32_t* ids) const;
  std::uint32_t draw_expert(std::uint64_t random) const;

  Kind kind_ = Kind::kUniform;
  std::uint64_t tokens_ = 0;
  std::uint32_t experts_ = 0;
  std::uint32_t top_k_ = 0;
  std::uint32_t experts_of_rank_0_ = 0;
  std::vector<double> likely_up_to_;  ///< zipf: sums over order_
  std::vector<std::uint32_t> order_;
};

}  // namespace mk::bench
