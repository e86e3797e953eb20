#include "client/embedded/embedded.h"

#include <fmt/format.h>
#include <unistd.h>

#include <random>
#include <utility>
#include <vector>

#include "daemon/control/local_peer_transport.h"
#include "daemon/control/node.h"
#include "shm/host/result.h"
#include "shm/limits.h"

namespace mk {

namespace {

/// A name nobody else has: several clusters may live in one process, and pids come again.
std::string socket_name(std::uint32_t node, std::uint64_t cluster) {
  return fmt::format("@mkernel-embedded-{}-{:016x}-{}", ::getpid(), cluster, node);
}

std::uint64_t random_word() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

daemon::NodeOptions node_options(const EmbeddedOptions& options, std::uint32_t node,
                                 std::uint64_t cluster) {
  daemon::NodeOptions result;
  result.control.node = node;
  result.control.version = "embedded";
  result.loop.socket_path = socket_name(node, cluster);
  result.loop.same_user_only = true;  // everybody on this machine can see and open the name
  daemon::RailOptions rail;
  rail.endpoint.fabric = options.fabric;
  rail.endpoint.provider = options.provider;
  rail.endpoint.bind_address = options.bind_address;
  rail.endpoint.link_model.bytes_per_second = options.link_bytes_per_second;
  rail.endpoint.link_model.latency_ns = static_cast<std::uint64_t>(options.link_latency.count());
  rail.proxy.spin_ns = static_cast<std::uint64_t>(options.spin.count());
  result.rails.assign(options.rails, rail);
  return result;
}

}  // namespace

class EmbeddedCluster::Impl {
 public:
  explicit Impl(const EmbeddedOptions& options) : options_(options), peers_(options.nodes) {}

  ~Impl() {
    for (std::uint32_t node = 0; node < nodes_.size(); ++node) stop_node(node);
  }

  Status start() {
    const std::uint64_t cluster = random_word();
    for (std::uint32_t id = 0; id < options_.nodes; ++id) {
      MK_ASSIGN_OR_RETURN(auto node, daemon::Node::create(node_options(options_, id, cluster)));
      nodes_.push_back(std::move(node));
    }
    for (std::uint32_t id = 0; id < options_.nodes; ++id) {
      MK_RETURN_IF_ERROR(nodes_[id]->start(peers_.transport(id)));
      peers_.join(id, nodes_[id]->peer_sink());
    }
    return {};
  }

  void stop_node(std::uint32_t node) {
    nodes_.at(node)->stop(std::chrono::steady_clock::now() + options_.drain_timeout);
    peers_.leave(node, "its node has stopped");
  }

  bool is_here() const { return owner_ == ::getpid(); }
  const daemon::Node& node(std::uint32_t id) const { return *nodes_.at(id); }
  std::uint32_t nodes() const { return options_.nodes; }

 private:
  const pid_t owner_ = ::getpid();
  const EmbeddedOptions options_;
  daemon::LocalCluster peers_;  ///< outlives the nodes that send by it
  std::vector<std::unique_ptr<daemon::Node>> nodes_;
};

Result<std::unique_ptr<EmbeddedCluster>> EmbeddedCluster::start(const EmbeddedOptions& options) {
  if (options.nodes == 0 || options.nodes > shm::kNodesMax) {
    return fail(ErrorCode::kInvalidArgument,
                "an embedded cluster of {} nodes; 1 to {} are possible", options.nodes,
                shm::kNodesMax);
  }
  if (options.rails == 0 || options.rails > shm::kLocalRanksMax) {
    return fail(ErrorCode::kInvalidArgument, "embedded nodes with {} rails; 1 to {} are possible",
                options.rails, shm::kLocalRanksMax);
  }
  if (options.link_latency.count() < 0 || !(options.link_bytes_per_second >= 0)) {
    return fail(ErrorCode::kInvalidArgument, "a link's speed and latency cannot be negative");
  }
  if (options.spin.count() < 0) {
    return fail(ErrorCode::kInvalidArgument, "a rail's thread cannot spin for a negative time");
  }
  auto impl = std::make_unique<Impl>(options);
  MK_RETURN_IF_ERROR(impl->start());
  return std::unique_ptr<EmbeddedCluster>(new EmbeddedCluster(std::move(impl)));
}

EmbeddedCluster::EmbeddedCluster(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
EmbeddedCluster::~EmbeddedCluster() {
  if (impl_->is_here()) return;
  // A forked child has none of the nodes' threads, for which it would wait for ever. Without memory
  // for a pointer the child ends.
  // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new)
  static auto& kept = *new std::vector<Impl*>;
  kept.push_back(impl_.release());
}

std::uint32_t EmbeddedCluster::nodes() const { return impl_->nodes(); }

const std::string& EmbeddedCluster::socket_path(std::uint32_t node) const {
  return impl_->node(node).socket_path();
}

const std::string& EmbeddedCluster::fabric() const { return impl_->node(0).capabilities(0).name; }

void EmbeddedCluster::stop_node(std::uint32_t node) { impl_->stop_node(node); }

}  // namespace mk
