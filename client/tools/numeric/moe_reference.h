/// \file
/// What MoE Dispatch+GEMM must give on one rank: which token stands in which output row, and each
/// element in float64 with its bound. Written from the operator's definition alone:
///
/// Rank r of W has the experts [floor(r E / W), floor((r + 1) E / W)). Its output has a row for
/// every (rank, token, slot) whose id is one of them, sorted by expert; then by the source's node
/// (r's, then node - 1, node - 2, ... cyclically); then by token / 256, rounded down; then by the
/// source (of each node beginning with r's rail, from there on cyclically); then by token; then by
/// slot. The row is the token times the expert's weights: one product of length H, rounded once
/// (gemm_reference.h has the bound). With a gated epilogue it is made of two such products; then
/// moe_row has the bound, which kernels/ops/moe/README.md derives, with gemm_reference.h's D for
/// each product's error.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "client/tools/numeric/comparison.h"
#include "client/tools/numeric/elements.h"
#include "mkernel/moe_dispatch_gemm.h"

namespace mk::tools {

struct MoeJobShape {
  std::uint32_t nodes = 1;
  std::uint32_t locals = 1;
  std::uint32_t experts = 0;
  std::uint32_t top_k = 0;
  std::uint64_t hidden = 0;    ///< H
  std::uint64_t features = 0;  ///< F
  DataType type = DataType::kBf16;
  MoeEpilogue epilogue = MoeEpilogue::kNone;

  /// Columns of an expert's weights.
  std::uint64_t weight_columns() const {
    return epilogue == MoeEpilogue::kNone ? features : 2 * features;
  }
};

/// Appends the output row [F] of a token [H] and an expert's weights, and by how much each element
/// may be off.
/// `bias`: the expert's, or null. `spread`: the root of its mean square error over random inputs,
/// or null.
void moe_row(const MoeJobShape& shape, const std::uint16_t* token, const std::uint16_t* weights,
             const std::uint16_t* bias, std::vector<double>* row, std::vector<double>* off,
             std::vector<double>* spread = nullptr);

/// One rank's input, dense.
struct MoeSource {
  std::uint64_t tokens = 0;
  std::vector<std::int32_t> ids;      ///< [tokens][top_k]; -1: dropped
  std::vector<float> weights;         ///< [tokens][top_k]
  std::vector<std::uint16_t> values;  ///< [tokens][H], within +-1
};

class MoeReference {
 public:
  struct Row {
    std::uint32_t expert = 0;  ///< of all, not of this rank
    std::uint32_t rank = 0;
    std::uint32_t token = 0;
    std::uint32_t slot = 0;
    float weight = 0;
  };

  /// What `rank` must get from `sources`, the inputs of all ranks, which outlive the reference.
  MoeReference(const MoeJobShape& shape, std::uint32_t rank, std::span<const MoeSource> sources);

  std::uint32_t first_expert() const { return first_expert_; }
  std::uint32_t expert_count() const { return expert_count_; }
  const std::vector<Row>& rows() const { return rows_; }
  /// Rows of the rank's experts before its `i`-th, 0 <= i <= expert_count().
  std::uint64_t offset(std::uint32_t i) const;

  /// Compares the output rows of the rank's `i`-th expert with its weights ([H][F], or
  /// [H][2 F] of a gated epilogue; within +-1).
  /// `y` is the whole output, [rows().size()][F]. Indices count its elements.
  /// `bias`: of the same columns, or null.
  Comparison compare(std::uint32_t i, const std::uint16_t* weights, const std::uint16_t* y,
                     const std::uint16_t* bias = nullptr) const;

 private:
  MoeJobShape shape_;
  std::span<const MoeSource> sources_;
  std::uint32_t first_expert_ = 0;
  std::uint32_t expert_count_ = 0;
  std::vector<Row> rows_;
};

}  // namespace mk::tools
