// Whom others wait for, now.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/slow.h"

namespace mk::mkctl {
namespace {

/// Two samples, an interval apart.
Answer look_at(Daemon& daemon, std::chrono::nanoseconds interval, Look& look) {
  grpc::ClientContext context;
  context.set_deadline(Daemon::deadline(daemon.timeout() + interval * 2));
  v1::WatchStatsRequest request;
  request.set_interval_ns(static_cast<std::uint64_t>(interval.count()));
  request.set_samples(2);
  const auto reader = daemon.stub().WatchStats(&context, request);
  const bool both = reader->Read(&look.before) && reader->Read(&look.after);
  for (v1::StatsSample rest; reader->Read(&rest);) {
  }
  const grpc::Status done = reader->Finish();
  return both && done.ok() ? Answer{} : daemon.explain(done);
}

int run(Fleet& fleet, std::chrono::nanoseconds interval) {
  std::vector<Look> looks(fleet.daemons().size());
  std::map<const Daemon*, Look*> of;
  for (std::size_t i = 0; i < looks.size(); ++i) {
    looks[i].host = fleet.daemons()[i]->name();
    of[fleet.daemons()[i].get()] = &looks[i];
  }
  int code = kExitOk;
  const auto answers =
      fleet.collect([&](Daemon& daemon) { return look_at(daemon, interval, *of.at(&daemon)); });
  std::vector<Look> good;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (answers[i].error.empty()) {
      good.push_back(std::move(looks[i]));
    } else {
      code = std::max(code, fleet.print(answers[i]));
    }
  }
  if (good.empty()) return code;
  const Slowness slowness = find_slow(good);
  Answer answer;
  answer.code = code;
  answer.text = render(slowness);
  answer.json = json_of(slowness);
  return fleet.print(answer);
}

}  // namespace

void declare_slow_command(Commands& commands) {
  const auto interval = std::make_shared<Duration>(Duration{"1s"});
  commands
      .add("who-is-slow", "Ranks and links that others wait for",
           [interval](Fleet& fleet) { return run(fleet, interval->value()); })
      .option("--interval", *interval, "Time between the two looks, 100ms to 60s")
      .with_default();
}

}  // namespace mk::mkctl
