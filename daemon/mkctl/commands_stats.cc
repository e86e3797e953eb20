// The counters as they move: one line per sample, of several daemons side by side.
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/render.h"
#include "daemon/mkctl/table.h"
#include "shm/files/standard_output.h"

namespace mk::mkctl {
namespace {

struct Options {
  Duration interval{"1s"};
  std::uint32_t count = 0;
};

class Stats {
 public:
  Stats(Fleet& fleet, const Options& options) : fleet_(fleet), options_(options) {
    for (const auto& daemon : fleet.daemons()) width_ = std::max(width_, daemon->name().size());
  }

  Answer watch(Daemon& daemon) {
    grpc::ClientContext context;
    const auto interval = options_.interval.value();
    if (options_.count > 0) {
      context.set_deadline(Daemon::deadline(daemon.timeout() * 2 + interval * options_.count));
    }  // without a count, keepalive notices a daemon that is gone
    v1::WatchStatsRequest request;
    request.set_interval_ns(static_cast<std::uint64_t>(interval.count()));
    request.set_samples(options_.count);
    const auto reader = daemon.stub().WatchStats(&context, request);
    for (v1::StatsSample sample; reader->Read(&sample);) {
      if (print(daemon, sample)) continue;
      context.TryCancel();
      while (reader->Read(&sample)) {
      }
      (void)reader->Finish();
      return {.code = kExitUnhealthy};  // nobody reads on; `main` says why
    }
    const grpc::Status done = reader->Finish();
    return done.ok() ? Answer{} : daemon.explain(done);
  }

 private:
  /// False: standard output takes no more.
  bool print(const Daemon& daemon, const v1::StatsSample& sample) {
    std::lock_guard lock(mutex_);
    if (fleet_.json()) {
      Json body = json_of(sample);
      if (fleet_.several()) body["host"] = daemon.name();
      print_out("{}\n", text_of(fleet_.envelope(body), -1));
    } else {
      const auto host = [&](const std::string& text) {
        return fleet_.several() ? fmt::format("{:<{}}  ", printable(text), width_) : std::string();
      };
      if (!std::exchange(header_, true)) print_out("{}{}", host("HOST"), stats_header());
      print_out("{}{}", host(daemon.name()), render(sample));
    }
    return flush_output();
  }

  Fleet& fleet_;
  const Options& options_;
  std::mutex mutex_;
  std::size_t width_ = 4;
  bool header_ = false;
};

int run(Fleet& fleet, const Options& options) {
  if (fleet.daemons().size() > Fleet::kParallelMax) {
    return fleet.print(
        error_answer(kExitUsage, fmt::format("stats watches {} daemons at once, not {}",
                                             Fleet::kParallelMax, fleet.daemons().size())));
  }
  Stats stats(fleet, options);
  int code = kExitOk;
  for (const Answer& answer : fleet.collect([&](Daemon& daemon) { return stats.watch(daemon); })) {
    code = std::max(code, answer.code);
    if (!answer.error.empty()) fmt::print(stderr, "mkctl: {}\n", printable(answer.error));
  }
  return code;
}

}  // namespace

void declare_stats_command(Commands& commands) {
  const auto options = std::make_shared<Options>();
  Command stats = commands.add("stats", "Watch the counters",
                               [options](Fleet& fleet) { return run(fleet, *options); });
  stats.option("--interval", options->interval, "Time between samples, 100ms to 60s")
      .with_default();
  stats.option("--count", options->count, "Stop after so many samples; 0: never").with_default();
}

}  // namespace mk::mkctl
