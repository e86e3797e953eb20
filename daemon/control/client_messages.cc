#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "daemon/control/client_text.h"
#include "daemon/control/control_plane_impl.h"
#include "shm/host/memfd.h"
#include "shm/layout.h"
#include "shm/limits.h"

namespace mk::daemon {

namespace {

std::string state_text(Client::State state) {
  switch (state) {
    case Client::State::kConnected:
      return "before hello";
    case Client::State::kGreeted:
      return "before attach";
    case Client::State::kAttached:
      return "after attach";
    case Client::State::kLeaving:
      return "after detach";
    case Client::State::kEnded:
      return "after the session has failed";
  }
  return "in an unknown state";
}

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

/// What is allowed when: one row per request. Every other type is a reply, or unknown.
struct ControlPlane::Impl::Handler {
  using Run = void (Impl::*)(Client&, shm::Frame&);

  shm::MessageType type;
  Client::State needs;
  bool also_ended;  ///< allowed, too, when the session has failed
  std::size_t fds;
  Run run;
  bool fds_optional = false;  ///< none will do as well
};

std::span<const ControlPlane::Impl::Handler> ControlPlane::Impl::handlers() {
  using enum Client::State;
  using T = shm::MessageType;
  static constexpr Handler kHandlers[] = {
      {T::kHello, kConnected, false, 0, &Impl::run<shm::Hello, &Impl::hello_from>},
      {T::kAttach, kGreeted, false, 1, &Impl::run<shm::Attach, &Impl::attach>, true},
      {T::kRegisterBuffer, kAttached, false, 1,
       &Impl::run<shm::RegisterBuffer, &Impl::register_buffer>},
      {T::kRegisterDeviceBuffer, kAttached, false, 0,
       &Impl::run<shm::RegisterDeviceBuffer, &Impl::register_device_buffer>},
      {T::kRegisterDmabuf, kAttached, false, 1,
       &Impl::run<shm::RegisterDmabuf, &Impl::register_dmabuf>},
      {T::kDeregisterBuffer, kAttached, false, 0,
       &Impl::run<shm::DeregisterBuffer, &Impl::deregister_buffer>},
      {T::kRetire, kAttached, false, 0, &Impl::run<shm::Retire, &Impl::retire>},
      {T::kAllocFlags, kAttached, false, 0, &Impl::run<shm::AllocFlags, &Impl::alloc_flags>},
      {T::kExchange, kAttached, false, 0, &Impl::run<shm::Exchange, &Impl::exchange>},
      {T::kOpenPeerBuffer, kAttached, false, 0,
       &Impl::run<shm::OpenPeerBuffer, &Impl::open_peer_buffer>},
      {T::kLaunchBegins, kAttached, false, 0, &Impl::run<shm::LaunchBegins, &Impl::launch_begins>},
      {T::kDetach, kAttached, true, 0, &Impl::run<shm::Detach, &Impl::detach>},
  };
  return kHandlers;
}

void ControlPlane::Impl::client_frame(ClientId id, shm::Frame frame) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;  // closed by us; the rest of its stream does not matter
  Client& client = found->second;
  const auto type = static_cast<shm::MessageType>(frame.type);
  const std::string name = shm::message_type_name(frame.type);
  const auto handler = std::ranges::find(handlers(), type, &Handler::type);
  if (handler == handlers().end()) {
    refuse(client, frame.request, {ErrorCode::kProtocol, fmt::format("{} is no request", name)});
    return;
  }
  if (frame.fds.size() != handler->fds && !(handler->fds_optional && frame.fds.empty())) {
    refuse(client, frame.request,
           {ErrorCode::kProtocol,
            fmt::format("{} came with {} descriptors; it takes {}{}", name, frame.fds.size(),
                        handler->fds_optional ? "none or " : "", handler->fds)});
    return;
  }
  const bool ended = client.state == Client::State::kEnded;
  if (client.state == handler->needs || (ended && handler->also_ended)) {
    (this->*handler->run)(client, frame);
    return;
  }
  if (ended && handler->needs == Client::State::kAttached) {
    reply_error(id, frame.request, client.failure);
    return;
  }
  const Error error{ErrorCode::kProtocol,
                    fmt::format("{} came {}", name, state_text(client.state))};
  if (client.state == Client::State::kConnected) {
    refuse(client, frame.request, error);  // not one of ours, it seems
  } else {
    reply_error(id, frame.request, error);
  }
}

template <class Message,
          void (ControlPlane::Impl::*Method)(Client&, std::uint64_t, Message&, shm::Frame&)>
void ControlPlane::Impl::run(Client& client, shm::Frame& frame) {
  auto message = shm::decode_message<Message>(frame.payload);
  if (!message) {
    refuse(client, frame.request, message.error());
    return;
  }
  if (const Status plain = check_text(*message); !plain) {
    reply_error(client.id, frame.request, plain.error());
    return;
  }
  (this->*Method)(client, frame.request, *message, frame);
}

void ControlPlane::Impl::reply_error(ClientId client, std::uint64_t request, const Error& error) {
  reply(client, request, shm::ErrorReply{error.code, error.message});
}

void ControlPlane::Impl::refuse(Client& client, std::uint64_t request, const Error& error) {
  const ClientId id = client.id;
  reply_error(id, request, error);
  if (client.session != nullptr) {
    Session& session = *client.session;
    session.client.reset();
    fail_session(session, error);
    fence(session);
  }
  log(LogLevel::kWarning, fmt::format("refused a client: {}", error.message),
      {{"pid", fmt::format("{}", client.credentials.pid)}}, client.credentials.uid);
  clients_.erase(id);
  clients_port_.close(id);
}

void ControlPlane::Impl::hello_from(Client& client, std::uint64_t request, shm::Hello& hello,
                                    shm::Frame&) {
  if (hello.abi_major != shm::kAbiMajor) {
    refuse(client, request,
           {ErrorCode::kAbiMismatch,
            fmt::format("the client (libmkclient {}) speaks ABI {}.{} and this daemon (mkerneld "
                        "{}) {}.{}; install the same major version of both",
                        hello.client_version, hello.abi_major, hello.abi_minor, options_.version,
                        shm::kAbiMajor, shm::kAbiMinor)});
    return;
  }
  client.state = Client::State::kGreeted;
  client.abi_minor = hello.abi_minor;
  reply(client.id, request,
        shm::HelloReply{shm::kAbiMajor, shm::kAbiMinor, hello_.generation, options_.version});
}

void ControlPlane::Impl::launch_begins(Client& client, std::uint64_t request, shm::LaunchBegins&,
                                       shm::Frame&) {
  proxy_of(*client.session).apply(ExpectCommands{client.session->slot});
  reply(client.id, request, shm::Done{});
}

void ControlPlane::Impl::register_buffer(Client& client, std::uint64_t request,
                                         shm::RegisterBuffer& message, shm::Frame& frame) {
  Session& session = *client.session;
  answer_registration(client, request,
                      register_buffer_for(session, message, std::move(frame.fds.front())));
}

void ControlPlane::Impl::answer_registration(Client& client, std::uint64_t request,
                                             const Result<std::uint16_t>& handle) {
  Session& session = *client.session;
  if (!handle) {
    reply_error(client.id, request, handle.error());
    return;
  }
  const Buffer& buffer = session.buffers.at(*handle);
  if (buffer.region != nullptr) {
    proxy_of(session).apply(BindBuffer{session.slot, *handle, buffer.region.get(), buffer.bytes});
  }
  // Answered first: if a peer proves unreachable while we announce, the failure comes after.
  reply(client.id, request, shm::RegisterBufferReply{*handle});
  if (session.job->state == JobState::kUp) announce_buffer(session, *handle);
}

void ControlPlane::Impl::register_device_buffer(Client& client, std::uint64_t request,
                                                shm::RegisterDeviceBuffer& message, shm::Frame&) {
  answer_registration(client, request, register_device_buffer_for(*client.session, message, {}, 0));
}

void ControlPlane::Impl::register_dmabuf(Client& client, std::uint64_t request,
                                         shm::RegisterDmabuf& message, shm::Frame& frame) {
  answer_registration(client, request,
                      register_device_buffer_for(*client.session, message.buffer,
                                                 std::move(frame.fds[0]), message.offset));
}

Status ControlPlane::Impl::check_buffer(const Session& session, const std::string& name,
                                        std::uint64_t bytes) const {
  if (bytes == 0 || bytes > shm::kBufferBytesMax) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: buffer '{}' has {} bytes; a buffer has 1 to {} bytes", session.describe(),
                name, bytes, shm::kBufferBytesMax);
  }
  return check_buffer_count(session, name);
}

