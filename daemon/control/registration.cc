#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/control/control_plane_impl.h"
#include "shm/host/memfd.h"
#include "shm/limits.h"

namespace mk::daemon {

// Pinning 60 GiB takes half a minute, and giving them back takes seconds. So both happen apart from
// the control thread (ControlOptions::apart). The session stays meanwhile, and its books count the
// buffer. Its client is not read from while one registers, so that its messages keep their order.

/// One that is under way.
struct ControlPlane::Impl::Registration {
  fabric::MemoryDescriptor what;
  std::optional<shm::BufferFile> memory;
  UniqueFd dmabuf;
  Result<std::unique_ptr<fabric::LocalRegion>> region =  ///< goes before `memory`
      fail(ErrorCode::kLimitExceeded, "the daemon has no memory left for it");
  bool threw = true;

  void run(fabric::Endpoint& endpoint) {
    try {
      region = endpoint.register_memory(what);
      threw = false;
    } catch (const std::exception&) {
      // It stays an error, for want of memory most likely.
    }
    dmabuf.reset();  // what is registered keeps the GPU's memory
    if (!region) memory.reset();
  }
};

namespace {

/// The rest of a buffer, to be given back.
struct Held {
  explicit Held(Buffer& buffer)
      : memory(std::exchange(buffer.memory, std::nullopt)), region(std::move(buffer.region)) {}
  std::optional<shm::BufferFile> memory;
  std::unique_ptr<fabric::LocalRegion> region;  ///< goes before `memory`
};

/// Adds what to do about it when the system has refused to pin memory.
Error explain_registration(Error error, const Session& session, const std::string& name,
                           std::uint64_t bytes) {
  error.message = fmt::format("{}: cannot register buffer '{}' of {} bytes: {}", session.describe(),
                              name, bytes, error.message);
  const bool no_memory = error.message.find("ENOMEM") != std::string::npos ||
                         error.message.find("EPERM") != std::string::npos ||
                         error.message.find("EAGAIN") != std::string::npos;
  if (error.code != ErrorCode::kSystem || !no_memory) return error;
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::string now = limit.rlim_cur == RLIM_INFINITY ? std::string("unlimited")
                                                          : fmt::format("{} bytes", limit.rlim_cur);
  error.message += fmt::format(
      "; the daemon's limit of locked memory is {} (systemd: LimitMEMLOCK=infinity; shell: ulimit "
      "-l unlimited)",
      now);
  return error;
}

}  // namespace

void ControlPlane::Impl::run_apart(Session& session, std::function<void()> work,
                                   std::function<void(Session&)> done) {
  if (options_.apart) {
    ++session.apart;
    try {
      options_.apart(session.credentials.uid, work,
                     [this, id = session.id, done] { ran_apart(id, done); });
      return;
    } catch (const std::exception& error) {
      --session.apart;
      log(LogLevel::kError,
          fmt::format("no thread registers memory, so all clients wait for it: {}", error.what()));
    }
  }
  work();
  done(session);
}

void ControlPlane::Impl::ran_apart(std::uint32_t id, const std::function<void(Session&)>& done) {
  Session& session = *sessions_.at(id);
  --session.apart;
  try {
    done(session);
  } catch (const std::exception& error) {
    // Its client may never be answered.
    fail_session(session, {ErrorCode::kLimitExceeded,
                           fmt::format("the daemon could not serve a request ({}); it has little "
                                       "memory left",
                                       error.what())});
  }
  reap();
}

// -- registering ----------------------------------------------------------------------------------

Status ControlPlane::Impl::check_buffer(const Session& session, const std::string& name,
                                        std::uint64_t bytes) const {
  if (bytes == 0 || bytes > shm::kBufferBytesMax) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: buffer '{}' has {} bytes; a buffer has 1 to {} bytes", session.describe(),
                name, bytes, shm::kBufferBytesMax);
  }
  return check_buffer_count(session, name);
}

void ControlPlane::Impl::register_buffer(Client& client, std::uint64_t request,
                                         shm::RegisterBuffer& message, shm::Frame& frame) {
  const Status begun = register_host(client, request, message, std::move(frame.fds.front()));
  if (!begun) reply_error(client.id, request, begun.error());
}

