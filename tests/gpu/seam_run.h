/// \file
/// A product through the policy examples, for timing.
#pragma once

#include "tests/gpu/gemm_reference.h"
#include "tests/gpu/gemm_seams.h"

namespace mk::test {

/// The product of `p` (bf16, B as [N,K]) with a gate that is asked every 8 k blocks, its flags all
/// set, and a store into packed slots on `device` that releases a flag per tile.
class SeamRun {
 public:
  SeamRun(const kernels::cuda::GemmProblem& p, int device, bool staged);
  void launch(int blocks) const;

 private:
  DeviceMemory chunk_flags_, incident_, tile_flags_, slots_;
  SeamProduct product_;
};

}  // namespace mk::test
