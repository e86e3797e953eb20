/// \file
/// What a test does to the software EFA devices of this process. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace mk::soft_efa {

/// "rdmap0s6" and "rdmap1s6", on one network; libfabric 1.22. As at the start again.
void reset();

/// What `fi_version` tells.
void set_version(std::uint32_t major, std::uint32_t minor);
/// Devices without remote writes: libfabric would emulate them.
void set_emulated_writes(bool emulated);
/// Whether the provider reaches GPUs' memory (FI_HMEM).
void set_gpu_memory(bool reachable);
/// A device that is down sends and receives nothing: what is under way to or from it fails.
void set_up(const std::string& device, bool up);
/// Messages (not writes) get no further, as to a peer that hangs.
void hold_messages(bool held);
/// The next `times` calls of that name ("fi_mr_regattr", "fi_av_insert") fail with `error`,
/// positive.
void refuse(const std::string& function, int error, int times);

/// Writes and reads that failed because their target did not know the sender.
std::size_t strangers();
/// Pieces of writes that waited for a read before the GPU saw them.
std::size_t flushed_pieces();
/// Addresses in all address tables.
std::size_t addresses();
/// Objects that were opened and not yet closed.
std::size_t live_objects();

}  // namespace mk::soft_efa
