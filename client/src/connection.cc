#include "client/src/connection.h"

#include <system_error>
#include <utility>

#include "client/src/listener_check.h"
#include "mkernel/mkernel.h"
#include "shm/atomic.h"

namespace mk::client {
namespace {

using Clock = std::chrono::steady_clock;

/// How often the monitor beats, and looks at the daemon's heartbeat, when the socket is quiet.
constexpr std::chrono::milliseconds kMonitorInterval{250};

/// What a reply without content says.
Status answer_of(const shm::Frame& reply) {
  if (reply.type == static_cast<std::uint16_t>(shm::MessageType::kDone)) return {};
  if (reply.type != static_cast<std::uint16_t>(shm::MessageType::kError)) {
    return fail(ErrorCode::kProtocol, "the daemon answered with {}, expected {}",
                shm::message_type_name(reply.type),
                shm::message_type_name(static_cast<std::uint16_t>(shm::MessageType::kDone)));
  }
  MK_ASSIGN_OR_RETURN(const shm::ErrorReply error,
                      shm::decode_message<shm::ErrorReply>(reply.payload));
  return tl::unexpected<Error>(Error{error.code, error.message});
}

}  // namespace

Result<std::unique_ptr<Connection>> Connection::open(const std::string& socket_path,
                                                     std::chrono::milliseconds timeout) {
  MK_ASSIGN_OR_RETURN(auto socket, shm::FrameSocket::connect(socket_path, timeout));
  MK_RETURN_IF_ERROR(check_listener(socket, socket_path));
  const auto deadline = Clock::now() + timeout;
  shm::Hello hello;
  hello.abi_major = shm::kAbiMajor;
  hello.abi_minor = shm::kAbiMinor;
  hello.client_version = version();
  constexpr std::uint64_t kHelloRequest = 1;
  MK_RETURN_IF_ERROR(socket.send(static_cast<std::uint16_t>(shm::Hello::kType), kHelloRequest,
                                 shm::encode_message(hello), {}, deadline));
  auto frame = socket.receive(deadline);
  if (!frame) {
    return fail(frame.error().code, "the daemon at {} did not answer Hello: {}", socket_path,
                frame.error().message);
  }
  if (frame->type == static_cast<std::uint16_t>(shm::MessageType::kError)) {
    MK_ASSIGN_OR_RETURN(const shm::ErrorReply error,
                        shm::decode_message<shm::ErrorReply>(frame->payload));
    return tl::unexpected<Error>(Error{error.code, error.message});
  }
  if (frame->type != static_cast<std::uint16_t>(shm::HelloReply::kType)) {
    return fail(ErrorCode::kProtocol,
                "the daemon at {} answered Hello with {}; is this an mkerneld socket?", socket_path,
                shm::message_type_name(frame->type));
  }
  MK_ASSIGN_OR_RETURN(const shm::HelloReply reply,
                      shm::decode_message<shm::HelloReply>(frame->payload));
  if (reply.abi_major != shm::kAbiMajor) {
    return fail(ErrorCode::kAbiMismatch,
                "libmkclient {} speaks ABI {}.{}, the daemon at {} (version {}) ABI {}.{}; install "
                "matching versions",
                version(), shm::kAbiMajor, shm::kAbiMinor, socket_path, reply.daemon_version,
                reply.abi_major, reply.abi_minor);
  }
  std::unique_ptr<Connection> connection(new Connection(std::move(socket)));
  connection->next_request_ = kHelloRequest + 1;
  connection->abi_minor_ = reply.abi_minor;
  try {
    connection->monitor_thread_ = std::thread([raw = connection.get()] { raw->monitor(); });
  } catch (const std::system_error& error) {
    return fail_errno(error.code().value(), "cannot start the session's monitor thread");
  }
  return connection;
}

Connection::~Connection() { close(); }

void Connection::close() {
  closing_.store(true);
  stop_.store(true);
  socket_.shutdown();
  if (monitor_thread_.joinable()) monitor_thread_.join();
}

Result<shm::Frame> Connection::call_frame(std::uint16_t type, const std::vector<std::byte>& payload,
                                          std::span<const int> fds,
                                          std::chrono::milliseconds timeout,
                                          std::uint16_t reply_type) {
  // Before any lock: in a forked child it may be held by a thread that is not there.
  MK_RETURN_IF_ERROR(home_.check());
  const auto deadline = Clock::now() + timeout;
  std::uint64_t request = 0;
  {
    std::lock_guard lock(mutex_);
    if (error_) return tl::unexpected<Error>(*error_);
    request = next_request_++;
    pending_.emplace(request, std::nullopt);
  }
  Status sent;
  {
    std::lock_guard lock(send_mutex_);
    sent = socket_.send(type, request, payload, fds, deadline);
  }
  std::unique_lock lock(mutex_);
  if (!sent) {
    pending_.erase(request);
    // What the monitor saw (the daemon's own reason) says more than a broken pipe.
    changed_.wait_for(lock, kMonitorInterval, [&] { return error_.has_value(); });
    return tl::unexpected<Error>(error_ ? *error_ : sent.error());
  }
  const bool answered = changed_.wait_until(
      lock, deadline, [&] { return pending_.at(request).has_value() || error_.has_value(); });
  std::optional<shm::Frame> reply = std::move(pending_.at(request));
  pending_.erase(request);
  if (!reply) {
    if (answered) return tl::unexpected<Error>(*error_);
    return fail(ErrorCode::kTimeout, "the daemon did not answer {} within {} ms",
                shm::message_type_name(type), timeout.count());
  }
  if (reply->type == static_cast<std::uint16_t>(shm::MessageType::kError)) {
    MK_ASSIGN_OR_RETURN(const shm::ErrorReply error,
                        shm::decode_message<shm::ErrorReply>(reply->payload));
    return tl::unexpected<Error>(Error{error.code, error.message});
  }
  if (reply->type != reply_type) {
    return fail(ErrorCode::kProtocol, "the daemon answered {} with {}, expected {}",
                shm::message_type_name(type), shm::message_type_name(reply->type),
                shm::message_type_name(reply_type));
  }
  return std::move(*reply);
}

void Connection::post_frame(std::uint16_t type, const std::vector<std::byte>& payload,
                            std::chrono::milliseconds timeout,
                            std::function<void(Status)> answered) {
  const auto take = [this](std::uint64_t request) {
    std::lock_guard lock(mutex_);
    const auto posted = posted_.extract(request);
    return posted ? std::move(posted.mapped()) : nullptr;
  };
  std::uint64_t request = 0;
  std::optional<Error> lost;
  {
    std::lock_guard lock(mutex_);
    lost = error_;
    if (!lost) {
      request = next_request_++;
      posted_.emplace(request, answered);
    }
  }
  if (lost) return answered(tl::unexpected<Error>(*lost));
  Status sent;
  {
    std::lock_guard lock(send_mutex_);
    sent = socket_.send(type, request, payload, {}, Clock::now() + timeout);
  }
  if (sent) return;
  if (const auto answer = take(request)) answer(sent);
}

Status Connection::wait_job_up(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const bool done = changed_.wait_for(lock, timeout, [&] { return job_up_ || error_.has_value(); });
  if (error_) return tl::unexpected<Error>(*error_);
  if (done) return {};
  return fail(
      ErrorCode::kTimeout,
      "the job did not come up within {} ms and the daemon did not say why; look at its log",
      timeout.count());
}

void Connection::watch_heartbeat(const shm::Segment* segment, std::chrono::milliseconds limit) {
  std::lock_guard lock(mutex_);
  watched_ = segment;
  heartbeat_limit_ = limit;
}

Status Connection::status() const {
  MK_RETURN_IF_ERROR(home_.check());
  std::lock_guard lock(mutex_);
  if (error_) return tl::unexpected<Error>(*error_);
  return {};
}

void Connection::monitor() {
  while (!stop_.load()) {
    auto frame = socket_.receive(Clock::now() + kMonitorInterval);
    beat();
    if (frame) {
      dispatch(std::move(*frame));
    } else if (frame.error().code == ErrorCode::kTimeout) {
      check_heartbeat();
    } else {
      if (closing_.load()) {
        fail_all(Error{ErrorCode::kUnavailable, "the session is detached"});
      } else {
        fail_all(
            Error{ErrorCode::kDaemonLost,
                  fmt::format(
                      "lost the connection to mkerneld ({}); it died or was restarted, attach anew",
                      frame.error().message)});
      }
      return;
    }
  }
}

void Connection::dispatch(shm::Frame frame) {
  switch (static_cast<shm::MessageType>(frame.type)) {
    case shm::MessageType::kSessionFailed: {
      const auto failed = shm::decode_message<shm::SessionFailed>(frame.payload);
      fail_all(failed ? Error{failed->code, failed->message} : failed.error());
      return;
    }
    case shm::MessageType::kJobUp: {
      std::lock_guard lock(mutex_);
      job_up_ = true;
      break;
    }
    default: {
      std::unique_lock lock(mutex_);
      if (auto posted = posted_.extract(frame.request)) {
        lock.unlock();
        posted.mapped()(answer_of(frame));
        return;
      }
      // A reply nobody waits for any more (its caller timed out) is dropped.
      if (const auto waiting = pending_.find(frame.request); waiting != pending_.end()) {
        waiting->second = std::move(frame);
      }
    }
  }
  changed_.notify_all();
}

void Connection::fail_all(Error error) {
  std::map<std::uint64_t, std::function<void(Status)>> posted;
  {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    shm::store_release(&abort_page_->word, 1u);
    error = *error_;
    posted = std::exchange(posted_, {});
  }
  for (auto& [request, answered] : posted) answered(tl::unexpected<Error>(error));
  changed_.notify_all();
}

void Connection::beat() {
  std::lock_guard lock(mutex_);
  if (watched_ == nullptr) return;
  std::uint64_t* beats = &watched_->header().beats;
  shm::store_relaxed(beats, shm::load_relaxed(beats) + 1);
}

void Connection::check_heartbeat() {
  std::uint64_t age_ns = 0;
  {
    std::lock_guard lock(mutex_);
    if (watched_ == nullptr || error_) return;
    const std::uint64_t beat_ns = shm::load_acquire(&watched_->header().heartbeat_ns);
    const std::uint64_t now_ns = shm::monotonic_ns();
    age_ns = now_ns > beat_ns ? now_ns - beat_ns : 0;
    if (age_ns <= static_cast<std::uint64_t>(heartbeat_limit_.count()) * 1'000'000u) return;
  }
  fail_all(
      Error{ErrorCode::kDaemonLost, fmt::format("mkerneld's heartbeat stopped {} ms ago; it hangs "
                                                "or was stopped, attach anew when it runs",
                                                age_ns / 1'000'000)});
}

}  // namespace mk::client
