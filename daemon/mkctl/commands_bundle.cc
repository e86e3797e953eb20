// A support archive: all that a daemon tells of itself, and this machine's facts; no secrets.
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>

#include "daemon/config/secrets.h"
#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/render.h"
#include "daemon/mkctl/slow.h"
#include "daemon/mkctl/system_facts.h"
#include "daemon/service/version.h"
#include "shm/files/output_file.h"

namespace mk::mkctl {
namespace {

namespace fs = std::filesystem;
using Stub = v1::Admin::Stub;

/// A name in the archive for a host: what is no letter, digit, dot or dash becomes '_'.
std::string file_name(const std::string& host) {
  std::string name = host;
  for (char& c : name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-';
    if (!plain) c = '_';
  }
  return name;
}

class Collector {
 public:
  explicit Collector(fs::path root) : root_(std::move(root)) {}

  void add(const Fact& fact) {
    std::error_code error;
    fs::create_directories((root_ / fact.file).parent_path(), error);
    save(fact.file, fact.text);
    manifest_.push_back({{"file", fact.file}, {"from", fact.from}, {"complete", fact.good}});
  }

  /// What one daemon tells; returns what it did not.
  Answer add(Daemon& daemon) {
    folder_ = "daemons/" + file_name(daemon.name()) + "/";
    Answer first;
    const auto take = [&](const char* file, auto method, const auto& request, auto response) {
      const auto done = daemon.ask(method, request, response);
      if (done.ok()) {
        add({folder_ + file, daemon::without_secrets(text_of(json_of(response), 2)) + "\n",
             "Admin service", true});
      } else {
        const Answer answer = daemon.explain(done);
        add({folder_ + file + ".error", answer.error + "\n", "Admin service", false});
        if (first.error.empty()) first = answer;
      }
      return done.ok();
    };
    // One that does not answer is not asked eight times.
    if (!take("version.json", &Stub::GetVersion, v1::GetVersionRequest(),
              v1::GetVersionResponse())) {
      return first;
    }
    take("status.json", &Stub::GetStatus, v1::GetStatusRequest(), v1::GetStatusResponse());
    take("sessions.json", &Stub::ListSessions, v1::ListSessionsRequest(),
         v1::ListSessionsResponse());
    take("jobs.json", &Stub::ListJobs, v1::ListJobsRequest(), v1::ListJobsResponse());
    take("queues.json", &Stub::ListQueues, v1::ListQueuesRequest(), v1::ListQueuesResponse());
    take("links.json", &Stub::ListLinks, v1::ListLinksRequest(), v1::ListLinksResponse());
    v1::GetConfigRequest compare;
    compare.set_compare(true);
    take("config.json", &Stub::GetConfig, compare, v1::GetConfigResponse());
    add_streams(daemon);
    return first;
  }

  void write_manifest() {
    const Json manifest = {{"schema_version", kSchemaVersion},
                           {"mkctl", daemon::version_text()},
                           {"unix_time", std::time(nullptr)},
                           {"files", manifest_}};
    save("manifest.json", text_of(manifest, 2) + "\n");
  }
  /// Empty, or the first file that could not be written.
  const std::string& unwritten() const { return unwritten_; }

 private:
  void save(const std::string& name, const std::string& text) {
    std::ofstream file(root_ / name, std::ios::binary);
    file << text;
    if (!file.flush() && unwritten_.empty()) unwritten_ = (root_ / name).string();
  }
  void add_streams(Daemon& daemon) {
    grpc::ClientContext context;
    context.set_deadline(Daemon::deadline(daemon.timeout() * 2));
    v1::WatchMetricsRequest one;
    one.set_samples(1);
    const auto metrics = daemon.stub().WatchMetrics(&context, one);
    v1::MetricsSample families;
    if (metrics->Read(&families)) {
      add({folder_ + "metrics.txt", render(families), "Admin service", true});
    }
    (void)metrics->Finish();

    grpc::ClientContext second;
    second.set_deadline(Daemon::deadline(daemon.timeout() * 2));
    v1::WatchStatsRequest two;
    two.set_interval_ns(500'000'000);
    two.set_samples(2);
    const auto stats = daemon.stub().WatchStats(&second, two);
    Look look;
    if (stats->Read(&look.before) && stats->Read(&look.after)) {
      add({folder_ + "stats.json", text_of(json_of(look.after), 2) + "\n", "Admin service", true});
      add({folder_ + "who_is_slow.txt", render(find_slow({look})), "Admin service", true});
    }
    (void)stats->Finish();
  }

