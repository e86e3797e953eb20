/// \file
/// Another daemon's side of the handshake, for the parts of jobs that a test plays: it offers them,
/// answers offers with proofs and proofs with parts, as daemons do.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "daemon/control/job_secret.h"
#include "daemon/control/peer_transport.h"

namespace mk::daemon::test {

class PlayedPeer {
 public:
  /// `other`: the node under test.
  PlayedPeer(NodeId self, NodeId other) : self_(self), other_(other) {}

  /// Plays `part` from now on, instead of one of that name before. What it says at once.
  std::vector<PeerMessage> play(const JobPart& part, std::uint32_t uid = 1000,
                                const std::string& secret = "") {
    Played& played = played_[part.job];
    played = {part, offer_of(part, uid), job_secret_digest(part.job, secret)};
    played.offer.has_secret = !secret.empty();
    std::vector<PeerMessage> says{played.offer};
    const auto known = known_.find(part.job);
    if (known != known_.end()) says.push_back(proof(played, known->second));
    return says;
  }
  /// What it says to a message of the node under test.
  std::vector<PeerMessage> answer(const PeerMessage& said) {
    if (const auto* offer = std::get_if<JobOffer>(&said)) {
      const auto known = known_.find(offer->job);
      const bool again = known != known_.end() && known->second.part_id == offer->part_id;
      known_[offer->job] = *offer;
      const auto played = played_.find(offer->job);
      if (played == played_.end() || again) return {};
      return {proof(played->second, *offer)};
    }
    if (const auto* theirs = std::get_if<JobProof>(&said)) {
      const auto played = played_.find(theirs->job);
      if (played != played_.end() && played->second.part.part_id == theirs->peer_part_id) {
        return {played->second.part};
      }
    }
    return {};
  }
  static JobOffer offer_of(const JobPart& part, std::uint32_t uid = 1000) {
    return {.job = part.job,
            .part_id = part.part_id,
            .node_rank = part.node_rank,
            .nodes = part.nodes,
            .local_size = part.local_size,
            .uid = uid,
            .has_secret = false,
            .nonce = Bytes(kNonceBytes, static_cast<std::byte>(part.part_id))};
  }

 private:
  struct Played {
    JobPart part;
    JobOffer offer;
    Bytes digest;
  };
  JobProof proof(const Played& played, const JobOffer& theirs) const {
    const JobOffer& ours = played.offer;
    return {ours.job, ours.part_id, theirs.part_id,
            job_proof(played.digest, ours.job, {self_, ours.uid, ours.part_id, ours.nonce},
                      {other_, theirs.uid, theirs.part_id, theirs.nonce})};
  }
  const NodeId self_, other_;
  std::map<std::string, Played> played_;
  std::map<std::string, JobOffer> known_;
};

}  // namespace mk::daemon::test
