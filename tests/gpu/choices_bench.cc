/// \file
/// choices_bench: the planner's choice beside other candidates, each measured.
///
///     choices_bench [--devices D] [--candidates C] [as operators_bench: --op --ranks --nodes
///                   --mkerneld --link-bandwidth --shape --launches --check-up-to --json]
///
/// It tries C (64) legal candidates. One half are those predicted to be the quickest. The other
/// half is an even choice of the rest, up to twice the prediction of the first. Each has a few
/// launches. The quickest six and the planned one are then timed, interleaved in random order,
/// begun together; a launch's time is its slowest rank's. `ratio`: planned over the best. The
/// planned one's results are checked, every element, up to M rows (8192).
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/host/planned.h"
#include "kernels/plan/choose.h"
#include "kernels/plan/legal.h"
#include "kernels/plan/model.h"
#include "tests/gpu/bench_devices.h"
#include "tests/gpu/operator_ranks.h"
#include "tests/gpu/stopwatch.h"

namespace {

namespace plan = mk::kernels::plan;

using mk::test::BenchRun;
using mk::test::DaemonNodes;
using mk::test::Job;
using mk::test::JobSetup;
using mk::test::require;
using mk::test::Stopwatch;
using mk::test::Timing;
using Json = nlohmann::ordered_json;

struct Options : mk::test::DeviceOptions {
  std::size_t candidates = 64;
};

/// One way to run the shape, on ranks of its own.
struct Contender {
  explicit Contender(const JobSetup& setup)
      : job(std::make_unique<Job>(setup)), stopwatch(std::make_unique<Stopwatch>(*job)) {
    for (std::uint32_t r = 0; r < job->world(); ++r) {
      job->fill(r, mk::test::fresh_seed() >> 16);
      job->poison(r);
      require(cudaStreamSynchronize(job->stream(r)), "inputs");
    }
    Timing warm_up;
    for (int i = 0; i < 3; ++i) run(warm_up);
  }
  void launch() {
    for (std::uint32_t r = 0; r < job->world(); ++r) {
      job->make_current(r);
      if (auto launched = job->launch(r, job->setup().m); !launched) {
        fmt::print(stderr, "{}\n", launched.error().message);
        std::exit(1);
      }
    }
  }
  void run(Timing& into) {
    stopwatch->run([this] { launch(); }, into);
  }

