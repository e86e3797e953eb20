#include "shm/host/buffer_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "shm/host/memfd.h"
#include "shm/layout.h"
#include "shm/limits.h"

namespace mk::shm {

namespace {

Status check_bytes(std::uint64_t bytes) {
  if (bytes == 0 || bytes > kBufferBytesMax) {
    return fail(ErrorCode::kInvalidArgument, "a buffer has 1 to {} bytes, not {}", kBufferBytesMax,
                bytes);
  }
  return {};
}

std::uint64_t in_pages(std::uint64_t bytes) {
  return round_up(bytes, static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)));
}

}  // namespace

BufferFile::BufferFile(UniqueFd fd, boost::interprocess::mapped_region region)
    : fd_(std::move(fd)), region_(std::move(region)) {}

Result<BufferFile> BufferFile::create(std::string_view name, std::uint64_t bytes, bool may_grow) {
  MK_RETURN_IF_ERROR(check_bytes(bytes));
  const std::uint64_t whole_pages = in_pages(bytes);
  MK_ASSIGN_OR_RETURN(UniqueFd fd, make_memfd(name, whole_pages));
  MK_RETURN_IF_ERROR(add_seals(fd.get(), may_grow ? F_SEAL_SHRINK : F_SEAL_SHRINK | F_SEAL_GROW));
  MK_ASSIGN_OR_RETURN(auto region, map_shared(fd.get(), whole_pages, "a new buffer"));
  return BufferFile(std::move(fd), std::move(region));
}

Result<BufferFile> BufferFile::grown(std::uint64_t bytes) const {
  MK_RETURN_IF_ERROR(check_bytes(bytes));
  const std::uint64_t whole_pages = in_pages(bytes);
  UniqueFd fd(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
  if (!fd.valid()) return fail_errno(errno, "cannot duplicate a buffer's descriptor");
  if (::ftruncate(fd.get(), static_cast<off_t>(whole_pages)) != 0)
    return fail_errno(errno, "cannot give a buffer {} bytes", whole_pages);
  MK_ASSIGN_OR_RETURN(auto region, map_shared(fd.get(), whole_pages, "a grown buffer"));
  return BufferFile(std::move(fd), std::move(region));
}

Result<BufferFile> BufferFile::map(UniqueFd fd, std::uint64_t bytes) {
  MK_RETURN_IF_ERROR(check_bytes(bytes));
  MK_RETURN_IF_ERROR(require_seals(fd.get(), F_SEAL_SHRINK, "the received buffer"));
  MK_RETURN_IF_ERROR(refuse_huge_pages(fd.get(), "the received buffer"));
  MK_ASSIGN_OR_RETURN(const std::uint64_t actual, file_bytes(fd.get(), "the received buffer"));
  if (actual < bytes) {
    return fail(ErrorCode::kInvalidArgument,
                "the received buffer has {} bytes where {} were announced", actual, bytes);
  }
  MK_ASSIGN_OR_RETURN(auto region, map_shared(fd.get(), bytes, "the received buffer"));
  exclude_from_dumps(region.get_address(), region.get_size());
  return BufferFile(std::move(fd), std::move(region));
}

}  // namespace mk::shm
