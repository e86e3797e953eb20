/// \file
/// Builds without the CUDA kernels.

#include "tests/bench/mkbench/attention_core.h"

namespace mk::bench {

Result<std::unique_ptr<AttentionCore>> AttentionCore::create(const CoreProblem&) {
  return fail(ErrorCode::kUnsupported, "the attention core is not in this build of mkbench");
}

}  // namespace mk::bench
