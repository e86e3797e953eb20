#include "kernels/plan/job_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "shm/host/result.h"

namespace mk::kernels::plan {

std::string job_plan_text(const JobPlan& plan) {
  // Each part is its own file's text, so that its own reader checks it.
  nlohmann::ordered_json json;
  json["machine"] = machine_text(plan.machine);
  json["tuned"] = tuned_text(plan.tuned);
  return json.dump();
}

Result<JobPlan> parse_job_plan(std::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.size() != 2 || !json.contains("machine") ||
      !json.contains("tuned") || !json["machine"].is_string() || !json["tuned"].is_string()) {
    return fail(ErrorCode::kInvalidArgument,
                "the job's plan is not one of a machine and tuned choices; all ranks must run the "
                "same version");
  }
  JobPlan plan;
  MK_ASSIGN_OR_RETURN(plan.machine,
                      parse_machine(json["machine"].get<std::string>(), "the job's machine file"));
  MK_ASSIGN_OR_RETURN(plan.tuned,
                      parse_tuned(json["tuned"].get<std::string>(), "the job's tuned.json"));
  return plan;
}

const Machine& slowest(std::span<const Machine> machines) {
  return *std::max_element(machines.begin(), machines.end(),
                           [](const Machine& one, const Machine& other) {
                             return one.step_us_256 / one.sms < other.step_us_256 / other.sms;
                           });
}

std::string difference(const JobPlan& job, const JobPlan& own, std::uint32_t rank) {
  if (own.machine.name != job.machine.name)
    return fmt::format("rank {} has machine '{}', but the job is planned for '{}'", rank,
                       own.machine.name, job.machine.name);
  // Links differ a little, each as it was measured.
  Machine on_its_network = own.machine;
  on_its_network.network_gb_s = job.machine.network_gb_s;
  if (!(on_its_network == job.machine))
    return fmt::format(
        "rank {}'s machine file for '{}' has other numbers than rank 0's, which count", rank,
        own.machine.name);
  if (tuned_text(own.tuned) != tuned_text(job.tuned))
    return fmt::format("rank {}'s tuned.json has other entries than rank 0's, which count", rank);
  return {};
}

}  // namespace mk::kernels::plan
