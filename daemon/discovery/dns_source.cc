#include "daemon/discovery/dns_source.h"

#include <grpcpp/grpcpp.h>

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
  identify();

  std::map<std::uint32_t, Host*> nodes;
  for (auto& [place, host] : hosts_) {
    if (!host.known) continue;
    if (host.node == self_.node) {
      if (host.generation == self_.generation) continue;  // ourselves
      host.ask_again = {};
      return fail(ErrorCode::kAlreadyExists,
                  "the daemon at {} has node id {}, as this one does; give each its own", place,
                  host.node);
    }
    const auto [at, fresh] = nodes.emplace(host.node, &host);
    if (!fresh && at->second->generation != host.generation) {
      // One of them may have restarted since it was asked.
      host.ask_again = at->second->ask_again = {};
      return fail(ErrorCode::kAlreadyExists,
                  "the daemons at {} and {} both have node id {}; give each its own",
                  at->second->answer.address.text(), place, host.node);
    }  // the same generation: one daemon under two addresses
  }
  std::vector<PeerConfig> peers;
  for (const auto& [node, host] : nodes) {
    peers.push_back(
        {.id = node, .address = host->answer.address, .name = node_name_of(config_, node)});
  }
  return peers;
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

void DnsSource::identify() {
  const auto now = Clock::now();
  grpc::CompletionQueue queue;
  std::map<Host*, Call> calls;
  for (auto& [place, host] : hosts_) {
    if (host.known && now < host.ask_again) continue;
    Call& call = calls[&host];
    call.context.set_deadline(std::chrono::system_clock::now() + kIdentifyTimeout);
    call.reader = host.stub->AsyncIdentify(&call.context, v1::IdentifyRequest(), &queue);
    call.reader->Finish(&call.response, &call.status, &host);
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
    host.known = true;
    host.node = node;
    host.generation = call.response.generation();
    host.ask_again = now + kAskAgain;
  }
  queue.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) {
  }
}

}  // namespace mk::daemon