  std::unique_ptr<Job> job;
  std::unique_ptr<Stopwatch> stopwatch;
  Timing timing;
};

plan::Problem problem_of(const JobSetup& setup) {
  plan::Problem problem;
  problem.op = setup.op == mk::test::Op::kAgGemm   ? plan::Op::kAgGemm
               : setup.op == mk::test::Op::kGemmRs ? plan::Op::kGemmRs
                                                   : plan::Op::kGemmAr;
  problem.nodes = setup.nodes;
  problem.locals = setup.locals;
  problem.shape = {setup.m, setup.n, setup.k[0]};
  problem.dtype = setup.dtype;
  problem.result = setup.result;
  problem.named.form = mk::kernels::Mode::kFused;
  return problem;
}

struct Predicted {
  double us = 0;
  plan::Candidate candidate;
};

/// The candidates to try, by predicted time.
std::vector<Predicted> to_try(const plan::Problem& problem, const plan::Machine& machine,
                              std::size_t count) {
  std::vector<Predicted> all;
  for (const plan::Candidate& candidate : plan::legal_candidates(problem, machine))
    all.push_back({plan::predict(problem, machine, candidate).total, candidate});
  std::stable_sort(all.begin(), all.end(),
                   [](const Predicted& one, const Predicted& other) { return one.us < other.us; });
  constexpr double kWorth = 2;
  while (all.size() > 1 && all.back().us > kWorth * all.front().us) all.pop_back();
  if (all.size() <= count) return all;
  const std::size_t first = count / 2;
  const std::size_t others = count - first;
  std::vector<Predicted> chosen(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(first));
  for (std::size_t i = 0; i < others; ++i)
    chosen.push_back(all[first + (all.size() - first) * i / others]);
  return chosen;
}

/// The job plan by which the candidate is chosen, as the only tuned one.
std::shared_ptr<const plan::JobPlan> only(const plan::Problem& problem,
                                          const plan::Machine& machine,
                                          const plan::Candidate& candidate) {
  auto job = std::make_shared<plan::JobPlan>();
  job->machine = machine;
  plan::TunedEntry entry;
  entry.op = problem.op;
  entry.machine = machine.name;
  entry.nodes = problem.nodes;
  entry.locals = problem.locals;
  entry.bucket = plan::bucket_of(problem.shape);
  entry.candidate = candidate;
  entry.measured_us = 1;  // not known yet
  job->tuned.put(entry);
  return job;
}

/// A candidate in the JSON: `kColumns`.
constexpr const char* kColumns[] = {"us",      "predicted_us", "tile_m",  "tile_n", "chunk_bytes",
                                    "compute", "stream",       "receive", "by_dma", "sums"};
Json to_json(const plan::Candidate& candidate, double us, double predicted_us) {
  const char* const sums = candidate.sums == plan::Sums::kOwn    ? "own"
                           : candidate.sums == plan::Sums::kOnce ? "once"
                                                                 : "warpgroups";
  const auto tenth = [](double value) { return std::round(value * 10) / 10; };
  return {tenth(us),
          tenth(predicted_us),
          candidate.tiling.tile_m,
          candidate.tiling.tile_n,
          candidate.tiling.chunk_bytes,
          candidate.compute_blocks,
          candidate.stream_warpgroups,
          candidate.receive_warpgroups,
          candidate.engines,
          sums};
}

plan::Machine machine_here() {
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return mk::kernels::cuda::machine_of(properties.name,
                                       static_cast<std::uint32_t>(properties.multiProcessorCount));
}

bool measure(const Options& options, const BenchRun& run, DaemonNodes* daemons, Json& rows) {
  JobSetup setup = mk::test::setup_of(options, run);
  setup.devices = options.devices;
  setup.in_workspace = run.op == mk::test::Op::kGemmAr;
  const auto attach = [&] { setup.join = mk::test::join_of(daemons); };
  const plan::Machine machine = machine_here();
  const plan::Problem problem = problem_of(setup);
  const auto with = [&](const plan::Candidate& candidate) {
    JobSetup one = setup;
    one.options.job_plan = only(problem, machine, candidate);
    return one;
  };
  struct Tried {
    double us;
    Predicted of;
  };
  std::vector<Tried> tried;
  for (const Predicted& one : to_try(problem, machine, options.candidates)) {
    attach();
    Contender contender(with(one.candidate));
    constexpr int kLaunches = 5;
    for (int i = 0; i < kLaunches; ++i) contender.run(contender.timing);
    tried.push_back({contender.timing.us(), one});
  }
  std::stable_sort(tried.begin(), tried.end(),
                   [](const Tried& one, const Tried& other) { return one.us < other.us; });
  constexpr std::size_t kFinal = 6;
  attach();
  std::vector<std::unique_ptr<Contender>> all;
  all.push_back(std::make_unique<Contender>(setup));
  for (std::size_t i = 0; i < std::min(kFinal, tried.size()); ++i)
    all.push_back(std::make_unique<Contender>(with(tried[i].of.candidate)));
  // Each has streams of its own.
  std::vector<Contender*> order;
  for (const auto& one : all) order.push_back(one.get());
  std::minstd_rand random;
  for (int round = 0; round < options.launches; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (Contender* one : order) one->run(one->timing);
  }

  const auto choice = plan::choose(problem, machine, &plan::shipped_tuned());
  if (!choice) {
    fmt::print(stderr, "{}\n", choice.error().message);
    return false;
  }
  const double planned_us = all[0]->timing.us();
  double best_us = planned_us;
  std::string best = "planned";
  Json finals = Json::array();
  for (std::size_t i = 1; i < all.size(); ++i) {
    const Tried& one = tried[i - 1];
    const std::string text = plan::describe(problem, one.of.candidate);
    const double us = all[i]->timing.us();
    if (us < best_us) {
      best_us = us;
      best = text;
    }
    finals.push_back(to_json(one.of.candidate, us, one.of.us));
  }
  Json row = mk::test::row_of(options, run, all[0]->job->op(0));
  row["planned"] = to_json(choice->candidate, planned_us, choice->time.total);
  row["ratio"] = planned_us / best_us;
  row["best_us"] = best_us;
  row["finals"] = finals;
  for (const Tried& one : tried)
    row["tried"].push_back(to_json(one.of.candidate, one.us, one.of.us));
  fmt::print(
      "{} {}x{} {} {} {}: planned {:.1f} (predicted {:.1f}), best {:.1f} of {}: {:.3f} | {} "
      "| best: {}",
      name(run.op), options.nodes, setup.locals, run.shape.m, run.shape.n, run.shape.k, planned_us,
      choice->time.total, best_us, tried.size(), planned_us / best_us,
      plan::describe(problem, choice->candidate), best);
  bool right = true;
  if (run.shape.m <= options.check_up_to) {
    Job& job = *all[0]->job;
    for (std::uint32_t r = 0; r < job.world(); ++r) {
      job.poison(r);
      require(cudaStreamSynchronize(job.stream(r)), "poison");
    }
    Timing once;
    all[0]->run(once);
    const mk::test::Verdict verdict = job.judge_all(setup.m);
    row["wrong_elements"] = verdict.bad;
    right = verdict.right();
    fmt::print(" | {} wrong", verdict.bad);
  }
  fmt::print("\n");
  std::fflush(stdout);
  rows.push_back(row);
  // Rows stay, whatever becomes of the rest.
  if (!options.json.empty()) mk::test::write(options, {{"rows", rows}});
  return right;
}

int usage() {
  fmt::print(stderr, "choices_bench [--devices D] [--candidates C] {}\n", Options::kUsage);
  return 2;
}

int run(int argc, char** argv) {
  Options options;
  const auto own = [&](const std::string& argument, const std::string& value) {
    if (argument != "--candidates") return false;
    options.candidates = static_cast<std::size_t>(std::atoi(value.c_str()));
    return true;
  };
  if (!mk::test::take_all(argc, argv, options, own) || options.candidates < 1) return usage();
  if (!mk::test::settle_ranks(options)) return 2;
  const std::unique_ptr<DaemonNodes> daemons = mk::test::daemons_of(options);
  if (!mk::test::has_devices(options)) return 1;
  Json rows = Json::array();
  const bool right = mk::test::run_all(
      options, [&](const BenchRun& one) { return measure(options, one, daemons.get(), rows); });
  Json document = mk::test::document_of(options, "choices_bench", argc, argv, options.devices);
  document["times"] =
      "us; slowest rank of a launch, begun together; planned and the best six interleaved";
  document["network"] =
      network_of(options, options.mkerneld.empty() ? "in this process" : "beside it");
  document["columns"] = kColumns;
  document["rows"] = rows;
  if (!mk::test::write(options, document)) return 1;
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return run(argc, argv); }
