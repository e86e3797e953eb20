/// \file
/// Which GPU this process has, as far as can be told without starting CUDA: a process that has
/// started it can no longer fork into children that use it.
#pragma once

#include <cstdint>
#include <string>

namespace mk::client {

/// PCI address ("0000:1b:00.0") of the calling thread's GPU, if it has a CUDA context; else what
/// CUDA_VISIBLE_DEVICES and the number of the process on its node tell (see `gpu_by_number`); else
/// empty.
std::string own_gpu(std::uint32_t local_rank);

/// The `local_rank`-th of the GPUs that `visible` (CUDA_VISIBLE_DEVICES; null: all) lets a process
/// see, or the only one. Numbers count in the order of PCI addresses, which is CUDA's where all
/// GPUs are of one kind. `folder`: /proc/driver/nvidia/gpus. Empty: there is none, or it cannot be
/// told (MIG instances).
std::string gpu_by_number(const char* visible, std::uint32_t local_rank, const std::string& folder);

}  // namespace mk::client
