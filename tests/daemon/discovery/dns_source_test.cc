// Discovery by DNS against a name server and daemons that say what the test says. A real name
// server is check_dns.py's.
#include "daemon/discovery/dns_source.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include "daemon/config/discovery_section.h"
#include "daemon/discovery/bystander.h"
#include "shm/host/unique_fd.h"
#include "tests/daemon/discovery/tls_files.h"

namespace mk::daemon {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

namespace v1 = ::mkernel::v1;

// RFC 1035.
constexpr std::uint16_t kA = 1, kAaaa = 28, kSrv = 33;
constexpr std::uint8_t kNoError = 0, kServerFailure = 2, kNoSuchName = 3;
constexpr std::size_t kHeaderBytes = 12;

UniqueFd bound_socket(int type, std::uint16_t& port) {
  UniqueFd fd(::socket(AF_INET, type | SOCK_CLOEXEC, 0));
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof place;
  EXPECT_EQ(0, ::bind(fd.get(), reinterpret_cast<sockaddr*>(&place), bytes));
  EXPECT_EQ(0, ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&place), &bytes));
  port = ntohs(place.sin_port);
  return fd;
}

std::string big_endian(std::uint32_t value, int bytes) {
  std::string text;
  while (bytes-- > 0) text += static_cast<char>(value >> (8 * bytes) & 0xff);
  return text;
}

/// "a.b" as the labels of a message.
std::string labels(const std::string& name) {
  std::string out;
  for (std::size_t at = 0; at < name.size();) {
    const std::size_t end = std::min(name.find('.', at), name.size());
    out += static_cast<char>(end - at) + name.substr(at, end - at);
    at = end + 1;
  }
  return out + '\0';
}

std::string ipv4(const std::string& text) {
  in_addr address{};
  EXPECT_EQ(1, ::inet_pton(AF_INET, text.c_str(), &address));
  return {reinterpret_cast<const char*>(&address), sizeof address};
}

std::string ipv6(const std::string& text) {
  in6_addr address{};
  EXPECT_EQ(1, ::inet_pton(AF_INET6, text.c_str(), &address));
  return {reinterpret_cast<const char*>(&address), sizeof address};
}

std::string service(const std::string& target, std::uint16_t port) {
  return big_endian(0, 2) + big_endian(0, 2) + big_endian(port, 2) + labels(target);
}

/// A name server on a port of its own.
class FakeDns {
 public:
  FakeDns() : fd_(bound_socket(SOCK_DGRAM, port_)), thread_([this] { run(); }) {}
  ~FakeDns() {
    stop_ = true;
    thread_.join();
  }
  std::string server() const { return fmt::format("127.0.0.1:{}", port_); }

  void add(const std::string& name, std::uint16_t type, const std::string& data) {
    std::lock_guard lock(mutex_);
    records_[name].emplace_back(type, data);
  }
  void forget(const std::string& name) {
    std::lock_guard lock(mutex_);
    records_.erase(name);
  }
  /// From now on every answer has this code, or announces a record that does not follow.
  void fail(std::uint8_t code, bool malformed = false) {
    std::lock_guard lock(mutex_);
    code_ = code;
    malformed_ = malformed;
  }

 private:
  void run() {
    while (!stop_) {
      pollfd ready{fd_.get(), POLLIN, 0};
      if (::poll(&ready, 1, 20) <= 0) continue;
      char question[512];
      sockaddr_in from{};
      socklen_t bytes = sizeof from;
      const ssize_t got = ::recvfrom(fd_.get(), question, sizeof question, 0,
                                     reinterpret_cast<sockaddr*>(&from), &bytes);
      if (got < static_cast<ssize_t>(kHeaderBytes) + 5) continue;
      const std::string reply = answer({question, static_cast<std::size_t>(got)});
      ::sendto(fd_.get(), reply.data(), reply.size(), 0, reinterpret_cast<sockaddr*>(&from), bytes);
    }
  }
  std::string answer(const std::string& question) {
    std::string name;
    std::size_t at = kHeaderBytes;
    while (question[at] != 0) {
      const auto label = static_cast<unsigned char>(question[at]);
      name += (name.empty() ? "" : ".") + question.substr(at + 1, label);
      at += label + 1u;
    }
    const auto type = static_cast<std::uint16_t>(static_cast<unsigned char>(question[at + 1]) << 8 |
                                                 static_cast<unsigned char>(question[at + 2]));
    const std::string asked = question.substr(kHeaderBytes, at + 5 - kHeaderBytes);
    std::lock_guard lock(mutex_);
    std::string records;
    std::uint32_t count = malformed_ ? 1 : 0;
    const auto found = records_.find(name);
    const std::uint8_t code =
        code_ != kNoError || malformed_ || found != records_.end() ? code_ : kNoSuchName;
    if (code == kNoError && found != records_.end() && !malformed_) {
      for (const auto& [of_type, data] : found->second) {
        if (of_type != type) continue;
        ++count;
        records += big_endian(0xc00c, 2) + big_endian(type, 2) + big_endian(1, 2) +
                   big_endian(60, 4) + big_endian(static_cast<std::uint32_t>(data.size()), 2) +
                   data;
      }
    }
    // A response, recursion available; one question, and its answers.
    return question.substr(0, 2) + big_endian(0x8180u | code, 2) + big_endian(1, 2) +
           big_endian(count, 2) + big_endian(0, 4) + asked + records;
  }

