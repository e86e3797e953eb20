/// \file
/// A session's buffers: memory of the host or of its GPU that the daemon knows of.

#include <cstring>
#include <thread>
#include <utility>

#include "client/src/session_checks.h"
#include "client/src/session_impl.h"
#include "shm/host/memory_room.h"

namespace mk {
namespace {

/// Since when daemons know of GPU memory.
constexpr std::uint16_t kDeviceBuffersAbiMinor = 1;
constexpr std::uint16_t kDmabufsAbiMinor = 2;
/// How long kernels of this node may go on writing to memory of an operator that goes, with a
/// daemon that knows of no Retire.
constexpr std::chrono::milliseconds kKernelsTimeout{1'000};

}  // namespace

Result<Buffer> Session::Impl::alloc_buffer(std::uint64_t bytes, std::string_view name,
                                           MemoryKind kind, bool may_grow) {
  if (bytes == 0 || bytes > shm::kBufferBytesMax) {
    return fail(ErrorCode::kInvalidArgument, "a buffer has 1 to {} bytes, not {}",
                shm::kBufferBytesMax, bytes);
  }
  MK_RETURN_IF_ERROR(check_name("a buffer's name", name));
  MK_RETURN_IF_ERROR(status());
  MK_RETURN_IF_ERROR(check_room(fmt::format("buffer '{}'", name), bytes, 1, kind));
  return with_room([&] { return try_buffer(bytes, name, kind, may_grow); });
}

Status Session::Impl::check_room(std::string_view what, std::uint64_t bytes, std::uint32_t ranks,
                                 MemoryKind kind) {
  MK_RETURN_IF_ERROR(check_room_now(what, bytes, ranks, kind, true));
  return with_room([&] { return check_room_now(what, bytes, ranks, kind, false); });
}

Status Session::Impl::check_room_now(std::string_view what, std::uint64_t bytes,
                                     std::uint32_t ranks, MemoryKind kind, bool ever) {
  std::uint64_t available = 0;
  std::uint64_t total = 0;
  std::string where = "this machine";
  std::string of_all;
  if (kind == MemoryKind::kDevice) {
    MK_ASSIGN_OR_RETURN(GpuSession* const gpu, this->gpu());
    MK_ASSIGN_OR_RETURN(const gpu::MemoryRoom room, gpu->driver()->room(gpu->device()));
    available = room.available;
    total = room.total;
    where = fmt::format("GPU {}", gpu->device());
  } else {
    const auto room = shm::memory_room();
    if (!room) return {};
    available = room->available;
    total = room->total;
    if (ranks > 1) of_all = fmt::format(", {} for the {} ranks here", bytes * ranks, ranks);
  }
  const std::uint64_t most = ever ? total : available;
  if (bytes <= most / ranks) return {};
  return fail(ErrorCode::kLimitExceeded,
              "{} needs {} bytes of memory{}; {} has {} bytes in all, {} of them free", what, bytes,
              of_all, where, total, available);
}

Result<Buffer> Session::Impl::try_buffer(std::uint64_t bytes, std::string_view name,
                                         MemoryKind kind, bool may_grow) {
  OwnBuffer own;
  if (kind == MemoryKind::kDevice) {
    if (connection_->abi_minor() < kDeviceBuffersAbiMinor) {
      return fail(ErrorCode::kUnsupported,
                  "the daemon speaks ABI {}.{}, which knows nothing of GPU memory; install one of "
                  "{}.{} or later",
                  shm::kAbiMajor, connection_->abi_minor(), shm::kAbiMajor, kDeviceBuffersAbiMinor);
    }
    MK_ASSIGN_OR_RETURN(GpuSession* const gpu, this->gpu());
    MK_ASSIGN_OR_RETURN(own.device, gpu::Allocation::create(gpu->driver(), gpu->device(), bytes));
    shm::RegisterDeviceBuffer request{bytes, std::string(name), {}};
    request.key.resize(sizeof(gpu::MemoryKey));
    std::memcpy(request.key.data(), &own.device->key(), sizeof(gpu::MemoryKey));
    MK_ASSIGN_OR_RETURN(const std::uint16_t handle,
                        register_device_buffer(std::move(request), *own.device));
    return keep_buffer(std::move(own), bytes, handle);
  }
  MK_ASSIGN_OR_RETURN(auto file, shm::BufferFile::create(name, bytes, may_grow));
  MK_ASSIGN_OR_RETURN(Buffer buffer, register_file(std::move(file), name));
  buffer.bytes = bytes;
  return buffer;
}

Result<Buffer> Session::Impl::register_file(shm::BufferFile file, std::string_view name) {
  const int fd = file.fd();
  MK_ASSIGN_OR_RETURN(const auto reply, connection_->call<shm::RegisterBufferReply>(
                                            shm::RegisterBuffer{file.bytes(), std::string(name)},
                                            kRequestTimeout, std::span(&fd, 1)));
  const std::uint64_t bytes = file.bytes();
  OwnBuffer own;
  own.file = std::move(file);
  return keep_buffer(std::move(own), bytes, reply.handle);
}

Result<Buffer> Session::Impl::grow_buffer(const Buffer& buffer, std::uint64_t bytes,
                                          std::string_view name) {
  MK_RETURN_IF_ERROR(status());
  std::optional<shm::BufferFile> grown;
  {
    std::lock_guard lock(mutex_);
    const auto found = buffers_.find(buffer.handle);
    if (found == buffers_.end() || !found->second.file)
      return fail(ErrorCode::kNotFound, "handle {} is not a buffer of the host", buffer.handle);
    MK_ASSIGN_OR_RETURN(grown, found->second.file->grown(bytes));
  }
  return register_file(std::move(*grown), name);
}

void Session::Impl::retire_ungrown(const Buffer& buffer, const Buffer& grown,
                                   std::vector<shm::Retire::PeerBuffer> peers) {
  {
    std::lock_guard lock(mutex_);
    const auto from = buffers_.find(buffer.handle);
    const auto to = buffers_.find(grown.handle);
    if (from == buffers_.end() || to == buffers_.end()) return;
    to->second.before = std::move(from->second.before);
    to->second.before.push_back(std::move(*from->second.file));
    buffers_.erase(from);
  }
  if (connection_->abi_minor() < shm::kRetireAbiMinor) {
    (void)connection_->call<shm::Done>(shm::DeregisterBuffer{buffer.handle}, kRequestTimeout);
    return;
  }
  connection_->post(shm::Retire{buffer.handle, shm::kNoFlags, std::move(peers)}, kRequestTimeout,
                    [](const Status&) {});
}

Result<std::uint16_t> Session::Impl::register_device_buffer(shm::RegisterDeviceBuffer request,
                                                            const gpu::Allocation& memory) {
  // Only NICs have a use for the file. Where the driver exports none, there are other ways.
  if (options_.nodes > 1 && connection_->abi_minor() >= kDmabufsAbiMinor) {
    if (const auto dmabuf = memory.dmabuf()) {
      const int fd = dmabuf->fd.get();
      MK_ASSIGN_OR_RETURN(const auto reply,
                          connection_->call<shm::RegisterBufferReply>(
                              shm::RegisterDmabuf{std::move(request), dmabuf->offset},
                              kRequestTimeout, std::span(&fd, 1)));
      return reply.handle;
    }
  }
  MK_ASSIGN_OR_RETURN(const auto reply,
                      connection_->call<shm::RegisterBufferReply>(request, kRequestTimeout));
  return reply.handle;
}

Buffer Session::Impl::keep_buffer(OwnBuffer own, std::uint64_t bytes, std::uint16_t handle) {
  const Buffer buffer{own.data(), bytes, handle};
  std::lock_guard lock(mutex_);
  buffers_.insert_or_assign(handle, std::move(own));
  return buffer;
}

Result<gpu::MemoryKey> Session::Impl::device_key(const Buffer& buffer) const {
  MK_RETURN_IF_ERROR(home_.check());
  std::lock_guard lock(mutex_);
  const auto found = buffers_.find(buffer.handle);
  if (found == buffers_.end() || !found->second.device) {
    return fail(ErrorCode::kNotFound, "handle {} is not a GPU buffer of this session",
                buffer.handle);
  }
  return found->second.device->key();
}

Status Session::Impl::free_buffer(const Buffer& buffer) {
  MK_RETURN_IF_ERROR(home_.check());
  {
    std::lock_guard lock(mutex_);
    const auto found = buffers_.find(buffer.handle);
    if (found == buffers_.end() || found->second.data() != buffer.data) {
      return fail(ErrorCode::kNotFound, "handle {} is not a buffer of this session", buffer.handle);
    }
  }
  auto done = connection_->call<shm::Done>(shm::DeregisterBuffer{buffer.handle}, kRequestTimeout);
  // Whatever the daemon said, it holds its own mapping: ours can go. Freeing GPU memory may wait
  // for kernels, so not under the lock.
  OwnBuffer own;
  {
    std::lock_guard lock(mutex_);
    const auto found = buffers_.find(buffer.handle);
    if (found != buffers_.end()) {
      own = std::move(found->second);
      buffers_.erase(found);
    }
  }
  if (!done) return propagate(done);
  return {};
}

void Session::Impl::retire(const Buffer& buffer, std::uint32_t flag_base,
                           std::vector<shm::Retire::PeerBuffer> peers, std::function<bool()> quiet,
                           std::shared_ptr<void> rest) {
  const auto well = [this] { return static_cast<bool>(status()); };
  if (connection_->abi_minor() < shm::kRetireAbiMinor) {
    // It knows of no agreement: wait a little for the kernels of this node, then take it away.
    const auto deadline = client::RetiredMemory::Clock::now() + kKernelsTimeout;
    while (quiet && well() && client::RetiredMemory::Clock::now() < deadline && !quiet())
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
    (void)free_buffer(buffer);
    return;
  }
  OwnBuffer own;
  bool attached = false;
  {
    std::lock_guard lock(mutex_);
    const auto found = buffers_.find(buffer.handle);
    if (found == buffers_.end()) return;
    own = std::move(found->second);
    buffers_.erase(found);
    attached = attached_;
  }
  // A file's memory the daemon and the local ranks have mapped themselves: ours goes with `own`.
  const std::uint64_t number =
      retired_.add(std::move(own.device), std::move(quiet), std::move(rest));
  // Of a session that failed nothing is given back to the daemon, which cleans up by itself.
  if (!attached) return retired_.answered(number, false);
  connection_->post(
      shm::Retire{buffer.handle, flag_base, std::move(peers)}, kRequestTimeout,
      [this, number](const Status& done) { retired_.answered(number, static_cast<bool>(done)); });
}

}  // namespace mk
