// mkctl: asks a mkerneld, prints the answer; drains it.
//
// Exit codes: 0 ok; 1 the daemon answered, but is not well or refused; 2 usage; 3 nobody answered.
#include <fmt/format.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <thread>

#include "daemon/config/config.h"
#include "daemon/config/units.h"
#include "daemon/mkctl/json.h"
#include "daemon/mkctl/render.h"
#include "daemon/service/grpc_channel.h"
#include "daemon/service/version.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"

namespace mk::mkctl {
namespace {

constexpr int kExitOk = 0;
constexpr int kExitUnhealthy = 1;
constexpr int kExitUsage = 2;
constexpr int kExitUnreachable = 3;
constexpr const char* kSystemConfig = "/etc/mkernel/mkerneld.toml";
constexpr auto kDrainPoll = std::chrono::milliseconds(100);
constexpr auto kKeepaliveTime = std::chrono::seconds(5);

struct Flags {
  std::string address, config, timeout = "5s";
  std::string tls_cert, tls_key, tls_ca;
  bool json = false;
  std::string interval = "1s", drain_timeout = "60s";
  std::uint32_t count = 0;
};

/// A daemon to ask.
struct Target {
  daemon::Address address;
  daemon::ChannelOptions channel;
  std::chrono::nanoseconds timeout{};
};

/// Where the daemon is: --address or MKCTL_ADDRESS, else what the configuration says.
Result<Target> find_target(const Flags& flags) {
  Target target;
  const auto timeout = daemon::parse_duration_ns(flags.timeout);
  if (!timeout) return fail(ErrorCode::kInvalidArgument, "--timeout: {}", timeout.error().message);
  target.timeout = std::chrono::nanoseconds(static_cast<std::int64_t>(*timeout));

  std::string path = flags.config;
  if (path.empty() && flags.address.empty() && ::access(kSystemConfig, R_OK) == 0) {
    path = kSystemConfig;
  }
  MK_ASSIGN_OR_RETURN(const daemon::Config config, daemon::load_config(path, {}));
  target.address = config.listen;
  if (!flags.address.empty()) {
    auto address = daemon::parse_address(flags.address, false);
    if (!address) {
      return fail(ErrorCode::kInvalidArgument, "--address {}: {}", flags.address,
                  address.error().message);
    }
    target.address = std::move(*address);
  }
  if (!target.address.unix_socket && target.address.port == 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{} has listen = \"{}\", whose port only the running daemon knows: give --address",
                path, target.address.text());
  }
  // A daemon that listens everywhere also listens here.
  if (target.address.host == "0.0.0.0") target.address.host = "127.0.0.1";
  if (target.address.host == "::") target.address.host = "::1";
  const auto either = [](const std::string& flag, const std::string& configured) {
    return flag.empty() ? configured : flag;
  };
  MK_ASSIGN_OR_RETURN(target.channel.tls, daemon::read_tls(either(flags.tls_cert, config.tls.cert),
                                                           either(flags.tls_key, config.tls.key),
                                                           either(flags.tls_ca, config.tls.ca)));
  target.channel.keepalive_time = kKeepaliveTime;
  target.channel.keepalive_timeout = kKeepaliveTime;
  return target;
}

int explain(const grpc::Status& status, const Target& target) {
  const bool absent = status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                      status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  if (absent) {
    const bool late = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
    fmt::print(
        stderr, "mkctl: no answer from {}: {}; is mkerneld running there? (--address)\n",
        target.address.text(),
        late ? fmt::format("none within {}", daemon::format_duration(static_cast<std::uint64_t>(
                                                 target.timeout.count())))
             : status.error_message());
    return kExitUnreachable;
  }
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
    fmt::print(stderr, "mkctl: {} is no mkerneld of this version: {}\n", target.address.text(),
               status.error_message());
    return kExitUnreachable;
  }
  fmt::print(stderr, "mkctl: {} refused: {}\n", target.address.text(), status.error_message());
  return kExitUnhealthy;
}

