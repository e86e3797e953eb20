// Records what the proxies do with every command, for a while.
#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/trace.h"
#include "shm/files/output_file.h"

namespace mk::mkctl {
namespace {

struct Options {
  double seconds = 5;
  std::string file;
  bool overwrite = false;
};

/// How a file of this command begins.
bool is_recording(int fd) { return begins_with(fd, fmt::format(R"({{"tool":"{}")", kTraceTool)); }

/// The daemon's recording into `recording`.
Answer record(Daemon& daemon, double seconds, Recording& recording) {
  const std::chrono::nanoseconds duration(static_cast<std::int64_t>(seconds * 1e9));
  grpc::ClientContext context;
  context.set_deadline(Daemon::deadline(duration + daemon.timeout() * 2));
  v1::RecordTraceRequest request;
  request.set_duration_ns(static_cast<std::uint64_t>(duration.count()));
  const auto reader = daemon.stub().RecordTrace(&context, request);
  for (v1::TraceChunk chunk; reader->Read(&chunk);) recording.chunks.push_back(std::move(chunk));
  const grpc::Status done = reader->Finish();
  return done.ok() ? Answer{} : daemon.explain(done);
}

int run(Fleet& fleet, const Options& options) {
  if (fleet.daemons().size() > Fleet::kParallelMax) {
    return fleet.print(error_answer(
        kExitUsage, fmt::format("a trace is of {} daemons at most, side by side, not {}",
                                Fleet::kParallelMax, fleet.daemons().size())));
  }
  // Before anything is recorded: a file that cannot be written is known at once.
  OutputRules rules;
  rules.option = "-o";
  rules.overwrite = options.overwrite;
  rules.is_earlier_output = is_recording;
  auto file = OutputFile::create(options.file, std::move(rules));
  if (!file) return fleet.print(error_answer(kExitUsage, file.error().message));
  std::vector<Recording> recordings(fleet.daemons().size());
  const auto answers = fleet.collect([&](Daemon& daemon) {
    for (std::size_t i = 0; i < recordings.size(); ++i) {
      if (fleet.daemons()[i].get() != &daemon) continue;
      if (fleet.several()) recordings[i].host = daemon.name();
      return record(daemon, options.seconds, recordings[i]);
    }
    return Answer{};
  });
  int code = kExitOk;
  for (const Answer& answer : answers) {
    if (!answer.error.empty()) fleet.print(answer);
    code = std::max(code, answer.code);
  }
  TraceSummary summary;
  std::erase_if(recordings, [](const Recording& one) { return one.chunks.empty(); });
  if (recordings.empty()) return code;
  Status written = file->write(text_of(perfetto(recordings, summary), -1) + "\n");
  if (written) written = file->publish();
  if (!written) return fleet.print(error_answer(kExitUnhealthy, written.error().message));
  Answer answer;
  answer.code = code;
  answer.json = {{"file", options.file},
                 {"writes", summary.writes},
                 {"failed", summary.failed},
                 {"unfinished", summary.unfinished},
                 {"submissions", summary.submissions},
                 {"arrivals", summary.arrivals},
                 {"dropped", summary.dropped}};
  answer.text = fmt::format(
      "{}: {} writes in {} submissions, {} failed, {} under way at an edge; {} arrivals\n",
      options.file, summary.writes, summary.submissions, summary.failed, summary.unfinished,
      summary.arrivals);
  if (summary.dropped > 0) {
    answer.text += fmt::format("{} events came too fast and are missing\n", summary.dropped);
  }
  return fleet.print(answer);
}

}  // namespace

void declare_trace_commands(Commands& commands) {
  const auto options = std::make_shared<Options>();
  Command app = commands.add("trace record", "Record what the proxies do, for ui.perfetto.dev",
                             [options](Fleet& fleet) { return run(fleet, *options); });
  app.option("--seconds", options->seconds, "For how long").between(0.001, 60.0).with_default();
  app.option("-o,--output", options->file,
             "The file to write (JSON): a new one, or an earlier recording")
      .required();
  app.flag("--overwrite", options->overwrite, "Let it replace any regular file");
}

}  // namespace mk::mkctl
