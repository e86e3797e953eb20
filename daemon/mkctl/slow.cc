#include "daemon/mkctl/slow.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

constexpr std::array<std::string_view, 8> kKinds{"peer-down",    "link-down",   "link-stalled",
                                                 "rank-stopped", "rank-behind", "rank-missing",
                                                 "ring-stuck",   "launch-long"};

std::size_t weight_of(const Finding& finding) {
  return static_cast<std::size_t>(std::find(kKinds.begin(), kKinds.end(), finding.kind) -
                                  kKinds.begin());
}

struct Rank {
  std::uint32_t node = 0;
  const v1::Session* before = nullptr;  ///< null: attached between the looks
  const v1::Session* after = nullptr;
  double commands_per_second = 0;
};

/// By name, all ranks of all nodes.
using Ranks = std::map<std::uint32_t, Rank>;

/// "0, 1, 5"; long ones are cut.
std::string numbers(const std::vector<std::uint32_t>& all) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(all.size(), kShown); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", all[i]);
  }
  if (all.size() > kShown) text += fmt::format(" and {} more", all.size() - kShown);
  return (all.size() == 1 ? "rank " : "ranks ") + text;
}

std::uint64_t launch_of(std::uint64_t launches) { return launches / 2 + launches % 2; }

class Search {
 public:
  explicit Search(const std::vector<Look>& looks) {
    for (const Look& look : looks) {
      nodes(look);
      ranks(look);
      rings(look);
    }
    for (const auto& [job, all] : jobs_) launches(job, all);
    std::stable_sort(found_.findings.begin(), found_.findings.end(),
                     [](const Finding& a, const Finding& b) {
                       return std::pair(weight_of(a), b.for_ns) < std::pair(weight_of(b), a.for_ns);
                     });
  }
  Slowness take() { return std::move(found_); }

 private:
  void add(Finding finding) { found_.findings.push_back(std::move(finding)); }

  /// Peers and links of one daemon, and ranks that have not come.
  void nodes(const Look& look) {
    const std::uint32_t node = look.after.node();
    for (const v1::PeerStatus& peer : look.after.peers()) {
      if (peer.state() == v1::PeerStatus::STATE_UP) continue;
      add({"peer-down", "", fmt::format("the daemon of node {}", peer.node()),
           fmt::format("not connected to node {}{}", node,
                       peer.reason().empty() ? "" : ": " + peer.reason()),
           -1, node, peer.state_for_ns()});
    }
    for (const v1::Link& link : look.after.links()) {
      const std::string who = fmt::format("the link of rail {} from node {} to node {}",
                                          link.rail(), node, link.peer());
      if (link.state() == "error") {
        add({"link-down", "", who, "in error: " + link.reason(), -1, node, link.state_for_ns()});
      } else if (link.stalled_for_ns() >= look.after.elapsed_ns() && link.outstanding() > 0 &&
                 look.after.elapsed_ns() > 0) {
        add({"link-stalled", "", who,
             fmt::format("{} writes outstanding, none has completed", link.outstanding()), -1, node,
             link.stalled_for_ns()});
      }
    }
    for (const v1::Job& job : look.after.jobs()) {
      if (job.waits_for().empty()) continue;
      const std::vector<std::uint32_t> missing(job.missing_ranks().begin(),
                                               job.missing_ranks().end());
      add({"rank-missing", job.job(), missing.empty() ? std::string("its links") : numbers(missing),
           job.waits_for(), -1, node, job.age_ns()});
    }
  }

  void ranks(const Look& look) {
    for (const v1::Session& session : look.after.ranks()) {
      if (session.state() != "up") continue;
      Rank& rank = jobs_[session.job()][session.rank()];
      rank.node = look.after.node();
      rank.after = &session;
      for (const v1::Session& old : look.before.ranks()) {
        if (old.session_id() == session.session_id()) rank.before = &old;
      }
      const auto commands = [&](const v1::StatsSample& sample) {
        std::uint64_t sum = 0;
        for (const v1::Queue& queue : sample.queues()) {
          if (queue.session_id() == session.session_id()) sum += queue.commands();
        }
        return static_cast<double>(sum);
      };
      const double seconds = 1e-9 * static_cast<double>(look.after.elapsed_ns());
      if (rank.before != nullptr && seconds > 0) {
        rank.commands_per_second = (commands(look.after) - commands(look.before)) / seconds;
        seconds_[session.job()] = std::max(seconds_[session.job()], seconds);
      }
    }
  }

  /// Commands that were there at both looks and that nobody took.
  void rings(const Look& look) {
    for (const v1::Queue& queue : look.after.queues()) {
      for (const v1::Queue& old : look.before.queues()) {
        if (old.session_id() != queue.session_id() || old.lane() != queue.lane()) continue;
        if (old.depth() == 0 || queue.depth() == 0 || old.commands() != queue.commands()) continue;
        const std::uint64_t stalls = queue.credit_stalls() - old.credit_stalls();
        add({"ring-stuck", queue.job(),
             fmt::format("lane {} of rank {}", queue.lane(), queue.rank()),
             fmt::format("{} commands wait{}", queue.depth(),
                         stalls > 0 ? " for earlier ones to complete" : " for their turn"),
             queue.rank(), look.after.node(), look.after.elapsed_ns()});
      }
    }
  }

