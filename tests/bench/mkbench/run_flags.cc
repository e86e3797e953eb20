#include "tests/bench/mkbench/run_flags.h"

#include <unistd.h>

#include "client/tools/numeric/random_matrix.h"
#include "daemon/config/units.h"
#include "shm/host/segment.h"

namespace mk::bench {
namespace {

/// Some milliseconds' worth: a GPU is at its clock again by then.
constexpr std::uint32_t kLeadOnGpus = 20;

}  // namespace

RunFlags::RunFlags(CLI::App& command) : command_(command) {
  BenchSpec& spec = options.spec;
  spec.seed = tools::mix64(shm::monotonic_ns() ^ static_cast<std::uint64_t>(::getpid()) << 32);
  const auto number = [&](const char* flag, std::uint32_t& value, std::uint32_t least,
                          std::uint32_t most, const char* help) {
    command.add_option(flag, value, help)->check(CLI::Range(least, most))->capture_default_str();
  };
  const auto choice = [&](const char* flag, std::string& value, std::vector<std::string> values,
                          const char* help) {
    command.add_option(flag, value, help)
        ->check(CLI::IsMember(std::move(values)))
        ->capture_default_str();
  };
  number("--nodes", spec.nodes, 1, 16, "nodes, each with a daemon of its own");
  number("--local", spec.local, 1, 16, "ranks per node");
  choice("--dtype", spec.dtype, {"bf16", "f16"}, "");
  choice("--executor", spec.executor, {"cpu", "cuda"}, "cuda: on the GPUs of this machine");
  choice("--fabric", options.fabric, {"loopback", "ofi", "verbs"}, "");
  number("--rails", options.rails, 1, 16, "NICs per node; with GPUs, one for each by default");
  command.parse_complete_callback([this] {
    const bool on_gpus = options.spec.executor == "cuda" && options.join_sockets.empty();
    if (on_gpus && command_.count("--rails") == 0) options.rails = options.spec.local;
    // Where launches are to meet each other or late ranks, they do so cold.
    const BenchSpec& asked = options.spec;
    const bool figures = asked.barrier && asked.skew_ms == 0 && asked.sizes == "fixed";
    if (asked.executor == "cuda" && command_.count("--lead") == 0)
      options.spec.lead = figures ? kLeadOnGpus : 0;
  });
  command.add_option("--link-bandwidth", options.link_bandwidth,
                     "loopback: pace every link, e.g. 2GB/s; \"balanced\": as long for a launch's "
                     "bytes as for its computation");
  command.add_option("--link-latency", options.link_latency, "loopback: e.g. 5us");
  number("--iters", spec.iterations, 1, 100'000, "timed launches of each mode");
  number("--warmup", spec.warmup, 0, 1000, "untimed launches of each mode first");
  command
      .add_option("--lead", spec.lead,
                  fmt::format("on GPUs, untimed launches right before each timed one ({} for "
                              "figures): while a launch is checked, the GPU's clock falls and the "
                              "daemons sleep",
                              kLeadOnGpus))
      ->check(CLI::Range(0, 1000));
  choice("--modes", spec.modes, {"both", "fused", "unfused", "auto"}, "");
  choice("--verify", spec.verify, {"all", "first", "none"}, "which launches to check");
  choice("--sizes", spec.sizes, {"fixed", "vary"}, "vary: launches go through edge sizes");
  number("--skew-ms", spec.skew_ms, 0, 60'000, "ranks start late by up to so much, at random");
  command.add_flag("--barrier,!--no-barrier", spec.barrier,
                   "before every launch (default), or launches back to back");
  command.add_option("--tamper-at", spec.tamper_at, "spoil an output after this launch")
      ->group("");  // shows that the check is able to fail
  command.add_option("--seed", spec.seed, "of the inputs; default: fresh");
  number("--timeout-ms", spec.timeout_ms, 100, 3'600'000, "of every wait");
  command
      .add_option("--join", options.join_sockets, "client sockets of running daemons, one per node")
      ->delimiter(',');
  command.add_option("--admin", options.join_admin, "their Admin addresses, for link figures")
      ->delimiter(',');
  command.add_option("--json", json_path,
                     "write the whole report here: a new file, or an earlier report");
  command.add_flag("--overwrite", overwrite, "let what is written replace any regular file");
}

void RunFlags::add_trace_flags() {
  command_.add_option(
      "--trace", trace_path,
      "write what every block did in a launch of each mode (the median of five more), for "
      "ui.perfetto.dev or chrome://tracing");
  command_.add_option("--trace-picture", picture_path, "the same as one SVG picture");
}

void RunFlags::check() const {
  if (options.spec.lead != 0 && options.spec.executor != "cuda")
    throw CLI::ValidationError("--lead", "is for GPUs: --executor cuda");
  const bool joined = !options.join_sockets.empty();
  if (joined && options.join_sockets.size() != options.spec.nodes) {
    throw CLI::ValidationError(
        "--join", fmt::format("names {} sockets for {} nodes", options.join_sockets.size(),
                              options.spec.nodes));
  }
  if (joined && command_.count("--fabric") + command_.count("--rails") +
                        command_.count("--link-bandwidth") + command_.count("--link-latency") >
                    0) {
    throw CLI::ValidationError(
        "--join", "running daemons have their own fabric, rails and links: leave those flags out");
  }
  if (options.fabric != "loopback" && !(options.link_bandwidth + options.link_latency).empty()) {
    throw CLI::ValidationError("--link-bandwidth", "only the loopback fabric has a link model");
  }
  if (!options.link_bandwidth.empty() && options.link_bandwidth != kBalanced) {
    if (const auto parsed = daemon::parse_bandwidth(options.link_bandwidth); !parsed)
      throw CLI::ValidationError("--link-bandwidth", parsed.error().message);
  }
}

void show_progress(const std::string& text) {
  if (::isatty(STDERR_FILENO) == 1) fmt::print(stderr, "\r\033[K{}", text);
}

int report_error(const Error& error, int code) {
  fmt::print(stderr, "mkbench: {}\n", error.message);
  return code;
}

}  // namespace mk::bench
