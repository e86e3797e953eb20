#include "daemon/discovery/discovery.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "daemon/discovery/dns_source.h"
#include "daemon/discovery/etcd_source.h"

namespace mk::daemon {
namespace {

using Entry = std::pair<std::uint32_t, std::string>;

/// What a change is: another node, or a node elsewhere.
std::vector<Entry> entries(const std::vector<PeerConfig>& nodes) {
  std::vector<Entry> all;
  for (const PeerConfig& node : nodes) all.emplace_back(node.id, node.address.text());
  return all;
}

}  // namespace

Result<std::unique_ptr<DiscoverySource>> open_discovery(const Config& config,
                                                        const DiscoverySelf& self,
                                                        const TlsTexts& tls) {
  std::unique_ptr<DiscoverySource> source;
  if (config.discovery.kind == "dns") {
    source = std::make_unique<DnsSource>(config, self, tls);
  } else if (config.discovery.kind == "etcd") {
    const auto& etcd = config.discovery.etcd;
    MK_ASSIGN_OR_RETURN(const TlsTexts etcd_tls,
                        read_tls(etcd.cert, etcd.key, etcd.ca, "discovery.etcd"));
    source = std::make_unique<EtcdSource>(config, self, etcd_tls);
  }
  return source;
}

class Discovery::Impl {
 public:
  Impl(std::unique_ptr<DiscoverySource> source, std::chrono::nanoseconds interval, Sink sink,
       LogSink log)
      : source_(std::move(source)),
        interval_(interval),
        sink_(std::move(sink)),
        log_(std::move(log)) {
    thread_ = std::thread([this] { run(); });
  }
  ~Impl() { stop(); }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (!thread_.joinable()) return;
    source_->cancel();
    thread_.join();
    source_->leave();
  }

  std::string trouble() const {
    std::lock_guard lock(mutex_);
    return trouble_;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      lock.unlock();
      auto nodes = source_->look();
      lock.lock();
      if (stopping_) return;
      note(nodes);
      if (nodes) {
        const auto found = entries(*nodes);
        if (found != known_) {
          known_ = found;
          lock.unlock();
          sink_(std::move(*nodes));
          lock.lock();
        }
      }
      changed_.wait_for(lock, interval_, [this] { return stopping_; });
    }
  }

  /// That it began to fail, and that it works again, is said once.
  void note(const Result<std::vector<PeerConfig>>& nodes) {
    const std::string trouble = nodes ? source_->remark() : nodes.error().message;
    if (trouble == trouble_) return;
    const bool had_failed = !trouble_.empty();
    trouble_ = trouble;
    if (!nodes) {
      say(LogLevel::kWarning, fmt::format("discovery: {}; the nodes known so far stay", trouble));
    } else if (!trouble.empty()) {
      say(LogLevel::kWarning, "discovery: " + trouble);
    } else if (had_failed) {
      say(LogLevel::kInfo, "discovery works again");
    }
  }

  /// One line of code, and so one kind: a source that comes and goes fills no log.
  void say(LogLevel level, std::string text) {
    if (log_) log_({.level = level, .message = std::move(text), .fields = {}});
  }

  const std::unique_ptr<DiscoverySource> source_;
  const std::chrono::nanoseconds interval_;
  const Sink sink_;
  const LogSink log_;
  std::optional<std::vector<Entry>> known_;  ///< the thread's
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::string trouble_;
  std::thread thread_;
};

Discovery::Discovery(std::unique_ptr<DiscoverySource> source, std::chrono::nanoseconds interval,
                     Sink sink, LogSink log)
    : impl_(std::make_unique<Impl>(std::move(source), interval, std::move(sink), std::move(log))) {}
Discovery::~Discovery() = default;
void Discovery::stop() { impl_->stop(); }
std::string Discovery::trouble() const { return impl_->trouble(); }

}  // namespace mk::daemon
