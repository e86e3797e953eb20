// Writes the shipped tuned.json (kernels/plan/machines) of the recorded runs: for each shape that
// was run on a GPU, the quickest fused candidate, where the model alone would take another.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/plan/choose.h"
#include "kernels/plan/legal.h"
#include "tests/kernels/plan/recorded_runs.h"

namespace mk::kernels::plan {
namespace {

struct Measured {
  Candidate candidate;
  double us = 0;
  std::size_t runs = 0;
};

/// Of earlier kernels only differences within a sweep count: several candidates of one shape.
constexpr std::size_t kSweepMin = 4;

int run(const char* path) {
  using Key = std::tuple<bool, std::string, Op, std::uint32_t, std::uint32_t, std::uint32_t,
                         std::uint32_t, std::uint32_t>;
  std::map<Key, std::vector<Measured>> shapes;
  for (const RecordedRun& run : recorded_runs()) {
    const Problem& of = run.problem;
    if (run.candidate.form != Mode::kFused || of.in_place || run.screened) continue;
    auto& all = shapes[{!run.present, run.gpu, of.op, of.nodes, of.locals, of.shape.m, of.shape.n,
                        of.shape.k}];
    auto known = std::find_if(all.begin(), all.end(),
                              [&](const Measured& m) { return m.candidate == run.candidate; });
    if (known == all.end()) known = all.insert(all.end(), {run.candidate, 0, 0});
    known->us += run.us;
    ++known->runs;
  }
  Tuned tuned;
  std::set<std::tuple<std::string, Op, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t,
                      std::uint32_t>>
      decided;
  for (const auto& [key, all] : shapes) {
    const auto& [earlier, gpu, op, nodes, locals, m, n, k] = key;
    if (earlier && all.size() < kSweepMin) continue;
    const auto mean = [](const Measured& one) { return one.us / static_cast<double>(one.runs); };
    const auto best = std::min_element(
        all.begin(), all.end(),
        [&](const Measured& one, const Measured& other) { return mean(one) < mean(other); });
    TunedEntry entry;
    entry.op = op;
    entry.machine = gpu;
    entry.nodes = nodes;
    entry.locals = locals;
    entry.bucket = bucket_of({m, n, k});
    entry.candidate = best->candidate;
    entry.measured_us = std::round(mean(*best) * 10) / 10;
    Problem problem;
    problem.op = op;
    problem.nodes = nodes;
    problem.locals = locals;
    problem.shape = {m, n, k};
    problem.named.form = Mode::kFused;
    // The present kernels' runs come first; so does the first shape of a bucket.
    const bool is_first =
        decided.insert({gpu, op, nodes, locals, entry.bucket.m, entry.bucket.n, entry.bucket.k})
            .second;
    if (!is_first) continue;
    const Machine machine = shipped_machine(gpu).value();
    if (const Status legal = check_candidate(problem, machine, entry.candidate); !legal) {
      fmt::print(stderr, "left out: {}\n", legal.error().message);
      continue;
    }
    const auto model = choose(problem, machine);
    if (model && model->candidate == entry.candidate) continue;
    tuned.put(entry);
  }
  const Status saved = save_tuned(tuned, path);
  if (!saved) fmt::print(stderr, "{}\n", saved.error().message);
  fmt::print("{} entries\n", tuned.entries.size());
  return saved ? 0 : 1;
}

}  // namespace
}  // namespace mk::kernels::plan

int main(int argc, char** argv) {
  if (argc != 2) {
    fmt::print(stderr, "usage: {} TUNED.json\n", argv[0]);
    return 2;
  }
  return mk::kernels::plan::run(argv[1]);
}
