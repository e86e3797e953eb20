#include <fmt/format.h>

#include "daemon/mkctl/render.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {

std::string render(const v1::ListJobsResponse& jobs) {
  if (jobs.jobs_size() == 0) return "no job has a rank here\n";
  Table table({"JOB", "STATE", "AGE", "RANKS", "WORLD", "NODE", "WEIGHT", "REGISTERED", "DEPTH",
               "COMMANDS", "BYTES", "STALLS", "WAITS FOR"});
  for (const v1::Job& one : jobs.jobs()) {
    table.add({one.job(), one.state(), human_age(one.age_ns()),
               fmt::format("{}/{}", one.sessions(), one.local_size()), std::to_string(one.world()),
               fmt::format("{}/{}", one.node_rank(), one.nodes()), std::to_string(one.weight()),
               human_bytes(static_cast<double>(one.registered_bytes())),
               std::to_string(one.depth()), std::to_string(one.commands()),
               human_bytes(static_cast<double>(one.bytes())), std::to_string(one.credit_stalls()),
               one.waits_for()});
  }
  return table.text();
}

}  // namespace mk::mkctl