  std::uint16_t port_ = 0;
  UniqueFd fd_;
  std::mutex mutex_;
  std::map<std::string, std::vector<std::pair<std::uint16_t, std::string>>> records_;
  std::uint8_t code_ = kNoError;
  bool malformed_ = false;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

std::vector<std::string> texts(const Result<std::vector<DnsAnswer>>& answers) {
  if (!answers) return {answers.error().message};
  std::vector<std::string> texts;
  for (const DnsAnswer& answer : *answers) {
    texts.push_back(answer.address.text() + " " + answer.name);
  }
  return texts;
}

TEST(Resolver, AHostHasAllItsAddressesOnce) {
  FakeDns dns;
  for (const char* address : {"127.0.0.2", "127.0.0.1", "127.0.0.2"}) {
    dns.add("pods.test", kA, ipv4(address));
  }
  dns.add("pods.test", kAaaa, ipv6("::1"));
  dns.add("pods.test", kA, "odd");  // no address
  EXPECT_THAT(
      texts(resolve({"pods.test", 71}, dns.server())),
      ElementsAre("127.0.0.1:71 pods.test", "127.0.0.2:71 pods.test", "[::1]:71 pods.test"));
}

TEST(Resolver, AServiceHasHostsAndPorts) {
  FakeDns dns;
  dns.add("_peer._tcp.test", kSrv, service("a.test", 71));
  dns.add("_peer._tcp.test", kSrv, service("b.test", 72));
  dns.add("_peer._tcp.test", kSrv, service("", 73));         // decidedly not available
  dns.add("_peer._tcp.test", kSrv, service("a.test", 0));    // nor this
  dns.add("_peer._tcp.test", kSrv, std::string("\0\0", 2));  // cut short
  dns.add("_peer._tcp.test", kSrv, big_endian(0, 4) + big_endian(74, 2) + "\x3f");
  dns.add("a.test", kA, ipv4("127.0.0.1"));
  dns.add("b.test", kA, ipv4("127.0.0.1"));
  EXPECT_THAT(texts(resolve({"_peer._tcp.test", 0}, dns.server())),
              ElementsAre("127.0.0.1:71 a.test", "127.0.0.1:72 b.test"));
}

TEST(Resolver, NoSuchNameIsNobody) {
  FakeDns dns;
  EXPECT_THAT(texts(resolve({"pods.test", 71}, dns.server())), IsEmpty());
  dns.add("pods.test", kSrv, service("a.test", 71));  // neither A nor AAAA
  EXPECT_THAT(texts(resolve({"pods.test", 71}, dns.server())), IsEmpty());
}

TEST(Resolver, AServerThatFailsIsNotAnEmptyList) {
  FakeDns dns;
  dns.add("pods.test", kA, ipv4("127.0.0.1"));
  dns.fail(kServerFailure);
  const auto failed = resolve({"pods.test", 71}, dns.server());
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, ErrorCode::kUnavailable);
  EXPECT_THAT(failed.error().message, HasSubstr("no name server answered for pods.test"));
  dns.fail(kNoError, /*malformed=*/true);
  const auto malformed = resolve({"pods.test", 71}, dns.server());
  ASSERT_FALSE(malformed);
  EXPECT_EQ(malformed.error().code, ErrorCode::kProtocol);
}

TEST(Resolver, AServerHasAnIpv4Address) {
  EXPECT_FALSE(resolve({"pods.test", 71}, "nonsense"));
  const auto other = resolve({"pods.test", 71}, "[::1]:53");
  ASSERT_FALSE(other);
  EXPECT_THAT(other.error().message, HasSubstr("IPv4 address is expected, not '[::1]:53'"));
}

