/// \file
/// mksim: simulates clusters, seed after seed, and stops at the first violation with the command
/// that replays it.
#include <fmt/format.h>
#include <time.h>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "tests/sim/cluster.h"
#include "tests/sim/plants.h"

namespace mk::sim {
namespace {

constexpr const char* kHelp =
    "mksim [--seconds N | --cpu-seconds N] [--seed S | --seeds A..B] [--nodes N] [--plant BUG] "
    "[--json FILE]\n"
    "  --seconds N   fresh seeds for N seconds (the default: 10);\n"
    "                --cpu-seconds: of its own CPU time\n"
    "  --seed S      one cluster, with its last events when it fails\n"
    "  --seeds A..B  those clusters, both included\n"
    "  --nodes N     2 to 16 in each cluster; else the seed says\n"
    "  --trace       with --seed: its last events in any case\n"
    "  --plant BUG   with one of the planted bugs switched on (mksim_planted only)\n"
    "  --json FILE   what was simulated, and how fast\n";

struct Arguments {
  double seconds = 10;
  bool timed = true, of_cpu = false, trace = false;
  std::uint64_t first = 0, last = ~0ull;
  PlanOptions plan;
  std::string plant, json;
};

struct Totals {
  std::uint64_t clusters = 0, steps = 0, launches = 0, runs = 0, failed_runs = 0, faults = 0;
  std::uint64_t nodes = 0;
  double simulated_hours = 0;
};

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double wall_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <class Number>
bool parse(const std::string& text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse(int argc, char** argv, Arguments& arguments) {
  bool seeds_given = false, seconds_given = false;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--trace") {
      arguments.trace = true;
      continue;
    }
    if (i + 1 == argc) return false;
    const std::string value = argv[++i];
    bool good = true;
    if (name == "--seconds" || name == "--cpu-seconds") {
      good = parse(value, arguments.seconds);
      arguments.of_cpu = name == "--cpu-seconds";
      seconds_given = true;
    } else if (name == "--seed") {
      good = parse(value, arguments.first);
      arguments.last = arguments.first;
      seeds_given = true;
    } else if (name == "--seeds") {
      const std::size_t dots = value.find("..");
      good = dots != std::string::npos && parse(value.substr(0, dots), arguments.first) &&
             parse(value.substr(dots + 2), arguments.last) && arguments.first <= arguments.last;
      seeds_given = true;
    } else if (name == "--nodes") {
      good = parse(value, arguments.plan.nodes) && arguments.plan.nodes >= 2 &&
             arguments.plan.nodes <= 16;
    } else if (name == "--plant") {
      arguments.plant = value;
    } else if (name == "--json") {
      arguments.json = value;
    } else {
      return false;
    }
    if (!good) return false;
  }
  arguments.timed = seconds_given || !seeds_given;
  if (!seeds_given) arguments.first = std::random_device{}();
  return true;
}

std::string replay_command(const char* program, std::uint64_t seed, const Arguments& arguments) {
  std::string command = fmt::format("{} --seed {}", program, seed);
  if (arguments.plan.nodes != 0) command += fmt::format(" --nodes {}", arguments.plan.nodes);
  if (!arguments.plant.empty()) command += " --plant " + arguments.plant;
  return command;
}

/// Returns whether the seed held.
bool simulate(const char* program, std::uint64_t seed, const Arguments& arguments, Totals& totals) {
  const bool alone = arguments.first == arguments.last;
  Report report = Cluster(seed, arguments.plan, alone && arguments.trace).run();
  ++totals.clusters;
  totals.steps += report.steps;
  totals.launches += report.launches;
  totals.runs += report.runs;
  totals.failed_runs += report.failed_runs;
  totals.faults += report.faults;
  totals.nodes += report.nodes;
  totals.simulated_hours += static_cast<double>(report.simulated_ns) / 3.6e12;
  if (report.violation && !arguments.trace) {
    report = Cluster(seed, arguments.plan, /*tracing=*/true).run();
  }
  for (const std::string& line : report.trace) fmt::print("{}\n", line);
  if (!report.violation) return true;
  fmt::print("seed {} of {} nodes: {}\nreplay: {}\n", seed, report.nodes, *report.violation,
             replay_command(program, seed, arguments));
  return false;
}

bool write_json(const Arguments& arguments, const Totals& totals, double cpu, double wall,
                const std::string& command) {
  std::FILE* file = std::fopen(arguments.json.c_str(), "w");
  if (file == nullptr) return false;
  fmt::print(file,
             "{{\n  \"command\": \"{}\",\n  \"first_seed\": {},\n  \"clusters\": {},\n"
             "  \"nodes_mean\": {:.2f},\n  \"job_runs\": {},\n  \"job_runs_disturbed\": {},\n"
             "  \"launches\": {},\n  \"faults\": {},\n  \"steps\": {},\n"
             "  \"simulated_cluster_hours\": {:.3f},\n  \"cpu_seconds\": {:.1f},\n"
             "  \"wall_seconds\": {:.1f},\n  \"clusters_per_cpu_minute\": {:.0f},\n"
             "  \"simulated_cluster_hours_per_cpu_minute\": {:.2f}\n}}\n",
             command, arguments.first, totals.clusters,
             static_cast<double>(totals.nodes) / static_cast<double>(totals.clusters), totals.runs,
             totals.failed_runs, totals.launches, totals.faults, totals.steps,
             totals.simulated_hours, cpu, wall, 60.0 * static_cast<double>(totals.clusters) / cpu,
             60.0 * totals.simulated_hours / cpu);
  return std::fclose(file) == 0;
}

int run(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) {
    std::fputs(kHelp, stderr);
    return 2;
  }
  if (!arguments.plant.empty() && !switch_plant(arguments.plant)) {
    fmt::print(stderr, "mksim: no planted bug '{}' in this build; there are:{}\n", arguments.plant,
               plant_list());
    return 2;
  }
  std::string command = argv[0];
  for (int i = 1; i < argc; ++i) command += fmt::format(" {}", argv[i]);
  Totals totals;
  const double wall_before = wall_seconds(), cpu_before = cpu_seconds();
  bool well = true;
  for (std::uint64_t seed = arguments.first; well; ++seed) {
    well = simulate(argv[0], seed, arguments, totals);
    const double passed =
        arguments.of_cpu ? cpu_seconds() - cpu_before : wall_seconds() - wall_before;
    const bool late = arguments.timed && passed >= arguments.seconds;
    if (seed == arguments.last || late) break;
  }
  const double cpu = cpu_seconds() - cpu_before, wall = wall_seconds() - wall_before;
  fmt::print(
      "{} clusters from seed {}, {} job runs ({} disturbed), {} launches, {} faults, {} "
      "steps: {:.2f} cluster-hours in {:.1f} s of CPU ({:.1f} per CPU minute)\n",
      totals.clusters, arguments.first, totals.runs, totals.failed_runs, totals.launches,
      totals.faults, totals.steps, totals.simulated_hours, cpu,
      60.0 * totals.simulated_hours / cpu);
  if (!arguments.json.empty() && !write_json(arguments, totals, cpu, wall, command)) {
    fmt::print(stderr, "mksim: cannot write {}\n", arguments.json);
    return 2;
  }
  return well ? 0 : 1;
}

}  // namespace
}  // namespace mk::sim

int main(int argc, char** argv) { return mk::sim::run(argc, argv); }