Result<std::uint16_t> ControlPlane::Impl::register_buffer_for(Session& session,
                                                              shm::RegisterBuffer& message,
                                                              UniqueFd fd) {
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
  auto region = proxy_of(session).endpoint().register_memory(
      {.address = memory->data(), .bytes = message.bytes, .fd = memory->fd(), .fd_offset = 0});
  if (!region) {
    return tl::unexpected<Error>(
        explain_registration(region.error(), session, message.name, message.bytes));
  }
  session.add_buffer(handle, {.name = std::move(message.name),
                              .bytes = message.bytes,
                              .host_bytes = host_bytes,
                              .memory = std::move(*memory),
                              .region = std::move(*region),
                              .withdrawal = std::nullopt});
  return handle;
}

Result<std::uint16_t> ControlPlane::Impl::register_device_buffer_for(
    Session& session, shm::RegisterDeviceBuffer& message, UniqueFd dmabuf,
    std::uint64_t dmabuf_offset) {
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
  std::unique_ptr<fabric::LocalRegion> region;
  std::uint64_t host_bytes = 0;
  // Within one node nobody but its ranks touches it.
  if (session.job->nodes > 1) {
    fabric::Endpoint& endpoint = proxy_of(session).endpoint();
    if (!endpoint.capabilities().device_memory) {
      return fail(ErrorCode::kUnsupported,
                  "{}: fabric {} does not reach GPU memory; a job with GPUs on several nodes needs "
                  "a fabric that does (loopback, ofi, verbs)",
                  session.describe(), endpoint.capabilities().name);
    }
    MK_RETURN_IF_ERROR(check_gpu_buffers(session, message.name));
    // What is registered keeps the memory; the file is closed with the end of this call.
    const Status image =
        check_session_memory(session, message.bytes,
                             fmt::format("{}: GPU buffer '{}' by way of {} bytes of host memory",
                                         session.describe(), message.name, message.bytes));
    auto registered = endpoint.register_memory({.bytes = message.bytes,
                                                .device = key,
                                                .dmabuf = dmabuf.get(),
                                                .dmabuf_offset = dmabuf_offset,
                                                .no_image = image ? "" : image.error().message});
    if (!registered) {
      return tl::unexpected<Error>(
          explain_registration(registered.error(), session, message.name, message.bytes));
    }
    region = std::move(*registered);
    host_bytes = region->image_bytes;
    if (!region->gpu_path.empty()) {
      log(LogLevel::kInfo,
          fmt::format("{}: GPU buffer '{}' of {} bytes goes {}{}", session.describe(), message.name,
                      message.bytes, region->gpu_path,
                      region->gpu_path_why.empty() ? "" : ": " + region->gpu_path_why),
          session);
    }
  }
  session.add_buffer(handle, {.name = std::move(message.name),
                              .bytes = message.bytes,
                              .host_bytes = host_bytes,
                              .memory = std::nullopt,
                              .region = std::move(region),
                              .withdrawal = std::nullopt});
  return handle;
}

