#include "daemon/discovery/dns_source.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <set>

#include "daemon/config/discovery_section.h"

namespace mk::daemon {
namespace {

namespace v1 = ::mkernel::v1;

/// All are asked at once; one that takes longer is left out until the next look.
constexpr auto kIdentifyTimeout = std::chrono::seconds(1);
/// Behind an address that stays, the daemon may have become another one.
constexpr auto kAskAgain = std::chrono::seconds(60);

struct Call {
  grpc::ClientContext context;
  v1::IdentifyResponse response;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::IdentifyResponse>> reader;
};

}  // namespace

DnsSource::DnsSource(const Config& config, const DiscoverySelf& self, const TlsTexts& tls)
    : config_(config),
      question_(parse_dns_question(config.discovery.dns.name).value_or(DnsQuestion{})),
      server_(config.discovery.dns.server),
      self_(self),
      tls_files_(tls),
      tls_(tls) {}

void DnsSource::renew_tls() {
  TlsTexts read = tls_files_.texts();
  tls_files_.renew();  // for the next look
  if (read == tls_) return;
  tls_ = std::move(read);
  for (auto& [place, host] : hosts_) host.stub.reset();
}

Result<std::vector<PeerConfig>> DnsSource::look() {
  MK_ASSIGN_OR_RETURN(const auto answers, resolve(question_, server_));
  renew_tls();
  std::set<std::string> present;
  for (const DnsAnswer& answer : answers) {
    const std::string place = answer.address.text();
    present.insert(place);
    Host& host = hosts_[place];
    if (host.stub) continue;
    host.answer = answer;
    ChannelOptions channel;
    channel.tls = tls_;
    channel.tls_name = answer.name;
    channel.connect_timeout = kIdentifyTimeout;
    host.stub = v1::Peer::NewStub(open_channel(answer.address, channel));
  }
  std::erase_if(hosts_, [&](const auto& host) { return !present.contains(host.first); });
  std::vector<Host*> asked;
  const auto now = Clock::now();
  for (auto& [place, host] : hosts_) {
    if (!host.answers || now - host.answered >= kAskAgain) asked.push_back(&host);
  }
  identify(asked);
  // One of them may have restarted, or be elsewhere, since it was asked.
  std::vector<Host*> in_question = rivals();
  std::erase_if(in_question, [&](Host* host) { return std::ranges::count(asked, host) != 0; });
  identify(in_question);

  std::map<std::uint32_t, Host*> nodes;
  for (auto& [place, host] : hosts_) {
    if (!host.known) continue;
    if (host.node == self_.node) {
      if (host.generation == self_.generation || !host.answers) continue;  // ourselves, or nobody
      return fail(ErrorCode::kAlreadyExists,
                  "the daemon at {} has node id {}, as this one does; give each its own", place,
                  host.node);
    }
    const auto [at, fresh] = nodes.emplace(host.node, &host);
    if (fresh) continue;
    const Host& other = *at->second;
    if (other.answers && host.answers && other.generation != host.generation) {
      return fail(ErrorCode::kAlreadyExists,
                  "the daemons at {} and {} both have node id {}; give each its own",
                  other.answer.address.text(), place, host.node);
    }
    // One daemon: under two addresses, or one of them is where it was before.
    if (!other.answers && (host.answers || host.answered > other.answered)) at->second = &host;
  }
  std::vector<PeerConfig> peers;
  for (const auto& [node, host] : nodes) {
    peers.push_back(
        {.id = node, .address = host->answer.address, .name = node_name_of(config_, node)});
  }
  return peers;
}

std::vector<DnsSource::Host*> DnsSource::rivals() {
  std::map<std::uint32_t, std::set<std::uint64_t>> generations{{self_.node, {self_.generation}}};
  for (const auto& [place, host] : hosts_) {
    if (host.known) generations[host.node].insert(host.generation);
  }
  std::vector<Host*> all;
  for (auto& [place, host] : hosts_) {
    if (host.known && generations.at(host.node).size() > 1) all.push_back(&host);
  }
  return all;
}

std::string DnsSource::remark() const {
  std::vector<std::string> all;
  for (const auto& [place, host] : hosts_) {
    if (!host.trouble.empty()) all.push_back(host.trouble);
  }
  return fmt::format("{}", fmt::join(all, "; "));
}

std::vector<Address> DnsSource::silent() const {
  std::vector<Address> addresses;
  for (const auto& [place, host] : hosts_) {
    if (!host.known) addresses.push_back(host.answer.address);
  }
  return addresses;
}

void DnsSource::identify(const std::vector<Host*>& hosts) {
  grpc::CompletionQueue queue;
  std::map<Host*, Call> calls;
  for (Host* const host : hosts) {
    host->answers = false;
    Call& call = calls[host];
    call.context.set_deadline(std::chrono::system_clock::now() + kIdentifyTimeout);
    call.reader = host->stub->AsyncIdentify(&call.context, v1::IdentifyRequest(), &queue);
    call.reader->Finish(&call.response, &call.status, host);
  }
  for (std::size_t left = calls.size(); left > 0; --left) {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    Host& host = *static_cast<Host*>(tag);
    const Call& call = calls.at(&host);
    if (!call.status.ok()) continue;  // it keeps the name it had
    const std::uint32_t node = call.response.node();
    // Another node's certificate says whose it is, and that is not this node.
    if (tls_.enabled()) {
      const auto names = certificate_names(*call.context.auth_context());
      const std::string wanted = node_name_of(config_, node);
      if (!names_match(names, wanted)) {
        host.trouble = fmt::format(
            "the daemon at {} says that it is node {}, but its certificate, of '{}', does not "
            "speak for node {}; give it one that is made out to {} (discovery.node_name)",
            host.answer.address.text(), node, fmt::join(names, "', '"), node, wanted);
        continue;
      }
    }
    host.trouble.clear();
    host.known = host.answers = true;
    host.answered = Clock::now();
    host.node = node;
    host.generation = call.response.generation();
  }
  queue.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) {
  }
}

}  // namespace mk::daemon