void ControlPlane::Impl::register_device_buffer(Client& client, std::uint64_t request,
                                                shm::RegisterDeviceBuffer& message, shm::Frame&) {
  const Status begun = register_device(client, request, message, {}, 0);
  if (!begun) reply_error(client.id, request, begun.error());
}

void ControlPlane::Impl::register_dmabuf(Client& client, std::uint64_t request,
                                         shm::RegisterDmabuf& message, shm::Frame& frame) {
  const Status begun =
      register_device(client, request, message.buffer, std::move(frame.fds[0]), message.offset);
  if (!begun) reply_error(client.id, request, begun.error());
}

Status ControlPlane::Impl::register_host(Client& client, std::uint64_t request,
                                         shm::RegisterBuffer& message, UniqueFd fd) {
  Session& session = *client.session;
  MK_RETURN_IF_ERROR(check_buffer(session, message.name, message.bytes));
  MK_ASSIGN_OR_RETURN(const std::uint16_t handle, session.free_handle());
  // All of the file counts, however little of it is there or announced: we keep all of it alive.
  // And before anything is pinned: a NIC's driver does so without asking for the client's own
  // limit.
  MK_ASSIGN_OR_RETURN(const std::uint64_t file_bytes,
                      shm::file_bytes(fd.get(), "the received buffer"));
  const std::uint64_t host_bytes = std::max(file_bytes, message.bytes);
  MK_RETURN_IF_ERROR(
      check_session_memory(session, host_bytes,
                           fmt::format("{}: buffer '{}' in a file of {} bytes", session.describe(),
                                       message.name, host_bytes)));
  auto memory = shm::BufferFile::map(std::move(fd), message.bytes);
  if (!memory) {
    return fail(memory.error().code, "{}: buffer '{}': {}", session.describe(), message.name,
                memory.error().message);
  }
  const fabric::MemoryDescriptor what{
      .address = memory->data(), .bytes = message.bytes, .fd = memory->fd(), .fd_offset = 0};
  Buffer buffer{.name = std::move(message.name), .bytes = message.bytes, .host_bytes = host_bytes};
  buffer.memory = std::move(*memory);
  begin_registration(client, request, handle, std::move(buffer), what, {});
  return {};
}

Status ControlPlane::Impl::register_device(Client& client, std::uint64_t request,
                                           shm::RegisterDeviceBuffer& message, UniqueFd dmabuf,
                                           std::uint64_t dmabuf_offset) {
  Session& session = *client.session;
  MK_RETURN_IF_ERROR(check_buffer(session, message.name, message.bytes));
  gpu::MemoryKey key;
  if (message.key.size() != sizeof key) {
    return fail(ErrorCode::kProtocol, "{}: the key of GPU buffer '{}' has {} bytes instead of {}",
                session.describe(), message.name, message.key.size(), sizeof key);
  }
  std::memcpy(&key, message.key.data(), sizeof key);
  if (message.bytes > key.bytes) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: GPU buffer '{}' of {} bytes in an allocation of {}", session.describe(),
                message.name, message.bytes, key.bytes);
  }
  // What is ours is used by its address: nobody else may say that it is.
  if (key.process == gpu::this_process() && session.credentials.pid != ::getpid()) {
    return fail(ErrorCode::kPermission, "{}: GPU buffer '{}' is said to be the daemon's own",
                session.describe(), message.name);
  }
  MK_ASSIGN_OR_RETURN(const std::uint16_t handle, session.free_handle());
  Buffer buffer{.name = message.name, .bytes = message.bytes, .of_gpu = true};
  // Within one node nobody but its ranks touches it.
  if (session.job->nodes == 1) {
    session.add_buffer(handle, std::move(buffer));
    reply(client.id, request, shm::RegisterBufferReply{handle});
    return {};
  }
  const fabric::Capabilities& can = proxy_of(session).endpoint().capabilities();
  if (!can.device_memory) {
    return fail(ErrorCode::kUnsupported,
                "{}: fabric {} does not reach GPU memory; a job with GPUs on several nodes needs "
                "a fabric that does (loopback, ofi, verbs)",
                session.describe(), can.name);
  }
  MK_RETURN_IF_ERROR(check_gpu_buffers(session, message.name));
  const Status image =
      check_session_memory(session, message.bytes,
                           fmt::format("{}: GPU buffer '{}' by way of {} bytes of host memory",
                                       session.describe(), message.name, message.bytes));
  if (image) buffer.host_bytes = message.bytes;  // until it is known
  const fabric::MemoryDescriptor what{.bytes = message.bytes,
                                      .device = key,
                                      .dmabuf = dmabuf.get(),
                                      .dmabuf_offset = dmabuf_offset,
                                      .no_image = image ? "" : image.error().message};
  begin_registration(client, request, handle, std::move(buffer), what, std::move(dmabuf));
  return {};
}

