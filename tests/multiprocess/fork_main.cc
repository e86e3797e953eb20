/// \file
/// One rank that forks, for the multi-process tests:
///
///   multiprocess_forker SOCKET JOB NODES LOCAL RANK WHAT
///
/// attaches, makes a GEMM+AllReduce, launches it, and then, if it is rank 0, has children that do
/// WHAT with what they inherited. Then it launches again, and leaves; with children that stay it
/// waits to be killed. It reports lines on descriptor 3: "child PID" for children that stay,
/// "done", or "error SENTENCE".

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/tools/launch/process.h"
#include "mkernel/mkernel.h"
#include "mkernel/mkernel_c.h"

/// In a child, what only the stacks of its parent's threads point to looks like a leak.
extern "C" const char* __lsan_default_options();  // NOLINT: the sanitizer's name
extern "C" const char* __lsan_default_options() { return "detect_leaks=0"; }  // NOLINT

namespace mk {
namespace {

constexpr std::uint64_t kSize = 64;
constexpr std::uint16_t kOne = 0x3f80;

/// What children inherit; static, so that exit() destroys it.
std::optional<Session> session;
std::optional<GemmAllReduce> op;
mk_session* c_session = nullptr;
mk_op* c_op = nullptr;

[[noreturn]] void finish(const std::string& error) {
  tools::report_line(tools::kReportFd, error.empty() ? "done" : "error " + error);
  std::_Exit(error.empty() ? 0 : 1);
}

void require(bool holds, const std::string& what) {
  if (!holds) finish(what);
}

void require(const Status& status, const std::string& what) {
  if (!status) finish(what + ": " + status.error().message);
}

const std::vector<std::uint16_t>& ones() {
  static const auto& all = *new std::vector<std::uint16_t>(kSize * kSize, kOne);
  return all;
}

/// The sum over all ranks of a product of ones.
void launch_and_check() {
  std::vector<std::uint16_t> c(kSize * kSize, 0xffff);
  const auto stats = op->launch(ones().data(), ones().data(), c.data(), kSize, LaunchMode::kFused);
  if (!stats) finish("a launch: " + stats.error().message);
  const float sum = static_cast<float>(kSize * session->options().world);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &sum, sizeof bits);
  for (const std::uint16_t element : c) require(element == bits >> 16, "a wrong element");
}

/// In a child: every call answers that it is one. 0: all did; else which did not.
int call_all() {
  int number = 0;
  int wrong = 0;
  const auto refuses = [&](ErrorCode code, const std::string& message) {
    ++number;
    const bool right = code == ErrorCode::kUnsupported && message.find("fork") != message.npos;
    if (!right && wrong == 0) wrong = number;
  };
  const auto check = [&](const auto& result) {
    refuses(result ? ErrorCode::kOk : result.error().code, result ? "" : result.error().message);
  };
  check(session->status());
  check(session->alloc_buffer(4096, "child"));
  check(session->free_buffer({nullptr, 4096, 1}));
  check(session->exchange("child", {}));
  check(session->barrier());
  check(GemmAllReduce::create(*session, {kSize, kSize, kSize}));
  check(RingAttention::create(*session, {kSize, 1, 1, 64}));
  check(op->launch(ones().data(), ones().data(), nullptr, kSize));
  check(op->status());
  check(session->detach());
  if (c_session == nullptr) return wrong;
  const auto c_check = [&](mk_status status) {
    refuses(static_cast<ErrorCode>(status), mk_last_error());
  };
  mk_gemm_shape shape{};
  shape.struct_bytes = sizeof shape;
  shape.m_max = shape.n = shape.k = kSize;
  shape.dtype = MK_BF16;
  mk_op* other = nullptr;
  c_check(mk_session_status(c_session));
  c_check(mk_session_barrier(c_session, 1000));
  c_check(mk_op_create(c_session, "gemm-ar", &shape, &other));
  mk_gemm_arguments arguments{};
  arguments.struct_bytes = sizeof arguments;
  arguments.a = arguments.b = ones().data();
  arguments.m = kSize;
  c_check(mk_op_launch(c_op, &arguments, MK_FUSED, nullptr));
  mk_blobs* blobs = nullptr;
  c_check(mk_session_exchange(c_session, "child", nullptr, 0, 1000, &blobs));
  mk_buffer buffer{};
  buffer.struct_bytes = sizeof buffer;
  c_check(mk_session_alloc_buffer(c_session, 4096, "child", MK_HOST, &buffer));
  c_check(mk_op_status(c_op));
  mk_op_destroy(c_op);
  c_check(mk_session_detach(c_session));
  return wrong;
}

void destroy_all() {
  op.reset();
  session.reset();
}

/// A child of its own that attaches, computes, and leaves.
void attach_own() {
  AttachOptions own = AttachOptions::of_rank(session->options().job + "-child", 0, 1, 1);
  own.socket = session->options().socket;
  destroy_all();
  auto attached = Session::attach(own);
  if (!attached) std::_Exit(2);
  session.emplace(std::move(*attached));
  auto made = GemmAllReduce::create(*session, {kSize, kSize, kSize});
  if (!made) std::_Exit(3);
  op.emplace(std::move(*made));
  std::vector<std::uint16_t> c(kSize * kSize);
  if (!op->launch(ones().data(), ones().data(), c.data(), kSize)) std::_Exit(4);
  if (!session->barrier()) std::_Exit(5);
}

/// A child that must not take longer than this however slow the machine is: it waits for nothing.
constexpr unsigned kChildSeconds = 100;

pid_t start_child(const std::function<void()>& body, pid_t (*fork_by)() = &::fork) {
  const pid_t child = fork_by();
  if (child != 0) return child;
  ::alarm(kChildSeconds);
  body();
  std::_Exit(0);
}

/// Of a child that `ends_by` this signal, 0: exits with 0.
void expect_end(pid_t child, int ends_by, const std::string& what) {
  int status = 0;
  require(child > 0 && ::waitpid(child, &status, 0) == child, what + " was not started");
  const bool right = ends_by != 0 ? WIFSIGNALED(status) && WTERMSIG(status) == ends_by
                                  : WIFEXITED(status) && WEXITSTATUS(status) == 0;
  require(right, what + " ended with status " + std::to_string(status));
}

[[noreturn]] void leave_behind(pid_t child) {
  require(child > 0, "no child");
  tools::report_line(tools::kReportFd, "child " + std::to_string(child));
  while (true) ::pause();
}

/// Children of one thread, while the others are in the middle of calls with their locks held.
void crowd() {
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop.load()) {
      const auto buffer = session->alloc_buffer(4096, "busy");
      require(buffer ? Status{} : Status(tl::unexpected<Error>(buffer.error())), "a buffer");
      require(session->free_buffer(*buffer), "its end");
    }
  });
  for (int round = 0; round < 8; ++round) {
    std::vector<pid_t> children;
    children.push_back(start_child([] { std::_Exit(call_all()); }));
    children.push_back(start_child([] { destroy_all(); }));
    children.push_back(start_child([] { std::exit(0); }));
    const pid_t killed = start_child([] { ::raise(SIGKILL); });
    for (const pid_t child : children) expect_end(child, 0, "one of the crowd");
    expect_end(killed, SIGKILL, "one that dies");
  }
  stop.store(true);
  caller.join();
}

