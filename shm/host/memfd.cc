#include "shm/host/memfd.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <boost/interprocess/exceptions.hpp>
#include <cerrno>
#include <limits>
#include <string>

namespace mk::shm {

namespace {

constexpr std::size_t kMemfdNameBytes = 200;  // the kernel takes at most 249

/// What Boost's mapped_region wants in order to map a plain descriptor.
struct MappableFd {
  int fd;
  boost::interprocess::mapping_handle_t get_mapping_handle() const {
    return boost::interprocess::ipcdetail::mapping_handle_from_file_handle(fd);
  }
};

std::string seal_names(int seals) {
  std::string names;
  const auto add = [&](int seal, const char* name) {
    if ((seals & seal) != 0) names += (names.empty() ? "" : ", ") + std::string(name);
  };
  add(F_SEAL_SHRINK, "F_SEAL_SHRINK");
  add(F_SEAL_GROW, "F_SEAL_GROW");
  add(F_SEAL_SEAL, "F_SEAL_SEAL");
  return names;
}

}  // namespace

Result<UniqueFd> make_memfd(std::string_view name, std::uint64_t bytes) {
  const std::string short_name(name.substr(0, kMemfdNameBytes));
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    return fail(ErrorCode::kInvalidArgument, "memory '{}' of {} bytes is larger than a file can be",
                short_name, bytes);
  }
  UniqueFd fd(::memfd_create(short_name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return fail_errno(errno, "cannot create shared memory '{}'", short_name);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return fail_errno(errno, "cannot size shared memory '{}' to {} bytes", short_name, bytes);
  }
  return fd;
}

Status add_seals(int fd, int seals) {
  if (::fcntl(fd, F_ADD_SEALS, seals) != 0) {
    return fail_errno(errno, "cannot seal shared memory with {}", seal_names(seals));
  }
  return {};
}

Status require_seals(int fd, int seals, std::string_view what) {
  const int present = ::fcntl(fd, F_GET_SEALS);
  if (present < 0) {
    return fail(ErrorCode::kInvalidArgument, "{} is not a sealable memory file (memfd): {}", what,
                errno_text(errno));
  }
  if (const int missing = seals & ~present; missing != 0) {
    return fail(ErrorCode::kInvalidArgument, "{} is not sealed: {} missing", what,
                seal_names(missing));
  }
  return {};
}

Status refuse_huge_pages(int fd, std::string_view what) {
  struct statfs status;
  if (::fstatfs(fd, &status) != 0) {
    return fail_errno(errno, "cannot tell the kind of memory of {}", what);
  }
  if (status.f_type == HUGETLBFS_MAGIC) {
    return fail(ErrorCode::kUnsupported,
                "{} is made of huge pages (MFD_HUGETLB), which are not accepted yet: use an "
                "ordinary memfd",
                what);
  }
  return {};
}

Result<std::uint64_t> file_bytes(int fd, std::string_view what) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return fail_errno(errno, "cannot read the size of {}", what);
  return static_cast<std::uint64_t>(status.st_size);
}

void exclude_from_dumps(void* address, std::size_t bytes) {
  // Only advice: where the kernel takes none, the dump is larger.
  (void)::madvise(address, bytes, MADV_DONTDUMP);
}

Result<boost::interprocess::mapped_region> map_shared(int fd, std::uint64_t bytes,
                                                      std::string_view what) {
  // Boost takes size 0 as "the whole file", and throws.
  if (bytes == 0) return fail(ErrorCode::kInvalidArgument, "{} has no bytes to map", what);
  try {
    return boost::interprocess::mapped_region(MappableFd{fd}, boost::interprocess::read_write, 0,
                                              bytes);
  } catch (const boost::interprocess::interprocess_exception& error) {
    return fail(
        ErrorCode::kSystem, "cannot map {} bytes of {}: {}", bytes, what,
        error.get_native_error() != 0 ? errno_text(error.get_native_error()) : error.what());
  }
}

}  // namespace mk::shm
