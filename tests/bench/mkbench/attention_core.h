/// \file
/// The attention core by itself, as the bound of what Ring Attention computes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "mkernel/types.h"
#include "shm/host/result.h"

namespace mk::bench {

struct CoreProblem {
  DataType dtype = DataType::kBf16;
  std::uint32_t batch = 1, query_heads = 1, key_heads = 1, head_dim = 64;
  bool causal = false;
  /// A rank's parts: queries, and the keys that the last one of them sees.
  struct Part {
    std::uint64_t queries = 0, keys = 0;
  };
  std::vector<Part> parts;
};

/// On the calling thread's GPU: the query-key pairs of one rank, all keys in local memory, nothing
/// awaited.
class AttentionCore {
 public:
  virtual ~AttentionCore() = default;
  /// kUnsupported in builds without the kernels.
  static Result<std::unique_ptr<AttentionCore>> create(const CoreProblem& problem);
  /// How long one run takes, of some in a row.
  virtual Result<std::uint64_t> measure_ns() = 0;
};

}  // namespace mk::bench
