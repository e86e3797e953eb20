#include "tests/bench/mkbench/planned_shapes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "kernels/plan/legal.h"
#include "kernels/plan/model.h"

namespace mk::bench {

namespace plan = kernels::plan;

Result<kernels::Shape> parse_shape(std::string_view text) {
  std::array<std::uint32_t, 3> sides{};
  const char* at = text.data();
  const char* const end = at + text.size();
  for (std::size_t side = 0; side < sides.size(); ++side) {
    const auto [rest, error] = std::from_chars(at, end, sides[side]);
    const bool last = side + 1 == sides.size();
    const bool follows = last ? rest == end : rest != end && *rest == 'x';
    if (error != std::errc() || sides[side] == 0 || !follows)
      return fail(ErrorCode::kInvalidArgument,
                  "'{}' is no shape; give M x N x K without spaces, such as 4096x7168x2048", text);
    at = last ? rest : rest + 1;
  }
  return kernels::Shape{sides[0], sides[1], sides[2]};
}

Result<plan::Op> planned_op(std::string_view name) {
  std::string of_plan(name);
  std::replace(of_plan.begin(), of_plan.end(), '-', '_');
  return plan::op_named(of_plan);
}

Result<plan::Machine> machine_named(const std::string& name) {
  if (auto shipped = plan::shipped_machine(name)) return shipped;
  return plan::load_machine(name);
}

Result<plan::Machine> machine_to_tune(const std::string& asked, const std::string& gpus) {
  const auto shipped = plan::shipped_machine(asked);
  if (!asked.empty() && !shipped) return plan::load_machine(asked);
  // Containers may hide them.
  if (gpus == "none" && shipped && shipped->kind == plan::MachineKind::kGpu) return shipped;
  const std::uint32_t sms = plan::shipped_machine("H100").value_or(plan::Machine{}).sms;
  const plan::DerivedMachine here = plan::machine_for_gpu(gpus, sms);
  if (!here.warning.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "no machine file is shipped for this machine's GPUs ({}): give --machine a file of "
                "their own; `mkbench calibrate --executor cuda --out FILE` writes it",
                gpus);
  }
  if (!asked.empty() && shipped->name != here.machine.name) {
    return fail(ErrorCode::kInvalidArgument,
                "--machine {}: this machine's GPUs are {}, whose times would count as an {}'s; "
                "leave it out",
                asked, gpus, asked);
  }
  return here.machine;
}

std::vector<plan::Candidate> candidates_to_try(const plan::Problem& problem,
                                               const plan::Machine& machine, double factor) {
  plan::Problem fused = problem;
  fused.named.form = kernels::Mode::kFused;
  std::vector<std::pair<double, plan::Candidate>> timed;
  for (const plan::Candidate& candidate : plan::legal_candidates(fused, machine))
    timed.emplace_back(plan::predict(fused, machine, candidate).total, candidate);
  std::stable_sort(timed.begin(), timed.end(),
                   [](const auto& one, const auto& other) { return one.first < other.first; });
  std::vector<plan::Candidate> candidates;
  for (const auto& [us, candidate] : timed) {
    if (us > factor * timed.front().first) break;
    candidates.push_back(candidate);
  }
  return candidates;
}

Result<std::vector<Trial>> try_candidates(
    const std::vector<plan::Candidate>& candidates,
    const std::function<Result<double>(const plan::Candidate&)>& measure,
    const std::function<bool()>& goes_on, const std::function<void(const std::string&)>& tell) {
  std::vector<Trial> trials;
  std::string reason = "no way to run it is legal";
  for (std::size_t i = 0; i < candidates.size() && (i == 0 || goes_on()); ++i) {
    const Result<double> us = measure(candidates[i]);
    if (us) {
      trials.push_back({candidates[i], *us});
      continue;
    }
    reason = us.error().message;
    tell(reason);
  }
  if (trials.empty()) return fail(ErrorCode::kUnavailable, "nothing could be measured: {}", reason);
  std::stable_sort(trials.begin(), trials.end(),
                   [](const Trial& one, const Trial& other) { return one.us < other.us; });
  return trials;
}

}  // namespace mk::bench