void ControlPlane::Impl::alloc_flags(Client& client, std::uint64_t request,
                                     shm::AllocFlags& message, shm::Frame&) {
  const auto base = client.session->allocate_flags(message.count);
  if (!base) {
    reply_error(client.id, request, base.error());
    return;
  }
  reply(client.id, request, shm::AllocFlagsReply{*base});
}

void ControlPlane::Impl::exchange(Client& client, std::uint64_t request, shm::Exchange& message,
                                  shm::Frame&) {
  Session& session = *client.session;
  Job& job = *session.job;
  const std::uint64_t deadline_ns = now_() + std::uint64_t{message.timeout_ms} * 1'000'000;
  const auto number = job.exchange.put_local(session.attach.rank, message.tag, message.blob,
                                             request, deadline_ns, message.timeout_ms);
  if (!number) {
    reply_error(client.id, request, number.error());
    return;
  }
  if (job.nodes > 1) {
    ExchangePart part{job.name,
                      job.part_id,
                      session.attach.rank,
                      *number,
                      std::move(message.tag),
                      std::move(message.blob)};
    if (job.state == JobState::kUp) {
      send_to_job(job, part);
    } else {
      job.exchange_unsent.push_back(std::move(part));
    }
  }
  answer_exchanges(job);
}

void ControlPlane::Impl::answer_exchanges(Job& job) {
  for (const ExchangeTable::Answer& answer : job.exchange.take_due(now_())) {
    const Session* session = job.session_of(answer.rank);
    if (session == nullptr || !session->active() || !session->client) continue;
    if (answer.outcome) {
      reply(*session->client, answer.request, **answer.outcome);
    } else {
      reply_error(*session->client, answer.request, answer.outcome.error());
    }
  }
  check_leavers(job);
}