  void launches(const std::string& job, const Ranks& all) {
    Motion motion{job, all.begin()->second.after->world(), static_cast<std::uint32_t>(all.size()),
                  0, 0};
    std::uint64_t most = 0, slowest = ~0ull;
    bool moved = false;
    for (const auto& [number, rank] : all) {
      most = std::max(most, rank.after->launches());
      motion.commands_per_second += rank.commands_per_second;
      if (rank.before == nullptr) continue;
      slowest = std::min(slowest, rank.after->launches() - rank.before->launches());
      moved = moved || rank.after->launches() != rank.before->launches();
    }
    const double seconds = seconds_[job];
    if (slowest != ~0ull && seconds > 0) {
      motion.launches_per_second = static_cast<double>(slowest) / 2 / seconds;
    }
    found_.jobs.push_back(motion);

    std::vector<std::uint32_t> ahead;
    bool stopped = false;
    for (const auto& [number, rank] : all) {
      if (rank.after->launches() == most) ahead.push_back(number);
      const v1::Session& now = *rank.after;
      if (now.reason().empty()) continue;
      stopped = true;
      add({"rank-stopped", job, person(number, rank), now.reason(), number, rank.node,
           now.launches_for_ns()});
    }
    std::vector<std::uint32_t> standing;
    for (const auto& [number, rank] : all) {
      // One that still moves may be behind only because it was looked at earlier.
      const v1::Session& now = *rank.after;
      if (now.launches() == most || rank.before == nullptr || !now.reason().empty()) continue;
      if (now.launches() == rank.before->launches()) standing.push_back(number);
    }
    for (const std::uint32_t number : standing) {
      if (may_wait(number, all, standing)) continue;
      const bool in_launch = all.at(number).after->launches() % 2 == 1;
      behind(job, number, all.at(number), most, ahead,
             in_launch && motion.ranks_seen < motion.world);
    }
    if (stopped || moved || most % 2 == 0 || ahead.size() != all.size()) return;
    // All are in one launch, and have been for as long as we looked.
    const auto [youngest, entered] = last_to_enter(all);
    if (const std::uint32_t unseen = motion.world - motion.ranks_seen; unseen > 0) {
      // Any of those may be the one, and all who are seen may wait for it.
      add({"launch-long", job,
           fmt::format("{} of {} ranks, which were not seen", unseen, motion.world),
           fmt::format(
               "all {} ranks seen are in launch {}, {} since last: ask the other nodes, too "
               "(--hosts)",
               all.size(), launch_of(most), numbers({youngest})),
           -1, all.at(youngest).node, entered});
      return;
    }
    add({"launch-long", job, numbers({youngest}),
         fmt::format("all {} ranks seen are in launch {}; this one came last", all.size(),
                     launch_of(most)),
         youngest, all.at(youngest).node, entered});
  }

  /// Whether rank `number` is in a launch that another who does not move has yet to come to, or
  /// that one whose process does not run is in: then it may be ready and wait, as those ahead of it
  /// do.
  static bool may_wait(std::uint32_t number, const Ranks& all,
                       const std::vector<std::uint32_t>& standing) {
    const std::uint64_t here = all.at(number).after->launches();
    if (here % 2 == 0) return false;
    return std::any_of(all.begin(), all.end(), [&](const auto& other) {
      const v1::Session& its = *other.second.after;
      if (!its.reason().empty()) return its.launches() <= here;
      return its.launches() < here &&
             std::find(standing.begin(), standing.end(), other.first) != standing.end();
    });
  }

  static std::string person(std::uint32_t number, const Rank& rank) {
    return fmt::format("rank {} (node {}, pid {})", number, rank.node, rank.after->pid());
  }

  void behind(const std::string& job, std::uint32_t number, const Rank& rank, std::uint64_t most,
              const std::vector<std::uint32_t>& ahead, bool may_wait_for_unseen) {
    const v1::Session& now = *rank.after;
    const std::string where = now.launches() % 2 == 1
                                  ? fmt::format("still in launch {}", launch_of(now.launches()))
                                  : fmt::format("has not begun launch {}", now.launches() / 2 + 1);
    const std::string others = most % 2 == 1 ? "in" : "through with";
    add({"rank-behind", job, person(number, rank),
         fmt::format("{}; {} {} {} launch {}{}", where, numbers(ahead),
                     ahead.size() == 1 ? "is" : "are", others, launch_of(most),
                     may_wait_for_unseen ? "; or it waits for a rank that was not seen" : ""),
         number, rank.node, now.launches_for_ns()});
  }

  /// The rank whose launch is the youngest, and for how long it has been in it.
  static std::pair<std::uint32_t, std::uint64_t> last_to_enter(const Ranks& all) {
    std::pair<std::uint32_t, std::uint64_t> last{0, ~0ull};
    for (const auto& [number, rank] : all) {
      if (rank.after->launches_for_ns() < last.second)
        last = {number, rank.after->launches_for_ns()};
    }
    return last;
  }

  std::map<std::string, Ranks> jobs_;
  std::map<std::string, double> seconds_;
  Slowness found_;
};

}  // namespace

Slowness find_slow(const std::vector<Look>& looks) { return Search(looks).take(); }

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