  const fs::path root_;
  std::string folder_;
  Json manifest_ = Json::array();
  std::string unwritten_;
};

/// A folder of its own in the temporary one, which goes with what is in it.
class Scratch {
 public:
  Scratch() : path_((fs::temp_directory_path() / "mkctl-bundle-XXXXXX").string()) {
    made_ = ::mkdtemp(path_.data()) != nullptr;
  }
  ~Scratch() {
    std::error_code ignored;
    if (made_) fs::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  bool made() const { return made_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool made_ = false;
};

/// Packs `folder`, which lies in `parent`, into the draft.
Status pack(const std::string& parent, const std::string& folder, const OutputFile& file) {
  std::vector<std::string> arguments{"tar",         "--create", "--gzip",    "--file",    "-",
                                     "--directory", parent,     "--owner=0", "--group=0", folder};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t child = 0;
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, file.fd(), STDOUT_FILENO);
  const int error = ::posix_spawnp(&child, "tar", &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return fail_errno(error, "cannot run tar");
  int status = 0;
  if (::waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    return fail(ErrorCode::kSystem, "tar could not write {}", file.path());
  }
  return {};
}

struct Options {
  std::string file;
  bool overwrite = false;
};

int run(Fleet& fleet, const Options& options) {
  const std::string name =
      fmt::format("mkernel-bundle-{:%Y%m%dT%H%M%SZ}", fmt::gmtime(std::time(nullptr)));
  OutputRules rules;
  rules.option = "-o";
  rules.overwrite = options.overwrite;
  auto file =
      OutputFile::create(options.file.empty() ? name + ".tar.gz" : options.file, std::move(rules));
  if (!file) return fleet.print(error_answer(kExitUsage, file.error().message));
  const Scratch scratch;
  std::error_code ignored;
  Collector collector(fs::path(scratch.path()) / name);
  if (!scratch.made() || !fs::create_directory(fs::path(scratch.path()) / name, ignored)) {
    return fleet.print(error_answer(kExitUsage, "cannot make " + scratch.path()));
  }
  int code = kExitOk;
  std::size_t answered = 0;
  for (const auto& daemon : fleet.daemons()) {
    const Answer answer = collector.add(*daemon);
    if (answer.error.empty()) {
      ++answered;
    } else {
      code = std::max(code, fleet.print(answer));
    }
  }
  for (const Fact& fact : system_facts()) collector.add(fact);
  collector.add(daemon_log());
  collector.write_manifest();
  if (!collector.unwritten().empty()) {
    return fleet.print(error_answer(kExitUsage, "cannot write " + collector.unwritten() +
                                                    ": is there room? (TMPDIR moves it)"));
  }
  Status packed = pack(scratch.path(), name, *file);
  if (packed) packed = file->publish();
  if (!packed) return fleet.print(error_answer(kExitUsage, packed.error().message));
  const auto bytes = fs::file_size(file->path(), ignored);
  Answer answer;
  answer.code = code;
  answer.json = {{"file", file->path()}, {"bytes", bytes}, {"daemons", answered}};
  answer.text = fmt::format(
      "{}: {} of {} daemons, {} KiB; no secrets, but names of jobs, hosts and "
      "users' numbers\n",
      file->path(), answered, fleet.daemons().size(), (bytes + 1023) / 1024);
  return fleet.print(answer);
}

}  // namespace

void declare_bundle_command(Commands& commands) {
  const auto options = std::make_shared<Options>();
  Command bundle = commands.add("bundle", "Write a support archive, without secrets",
                                [options](Fleet& fleet) { return run(fleet, *options); });
  bundle.option("-o,--output", options->file,
                "The new file to write; default: mkernel-bundle-TIME.tar.gz");
  bundle.flag("--overwrite", options->overwrite, "Let it replace any regular file");
}

}  // namespace mk::mkctl