void have_children(const std::string& what) {
  if (what == "destroy") {
    expect_end(start_child(&destroy_all), 0, "a child that destroys");
  } else if (what == "exit") {
    expect_end(start_child([] { std::exit(0); }), 0, "a child that exits");
  } else if (what == "exec") {
    expect_end(start_child([] { ::execl("/bin/true", "true", nullptr); }), 0, "a child that execs");
  } else if (what == "die") {
    expect_end(start_child([] { ::raise(SIGKILL); }), SIGKILL, "a child that dies");
  } else if (what == "call") {
    expect_end(start_child([] { std::_Exit(call_all()); }), 0, "a child that calls");
  } else if (what == "attach") {
    expect_end(start_child(&attach_own), 0, "a child that attaches");
  } else if (what == "crowd") {
    crowd();
  } else if (what == "stay") {
    leave_behind(start_child([] { ::pause(); }));
  } else if (what == "hold") {
    // Without the handlers of fork(): as a process does that makes its children by itself.
    leave_behind(start_child([] { ::pause(); }, &::_Fork));
  } else {
    finish("no such thing to do: " + what);
  }
}

void attach_by_c(const AttachOptions& place) {
  const std::string job = place.job + "-c";
  mk_attach_options options{};
  options.struct_bytes = sizeof options;
  options.socket = place.socket.c_str();
  options.job = job.c_str();
  options.rank = place.rank;
  options.world = place.world;
  options.node_rank = place.node_rank;
  options.nodes = place.nodes;
  options.local_rank = place.local_rank;
  options.local_size = place.local_size;
  require(mk_session_attach(&options, &c_session) == 0, mk_last_error());
  mk_gemm_shape shape{};
  shape.struct_bytes = sizeof shape;
  shape.m_max = shape.n = shape.k = kSize;
  shape.dtype = MK_BF16;
  require(mk_op_create(c_session, "gemm-ar", &shape, &c_op) == 0, mk_last_error());
}

void run(const AttachOptions& place, const std::string& what) {
  auto attached = Session::attach(place);
  if (!attached) finish(attached.error().message);
  session.emplace(std::move(*attached));
  GemmAllReduce::Tuning tuning;
  tuning.wait_timeout = std::chrono::seconds{60};
  auto made = GemmAllReduce::create(*session, {kSize, kSize, kSize}, tuning);
  if (!made) finish(made.error().message);
  op.emplace(std::move(*made));
  if (what == "call") attach_by_c(place);
  launch_and_check();
  if (place.rank == 0) have_children(what);
  for (int launch = 0; launch < 3; ++launch) launch_and_check();
  require(session->status(), "the session");
  require(session->barrier(), "the barrier");
  if (c_session != nullptr) {
    require(mk_session_barrier(c_session, 0) == 0, mk_last_error());
    mk_op_destroy(c_op);
    require(mk_session_detach(c_session) == 0, mk_last_error());
  }
  op.reset();
  require(session->detach(), "the detach");
  finish("");
}

}  // namespace
}  // namespace mk

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const auto number = [argv](int i) { return static_cast<std::uint32_t>(std::atoi(argv[i])); };
  auto place = mk::AttachOptions::of_rank(argv[2], number(5), number(3), number(4));
  place.socket = argv[1];
  mk::run(place, argv[6]);
}
