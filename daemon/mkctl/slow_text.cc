// What a search for slow ranks and links has found, as text and as JSON.
#include <fmt/format.h>

#include <string>

#include "daemon/mkctl/slow.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {

std::string render(const Slowness& slowness) {
  std::string text;
  if (slowness.findings.empty()) {
    text = slowness.jobs.empty() ? "no job is up\n" : "no rank is behind\n";
  } else {
    Table table({"JOB", "WHO", "FOR", "WHY"});
    for (const Finding& one : slowness.findings) {
      table.add(
          {one.job.empty() ? "(all)" : one.job, one.who, human_duration(one.for_ns), one.why});
    }
    text = table.text();
  }
  for (const Motion& job : slowness.jobs) {
    text += fmt::format("{}: {:.1f} launches/s, {} commands/s", printable(job.job),
                        job.launches_per_second, human_count(job.commands_per_second));
    if (job.ranks_seen < job.world) {
      text += fmt::format("; only {} of {} ranks were seen (--hosts asks more nodes)",
                          job.ranks_seen, job.world);
    }
    text += "\n";
  }
  return text;
}

Json json_of(const Slowness& slowness) {
  Json findings = Json::array(), jobs = Json::array();
  for (const Finding& one : slowness.findings) {
    findings.push_back({{"kind", one.kind},
                        {"job", one.job},
                        {"who", one.who},
                        {"why", one.why},
                        {"rank", one.rank},
                        {"node", one.node},
                        {"for_ns", one.for_ns}});
  }
  for (const Motion& job : slowness.jobs) {
    jobs.push_back({{"job", job.job},
                    {"world", job.world},
                    {"ranks_seen", job.ranks_seen},
                    {"launches_per_second", job.launches_per_second},
                    {"commands_per_second", job.commands_per_second}});
  }
  return {{"findings", findings}, {"jobs", jobs}};
}

}  // namespace mk::mkctl
