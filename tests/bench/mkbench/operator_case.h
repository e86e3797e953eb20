/// \file
/// What mkbench has to know of an operator. A case is two halves: OperatorCase says what there is
/// to choose and is used by the parent and by the ranks. RankCase is one rank's operator with its
/// inputs and outputs. Everything else is the same for all operators: rank_loop.h, bench.h,
/// report.h.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/tools/numeric/comparison.h"
#include "kernels/plan/candidate.h"
#include "mkernel/mkernel.h"
#include "shm/host/result.h"
#include "tests/bench/mkbench/output.h"
#include "tests/bench/mkbench/spec.h"

namespace CLI {
class App;
}  // namespace CLI

namespace mk::bench {

/// One rank's operator. Calls come in the order make_inputs, lead (perhaps), launch, verify.
class RankCase {
 public:
  virtual ~RankCase() = default;
  /// Draws the inputs of launch `launch` and gives the outputs their sizes. What other ranks draw
  /// follows from the same numbers.
  virtual void make_inputs(std::uint32_t launch) = 0;
  virtual Result<LaunchStats> launch(LaunchMode mode) = 0;
  /// On GPUs, `launches` like the one that follows, of the same shapes and other values, into
  /// memory of their own: they wake up GPU and daemons. Others have no need of that.
  virtual Status lead(LaunchMode /*mode*/, std::uint32_t /*launches*/) { return {}; }
  /// All memory the launch may write: poisoned before it, hashed after it.
  virtual std::vector<Output*> outputs() = 0;
  /// Compares with float64: all of this rank's outputs or, when all ranks' are equal, a share of
  /// them of which every rank takes another.
  virtual tools::Comparison verify() const = 0;
  virtual Work work() const = 0;
  /// What this rank's computation takes by itself, measured on its GPU with all inputs there; 0:
  /// not known, the unfused form's computation stands for it.
  virtual Result<std::uint64_t> core_ns() { return 0; }
  virtual void set_trace(bool on) = 0;
  virtual std::vector<TraceSpan> trace() const = 0;  ///< of the last launch
};

class OperatorCase {
 public:
  virtual ~OperatorCase() = default;
  virtual const char* name() const = 0;   ///< as typed: "gemm-ar"
  virtual const char* title() const = 0;  ///< "GEMM+AllReduce"
  virtual const char* help() const = 0;
  /// The case's own options: of the command line, and as JSON between parent and ranks.
  virtual void add_options(CLI::App& command) = 0;
  virtual nlohmann::json options() const = 0;
  virtual void set_options(const nlohmann::json& options) = 0;
  /// "C[1024, 1024] = sum of ...", for users.
  virtual std::string describe(const BenchSpec& spec) const = 0;
  /// What a launch asks of the planner, one problem for each operator that it launches; of sizes
  /// that vary the largest.
  virtual std::vector<kernels::plan::Problem> problems(const BenchSpec& spec) const = 0;
  /// Whether all ranks put out the same bytes.
  virtual bool outputs_are_equal() const = 0;
  /// Sizes at which figures mean something: launches of some hundred milliseconds on two cores.
  virtual void make_large() = 0;
  /// Changes the sizes, meant for one node, so that a rank computes as much with `nodes`.
  virtual void keep_work_per_rank(std::uint32_t nodes) = 0;
  /// Collective: creates the operator.
  virtual Result<std::unique_ptr<RankCase>> start(Session& session, const BenchSpec& spec,
                                                  std::uint32_t rank) const = 0;
};

/// All cases, in the order of the README's table of operators.
std::vector<std::string> case_names();
/// A new case with its default options; null for a name there is not.
std::unique_ptr<OperatorCase> make_case(const std::string& name);
/// The case of a spec, with the spec's options.
Result<std::unique_ptr<OperatorCase>> case_of(const BenchSpec& spec);

/// OperatorCase's part about options, for a struct with NLOHMANN_DEFINE_TYPE_...
template <class Options>
class CaseWithOptions : public OperatorCase {
 public:
  nlohmann::json options() const override { return options_; }
  void set_options(const nlohmann::json& options) override { options_ = options.get<Options>(); }

 protected:
  Options options_;
};

}  // namespace mk::bench
