// Out of service, and back.
#include <thread>

#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/render.h"

namespace mk::mkctl {
namespace {

using Stub = v1::Admin::Stub;

constexpr auto kDrainPoll = std::chrono::milliseconds(100);

/// Drains, and waits until the last session has ended, at most `patience`.
Answer drain(Daemon& daemon, std::chrono::nanoseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  v1::DrainResponse left;
  if (const auto done = daemon.ask(&Stub::Drain, v1::DrainRequest(), left); !done.ok()) {
    return daemon.explain(done);
  }
  while (left.sessions() > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(kDrainPoll);
    v1::GetStatusResponse now;
    auto done = daemon.ask(&Stub::GetStatus, v1::GetStatusRequest(), now);
    if (done.ok() && now.health() != v1::GetStatusResponse::HEALTH_DRAINING) {
      return error_answer(kExitUnhealthy, daemon.name() + " has been resumed by somebody else");
    }
    if (done.ok() && now.sessions() == left.sessions()) continue;
    left.Clear();
    if (done.ok()) done = daemon.ask(&Stub::Drain, v1::DrainRequest(), left);
    if (!done.ok()) return daemon.explain(done);
  }
  return answer_of(left, render(left), left.sessions() == 0 ? kExitOk : kExitUnhealthy);
}

Answer resume(Daemon& daemon) {
  v1::ResumeResponse response;
  const auto done = daemon.ask(&Stub::Resume, v1::ResumeRequest(), response);
  return done.ok() ? answer_of(response, "new jobs are taken again\n") : daemon.explain(done);
}

/// For scripts and probes, by the exit status. A peer or link in trouble does not matter here.
Answer ready(Daemon& daemon) {
  v1::GetStatusResponse response;
  const auto done = daemon.ask(&Stub::GetStatus, v1::GetStatusRequest(), response);
  if (!done.ok()) return daemon.explain(done);
  if (response.health() == v1::GetStatusResponse::HEALTH_DRAINING) {
    return {kExitUnhealthy, "", json_of(response), daemon.name() + " is drained or shutting down"};
  }
  if (response.health() == v1::GetStatusResponse::HEALTH_NOT_READY) {
    // A daemon of an earlier release does not say which of its problems it is.
    const std::string why = response.not_ready_because().empty()
                                ? fmt::format("{}", fmt::join(response.problems(), "; "))
                                : response.not_ready_because();
    return {kExitUnhealthy, "", json_of(response),
            fmt::format("{} is not ready: {}", daemon.name(), why)};
  }
  return answer_of(response, "new jobs are taken\n");
}

}  // namespace

void declare_drain_commands(Commands& commands) {
  const auto patience = std::make_shared<Duration>(Duration{"60s"});
  commands
      .add("drain", "Refuse new jobs, wait for the running ones to end",
           [patience](Fleet& fleet) {
             return fleet.each([&](Daemon& daemon) { return drain(daemon, patience->value()); });
           })
      .option("--timeout", *patience, "How long to wait for them; 0s: not at all")
      .with_default();
  commands.add("ready", "Whether new jobs are taken",
               [](Fleet& fleet) { return fleet.each(ready); });
  commands.add("resume", "Take new jobs again", [](Fleet& fleet) { return fleet.each(resume); });
}

}  // namespace mk::mkctl