void ControlPlane::Impl::abort_requests(Session& session, const Error& error) {
  const auto waiting = session.job->exchange.take_waiting(session.attach.rank);
  if (waiting && session.client) reply_error(*session.client, *waiting, error);
  for (auto& [handle, buffer] : session.buffers) {
    if (!buffer.withdrawal || buffer.withdrawal->answered) continue;
    buffer.withdrawal->answered = true;
    if (session.client) reply_error(*session.client, buffer.withdrawal->request, error);
  }
}

void ControlPlane::Impl::open_peer_buffer(Client& client, std::uint64_t request,
                                          shm::OpenPeerBuffer& message, shm::Frame&) {
  const Job& job = *client.session->job;
  const auto refuse_with = [&](std::string what) {
    reply_error(client.id, request, {ErrorCode::kNotFound, std::move(what)});
  };
  const Session* owner =
      message.local_rank < job.local_size ? job.locals[message.local_rank] : nullptr;
  if (owner == nullptr || !owner->active()) {
    refuse_with(
        fmt::format("job '{}' has no local rank {} on this node", job.name, message.local_rank));
    return;
  }
  const auto buffer = owner->buffers.find(message.handle);
  // Its owner may have created the operator and given it up again before this rank has mapped it.
  if (buffer == owner->buffers.end() ||
      (buffer->second.withdrawal && !may_hold(*client.session, buffer->second))) {
    refuse_with(fmt::format("local rank {} of job '{}' has no buffer with handle {}",
                            message.local_rank, job.name, message.handle));
    return;
  }
  if (!buffer->second.memory) {
    refuse_with(
        fmt::format("local rank {}'s buffer {} is GPU memory, which ranks lend each other "
                    "by its key",
                    message.local_rank, message.handle));
    return;
  }
  if (const Status room = check_descriptors(client.credentials.uid, 1, "one more on its way");
      !room) {
    reply_error(client.id, request, room.error());
    return;
  }
  const int fds[] = {buffer->second.memory->fd()};
  reply(client.id, request, shm::OpenPeerBufferReply{buffer->second.bytes}, fds);
}

void ControlPlane::Impl::detach(Client& client, std::uint64_t request, shm::Detach&, shm::Frame&) {
  if (client.session == nullptr || client.session->state == SessionState::kFailed) {
    // It is over already; what is left of it needs no client.
    if (client.session != nullptr) client.session->client.reset();
    reply(client.id, request, shm::Done{});
    const ClientId id = client.id;
    clients_.erase(id);
    clients_port_.close(id);
    return;
  }
  Session& session = *client.session;
  Job& job = *session.job;
  client.state = Client::State::kLeaving;
  session.state = SessionState::kLeaving;
  session.detach_request = request;
  session.leave_deadline_ns = now_() + kLeavingStallNs;
  abort_requests(session, {ErrorCode::kAborted, "the session was detached meanwhile"});
  retire_all(session);
  log(LogLevel::kInfo, fmt::format("{} of job '{}' detaches", session.describe(), job.name),
      session);
  if (job.state == JobState::kUp) {
    note_leave(job, session.attach.rank, session.describe());
    check_leavers(job);
  } else {
    const std::string what = "it detached before all ranks had attached";
    fail_job(job, lost_error(job, session.attach.rank, what),
             {session.attach.rank, ErrorCode::kPeerLost, what});
  }
  if (session.rings_done()) fence(session);
}

}  // namespace mk::daemon