/// A daemon that says who it is.
class FakePeer final : public v1::Peer::Service {
 public:
  FakePeer(std::uint32_t node, std::uint64_t generation,
           const std::shared_ptr<grpc::ServerCredentials>& credentials =
               grpc::InsecureServerCredentials())
      : node_(node), generation_(generation) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", credentials, &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~FakePeer() override { server_->Shutdown(std::chrono::system_clock::now()); }
  std::uint16_t port() const { return static_cast<std::uint16_t>(port_); }
  grpc::Status Identify(grpc::ServerContext*, const v1::IdentifyRequest*,
                        v1::IdentifyResponse* response) override {
    response->set_node(node_);
    response->set_generation(generation_);
    return grpc::Status::OK;
  }

 private:
  const std::uint32_t node_;
  const std::uint64_t generation_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

constexpr const char* kService = "_peer._tcp.test";

class DnsSourceTest : public testing::Test {
 protected:
  DnsSourceTest() {
    dns_.add("host.test", kA, ipv4("127.0.0.1"));
    look_with({});
  }
  void look_with(const TlsTexts& tls) {
    Config config;
    config.discovery.kind = "dns";
    config.discovery.dns = {kService, dns_.server()};
    source_ = std::make_unique<DnsSource>(config, DiscoverySelf{0, 100, {}}, tls);
  }
  void publish(const std::vector<std::uint16_t>& ports) {
    dns_.forget(kService);
    for (const std::uint16_t port : ports) dns_.add(kService, kSrv, service("host.test", port));
  }
  /// The list that a look gives, sooner or later: a daemon that takes long to answer is found by
  /// the next one.
  void expect_nodes(const std::vector<std::string>& nodes) {
    expect([&](const auto& found) {
      std::vector<std::string> ids;
      if (!found) return false;
      for (const PeerConfig& peer : *found) {
        ids.push_back(fmt::format("{}@{} {}", peer.id, peer.address.text(), peer.name));
      }
      return ids == nodes;
    });
  }
  void expect_error(const std::string& text) {
    expect([&](const auto& found) {
      return !found && found.error().code == ErrorCode::kAlreadyExists &&
             found.error().message.find(text) != std::string::npos;
    });
  }
  static std::string at(std::uint32_t node, const FakePeer& peer) {
    return fmt::format("{}@127.0.0.1:{} node-{}.test", node, peer.port(), node);
  }

  FakeDns dns_;
  std::unique_ptr<DnsSource> source_;

