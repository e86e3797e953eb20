#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <span>
#include <thread>

#include "client/src/gpu_place.h"
#include "client/src/session_checks.h"
#include "client/src/session_impl.h"
#include "client/src/shared_core.h"
#include "shm/host/memory_room.h"
#include "shm/host/process_fd.h"
#include "shm/host/text.h"

namespace mk {
namespace {

/// How much later than its local peers a rank may hear of a failure.
constexpr std::chrono::milliseconds kFailureNewsTimeout{500};

/// Since when daemons take a client's pidfd.
constexpr std::uint16_t kProcessAbiMinor = 3;

/// How long kernels of this node may go on writing to memory of an operator that goes, when the
/// session goes as well.
constexpr std::chrono::milliseconds kKernelsTimeoutAtDetach{30'000};

constexpr const char* kDefaultSocket = "/run/mkernel/mkerneld.sock";

std::string socket_of(const AttachOptions& options) {
  if (!options.socket.empty()) return options.socket;
  const char* from_environment = std::getenv("MKERNEL_SOCKET");
  return from_environment != nullptr && *from_environment != '\0' ? from_environment
                                                                  : kDefaultSocket;
}

/// The job's secret, from the options or the environment.
std::string secret_of(const AttachOptions& options) {
  if (!options.job_secret.empty()) return options.job_secret;
  const char* from_environment = std::getenv("MKERNEL_JOB_SECRET");
  return from_environment != nullptr ? from_environment : "";
}

/// The rail, from the options or the environment.
Result<std::int32_t> rail_of(const AttachOptions& options) {
  const char* const text = std::getenv("MKERNEL_RAIL");
  if (options.rail >= 0 || text == nullptr || *text == '\0') return options.rail;
  const std::string_view digits = text;
  std::int32_t rail = -1;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), rail);
  if (error == std::errc() && end == digits.end() && rail >= 0) return rail;
  return fail(ErrorCode::kInvalidArgument, "MKERNEL_RAIL is '{}'; a rail's number is expected",
              shm::plain_text(digits, 64));
}

/// Where the rank is wanted to be served, in the words of the protocol.
Status put_place(const AttachOptions& options, std::uint16_t abi_minor, shm::Attach& attach) {
  MK_ASSIGN_OR_RETURN(const std::int32_t rail, rail_of(options));
  if (abi_minor < shm::kPlaceAbiMinor) {
    if (rail < 0) return {};
    return fail(ErrorCode::kUnsupported,
                "rail {} cannot be asked for: the daemon is older than this library and chooses by "
                "itself (ABI 1.{}); upgrade it, or leave AttachOptions::rail and MKERNEL_RAIL out",
                rail, abi_minor);
  }
  attach.gpu = options.gpu.empty() ? client::own_gpu(options.local_rank) : options.gpu;
  if (rail >= 0) attach.rail = static_cast<std::uint32_t>(rail);
  return {};
}

/// Daemons before ABI 1.5 do not say what ranks at unlike exchanges can do.
tl::unexpected<Error> advised(Error error) {
  if (error.message.find("is at '") != std::string::npos &&
      error.message.find("different releases") == std::string::npos)
    error.message += "; if they have different releases of libmkclient, install the same one";
  return tl::unexpected<Error>(std::move(error));
}

}  // namespace

