#include "daemon/control/node.h"

#include <algorithm>
#include <utility>

namespace mk::daemon {

namespace {

/// Connecting blocks the control thread: clients' requests and other jobs wait for so long.
constexpr std::uint64_t kConnectTimeoutNsMax = 2'000'000'000;

}  // namespace

class Node::Impl {
 public:
  explicit Impl(NodeOptions options) : options_(std::move(options)) {}
  ~Impl() { stop(std::chrono::steady_clock::now(), nullptr); }

  Status open() {
    if (options_.rails.empty()) {
      return fail(ErrorCode::kInvalidArgument, "a node needs at least one rail");
    }
    MK_ASSIGN_OR_RETURN(loop_, ControlLoop::create(options_.loop));
    std::vector<Proxy*> raw;
    std::vector<LogRecord>
        chosen;  // told once all rails are open: a daemon may try again and again
    for (std::uint32_t rail = 0; rail < options_.rails.size(); ++rail) {
      RailOptions& rail_options = options_.rails[rail];
      rail_options.endpoint.rail = rail;
      rail_options.proxy.rail = rail;
      rail_options.endpoint.connect_timeout_ns =
          std::min(rail_options.endpoint.connect_timeout_ns, kConnectTimeoutNsMax);
      ControlLoop* loop = loop_.get();
      rail_options.endpoint.notice = [loop, rail, log = options_.control.log](const auto& text) {
        // The sink is the control thread's.
        loop->post([rail, log, text](ControlPlane&) {
          if (log)
            log({LogLevel::kWarning,
                 fmt::format("rail {}: {}", rail, text),
                 {{"rail", std::to_string(rail)}}});
        });
      };
      auto endpoint = fabric::open_endpoint(rail_options.endpoint);
      if (!endpoint) {
        return fail(endpoint.error().code, "cannot open rail {}: {}", rail,
                    endpoint.error().message);
      }
      if (const std::string& why = (*endpoint)->capabilities().explanation; !why.empty()) {
        chosen.push_back({LogLevel::kInfo,
                          fmt::format("rail {}: {}", rail, why),
                          {{"rail", std::to_string(rail)}}});
      }
      proxies_.push_back(std::make_unique<Proxy>(
          std::move(*endpoint), rail_options.proxy,
          [loop, rail](ProxyEvent event) { loop->proxy_event(rail, std::move(event)); }));
      raw.push_back(proxies_.back().get());
    }
    for (const LogRecord& record : chosen) {
      if (options_.control.log) options_.control.log(record);
    }
    loop_->configure(options_.control, std::move(raw));
    return {};
  }

  Status start(PeerTransport& peers) {
    for (const auto& proxy : proxies_) {
      if (Status started = proxy->start(); !started) {
        for (const auto& other : proxies_) other->stop();
        return started;
      }
    }
    return loop_->start(peers);
  }

  void stop(std::chrono::steady_clock::time_point deadline, StopPhase* phase) {
    if (loop_ == nullptr || std::exchange(stopped_, true)) return;
    const auto at = [phase](const char* what) {
      if (phase != nullptr) phase->store(what);
    };
    at("the control thread");
    loop_->stop(deadline);
    // What could not drain is still in flight: the proxies stop before its memory goes, and the
    // memory goes before the endpoints it is registered with.
    at("the proxies");
    for (const auto& proxy : proxies_) proxy->stop();
    at("the memory of the last sessions");
    loop_->reset();
  }

  ControlLoop& loop() { return *loop_; }
  Proxy& proxy(std::uint32_t rail) { return *proxies_.at(rail); }
  const NodeOptions& options() const { return options_; }

 private:
  NodeOptions options_;
  bool stopped_ = false;
  std::unique_ptr<ControlLoop> loop_;
  std::vector<std::unique_ptr<Proxy>> proxies_;  ///< gone before the loop they report to
};

Result<std::unique_ptr<Node>> Node::create(NodeOptions options) {
  auto impl = std::make_unique<Impl>(std::move(options));
  MK_RETURN_IF_ERROR(impl->open());
  return std::unique_ptr<Node>(new Node(std::move(impl)));
}

Node::Node(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Node::~Node() = default;

Status Node::start(PeerTransport& peers) { return impl_->start(peers); }

void Node::drain(const std::string& reason) {
  impl_->loop().post([reason](ControlPlane& plane) { plane.drain(reason); });
}

void Node::resume() {
  impl_->loop().post([](ControlPlane& plane) { plane.resume(); });
}

void Node::stop(std::chrono::steady_clock::time_point deadline, StopPhase* phase) {
  impl_->stop(deadline, phase);
}

PeerSink& Node::peer_sink() { return impl_->loop(); }
ControlLoop& Node::loop() { return impl_->loop(); }

Result<ControlSnapshot> Node::snapshot() {
  return impl_->loop().run_sync([](ControlPlane& plane) { return plane.snapshot(); });
}

NodeId Node::id() const { return impl_->options().control.node; }
std::uint64_t Node::generation() const { return impl_->loop().hello().generation; }
const std::string& Node::socket_path() const { return impl_->loop().socket_path(); }
std::uint32_t Node::rails() const {
  return static_cast<std::uint32_t>(impl_->options().rails.size());
}
const fabric::Capabilities& Node::capabilities(std::uint32_t rail) const {
  return impl_->proxy(rail).endpoint().capabilities();
}
const ProxyStats& Node::proxy_stats(std::uint32_t rail) const { return impl_->proxy(rail).stats(); }
TraceBuffer& Node::trace(std::uint32_t rail) { return impl_->proxy(rail).trace(); }

}  // namespace mk::daemon
