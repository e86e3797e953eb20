/// \file
/// Which steps of a gather's role a block takes. Compiles for host and device.
#pragma once

#include <cstdint>

#include "kernels/comm/operator_block.h"

namespace mk::kernels::gather {

/// Of steps 0, 1, ... of the role, which `blocks` blocks share, this block's first is its index.
/// This is the one that it takes after `step`: at a distance of `blocks`; or, where blocks are not
/// equally quick (`taken`), the next that nobody has. For that the executor supplies
///     std::uint32_t take_step(Role);    how many have been taken so in this launch, before this
///     one
template <class Executor>
MK_HOST_DEVICE inline std::uint32_t next_step(OperatorBlock<Executor>& block, std::uint32_t step,
                                              std::uint32_t blocks, bool taken) {
  if constexpr (requires { block.executor.take_step(block.role); }) {
    if (taken) return blocks + block.executor.take_step(block.role);
  }
  return step + blocks;
}

}  // namespace mk::kernels::gather
