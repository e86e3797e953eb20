// One link: its state and since when, and that of the daemon at the other end.
#include <fmt/format.h>

#include <set>

#include "daemon/mkctl/commands.h"
#include "daemon/mkctl/render.h"
#include "daemon/mkctl/table.h"

namespace mk::mkctl {
namespace {

using Stub = v1::Admin::Stub;

struct Options {
  std::int64_t peer = -1, rail = -1;  ///< -1: all
};

std::string plural(std::uint64_t count, const std::string& one, const std::string& many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

std::string peer_text(const v1::PeerStatus& peer) {
  const std::string_view state = peer.state() == v1::PeerStatus::STATE_UP ? "connected"
                                 : peer.state() == v1::PeerStatus::STATE_CONNECTING
                                     ? "not connected (we call it)"
                                     : "not connected (it has to call us)";
  std::string text = fmt::format("{} for {}", state, human_age(peer.state_for_ns()));
  if (!peer.version().empty()) text += ", mkerneld " + printable(peer.version());
  text += ", lost " + plural(peer.breaks(), "time", "times");
  if (peer.state() != v1::PeerStatus::STATE_UP && !peer.reason().empty()) {
    text += ": " + printable(peer.reason());
  }
  return text;
}

std::string sizes_text(const v1::Link& link) {
  std::string text;
  for (int i = 0; i < link.batch_commands_size(); ++i) {
    if (link.batch_commands(i) == 0) continue;
    text += fmt::format("{}{} of {}", text.empty() ? "" : ", ", link.batch_commands(i), i + 1);
  }
  return text.empty() ? "none" : text;
}

std::string link_text(const v1::Link& link, const v1::GetStatusResponse& status) {
  std::string text = fmt::format(
      "rail {} to {}: {} for {}{}\n", rails_of(link), printable(link.peer_name()), link.state(),
      human_age(link.state_for_ns()), link.reason().empty() ? "" : ": " + printable(link.reason()));
  for (const v1::PeerStatus& peer : status.peers()) {
    if (peer.node() == link.peer()) text += "  its daemon   " + peer_text(peer) + "\n";
  }
  text += fmt::format("  network      {}\n", printable(link.fabric()));
  text += fmt::format("  sent         {} in {}\n", human_bytes(static_cast<double>(link.bytes())),
                      plural(link.messages(), "write", "writes"));
  text += fmt::format("  submissions  {}\n", sizes_text(link));
  text += fmt::format(
      "  outstanding  {}{}\n", plural(link.outstanding(), "write", "writes"),
      link.stalled_for_ns() == 0
          ? ""
          : fmt::format(", none completed for {}", human_duration(link.stalled_for_ns())));
  const std::uint64_t again = link.connects() > 1 ? link.connects() - 1 : 0;
  text += fmt::format("  trouble      {}, {}, {}, {}\n",
                      plural(link.errors(), "failed write", "failed writes"),
                      plural(link.post_retries(), "retried submission", "retried submissions"),
                      plural(again, "reconnection", "reconnections"),
                      plural(link.connect_failures(), "failed try", "failed tries"));
  return text;
}

Answer show(Daemon& daemon, const Options& options) {
  v1::ListLinksResponse links;
  v1::GetStatusResponse status;
  auto done = daemon.ask(&Stub::ListLinks, v1::ListLinksRequest(), links);
  if (done.ok()) done = daemon.ask(&Stub::GetStatus, v1::GetStatusRequest(), status);
  if (!done.ok()) return daemon.explain(done);
  v1::ListLinksResponse found;
  std::set<std::uint32_t> nodes;
  std::string text;
  for (const v1::Link& link : links.links()) {
    if (options.peer >= 0 && link.peer() != options.peer) continue;
    if (options.rail >= 0 && link.rail() != options.rail) continue;
    *found.add_links() = link;
    nodes.insert(link.peer());
    text += (text.empty() ? "" : "\n") + link_text(link, status);
  }
  // A peer to which no job has wanted a link yet has a state all the same.
  v1::GetStatusResponse peers;
  for (const v1::PeerStatus& peer : status.peers()) {
    if (options.peer >= 0 && peer.node() != options.peer) continue;
    *peers.add_peers() = peer;
    if (nodes.contains(peer.node()) || options.rail >= 0) continue;
    text += fmt::format("{}node {} ({}): no job has wanted a link yet\n  its daemon   {}\n",
                        text.empty() ? "" : "\n", peer.node(), printable(peer.address()),
                        peer_text(peer));
  }
  if (text.empty()) {
    return error_answer(kExitUnhealthy,
                        fmt::format("no such link at {}; see: mkctl link list", daemon.name()));
  }
  Json json = json_of(found);
  json["peers"] = json_of(peers)["peers"];
  return {kExitOk, text, json, ""};
}

}  // namespace

void declare_link_commands(Commands& commands) {
  const auto options = std::make_shared<Options>();
  Command app =
      commands.add("link show", "A link's state and since when, and its peer's", [=](Fleet& fleet) {
        return fleet.each([&](Daemon& daemon) { return show(daemon, *options); });
      });
  app.option("NODE", options->peer, "The peer's node id; default: all").not_negative();
  app.option("--rail", options->rail, "Only this rail").not_negative();
}

}  // namespace mk::mkctl
