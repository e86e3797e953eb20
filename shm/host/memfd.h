/// \file
/// Sealed memory files, the one kind of memory that this ABI shares: how one is made, checked and
/// mapped.
#pragma once

#include <fcntl.h>

#include <boost/interprocess/mapped_region.hpp>
#include <cstdint>
#include <string_view>

#include "shm/host/result.h"
#include "shm/host/unique_fd.h"

namespace mk::shm {

/// A zeroed memfd of exactly `bytes`; it closes on exec and can still be sealed. At most 200 bytes
/// of `name` are used.
Result<UniqueFd> make_memfd(std::string_view name, std::uint64_t bytes);

/// Adds `seals` (F_SEAL_*) for good.
Status add_seals(int fd, int seals);

/// Refuses a descriptor that lacks one of `seals`: a file that can shrink kills its readers,
/// with SIGBUS. `what` names it in the error.
Status require_seals(int fd, int seals, std::string_view what);

/// Refuses hugetlbfs (kUnsupported): a huge page that somebody punches out of the file is taken
/// from a pool at the next access. An empty pool is SIGBUS. `what` names the file in the error.
Status refuse_huge_pages(int fd, std::string_view what);

/// The file's size in bytes.
Result<std::uint64_t> file_bytes(int fd, std::string_view what);

/// Leaves the mapping out of core dumps. Memory that others share with this process is not ours to
/// write to a disk. It can be most of a machine's memory.
void exclude_from_dumps(void* address, std::size_t bytes);

/// Maps the first `bytes` for reading and writing, shared.
Result<boost::interprocess::mapped_region> map_shared(int fd, std::uint64_t bytes,
                                                      std::string_view what);

}  // namespace mk::shm
