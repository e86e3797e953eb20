#include "daemon/control/local_peer_transport.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace mk::daemon {

class LocalCluster::Impl {
 public:
  explicit Impl(std::uint32_t nodes) {
    for (NodeId node = 0; node < nodes; ++node) {
      members_.push_back({std::make_unique<Transport>(*this, node), nullptr});
    }
  }

  PeerTransport& transport(NodeId node) { return *members_.at(node).transport; }

  void join(NodeId node, PeerSink& sink) {
    std::lock_guard lock(mutex_);
    members_.at(node).sink = &sink;
    for (NodeId other = 0; other < members_.size(); ++other) bring_up(node, other);
  }

  void leave(NodeId node, const std::string& reason) {
    std::lock_guard lock(mutex_);
    for (NodeId other = 0; other < members_.size(); ++other) break_stream(node, other, reason);
    members_.at(node).sink = nullptr;
  }

  void disconnect(NodeId a, NodeId b, const std::string& reason) {
    std::lock_guard lock(mutex_);
    break_stream(a, b, reason);
    cut_.insert(std::minmax(a, b));
  }

  void connect(NodeId a, NodeId b) {
    std::lock_guard lock(mutex_);
    cut_.erase(std::minmax(a, b));
    bring_up(a, b);
  }

 private:
  class Transport final : public PeerTransport {
   public:
    Transport(Impl& cluster, NodeId node) : cluster_(cluster), node_(node) {}
    std::vector<NodeId> nodes() const override {
      std::vector<NodeId> others;
      for (NodeId node = 0; node < cluster_.members_.size(); ++node) {
        if (node != node_) others.push_back(node);
      }
      return others;
    }
    Status send(NodeId node, const PeerMessage& message) override {
      return cluster_.send(node_, node, message);
    }
    std::string describe(NodeId node) const override {
      return fmt::format("node {} (in this process)", node);
    }
    void disconnect(NodeId node, const std::string& reason) override {
      cluster_.disconnect(node_, node, reason);
    }

   private:
    Impl& cluster_;
    const NodeId node_;
  };
  struct Member {
    std::unique_ptr<Transport> transport;
    PeerSink* sink;  ///< null: has not joined
  };

  Status send(NodeId from, NodeId to, const PeerMessage& message) {
    std::lock_guard lock(mutex_);
    if (!up_.contains(std::minmax(from, to))) {
      return fail(ErrorCode::kUnavailable, "there is no stream from node {} to node {}", from, to);
    }
    members_[to].sink->peer_message(from, message, {});
    return {};
  }

  void bring_up(NodeId a, NodeId b) {
    const auto pair = std::minmax(a, b);
    if (a == b || members_.at(a).sink == nullptr || members_.at(b).sink == nullptr) return;
    if (cut_.contains(pair) || !up_.insert(pair).second) return;
    members_[a].sink->peer_message(b, members_[b].sink->hello_for(a), {});
    members_[b].sink->peer_message(a, members_[a].sink->hello_for(b), {});
  }

  void break_stream(NodeId a, NodeId b, const std::string& reason) {
    if (up_.erase(std::minmax(a, b)) == 0) return;
    members_[a].sink->peer_down(b, reason);
    members_[b].sink->peer_down(a, reason);
  }

  std::mutex mutex_;  ///< held while sinks are called: they only queue
  std::vector<Member> members_;
  std::set<std::pair<NodeId, NodeId>> up_;
  std::set<std::pair<NodeId, NodeId>> cut_;
};

LocalCluster::LocalCluster(std::uint32_t nodes) : impl_(std::make_unique<Impl>(nodes)) {}
LocalCluster::~LocalCluster() = default;
PeerTransport& LocalCluster::transport(NodeId node) { return impl_->transport(node); }
void LocalCluster::join(NodeId node, PeerSink& sink) { impl_->join(node, sink); }
void LocalCluster::leave(NodeId node, const std::string& reason) { impl_->leave(node, reason); }
void LocalCluster::disconnect(NodeId a, NodeId b, const std::string& reason) {
  impl_->disconnect(a, b, reason);
}
void LocalCluster::connect(NodeId a, NodeId b) { impl_->connect(a, b); }

}  // namespace mk::daemon
