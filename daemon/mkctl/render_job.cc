#include <fmt/format.h>

#include "daemon/mkctl/render.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {

namespace {

/// "", or a table under a line of its own.
std::string ended_table(const google::protobuf::RepeatedPtrField<v1::EndedJob>& ended) {
  if (ended.empty()) return {};
  Table table({"JOB", "UID", "RANKS", "ENDED", "AGO", "RAN", "LAUNCHES", "COMMANDS", "BYTES"});
  for (const v1::EndedJob& one : ended) {
    table.add({one.job(), std::to_string(one.uid()), std::to_string(one.ranks()),
               one.failed() ? "with an error" : "well", human_age(one.ended_for_ns()),
               human_age(one.ran_for_ns()), std::to_string(one.launches()),
               std::to_string(one.commands()), human_bytes(static_cast<double>(one.bytes()))});
  }
  return "\nended:\n" + table.text();
}

}  // namespace

std::string render(const v1::ListJobsResponse& jobs) {
  if (jobs.jobs_size() == 0) return "no job has a rank here\n" + ended_table(jobs.ended());
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
  std::string text = table.text();
  for (const v1::Job& one : jobs.jobs()) {
    if (!one.held_up().empty()) text += printable(one.job() + ": " + one.held_up()) + "\n";
  }
  return text + ended_table(jobs.ended());
}

}  // namespace mk::mkctl