 private:
  template <class Holds>
  void expect(const Holds& holds) {
    std::string last;
    for (const auto end = std::chrono::steady_clock::now() + kPatience;
         std::chrono::steady_clock::now() < end;) {
      const auto found = source_->look();
      if (holds(found)) return;
      last = found ? fmt::format("{} nodes", found->size()) : found.error().message;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ADD_FAILURE() << last;
  }
};

// The name that is looked up is everybody's: a certificate that holds it speaks for no node.
TEST(NodeName, IsTheNodesOwn) {
  Config config;
  EXPECT_EQ(node_name_of(config, 3), "");
  config.discovery.kind = "dns";
  config.discovery.dns.name = "peers.mkernel.svc.cluster.local:7171";
  EXPECT_EQ(node_name_of(config, 3), "node-3.peers.mkernel.svc.cluster.local");
  config.discovery.dns.name = "_peer._tcp.cluster";
  EXPECT_EQ(node_name_of(config, 13), "node-13.cluster");
  config.discovery.node_name = "gpu-{node}.example.org";
  EXPECT_EQ(node_name_of(config, 3), "gpu-3.example.org");
  config.discovery.kind = "etcd";
  EXPECT_EQ(node_name_of(config, 127), "gpu-127.example.org");
}

TEST_F(DnsSourceTest, EveryAddressIsAskedWhoItIs) {
  const FakePeer two(2, 7), one(1, 8), ourselves(0, 100);
  std::uint16_t dead = 0;
  const UniqueFd nobody = bound_socket(SOCK_STREAM, dead);  // bound, and nobody listens
  publish({two.port(), one.port(), ourselves.port(), dead});
  expect_nodes({at(1, one), at(2, two)});
}

TEST_F(DnsSourceTest, ABystanderSeesTheNodesAndWhoDoesNotAnswer) {
  const FakePeer two(2, 7), one(1, 8), ourselves(0, 100);
  std::uint16_t dead = 0;
  const UniqueFd nobody = bound_socket(SOCK_STREAM, dead);
  publish({two.port(), one.port(), ourselves.port(), dead});
  Config config;
  config.peers.push_back({1, {.host = "127.0.0.9", .port = 9}});  // wins over the one that is found
  config.discovery.kind = "dns";
  config.discovery.dns = {kService, dns_.server()};
  const auto seen = [&]() -> std::vector<std::string> {
    const auto nodes = find_nodes(config);
    if (!nodes) return {nodes.error().message};
    std::vector<std::string> texts;
    for (const Sighting& node : *nodes) {
      texts.push_back(fmt::format("{}@{}{}", node.node ? fmt::format("{}", *node.node) : "?",
                                  node.address.text(), node.trouble));
    }
    return texts;
  };
  EXPECT_THAT(seen(), ElementsAre("1@127.0.0.9:9", fmt::format("2@127.0.0.1:{}", two.port()),
                                  fmt::format("?@127.0.0.1:{}", dead)));
  dns_.fail(kServerFailure);
  EXPECT_THAT(seen(), ElementsAre(HasSubstr("no name server answered")));
}

TEST_F(DnsSourceTest, WhoIsKnownStaysKnownWhileDnsHasIt) {
  const FakePeer one(1, 8);
  auto two = std::make_unique<FakePeer>(2, 7);
  const std::string at_two = at(2, *two);
  const std::uint16_t port = two->port();
  publish({one.port(), port});
  expect_nodes({at(1, one), at_two});
  two.reset();
  const auto again = source_->look();
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->size(), 2u);
  publish({one.port()});
  expect_nodes({at(1, one)});
  publish({});
  expect_nodes({});
  dns_.fail(kServerFailure);
  EXPECT_FALSE(source_->look());
}

TEST_F(DnsSourceTest, TwoDaemonsOfOneIdAreNamed) {
  const FakePeer one(1, 8), impostor(1, 9), same(1, 8), like_us(0, 5);
  publish({one.port(), same.port()});  // one daemon under two addresses
  expect_nodes({std::min(at(1, one), at(1, same))});
  publish({one.port(), impostor.port()});
  expect_error("both have node id 1; give each its own");
  publish({one.port(), like_us.port()});
  expect_error(fmt::format("at 127.0.0.1:{} has node id 0, as this one does", like_us.port()));
  publish({one.port()});
  expect_nodes({at(1, one)});
}

// DNS still has an address where nobody answers any more, whatever its place in the list.
TEST_F(DnsSourceTest, ADaemonThatIsElsewhereNowIsNoSecondOne) {
  for (const bool was_first : {true, false}) {
    SCOPED_TRACE(was_first);
    look_with({});
    auto before = std::make_unique<FakePeer>(1, 8), now = std::make_unique<FakePeer>(1, 9);
    if ((at(1, *before) < at(1, *now)) != was_first) before.swap(now);
    const FakePeer three(3, 5);
    const std::uint16_t left = before->port();
    publish({left, three.port()});
    expect_nodes({at(1, *before), at(3, three)});
    before.reset();
    publish({left, now->port(), three.port()});
    const auto found = source_->look();
    EXPECT_TRUE(found) << found.error().message;
    expect_nodes({at(1, *now), at(3, three)});
    // When neither answers, it is where it was last.
    const std::string last = at(1, *now);
    const std::uint16_t here = now->port();
    now.reset();
    const FakePeer four(4, 6);
    publish({left, here, three.port(), four.port()});
    expect_nodes({last, at(3, three), at(4, four)});
  }
}

TEST_F(DnsSourceTest, ADaemonOfOurIdThatIsGoneHidesNobody) {
  const FakePeer one(1, 8);
  auto like_us = std::make_unique<FakePeer>(0, 5);
  const std::uint16_t left = like_us->port();
  publish({one.port(), left});
  expect_error("has node id 0, as this one does");
  like_us.reset();
  expect_nodes({at(1, one)});
}

TEST_F(DnsSourceTest, FilesOfTlsThatChangeAreTaken) {
  TlsFiles files;
  files.renew("first");
  look_with(files.read());
  const FakePeer one(1, 8, files.serve("one", "DNS:host.test,DNS:node-1.test"));
  publish({one.port()});
  expect_nodes({at(1, one)});
  files.renew("second");
  const FakePeer two(2, 7, files.serve("two", "DNS:host.test,DNS:node-2.test"));
  publish({one.port(), two.port()});
  expect_nodes({at(1, one), at(2, two)});
}

}  // namespace
}  // namespace mk::daemon
