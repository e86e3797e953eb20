// The queue of datagrams when its port lags or the queue breaks, and connections that end before
// the proxy has looked; on software NICs.
#include "daemon/fabric/verbs/contact.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

#include "daemon/fabric/verbs/acceptor.h"
#include "daemon/fabric/verbs/directory.h"
#include "tests/daemon/fabric/verbs/trouble.h"

namespace mk::fabric {
namespace {

using verbs::Contact;
using verbs::Datagram;
using verbs::Device;

/// A datagram queue at a port of its own, without the service.
struct Station {
  explicit Station(const std::string& name)
      : device(*Device::open(on(name).config, 0)), contact(*Contact::open(device)) {}
  verbs::Address address() const {
    verbs::Address address = device->address();
    address.contact_queue = contact->number();
    address.contact_key = contact->key();
    return address;
  }
  std::optional<Datagram> next() const {
    std::optional<Datagram> got;
    const auto until = std::chrono::steady_clock::now() + patience() * std::chrono::seconds(10);
    while (!(got = contact->receive()) && std::chrono::steady_clock::now() < until)
      std::this_thread::yield();
    return got;
  }
  /// Until the NIC has let the last one out.
  bool sends(const verbs::Address& to, const Datagram& datagram) const {
    return pump({}, [&] { return contact->send(to, datagram).has_value(); });
  }

