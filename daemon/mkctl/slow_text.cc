// What a search for slow ranks and links has found, as text and as JSON.
#include <fmt/format.h>

#include <string>

#include "daemon/mkctl/render.h"
#include "daemon/mkctl/slow.h"
#include "daemon/mkctl/slow_rank.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {

std::string person(std::uint32_t number, const Rank& rank) {
  return fmt::format("rank {} (node {}, pid {})", number, rank.node, rank.after->pid());
}

daemon::RankProgress work_of(const Rank& rank) {
  for (const v1::Session* look : {rank.after, rank.before}) {
    if (look->progress().waits_for().empty()) return progress_of(look->progress());
  }
  daemon::RankProgress its = progress_of(rank.after->progress());
  its.phase.clear();
  its.waits_for.clear();
  its.waits_for_rank = -1;
  return its;
}

std::string waits_of(const std::vector<std::uint32_t>& waiting, const Ranks& all) {
  double least = 1;
  for (const std::uint32_t number : waiting) least = std::min(least, all.at(number).waited());
  constexpr double kAll = 0.995;
  std::string text = fmt::format(
      "{} {} {}", numbers(waiting), waiting.size() == 1 ? "waits" : "wait",
      least < kAll ? fmt::format("at least {:.0f}% of the time", 100 * least) : "all the time");
  for (const std::uint32_t number : waiting) {
    const v1::Progress& its = all.at(number).after->progress();
    if (its.waits_for().empty()) continue;
    if (its.phase() == daemon::kExchangePhase) {
      text += fmt::format(", rank {} {}", number, daemon::control::describe(progress_of(its)));
      break;
    }
    text += fmt::format(", rank {} in {} of {} launch {} for {}", number, its.phase(), its.op(),
                        its.epoch(), daemon::control::awaited_text(progress_of(its)));
    break;
  }
  return text;
}

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
    if (job.idle) text += "; no rank is in a launch: they wait or work outside of mkernel";
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
                    {"commands_per_second", job.commands_per_second},
                    {"idle", job.idle}});
  }
  return {{"findings", findings}, {"jobs", jobs}};
}

}  // namespace mk::mkctl
