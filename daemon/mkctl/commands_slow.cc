// Whom others wait for, now.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/slow.h"

namespace mk::mkctl {
namespace {

/// Two samples, an interval apart.
Answer look_at(Daemon& daemon, std::chrono::nanoseconds interval, Look& look) {
  grpc::ClientContext context;
  context.set_deadline(Daemon::deadline(daemon.timeout() + interval * 2));
  v1::WatchStatsRequest request;
  request.set_interval_ns(static_cast<std::uint64_t>(interval.count()));
  request.set_samples(2);
  const auto reader = daemon.stub().WatchStats(&context, request);
  const bool both = reader->Read(&look.before) && reader->Read(&look.after);
  for (v1::StatsSample rest; reader->Read(&rest);) {
  }
  const grpc::Status done = reader->Finish();
  return both && done.ok() ? Answer{} : daemon.explain(done);
}

struct Looks {
  std::vector<Look> good;
  std::vector<std::pair<std::size_t, Answer>> bad;  ///< with their places in the fleet
};

/// At all daemons of the fleet.
Looks look_at_all(Fleet& fleet, std::chrono::nanoseconds interval) {
  std::vector<Look> looks(fleet.daemons().size());
  std::map<const Daemon*, Look*> of;
  for (std::size_t i = 0; i < looks.size(); ++i) {
    looks[i].host = fleet.daemons()[i]->name();
    of[fleet.daemons()[i].get()] = &looks[i];
  }
  std::vector<Answer> answers =
      fleet.collect([&](Daemon& daemon) { return look_at(daemon, interval, *of.at(&daemon)); });
  Looks all;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (answers[i].error.empty()) {
      all.good.push_back(std::move(looks[i]));
    } else {
      all.bad.emplace_back(i, std::move(answers[i]));
    }
  }
  return all;
}

/// Adds the daemons of other nodes, as the ones that were asked call them, when ranks of a job were
/// not seen: the rank that all wait for may be there. False when there is none to add.
bool add_unseen(Fleet& fleet, const std::vector<Look>& looks) {
  std::map<std::string, std::uint32_t> missing;
  std::set<std::uint32_t> nodes;
  std::map<std::uint32_t, std::string> others;
  for (const Look& look : looks) {
    nodes.insert(look.after.node());
    for (const v1::Session& session : look.after.ranks()) {
      missing.try_emplace(session.job(), session.world()).first->second -= 1;
    }
    for (const v1::PeerStatus& peer : look.after.peers()) {
      if (peer.state() == v1::PeerStatus::STATE_UP) others[peer.node()] = peer.address();
    }
  }
  const bool all_seen =
      std::ranges::all_of(missing, [](const auto& job) { return job.second == 0; });
  if (all_seen) return false;
  bool added = false;
  for (const auto& [node, text] : others) {
    const auto address = daemon::parse_address(text, false);
    if (nodes.contains(node) || !address) continue;
    fleet.daemons().push_back(fleet.daemons().front()->beside(*address));
    added = true;
  }
  return added;
}

int run(Fleet& fleet, std::chrono::nanoseconds interval) {
  Looks looks = look_at_all(fleet, interval);
  const std::size_t asked_for = fleet.daemons().size();
  if (add_unseen(fleet, looks.good)) {
    Looks more = look_at_all(fleet, interval);
    if (!more.good.empty()) looks = std::move(more);
  }
  int code = kExitOk;
  for (const auto& [place, answer] : looks.bad) {
    // A daemon that was not named need not answer: that is worth a word, and no failure.
    const int its_code = fleet.print(answer);
    if (place < asked_for) code = std::max(code, its_code);
  }
  if (looks.good.empty()) return code;
  const Slowness slowness = find_slow(looks.good);
  Answer answer;
  answer.code = code;
  answer.text = render(slowness);
  answer.json = json_of(slowness);
  return fleet.print(answer);
}

}  // namespace

void declare_slow_command(Commands& commands) {
  const auto interval = std::make_shared<Duration>(Duration{"1s"});
  commands
      .add("who-is-slow", "Ranks and links that others wait for",
           [interval](Fleet& fleet) { return run(fleet, interval->value()); })
      .option("--interval", *interval, "Time between the two looks, 100ms to 60s")
      .with_default();
}

}  // namespace mk::mkctl