class Session {
 public:
  Session(const Flags& flags, Target target)
      : flags_(flags),
        target_(std::move(target)),
        stub_(v1::Admin::NewStub(daemon::open_channel(target_.address, target_.channel))) {}

  int status() {
    v1::GetStatusResponse response;
    const auto done = ask(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), response);
    if (!done.ok()) return explain(done, target_);
    print(response, render(response));
    return response.health() == v1::GetStatusResponse::HEALTH_OK ? kExitOk : kExitUnhealthy;
  }

  int version() {
    v1::GetVersionResponse response;
    const auto done = ask(&v1::Admin::Stub::GetVersion, v1::GetVersionRequest(), response);
    if (!done.ok()) return explain(done, target_);
    print(response, render(response, daemon::version_text()));
    return kExitOk;
  }

  /// Drains, and waits until the last session has ended, at most `patience`.
  int drain(std::chrono::nanoseconds patience) {
    const auto until = std::chrono::steady_clock::now() + patience;
    v1::DrainResponse left;
    if (const auto done = ask(&v1::Admin::Stub::Drain, v1::DrainRequest(), left); !done.ok()) {
      return explain(done, target_);
    }
    while (left.sessions() > 0 && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(kDrainPoll);
      v1::GetStatusResponse now;
      auto done = ask(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), now);
      if (done.ok() && now.health() != v1::GetStatusResponse::HEALTH_DRAINING) {
        fmt::print(stderr, "mkctl: {} has been resumed by somebody else\n", target_.address.text());
        return kExitUnhealthy;
      }
      if (done.ok() && now.sessions() == left.sessions()) continue;
      left.Clear();
      if (done.ok()) done = ask(&v1::Admin::Stub::Drain, v1::DrainRequest(), left);
      if (!done.ok()) return explain(done, target_);
    }
    print(left, render(left));
    return left.sessions() == 0 ? kExitOk : kExitUnhealthy;
  }

  int resume() {
    v1::ResumeResponse response;
    const auto done = ask(&v1::Admin::Stub::Resume, v1::ResumeRequest(), response);
    if (!done.ok()) return explain(done, target_);
    print(response, "new jobs are taken again\n");
    return kExitOk;
  }

  template <class Method, class Request, class Response>
  int list(Method method, const Request& request, Response response) {
    const auto done = ask(method, request, response);
    if (!done.ok()) return explain(done, target_);
    print(response, render(response));
    return kExitOk;
  }

  int stats(std::chrono::nanoseconds interval) {
    grpc::ClientContext context;
    context.set_wait_for_ready(false);
    if (flags_.count > 0) {
      context.set_deadline(std::chrono::system_clock::now() +
                           std::chrono::duration_cast<std::chrono::milliseconds>(
                               target_.timeout * 2 + interval * flags_.count));
    }  // without a count, keepalive notices a daemon that is gone
    v1::WatchStatsRequest request;
    request.set_interval_ns(static_cast<std::uint64_t>(interval.count()));
    request.set_samples(flags_.count);
    const auto reader = stub_->WatchStats(&context, request);
    v1::StatsSample sample;
    for (bool first = true; reader->Read(&sample); first = false) {
      if (flags_.json) {
        fmt::print("{}\n", to_json(sample, -1));
      } else {
        fmt::print("{}{}", first ? stats_header() : "", render(sample));
      }
      std::fflush(stdout);
    }
    const grpc::Status done = reader->Finish();
    return done.ok() ? kExitOk : explain(done, target_);
  }

 private:
  template <class Method, class Request, class Response>
  grpc::Status ask(Method method, const Request& request, Response& response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::milliseconds>(target_.timeout));
    return ((*stub_).*method)(&context, request, &response);
  }
  void print(const google::protobuf::Message& message, const std::string& text) {
    if (flags_.json) {
      fmt::print("{}\n", to_json(message, 2));
    } else {
      fmt::print("{}", text);
    }
  }

  const Flags& flags_;
  const Target target_;
  const std::unique_ptr<v1::Admin::Stub> stub_;
};