Result<std::shared_ptr<Session::Impl>> Session::Impl::attach(AttachOptions options) {
  options.socket = socket_of(options);
  options.job_secret = secret_of(options);
  MK_RETURN_IF_ERROR(check_options(options));
  MK_ASSIGN_OR_RETURN(options.timeout, checked_timeout("AttachOptions::timeout", options.timeout));
  MK_ASSIGN_OR_RETURN(options.heartbeat_timeout, checked_timeout("AttachOptions::heartbeat_timeout",
                                                                 options.heartbeat_timeout));
  std::shared_ptr<Impl> impl(new Impl(std::move(options)), client::DeleteAtHome<Impl>{});
  const AttachOptions& o = impl->options_;
  MK_ASSIGN_OR_RETURN(impl->connection_,
                      client::Connection::open(o.socket, std::min(o.timeout, kRequestTimeout)));

  shm::Attach attach;
  attach.job = o.job;
  attach.secret = o.job_secret;
  attach.rank = o.rank;
  attach.world = o.world;
  attach.node_rank = o.node_rank;
  attach.nodes = o.nodes;
  attach.local_rank = o.local_rank;
  attach.local_size = o.local_size;
  attach.lane_count = o.lanes;
  attach.flag_count = o.arrival_flags;
  attach.timeout_ms = static_cast<std::uint32_t>(o.timeout.count());
  MK_RETURN_IF_ERROR(put_place(o, impl->connection_->abi_minor(), attach));
  // By it the daemon sees this process end, also while another one holds the socket. Where there is
  // none (an old kernel, a strict sandbox) the socket has to do.
  UniqueFd process;
  if (impl->connection_->abi_minor() >= kProcessAbiMinor) {
    if (auto own = shm::open_process(::getpid())) process = std::move(*own);
  }
  const int own_process = process.get();
  std::vector<UniqueFd> fds;
  MK_ASSIGN_OR_RETURN(
      const auto reply,
      impl->connection_->call<shm::AttachReply>(
          attach, kRequestTimeout, std::span(&own_process, process.valid() ? 1 : 0), &fds));
  if (fds.size() != 1) {
    return fail(ErrorCode::kProtocol,
                "the daemon sent {} descriptors with its attach reply instead of 1", fds.size());
  }
  MK_ASSIGN_OR_RETURN(auto segment, shm::Segment::map(std::move(fds[0])));
  if (segment.shape().lane_count < o.lanes) {
    return fail(ErrorCode::kProtocol, "the daemon gave {} lanes instead of {}",
                segment.shape().lane_count, o.lanes);
  }
  impl->segment_ = std::make_unique<shm::Segment>(std::move(segment));
  impl->fabric_ = reply.fabric;
  shm::store_relaxed(&impl->segment_->header().client_pid, static_cast<std::uint64_t>(::getpid()));
  for (std::uint32_t lane = 0; lane < o.lanes; ++lane) {
    shm::RingProducer producer;
    producer.ring = impl->segment_->ring(lane);
    impl->lanes_.push_back(producer);
  }
  impl->connection_->watch_heartbeat(impl->segment_.get(), o.heartbeat_timeout);
  // The daemon lists the missing ranks when `timeout` is over; give that answer time to arrive.
  MK_RETURN_IF_ERROR(impl->connection_->wait_job_up(o.timeout + std::chrono::milliseconds{5'000}));
  impl->attached_ = true;
  return impl;
}

Session::Impl::Impl(AttachOptions options)
    : options_(std::move(options)), shared_cores_(std::make_shared<SharedCores>()) {}

Session::Impl::~Impl() {
  // Nobody is told about a failed session but by the closed connection.
  if (attached_ && status()) (void)detach();
  if (connection_ != nullptr) connection_->close();  // it calls back into what goes now
}

Result<GpuSession*> Session::Impl::gpu() {
  MK_RETURN_IF_ERROR(home_.check());
  std::lock_guard lock(mutex_);
  if (gpu_ == nullptr) {
    if (driver_ == nullptr) {
      MK_ASSIGN_OR_RETURN(driver_, gpu::load_driver());
    }
    MK_ASSIGN_OR_RETURN(gpu_,
                        GpuSession::create(driver_, *segment_, connection_->abort_word(), lanes_));
    launches_.emplace(&segment_->header().launches);
    return gpu_.get();
  }
  MK_ASSIGN_OR_RETURN(const int device, gpu_->driver()->current_device());
  if (device != gpu_->device()) {
    return fail(ErrorCode::kInvalidArgument,
                "this session uses GPU {}, the calling thread GPU {}; a session uses one "
                "(cudaSetDevice before the first GPU buffer or operator)",
                gpu_->device(), device);
  }
  return gpu_.get();
}

Status Session::Impl::claim_lanes(Executor executor) {
  MK_RETURN_IF_ERROR(home_.check());
  std::lock_guard lock(mutex_);
  if (!lanes_claimed_) lanes_claimed_ = executor;
  if (*lanes_claimed_ == executor) return {};
  return fail(ErrorCode::kUnsupported,
              "the operators of one session run all on the CPU or all on the GPU where they cross "
              "nodes; attach a second session for the others");
}

Result<std::vector<std::vector<std::byte>>> Session::Impl::exchange(
    std::string_view tag, std::span<const std::byte> blob, std::chrono::milliseconds timeout) {
  MK_RETURN_IF_ERROR(check_name("an exchange's tag", tag));
  MK_RETURN_IF_ERROR(check_blob(blob.size(), options_.world));
  MK_ASSIGN_OR_RETURN(timeout, checked_timeout("an exchange's timeout", timeout));
  MK_RETURN_IF_ERROR(status());
  shm::Exchange request;
  request.tag = std::string(tag);
  request.blob.assign(blob.begin(), blob.end());
  request.timeout_ms = static_cast<std::uint32_t>(timeout.count());
  auto reply = connection_->call<shm::ExchangeReply>(request, timeout + kRequestTimeout);
  if (!reply) return advised(reply.error());
  if (reply->blobs.size() != options_.world) {
    return fail(ErrorCode::kProtocol, "an exchange over {} ranks returned {} blobs", options_.world,
                reply->blobs.size());
  }
  return std::move(reply->blobs);
}

Status Session::Impl::barrier(std::chrono::milliseconds timeout) {
  MK_RETURN_IF_ERROR(home_.check());
  std::string tag;
  {
    std::lock_guard lock(mutex_);
    tag = fmt::format("barrier {}", barriers_++);
  }
  MK_ASSIGN_OR_RETURN([[maybe_unused]] const auto blobs, exchange(tag, {}, timeout));
  return {};
}

Status Session::Impl::agree(std::string_view tag, std::string_view kind, const Status& own) {
  if (options_.world == 1) return own;
  const std::string_view why = own ? std::string_view("") : own.error().message;
  const std::size_t most = shm::exchange_blob_bytes_max(options_.world);
  const auto blobs = exchange(tag, std::as_bytes(std::span(why.substr(0, most))),
                              own ? options_.timeout : kRefusalTimeout);
  if (!own) return own;
  if (!blobs) return propagate(blobs);
  for (std::size_t rank = 0; rank < blobs->size(); ++rank) {
    const std::vector<std::byte>& blob = (*blobs)[rank];
    if (blob.empty()) continue;
    return fail(ErrorCode::kAborted, "rank {} cannot create {}: {}", rank, kind,
                std::string_view(reinterpret_cast<const char*>(blob.data()), blob.size()));
  }
  return {};
}

Status Session::Impl::status() const {
  MK_RETURN_IF_ERROR(home_.check());
  if (segment_ != nullptr) MK_RETURN_IF_ERROR(segment_->failure());
  return connection_->status();
}

Status Session::Impl::failure_behind(const Error& launch_error) const {
  const auto deadline = std::chrono::steady_clock::now() + kFailureNewsTimeout;
  while (true) {
    const Status now = status();
    if (!now || launch_error.code != ErrorCode::kAborted ||
        std::chrono::steady_clock::now() >= deadline) {
      return now;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
}

Status Session::Impl::detach() {
  MK_RETURN_IF_ERROR(home_.check());
  {
    std::lock_guard lock(mutex_);
    // A session that never came up has nothing to leave in order: closing the connection says it
    // all.
    if (!std::exchange(attached_, false)) return {};
  }
  // Kernels of this node may still write to GPU memory that operators of ours had.
  retired_.await_quiet([this] { return static_cast<bool>(status()); },
                       client::RetiredMemory::Clock::now() + kKernelsTimeoutAtDetach);
  connection_->expect_close();
  const auto done = connection_->call<shm::Done>(shm::Detach{}, kDetachTimeout);
  if (!done) return propagate(done);
  // What is left is freed next, which waits for kernels of other ranks of this process, too.
  retired_.await_idle(client::RetiredMemory::Clock::now() + kKernelsTimeoutAtDetach);
  return {};
}

Result<std::uint32_t> Session::Impl::alloc_flags(std::uint32_t count) {
  MK_ASSIGN_OR_RETURN(const auto reply, with_room([&] {
                        return connection_->call<shm::AllocFlagsReply>(shm::AllocFlags{count},
                                                                       kRequestTimeout);
                      }));
  if (std::uint64_t{reply.base} + count > segment_->shape().flag_count) {
    return fail(ErrorCode::kProtocol, "the daemon gave flags {} to {} of {}", reply.base,
                reply.base + count, segment_->shape().flag_count);
  }
  return reply.base;
}

Result<shm::BufferFile> Session::Impl::open_peer_buffer(std::uint32_t local_rank,
                                                        std::uint16_t handle) {
  std::vector<UniqueFd> fds;
  MK_ASSIGN_OR_RETURN(const auto reply,
                      connection_->call<shm::OpenPeerBufferReply>(
                          shm::OpenPeerBuffer{local_rank, handle}, kRequestTimeout, {}, &fds));
  if (fds.size() != 1) {
    return fail(ErrorCode::kProtocol,
                "the daemon sent {} descriptors for local rank {}'s buffer {} instead of 1",
                fds.size(), local_rank, handle);
  }
  return shm::BufferFile::map(std::move(fds[0]), reply.bytes);
}

void Session::Impl::announce_launch() const {
  const bool taken = (segment_->header().features & shm::kFeatureLaunchBegins) != 0;
  if (options_.nodes == 1 || !taken || !launch_pauses_.begins(shm::monotonic_ns())) return;
  connection_->post(shm::LaunchBegins{}, kRequestTimeout, [](const Status&) {});
}

std::string Session::Impl::next_operator_tag(std::string_view kind) {
  std::lock_guard lock(mutex_);
  return fmt::format("{} {}", kind, operators_++);
}

AttachOptions AttachOptions::of_rank(std::string job, std::uint32_t rank, std::uint32_t nodes,
                                     std::uint32_t local_size) {
  AttachOptions options;
  options.job = std::move(job);
  options.rank = rank;
  options.world = nodes * local_size;
  options.nodes = nodes;
  options.local_size = local_size;
  if (local_size != 0) {
    options.node_rank = rank / local_size;
    options.local_rank = rank % local_size;
  }
  return options;
}

Result<Session> Session::attach(const AttachOptions& options) {
  MK_ASSIGN_OR_RETURN(auto impl, Impl::attach(options));
  return Session(std::move(impl));
}

Session::Session(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

const AttachOptions& Session::options() const { return impl_->options(); }
const std::string& Session::fabric() const { return impl_->fabric(); }
Result<Buffer> Session::alloc_buffer(std::uint64_t bytes, std::string_view name, MemoryKind kind) {
  return impl_->alloc_buffer(bytes, name, kind);
}
Status Session::free_buffer(const Buffer& buffer) { return impl_->free_buffer(buffer); }
Result<std::vector<std::vector<std::byte>>> Session::exchange(std::string_view tag,
                                                              std::span<const std::byte> blob,
                                                              std::chrono::milliseconds timeout) {
  return impl_->exchange(tag, blob, timeout);
}
Status Session::barrier(std::chrono::milliseconds timeout) { return impl_->barrier(timeout); }
Status Session::status() const { return impl_->status(); }
Status Session::detach() { return impl_->detach(); }

}  // namespace mk
