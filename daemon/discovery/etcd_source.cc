#include "daemon/discovery/etcd_source.h"

#include <grpcpp/grpcpp.h>

#include <charconv>
#include <map>
#include <nlohmann/json.hpp>

#include "daemon/config/discovery_section.h"
#include "shm/limits.h"

namespace mk::daemon {
namespace {

using namespace etcdserverpb;
using Json = nlohmann::json;

constexpr auto kCallTimeout = std::chrono::seconds(2);
constexpr auto kLeaveTimeout = std::chrono::milliseconds(500);

Status check(const grpc::Status& status) {
  if (status.ok()) return {};
  return fail(ErrorCode::kUnavailable, "{}",
              status.error_message().empty() ? "no answer" : status.error_message());
}

/// The first key behind all that begin with `prefix`.
std::string end_of(std::string prefix) {
  while (!prefix.empty() && prefix.back() == '\xff') prefix.pop_back();
  if (!prefix.empty()) ++prefix.back();
  return prefix;
}

/// The address in a value; nothing when it is none of ours.
std::optional<PeerConfig> parse_value(std::string_view id, const std::string& value) {
  PeerConfig peer;
  const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), peer.id);
  if (error != std::errc{} || end != id.data() + id.size() || peer.id >= shm::kNodesMax) return {};
  const Json json = Json::parse(value, nullptr, /*allow_exceptions=*/false);
  const auto text = [&json](const char* key) -> std::string {
    if (!json.is_object()) return "";
    const auto at = json.find(key);
    return at != json.end() && at->is_string() ? at->get<std::string>() : "";
  };
  auto address = parse_address(text("address"), false);
  if (!address) return {};
  peer.address = std::move(*address);
  peer.name = text("name");
  return peer;
}

}  // namespace