  std::shared_ptr<Device> device;
  std::unique_ptr<Contact> contact;
};

Datagram numbered(std::uint64_t number) {
  Datagram datagram;
  datagram.kind = verbs::DatagramKind::kDisconnect;
  datagram.number = number;
  return datagram;
}

class VerbsContact : public VerbsTrouble {};

TEST_F(VerbsContact, ADatagramThatLeavesLateIsStillTheOneThatWasSent) {
  const Station a("soft0"), b("soft1");
  soft_nic::hold(true);
  EXPECT_FALSE(a.contact->send(b.address(), numbered(1)));
  const Status second = a.contact->send(b.address(), numbered(2));
  ASSERT_FALSE(second);
  EXPECT_TRUE(holds(second.error().message, "soft0:1 has not sent an earlier datagram"))
      << second.error().message;
  EXPECT_FALSE(a.contact->broken());
  soft_nic::hold(false);
  auto got = b.next();
  ASSERT_TRUE(got);
  EXPECT_EQ(got->number, 1u);
  // And its completion is not taken for that of a later one.
  for (std::uint64_t number = 3; number < 10; ++number) {
    ASSERT_TRUE(a.sends(b.address(), numbered(number)));
    got = b.next();
    ASSERT_TRUE(got);
    EXPECT_EQ(got->number, number);
  }
}

// All nodes know the names of all endpoints. Only by what one was told itself does one speak, and
// only for itself.
TEST_F(VerbsContact, WhatAPeerSaysOfAnotherChangesNothing) {
  Node a(on("soft0")), b(on("soft1"));
  const auto joined = [](Node& from, PeerNumber self, Node& to, PeerNumber peer) {
    const auto id = from.endpoint->connect_peer(
        peer, to.endpoint->personal(to.endpoint->address(), self), "the other node");
    EXPECT_TRUE(id) << id.error().message;
    auto flags = from.endpoint->import_region(*id, to.flags.region->key());
    EXPECT_TRUE(flags);
    return TestLink{*id, std::move(*flags)};
  };
  const Busy out(a, b, joined(a, 0, b, 1)), back(b, a, joined(b, 1, a, 0));
  EXPECT_TRUE(out.arrives(a, b));
  EXPECT_TRUE(back.arrives(b, a));

  // Node 2 is told node 0's address, as all nodes are, and claims to be node 1.
  const auto address = [](const Node& node, PeerNumber peer) {
    return *from_blob<verbs::Address>(node.endpoint->personal(node.endpoint->address(), peer));
  };
  const Station two("soft1");
  const verbs::Address told = address(a, 2), victim = address(b, 2);
  for (const Token& pass : {told.pass, told.endpoint, Token{}}) {
    for (const auto kind : {verbs::DatagramKind::kGone, verbs::DatagramKind::kMoved,
                            verbs::DatagramKind::kDisconnect}) {
      for (const std::uint64_t number : {1u, 2u, 3u}) {
        Datagram lie;
        lie.kind = kind;
        lie.to = pass;
        lie.from = victim.endpoint;
        lie.number = number;
        verbs::Address elsewhere = victim;
        elsewhere.version = 99;
        elsewhere.contact_queue = 1;
        if (kind == verbs::DatagramKind::kMoved) lie.put(elsewhere);
        EXPECT_TRUE(two.sends(told, lie));
      }
    }
  }
  // Datagrams are taken in their order: the answers to these say that the others were looked at.
  EXPECT_TRUE(Busy(b, a, joined(b, 1, a, 0)).arrives(b, a));
  EXPECT_TRUE(Busy(a, b, joined(a, 0, b, 1)).arrives(a, b)) << "it is where it was";
  const auto goes_on = [](const Busy& busy, Node& from, Node& to) {
    const Write write = make_write(busy.link, 77, 1, 777, busy.source, 0, *busy.remote, 0, 4097);
    return post_all(from, busy.link.id, {&write, 1}, {&from, &to}) &&
           pump({&from, &to}, [&] { return to.flag(77) == 1 || from.failed.contains(777); }) &&
           to.flag(77) == 1;
  };
  EXPECT_TRUE(goes_on(out, a, b));
  EXPECT_TRUE(goes_on(back, b, a));
  EXPECT_TRUE(a.links_down.empty());
  EXPECT_TRUE(b.links_down.empty());
  // Node 1 itself is believed.
  b.endpoint.reset();
  EXPECT_TRUE(holds(reason_of(a, a, out.link.id), "its daemon ended"));
}

// The peer itself answers whether its key is valid: a hostile one says yes to each.
TEST_F(VerbsContact, AKeyWhoseBytesHaveNotAllAPieceIsRefused) {
  Node a(on("soft0"));
  const Station peer("soft1");
  verbs::Address address = peer.address();
  address.endpoint = Token{1};
  address.pass = Token{2};
  const std::jthread answers([&](const std::stop_token& ending) {
    while (!ending.stop_requested()) {
      const auto question = peer.contact->receive();
      if (!question) {
        std::this_thread::yield();
        continue;
      }
      Datagram answer = numbered(question->number);
      answer.kind = verbs::DatagramKind::kAccept;
      const auto asked = question->get<verbs::ConnectBody>();
      answer.to = asked.from.pass;
      answer.from = address.endpoint;
      answer.put(verbs::AcceptBody{.queues = 1, .ends = {{{.number = 1, .first_packet = 0}}}});
      (void)peer.sends(asked.from, answer);
    }
  });
  const auto link = a.endpoint->connect(to_blob(address), "node 1 rail 0");
  ASSERT_TRUE(link) << link.error().message;
  const auto imported = [&](std::uint64_t bytes, std::uint32_t shift) {
    verbs::Key key;
    key.endpoint = address.endpoint;
    key.bytes = bytes;
    key.piece_shift = shift;
    const auto region = a.endpoint->import_region(*link, to_blob(key));
    return region ? ErrorCode::kOk : region.error().code;
  };
  constexpr std::uint64_t kPieces = verbs::kPiecesMax;
  for (const std::uint32_t shift : {0u, 12u, 31u, 57u}) {
    EXPECT_EQ(imported(kPieces << shift, shift), ErrorCode::kOk) << shift;
    EXPECT_EQ(imported((kPieces << shift) + 1, shift), ErrorCode::kInvalidArgument) << shift;
    EXPECT_EQ(imported(~0ull, shift), ErrorCode::kInvalidArgument) << shift;
  }
  EXPECT_EQ(imported(~0ull, 63), ErrorCode::kOk);
  EXPECT_EQ(imported(0, 31), ErrorCode::kInvalidArgument);
  for (const std::uint32_t shift : {64u, 65u, ~0u})
    EXPECT_EQ(imported(4096, shift), ErrorCode::kInvalidArgument) << shift;
}

TEST_F(VerbsContact, AQueueInErrorSaysSoAndStartsAnewUnderItsNumber) {
  const Station a("soft0"), b("soft1");
  const std::uint32_t number = a.contact->number();
  soft_nic::fail_datagrams("soft0", false);
  EXPECT_FALSE(a.contact->send(b.address(), numbered(1)));
  EXPECT_TRUE(a.contact->broken());
  ASSERT_TRUE(a.contact->restart());
  EXPECT_FALSE(a.contact->broken());
  EXPECT_EQ(a.contact->number(), number);
  ASSERT_TRUE(a.sends(b.address(), numbered(2)));
  EXPECT_EQ(b.next()->number, 2u);
  ASSERT_TRUE(b.sends(a.address(), numbered(3)));
  EXPECT_EQ(a.next()->number, 3u);
}

// Whether the NIC tells by an event or the endpoint finds out by what comes back.
class VerbsDatagrams : public VerbsTrouble, public testing::WithParamInterface<bool> {};

TEST_P(VerbsDatagrams, AreServedAgainAfterTheirQueueBroke) {
  Notices notices;
  FabricSetup setup = on("soft0");
  setup.config.notice = notices.sink();
  {
    Node a(setup);
    Node b(on("soft1"));
    const Busy before(a, b);
    EXPECT_TRUE(before.arrives(a, b));
    soft_nic::fail_datagrams("soft0", GetParam());
    EXPECT_TRUE(Busy(a, b).arrives(a, b));
    EXPECT_TRUE(Busy(b, a).arrives(b, a));
    EXPECT_TRUE(a.links_down.empty()) << "links do not need it";
  }
  EXPECT_GE(notices.count("RDMA port soft0:1: the device's queue of datagrams: "), 1)
      << testing::PrintToString(notices.all());
}
INSTANTIATE_TEST_SUITE_P(Ways, VerbsDatagrams, testing::Bool(),
                         [](const auto& param) { return param.param ? "told" : "found"; });

// What was acknowledged has arrived, also when its sender leaves before the proxy looks: the NIC
// forgets what a queue pair received once that is destroyed.
TEST_F(VerbsContact, WhatALeavingPeerHasWrittenIsShown) {
  FabricSetup setup = on("soft0");
  setup.config.verbs.arrival = "immediate";
  Node b(setup);
  setup.config.verbs.devices = {"soft1"};
  for (const bool with_goodbye : {false, true}) {
    SCOPED_TRACE(with_goodbye);
    Node c(setup);
    auto a = std::make_unique<Node>(setup);
    const TestLink link = join(*a, b);
    std::vector<Write> writes;
    const std::uint32_t epoch = with_goodbye ? 2 : 1;
    for (std::uint32_t i = 0; i < 100; ++i) writes.push_back(make_write(link, i, epoch, i));
    ASSERT_TRUE(post_all(*a, link.id, writes, {a.get()}));
    ASSERT_TRUE(pump({a.get()}, [&] { return a->total(a->completed) == writes.size(); }));
    a->endpoint->disconnect(link.id);
    if (with_goodbye) a.reset();
    // Datagrams are taken in turn: when this is answered, that has been heard.
    ASSERT_TRUE(c.endpoint->connect(b.endpoint->address(), "node 1 rail 0"));
    EXPECT_TRUE(pump({&b}, [&] {
      for (std::uint32_t i = 0; i < writes.size(); ++i) {
        if (b.flag(i) != epoch) return false;
      }
      return true;
    }));
  }
}

TEST_F(VerbsContact, EndedConnectionsAreClosedOnceTheProxyHasLooked) {
  FabricSetup setup = on("soft0");
  setup.config.verbs.arrival = "immediate";
  Node a(setup);
  Node b(setup);
  const auto connected = [&] {
    const auto link = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
    EXPECT_TRUE(link);
    if (link) a.endpoint->disconnect(*link);
    a.poll();
  };
  connected();
  const std::size_t few = soft_nic::live_objects();
  for (int i = 0; i < 20; ++i) connected();
  EXPECT_TRUE(pump({&a, &b},
                   [&] {
                     connected();  // sweeps
                     return soft_nic::live_objects() <= few + 4;
                   }))
      << soft_nic::live_objects() << " objects, " << few << " with one link";
}

class VerbsConnections : public VerbsTrouble, public testing::WithParamInterface<bool> {};

Token token(std::uint64_t number) {
  Token made{};
  std::memcpy(made.data(), &number, sizeof number);
  return made;
}

// One peer connects again and again, and never gives a connection up.
TEST_P(VerbsConnections, OfOnePeerAreNoOtherPeersLoss) {
  const bool unordered = GetParam();
  const auto device = *Device::open(on("soft0").config, 0);
  const auto acceptor = *verbs::Acceptor::open(device, unordered);
  const auto connect = [&](PeerNumber peer, std::uint64_t number, const Token& endpoint) {
    verbs::ConnectBody body;
    body.from = device->address();
    body.from.endpoint = endpoint;
    body.from.unordered = unordered ? 1 : 0;
    body.queues = 1;
    body.ends[0].number = 1;
    return acceptor->accept(peer, number, body, device->address());
  };
  const auto first = connect(1, 1, token(1));
  ASSERT_TRUE(first) << first.error().message;
  for (std::uint64_t i = 0; i < 3 * shm::kNodesMax; ++i) {
    const auto flood = connect(2, i, token(i % 5));
    // With immediates those let go of stay until the proxy has looked, which it does not here.
    ASSERT_TRUE(flood || unordered) << i << ": " << flood.error().message;
  }
  const auto other = connect(3, 1, token(3));
  EXPECT_TRUE(other) << other.error().message;
  const auto again = connect(1, 1, token(1));
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->ends[0].number, first->ends[0].number) << "the same connection";
  // The proxy looks: the peer may go on.
  std::array<Event, 4> events;
  for (int i = 0; i < 4; ++i) EXPECT_EQ(acceptor->arrivals(events), 0u);
  EXPECT_TRUE(acceptor->bury());
  EXPECT_TRUE(connect(2, 1u << 20, token(2)));
}
INSTANTIATE_TEST_SUITE_P(Ways, VerbsConnections, testing::Bool(),
                         [](const auto& way) { return way.param ? "immediate" : "flag"; });

TEST(VerbsDirectory, ForgetsAPeersOldestEndpointAndNoOtherPeers) {
  verbs::Directory directory;
  const auto remote = [](PeerNumber peer, std::uint64_t endpoint, std::uint32_t version) {
    return verbs::Remote{peer, {.endpoint = token(endpoint), .version = version}};
  };
  const auto version = [&](PeerNumber peer, std::uint64_t endpoint) {
    return directory.newest(remote(peer, endpoint, 0)).version;
  };
  EXPECT_TRUE(directory.learn(remote(1, 7, 5)));
  EXPECT_TRUE(directory.learn(remote(2, 9, 5)));
  for (std::uint64_t i = 0; i < 40'000; ++i) directory.learn(remote(2, 100 + i, 1));
  EXPECT_EQ(version(1, 7), 5u);
  EXPECT_EQ(version(2, 9), 0u) << "the oldest of its own peer";
  EXPECT_EQ(version(2, 100 + 39'999), 1u);
  EXPECT_FALSE(directory.learn(remote(1, 7, 5)));
  EXPECT_TRUE(directory.learn(remote(1, 7, 6)));
}

TEST_F(VerbsContact, APortThatIsDownIsNamedWithoutAskingAnybody) {
  FabricSetup setup = on("soft0");
  setup.config.connect_timeout_ns = soon_ns(20);  // nobody waits for it
  Node a(setup);
  Node b(on("soft1"));
  const Busy before(a, b);
  ASSERT_TRUE(before.arrives(a, b));
  soft_nic::set_port("soft0", false);
  // When this is known, no late news of it can end the link that is made below.
  EXPECT_TRUE(holds(reason_of(a, b, before.link.id), "the port went down"));
  const auto refused = a.endpoint->connect(b.endpoint->address(), "node 1 rail 0");
  ASSERT_FALSE(refused);
  EXPECT_TRUE(holds(refused.error().message, "node 1 rail 0: RDMA port soft0:1 is down"))
      << refused.error().message;
  soft_nic::set_port("soft0", true);
  EXPECT_TRUE(Busy(a, b).arrives(a, b));
}

}  // namespace
}  // namespace mk::fabric