void declare(CLI::App& app, Flags& flags) {
  app.fallthrough();  // flags may follow the command
  app.require_subcommand(1);
  app.set_version_flag("--version", daemon::version_text());
  app.add_option("--address", flags.address,
                 "The daemon's --listen: HOST:PORT or unix:/PATH; default: the configuration's")
      ->envname("MKCTL_ADDRESS");
  app.add_option(
         "--config", flags.config,
         fmt::format("The daemon's configuration; default: {} if it is there", kSystemConfig))
      ->envname("MKERNELD_CONFIG");
  app.add_flag("--json", flags.json, "Print JSON (stats: one line per sample)");
  app.add_option("--timeout", flags.timeout, "How long to wait for an answer")
      ->capture_default_str();
  app.add_option("--tls-cert", flags.tls_cert, "Own certificate (PEM)");
  app.add_option("--tls-key", flags.tls_key, "Its key (PEM)");
  app.add_option("--tls-ca", flags.tls_ca, "The daemons' CA (PEM)");

  app.add_subcommand("status", "Health, peers, and what is wrong");
  app.add_subcommand("version", "Versions of the daemon and of mkctl");
  for (const char* noun : {"session", "queue", "link"}) {
    CLI::App* group = app.add_subcommand(noun, fmt::format("About {}s", noun));
    group->require_subcommand(1);
    group->fallthrough();
    group->add_subcommand("list", fmt::format("List all {}s", noun))->fallthrough();
  }
  app.add_subcommand("drain", "Refuse new jobs, wait for the running ones to end")
      ->add_option("--timeout", flags.drain_timeout, "How long to wait for them; 0s: not at all")
      ->capture_default_str();
  app.add_subcommand("resume", "Take new jobs again");
  CLI::App* stats = app.add_subcommand("stats", "Watch the counters");
  stats->add_option("--interval", flags.interval, "Time between samples, 100ms to 60s")
      ->capture_default_str();
  stats->add_option("--count", flags.count, "Stop after so many samples; 0: never")
      ->capture_default_str();
}

int run(int argc, char** argv) {
  CLI::App app("mkctl: asks a mkernel daemon", "mkctl");
  Flags flags;
  declare(app, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const auto rest = app.remaining(true);
    const bool unknown = dynamic_cast<const CLI::RequiredError*>(&error) && !rest.empty();
    fmt::print(stderr, "mkctl: {}\nTry `mkctl --help`.\n",
               unknown ? fmt::format("unknown command \"{}\"", rest.front()) : error.what());
    return kExitUsage;
  }
  auto target = find_target(flags);
  const auto interval = daemon::parse_duration_ns(flags.interval);
  const auto drain_timeout = daemon::parse_duration_ns(flags.drain_timeout);
  if (!target || !interval || !drain_timeout) {
    fmt::print(stderr, "mkctl: {}\n",
               !target     ? target.error().message
               : !interval ? "--interval: " + interval.error().message
                           : "--timeout: " + drain_timeout.error().message);
    return kExitUsage;
  }
  Session session(flags, std::move(*target));
  const std::string command = app.get_subcommands().front()->get_name();
  using Stub = v1::Admin::Stub;
  if (command == "status") return session.status();
  if (command == "version") return session.version();
  if (command == "stats") {
    return session.stats(std::chrono::nanoseconds(static_cast<std::int64_t>(*interval)));
  }
  if (command == "drain") {
    return session.drain(std::chrono::nanoseconds(static_cast<std::int64_t>(*drain_timeout)));
  }
  if (command == "resume") return session.resume();
  if (command == "session") {
    return session.list(&Stub::ListSessions, v1::ListSessionsRequest(), v1::ListSessionsResponse());
  }
  if (command == "queue") {
    return session.list(&Stub::ListQueues, v1::ListQueuesRequest(), v1::ListQueuesResponse());
  }
  return session.list(&Stub::ListLinks, v1::ListLinksRequest(), v1::ListLinksResponse());
}

}  // namespace
}  // namespace mk::mkctl

int main(int argc, char** argv) { return mk::mkctl::run(argc, argv); }
