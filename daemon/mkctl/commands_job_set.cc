// A job's share of the network, changed while it runs.
#include <fmt/format.h>

#include "daemon/config/units.h"
#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

struct Wanted {
  std::string job, rate;
  std::uint32_t weight = 0;  ///< 0: not given
  double commands = -1;      ///< below 0: not given
  bool reset = false;
};

Answer set(Daemon& daemon, const Wanted& wanted) {
  v1::SetJobRequest request;
  request.set_job(wanted.job);
  request.set_reset(wanted.reset);
  if (wanted.weight != 0) request.set_weight(wanted.weight);
  if (wanted.commands >= 0) request.set_commands_per_second(wanted.commands);
  if (!wanted.rate.empty()) {
    const auto rate = daemon::parse_bandwidth(wanted.rate);
    if (!rate) {
      return error_answer(kExitUsage,
                          fmt::format("--rate {}: {}", wanted.rate, rate.error().message));
    }
    request.set_bytes_per_second(*rate);
  }
  v1::SetJobResponse now;
  const auto done = daemon.ask(&v1::Admin::Stub::SetJob, request, now);
  if (!done.ok()) return daemon.explain(done);
  const std::string commands = now.commands_per_second() > 0
                                   ? fmt::format("{:g}/s", now.commands_per_second())
                                   : std::string("unlimited");
  return answer_of(
      now, fmt::format("job '{}': weight {}, rate {}, commands {}; {} of its ranks are here\n",
                       printable(wanted.job), now.weight(),
                       daemon::format_bandwidth(now.bytes_per_second()), commands, now.sessions()));
}

}  // namespace

void declare_job_set_command(Commands& commands) {
  const auto wanted = std::make_shared<Wanted>();
  Command app = commands.add(
      "job set", "Change a job's share of the network on this node until its daemon ends",
      [wanted](Fleet& fleet) {
        return fleet.each([&](Daemon& daemon) { return set(daemon, *wanted); });
      });
  app.option("JOB", wanted->job, "Its name").required();
  app.option("--weight", wanted->weight, "Beside other jobs on a full link").between(1, 1000);
  app.option("--rate", wanted->rate, "At most so much, e.g. 2GB/s, or unlimited");
  app.option("--commands", wanted->commands, "At most so many per second; 0: unlimited")
      .not_negative();
  app.flag("--reset", wanted->reset, "First undo what was set before");
}

}  // namespace mk::mkctl