void ControlPlane::Impl::begin_registration(Client& client, std::uint64_t request,
                                            std::uint16_t handle, Buffer buffer,
                                            const fabric::MemoryDescriptor& what, UniqueFd dmabuf) {
  Session& session = *client.session;
  fabric::Endpoint& endpoint = proxy_of(session).endpoint();
  const auto one = std::make_shared<Registration>();
  one->what = what;
  one->memory = std::exchange(buffer.memory, std::nullopt);
  one->dmabuf = std::move(dmabuf);
  buffer.registering = request;
  session.add_buffer(handle, std::move(buffer));
  clients_port_.hold(client.id, true);
  try {
    run_apart(
        session, [one, &endpoint] { one->run(endpoint); },
        [this, one, handle](Session& own) { registered(own, handle, *one); });
  } catch (...) {
    const auto found = session.buffers.find(handle);
    if (found != session.buffers.end() && found->second.registering) {  // it never began
      session.remove_buffer(handle);
      clients_port_.hold(client.id, false);
    }
    throw;
  }
}

void ControlPlane::Impl::registered(Session& session, std::uint16_t handle, Registration& one) {
  Buffer& buffer = session.buffers.at(handle);
  if (one.threw) fail_session(session, one.region.error());
  const auto request = std::exchange(buffer.registering, std::nullopt);
  if (one.region) {
    buffer.memory = std::move(one.memory);
    buffer.region = std::move(*one.region);
    if (buffer.of_gpu) session.set_host_bytes(buffer, buffer.region->image_bytes);
  }
  if (!request || !session.client) return;  // the session ends, and with it the buffer
  const ClientId client = *session.client;
  clients_port_.hold(client, false);
  if (!one.region) {
    const Error error =
        explain_registration(one.region.error(), session, buffer.name, buffer.bytes);
    session.remove_buffer(handle);
    reply_error(client, *request, error);
    return;
  }
  if (!buffer.region->gpu_path.empty()) {
    log(LogLevel::kInfo,
        fmt::format("{}: GPU buffer '{}' of {} bytes goes {}{}", session.describe(), buffer.name,
                    buffer.bytes, buffer.region->gpu_path,
                    buffer.region->gpu_path_why.empty() ? "" : ": " + buffer.region->gpu_path_why),
        session);
  }
  proxy_of(session).apply(BindBuffer{session.slot, handle, buffer.region.get(), buffer.bytes});
  // Answered first: if a peer proves unreachable while we announce, the failure comes after.
  reply(client, *request, shm::RegisterBufferReply{handle});
  if (session.job->state == JobState::kUp) announce_buffer(session, handle);
}

// -- deregistering --------------------------------------------------------------------------------

bool ControlPlane::Impl::deregister(Session& session, std::uint16_t handle) {
  Buffer& buffer = session.buffers.at(handle);
  if (buffer.region == nullptr && !buffer.memory) return false;
  const auto held = std::make_shared<std::optional<Held>>(std::in_place, buffer);
  buffer.withdrawal->deregisters = true;
  try {
    run_apart(
        session, [held] { held->reset(); },
        [this, handle](Session& own) {
          own.buffers.at(handle).withdrawal->deregisters = false;
          advance_withdrawal(own, handle);
        });
  } catch (const std::bad_alloc&) {
    buffer.withdrawal->deregisters = false;
    return false;  // what was held has gone here
  }
  return true;
}

void ControlPlane::Impl::deregister_all(Session& session) {
  const auto held = std::make_shared<std::vector<Held>>();
  held->reserve(session.buffers.size());
  for (auto& [handle, buffer] : session.buffers) {
    if (buffer.region != nullptr || buffer.memory) held->emplace_back(buffer);
  }
  if (held->empty()) return;
  run_apart(
      session, [held] { held->clear(); }, [](Session&) {});
}

}  // namespace mk::daemon
