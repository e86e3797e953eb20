#include "daemon/mkctl/slow.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "daemon/control/held_up.h"
#include "daemon/mkctl/render.h"
#include "daemon/mkctl/slow_rank.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

constexpr std::array<std::string_view, 11> kKinds{
    "peer-down",   "link-down",    "link-stalled", "rank-stopped", "link-slow",  "rank-holds",
    "rank-behind", "rank-missing", "ring-stuck",   "launch-long",  "rank-slower"};

std::size_t weight_of(const Finding& finding) {
  return static_cast<std::size_t>(std::find(kKinds.begin(), kKinds.end(), finding.kind) -
                                  kKinds.begin());
}

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

  static std::string link_name(const v1::Link& link, std::uint32_t from) {
    return fmt::format("the link of rail {} from node {} to node {}", link.rail(), from,
                       link.peer());
  }

  /// Peers and links of one daemon, and ranks that have not come.
  void nodes(const Look& look) {
    const std::uint32_t node = look.after.node();
    looks_[node] = &look;
    for (const v1::PeerStatus& peer : look.after.peers()) {
      if (peer.state() == v1::PeerStatus::STATE_UP) continue;
      add({"peer-down", "", fmt::format("the daemon of node {}", peer.node()),
           fmt::format("not connected to node {}{}", node,
                       peer.reason().empty() ? "" : ": " + peer.reason()),
           -1, node, peer.state_for_ns()});
    }
    for (const v1::Link& link : look.after.links()) {
      const std::string who = link_name(link, node);
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
    Motion motion{
        job, all.begin()->second.after->world(), static_cast<std::uint32_t>(all.size()), 0, 0,
        true};
    std::uint64_t most = 0, slowest = ~0ull;
    bool moved = false;
    for (const auto& [number, rank] : all) {
      most = std::max(most, rank.after->launches());
      motion.commands_per_second += rank.commands_per_second;
      motion.idle = motion.idle && rank.before != nullptr &&
                    rank.before->launches() == rank.after->launches() &&
                    rank.after->launches() % 2 == 0;
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
    const bool held = holders(motion, all);
    if (!held && !stopped) slower(job, all);
    std::vector<std::uint32_t> standing;
    for (const auto& [number, rank] : all) {
      // One that still moves may be behind only because it was looked at earlier.
      const v1::Session& now = *rank.after;
      if (now.launches() == most || rank.before == nullptr || !now.reason().empty()) continue;
      if (now.launches() == rank.before->launches()) standing.push_back(number);
    }
    for (const std::uint32_t number : standing) {
      if (held || all.at(number).waits() || may_wait(number, all, standing)) continue;
      const bool in_launch = all.at(number).after->launches() % 2 == 1;
      behind(job, number, all.at(number), most, ahead,
             in_launch && motion.ranks_seen < motion.world);
    }
    if (stopped || held || moved || most % 2 == 0 || ahead.size() != all.size()) return;
    // All are in one launch, and have been for as long as we looked.
    const auto [youngest, entered] = last_to_enter(all);
    if (motion.ranks_seen < motion.world) {
      // Any of those may be the one, and all who are seen may wait for it.
      add({"launch-long", job, unseen(motion),
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

  /// Names ranks that work while others wait for most of the time, or says that the waits lead to
  /// ranks that were not seen. False: nothing explains the waits.
  bool holders(const Motion& motion, const Ranks& all) {
    const std::string& job = motion.job;
    std::vector<std::uint32_t> waiting, working;
    std::vector<daemon::control::RankDoing> doing;
    std::uint64_t longest_ns = 0;
    for (const auto& [number, rank] : all) {
      doing.push_back({number, rank.after->launches() % 2 == 1, {}, rank.after->reason()});
      if (rank.after->has_progress()) doing.back().progress = progress_of(rank.after->progress());
      if (rank.looks() < kLooksMin || !rank.after->reason().empty()) continue;
      if (rank.waited() >= kHeldUp) {
        waiting.push_back(number);
        longest_ns = std::max(longest_ns, rank.after->progress().phase_for_ns());
      } else if (rank.waited() <= kHolds) {
        working.push_back(number);
      }
    }
    if (waiting.empty()) return false;
    if (slow_links(job, all, waiting)) return true;
    // Of several that work, those to which the waits lead just now, if they lead to any.
    std::vector<std::uint32_t> named;
    bool to_stopped = false, to_unseen = false;
    for (const auto& held : daemon::control::who_holds_up(doing)) {
      const auto by = all.find(held.by);
      if (by == all.end()) {
        to_unseen = true;
      } else if (!by->second.after->reason().empty()) {
        to_stopped = true;
      } else if (std::ranges::find(working, held.by) != working.end()) {
        named.push_back(held.by);
      }
    }
    if (named.empty() && to_stopped) return true;  // it is named as such
    if (named.empty() && to_unseen) {
      add({"launch-long", job, unseen(motion),
           waits_of(waiting, all) + "; ask the other nodes, too (--hosts)", -1,
           all.at(waiting[0]).node, longest_ns});
      return true;
    }
    if (working.empty()) return false;
    for (const std::uint32_t number : named.empty() ? working : named) {
      const Rank& rank = all.at(number);
      std::string does = "in no launch" + elsewhere(job, rank);
      if (rank.in_launch() >= 0.5) does = "works: " + daemon::control::describe(work_of(rank));
      add({"rank-holds", job, person(number, rank),
           fmt::format("{}; meanwhile {}", does, waits_of(waiting, all)), number, rank.node,
           longest_ns});
    }
    return true;
  }

  /// Names the ranks that wait clearly less than all others, where nobody waits for most of the
  /// time: each launch lasts as long as theirs.
  void slower(const std::string& job, const Ranks& all) {
    double least = 1, others_least = 1;
    for (const auto& [number, rank] : all) {
      if (rank.looks() < kLooksOfShares || rank.in_launch() < 0.5) return;
      least = std::min(least, rank.waited());
    }
    const auto is_slow = [&](const Rank& rank) { return rank.waited() <= least + kAlike; };
    std::size_t others = 0;
    for (const auto& [number, rank] : all) {
      if (is_slow(rank)) continue;
      others_least = std::min(others_least, rank.waited());
      ++others;
    }
    if (others == 0 || others_least < least + kSlowerBy) return;
    for (const auto& [number, rank] : all) {
      if (!is_slow(rank)) continue;
      add({"rank-slower", job, person(number, rank),
           fmt::format("waits {:.0f}% of the time, the other {} at least {:.0f}%: slower by about "
                       "{:.0f}%",
                       100 * rank.waited(), others == 1 ? "rank" : "ranks", 100 * others_least,
                       100 * ((1 - rank.waited()) / (1 - others_least) - 1)),
           number, rank.node, static_cast<std::uint64_t>(1e9 * seconds_[job])});
    }
  }

  /// Names links that still carry what ranks wait for, all the while; the sender has done its part.
  bool slow_links(const std::string& job, const Ranks& all,
                  const std::vector<std::uint32_t>& waiting) {
    std::map<std::pair<std::uint32_t, const v1::Link*>, std::vector<std::uint32_t>> carried;
    for (const std::uint32_t number : waiting) {
      const Rank& rank = all.at(number);
      const v1::Progress& its = rank.after->progress();
      if (!rank.waits() || its.waits_for_rank() < 0 || its.phase() == daemon::kExchangePhase) {
        continue;
      }
      const auto sender = all.find(its.waits_for_rank());
      if (sender == all.end() || sender->second.node == rank.node || sender->second.works())
        continue;
      const v1::Link* link = busy_link(sender->second, rank.node);
      if (link != nullptr) carried[{sender->second.node, link}].push_back(number);
    }
    for (const auto& [way, ranks] : carried) {
      const auto& [node, link] = way;
      const Look& look = *looks_.at(node);
      const double moved = static_cast<double>(link->bytes() - before(look, *link)->bytes());
      const double seconds = 1e-9 * static_cast<double>(look.after.elapsed_ns());
      std::uint64_t longest_ns = 0;
      for (const std::uint32_t number : ranks)
        longest_ns = std::max(longest_ns, all.at(number).after->progress().phase_for_ns());
      add({"link-slow", job, link_name(*link, node),
           fmt::format("moves {}/s, {} writes outstanding; meanwhile {}",
                       human_bytes(seconds > 0 ? moved / seconds : 0), link->outstanding(),
                       waits_of(ranks, all)),
           -1, node, longest_ns});
    }
    return !carried.empty();
  }
  static const v1::Link* before(const Look& look, const v1::Link& link) {
    for (const v1::Link& old : look.before.links()) {
      if (old.peer() == link.peer() && old.rail() == link.rail()) return &old;
    }
    return nullptr;
  }
  /// The sender's link to the node, where writes were under way at both looks.
  const v1::Link* busy_link(const Rank& sender, std::uint32_t to) const {
    const Look& look = *looks_.at(sender.node);
    for (const v1::Link& link : look.after.links()) {
      if (link.peer() != to || link.rail() != sender.after->rail()) continue;
      const v1::Link* const old = before(look, link);
      if (link.outstanding() > 0 && old != nullptr && old->outstanding() > 0) return &link;
    }
    return nullptr;
  }

  /// A process may be in several jobs (the groups of its ranks): ": its process is in job 'tp',
  /// gemm_ar launch 3, compute". Empty: nothing of that is known.
  std::string elsewhere(const std::string& job, const Rank& rank) const {
    for (const auto& [other, ranks] : jobs_) {
      if (other == job || rank.after->pid() == 0) continue;
      for (const auto& [number, its] : ranks) {
        const v1::Session& now = *its.after;
        const bool busy = now.launches() % 2 == 1 || !now.progress().waits_for().empty();
        if (its.node != rank.node || now.pid() != rank.after->pid() || !busy) continue;
        return fmt::format(": its process is in job '{}', {}", other,
                           daemon::control::describe(progress_of(now.progress())));
      }
    }
    return {};
  }

  static std::string unseen(const Motion& motion) {
    return fmt::format("{} of {} ranks, which were not seen", motion.world - motion.ranks_seen,
                       motion.world);
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
  std::map<std::uint32_t, const Look*> looks_;  ///< by node
  Slowness found_;
};

}  // namespace

Slowness find_slow(const std::vector<Look>& looks) { return Search(looks).take(); }

}  // namespace mk::mkctl