/// The context of one call, which `cancel` ends.
class EtcdSource::Call {
 public:
  explicit Call(EtcdSource& source) : source_(source) {
    context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
    std::lock_guard lock(source_.mutex_);
    source_.call_ = this;
    if (source_.cancelled_) context.TryCancel();
  }
  ~Call() {
    std::lock_guard lock(source_.mutex_);
    source_.call_ = nullptr;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  grpc::ClientContext context;

 private:
  EtcdSource& source_;
};

void EtcdSource::cancel() {
  std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (call_ != nullptr) call_->context.TryCancel();
}

EtcdSource::EtcdSource(const Config& config, const DiscoverySelf& self, const TlsTexts& tls)
    : config_(config),
      prefix_(config.discovery.etcd.prefix),
      ttl_seconds_(static_cast<std::int64_t>(config.discovery.etcd.ttl_ns / 1'000'000'000)),
      self_(self),
      value_(Json{{"address", self.advertise.text()}, {"version", self.version}}.dump()),
      tls_files_(tls),
      tls_(tls) {
  open_endpoints(tls);
}

void EtcdSource::open_endpoints(const TlsTexts& tls) {
  endpoints_.clear();
  for (const std::string& text : config_.discovery.etcd.endpoints) {
    const auto address = parse_address(text, false);
    if (!address) continue;  // checked with the configuration
    ChannelOptions options;
    options.tls = tls;
    options.connect_timeout = kCallTimeout;
    const auto channel = open_channel(*address, options);
    endpoints_.push_back({text, KV::NewStub(channel), Lease::NewStub(channel)});
  }
}

void EtcdSource::renew_tls() {
  TlsTexts read = tls_files_.texts();
  tls_files_.renew();  // for the next look
  if (read == tls_) return;
  tls_ = std::move(read);
  open_endpoints(tls_);
}

EtcdSource::Nodes EtcdSource::look() { return ask_in_turn(&EtcdSource::look_at); }
EtcdSource::Nodes EtcdSource::list() { return ask_in_turn(&EtcdSource::read_list); }

EtcdSource::Nodes EtcdSource::ask_in_turn(Nodes (EtcdSource::*ask)(Endpoint&)) {
  renew_tls();
  std::string reasons;
  for (std::size_t i = 0; i < endpoints_.size(); ++i) {
    const std::size_t at = (first_ + i) % endpoints_.size();
    auto peers = (this->*ask)(endpoints_[at]);
    if (peers || peers.error().code != ErrorCode::kUnavailable) {
      first_ = at;
      return peers;
    }
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", endpoints_[at].name,
                           peers.error().message);
  }
  return fail(ErrorCode::kUnavailable, "etcd does not answer: {}", reasons);
}

EtcdSource::Nodes EtcdSource::look_at(Endpoint& endpoint) {
  MK_RETURN_IF_ERROR(renew(endpoint));
  if (!registered_) MK_RETURN_IF_ERROR(put(endpoint));
  return read_list(endpoint);
}

EtcdSource::Nodes EtcdSource::read_list(Endpoint& endpoint) {
  Call call(*this);
  RangeRequest request;
  request.set_key(prefix_);
  request.set_range_end(end_of(prefix_));
  RangeResponse response;
  MK_RETURN_IF_ERROR(check(endpoint.kv->Range(&call.context, request, &response)));
  std::map<std::uint32_t, PeerConfig> nodes;
  registered_ = false;
  for (const KeyValue& entry : response.kvs()) {
    if (entry.key() == key()) {
      registered_ = entry.lease() == lease_;  // somebody may have removed it
      continue;
    }
    const auto peer =
        parse_value(std::string_view(entry.key()).substr(prefix_.size()), entry.value());
    if (peer) nodes.emplace(peer->id, *peer);
  }
  std::vector<PeerConfig> peers;
  for (auto& [node, peer] : nodes) {
    // A client that may write to etcd may write another node's name there.
    if (std::string own = node_name_of(config_, node); !own.empty()) peer.name = std::move(own);
    peers.push_back(peer);
  }
  return peers;
}

Status EtcdSource::renew(Endpoint& endpoint) {
  if (lease_ != 0) {
    MK_ASSIGN_OR_RETURN(const bool alive, keep_alive(endpoint));
    if (alive) return {};
    lease_ = 0;  // it ran out while etcd could not be reached
    registered_ = false;
  }
  Call call(*this);
  LeaseGrantRequest request;
  request.set_ttl(ttl_seconds_);
  LeaseGrantResponse response;
  MK_RETURN_IF_ERROR(check(endpoint.lease->LeaseGrant(&call.context, request, &response)));
  if (!response.error().empty()) return fail(ErrorCode::kUnavailable, "{}", response.error());
  lease_ = response.id();
  return {};
}

Result<bool> EtcdSource::keep_alive(Endpoint& endpoint) {
  Call call(*this);
  LeaseKeepAliveRequest request;
  request.set_id(lease_);
  LeaseKeepAliveResponse response;
  const auto stream = endpoint.lease->LeaseKeepAlive(&call.context);
  if (!stream->Write(request) || !stream->Read(&response)) {
    stream->WritesDone();
    MK_RETURN_IF_ERROR(check(stream->Finish()));
    return fail(ErrorCode::kUnavailable, "it did not renew the lease");
  }
  call.context.TryCancel();  // one renewal is all we want of it
  (void)stream->Finish();
  return response.ttl() > 0;
}

Status EtcdSource::put(Endpoint& endpoint) {
  MK_ASSIGN_OR_RETURN(const auto there, put_if_unchanged(endpoint, 0));
  if (!there) return {};
  const auto holder = parse_value(std::to_string(self_.node), there->value());
  if (holder && holder->address.text() != self_.advertise.text()) {
    return fail(ErrorCode::kAlreadyExists,
                "etcd has node id {} for the daemon at {} (key {}); give each daemon its own, or "
                "wait until its lease has ended",
                self_.node, holder->address.text(), key());
  }
  // Ours, from before a restart.
  MK_ASSIGN_OR_RETURN(const auto changed, put_if_unchanged(endpoint, there->mod_revision()));
  if (!changed) return {};
  return fail(ErrorCode::kUnavailable, "key {} changed meanwhile", key());
}

Result<std::optional<KeyValue>> EtcdSource::put_if_unchanged(Endpoint& endpoint,
                                                             std::int64_t revision) {
  Call call(*this);
  TxnRequest request;
  Compare& compare = *request.add_compare();
  compare.set_target(Compare::MOD);
  compare.set_key(key());
  compare.set_mod_revision(revision);
  PutRequest& put = *request.add_success()->mutable_request_put();
  put.set_key(key());
  put.set_value(value_);
  put.set_lease(lease_);
  request.add_failure()->mutable_request_range()->set_key(key());
  TxnResponse response;
  MK_RETURN_IF_ERROR(check(endpoint.kv->Txn(&call.context, request, &response)));
  if (response.succeeded()) return std::nullopt;
  if (response.responses_size() == 0 || response.responses(0).response_range().kvs_size() == 0) {
    return fail(ErrorCode::kUnavailable, "key {} came and went", key());
  }
  return response.responses(0).response_range().kvs(0);
}

void EtcdSource::leave() {
  if (lease_ == 0 || endpoints_.empty()) return;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kLeaveTimeout);
  LeaseRevokeRequest request;
  request.set_id(lease_);
  LeaseRevokeResponse response;
  (void)endpoints_[first_].lease->LeaseRevoke(&context, request, &response);
  lease_ = 0;
}

}  // namespace mk::daemon
