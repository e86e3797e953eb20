// Two transports and their streams: order, size, breaks, absent and wrong peers.
#include "daemon/service/grpc_peer_transport.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/generic/async_generic_service.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "proto/mkernel/v1/peer.grpc.pb.h"
#include "shm/host/unique_fd.h"
#include "shm/limits.h"
#include "tests/daemon/service/peer_rig.h"
#include "tests/daemon/service/process_rig.h"

namespace mk::daemon {
namespace {

namespace v1 = ::mkernel::v1;
using testing::HasSubstr;

/// Two daemons, 0 and 1, connected.
class Pair : public testing::Test {
 protected:
  void SetUp() override {
    zero.start();
    one.start();
    ASSERT_TRUE(zero.sink.until_hello(1));
    ASSERT_TRUE(one.sink.until_hello(0));
  }
  TempFolder folder;
  PeerRig zero{folder, 0, {1}};
  PeerRig one{folder, 1, {0}};
};

ExchangePart part(std::uint64_t sequence, std::size_t bytes = 3) {
  return {.job = "job",
          .part_id = 9,
          .rank = 1,
          .sequence = sequence,
          .tag = "t",
          .blob = Bytes(bytes, std::byte{0x5a})};
}

/// The sequence of the next message, which must be an ExchangePart.
std::optional<std::uint64_t> next_sequence(RecordingSink& sink) {
  const auto event = sink.next();
  if (!event || !event->message) return {};
  const auto* exchange = std::get_if<ExchangePart>(&*event->message);
  return exchange ? std::optional(exchange->sequence) : std::nullopt;
}

TEST_F(Pair, CarriesMessagesInOrderBothWays) {
  constexpr std::uint64_t kMessages = 2000;
  for (std::uint64_t i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(zero.transport->send(1, part(i)));
    ASSERT_TRUE(one.transport->send(0, part(i)));
  }
  for (std::uint64_t i = 0; i < kMessages; ++i) {
    ASSERT_EQ(next_sequence(zero.sink), i);
    ASSERT_EQ(next_sequence(one.sink), i);
  }
  const PeerInfo info = zero.transport->peers().at(0);
  EXPECT_EQ(info.state, PeerState::kUp);
  EXPECT_EQ(info.messages_sent, kMessages);
  EXPECT_EQ(info.messages_received, kMessages);
  EXPECT_EQ(info.version, "test");
  EXPECT_GT(info.up_for_ns, 0u);
}

TEST_F(Pair, CarriesTheLargestMessages) {
  for (std::uint64_t i = 0; i < 64; ++i) {
    ASSERT_TRUE(one.transport->send(0, part(i, shm::kExchangeBlobBytesMax)));
  }
  for (std::uint64_t i = 0; i < 64; ++i) {
    const auto event = zero.sink.next();
    ASSERT_TRUE(event && event->message);
    const auto& exchange = std::get<ExchangePart>(*event->message);
    ASSERT_EQ(exchange.sequence, i);
    ASSERT_EQ(exchange.blob, Bytes(shm::kExchangeBlobBytesMax, std::byte{0x5a}));
  }
}

TEST_F(Pair, AMessageBeyondTheLimitsBreaksTheStream) {
  ASSERT_TRUE(one.transport->send(0, part(0, shm::kExchangeBlobBytesMax + 1)));
  EXPECT_THAT(zero.sink.until_down(1), HasSubstr("bytes of blob is 65537, at most 65536"));
  // The one who sent it learns why, and both meet again.
  EXPECT_THAT(one.sink.until_down(0), HasSubstr("bytes of blob is 65537"));
  EXPECT_TRUE(zero.sink.until_hello(1));
  EXPECT_TRUE(one.sink.until_hello(0));
}

TEST_F(Pair, DisconnectTellsTheOtherSideAndMeetsAgain) {
  zero.transport->disconnect(1, "a part of job x came twice");
  EXPECT_THAT(one.sink.until_down(0), HasSubstr("a part of job x came twice"));
  EXPECT_TRUE(one.sink.until_hello(0));
  EXPECT_TRUE(zero.sink.until_hello(1));
  one.transport->disconnect(0, "whatever");  // the calling side
  EXPECT_NE(zero.sink.until_down(1), "(never)");
  EXPECT_TRUE(one.sink.until_hello(0));
  EXPECT_TRUE(zero.sink.until_hello(1));
  ASSERT_TRUE(zero.transport->send(1, part(5)));
  EXPECT_EQ(next_sequence(one.sink), 5u);
}

class Leaving : public Pair, public testing::WithParamInterface<NodeId> {};

TEST_P(Leaving, LastWordsArriveBeforeTheEnd) {
  const NodeId leaver = GetParam(), other = 1 - leaver;
  PeerRig& from = leaver == 1 ? one : zero;
  PeerRig& to = leaver == 1 ? zero : one;
  for (std::uint64_t i = 0; i < 50; ++i) {
    ASSERT_TRUE(from.transport->send(other, part(i, 50'000)));
  }
  from.stop();
  for (std::uint64_t i = 0; i < 50; ++i) ASSERT_EQ(next_sequence(to.sink), i);
  const auto end = to.sink.next();
  ASSERT_TRUE(end);
  EXPECT_FALSE(end->message);
  const Status late = from.transport->send(other, part(0));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kUnavailable);
}
INSTANTIATE_TEST_SUITE_P(CalledAndCalling, Leaving, testing::Values(0u, 1u));

TEST_F(Pair, ADescriptionNamesNodeAndAddress) {
  EXPECT_EQ(zero.transport->describe(1), "node 1 (unix:" + (folder / "1.sock") + ")");
  EXPECT_EQ(zero.transport->describe(7), "node 7 (not configured)");
  EXPECT_EQ(zero.transport->nodes(), std::vector<NodeId>{1});
  const Status status = zero.transport->send(7, part(0));
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kNotFound);
}

TEST(GrpcPeerTransport, WaitsForAPeerThatIsAbsentAtTheStart) {
  TempFolder folder;
  PeerRig one(folder, 1, {0});
  one.start();
  const Status early = one.transport->send(0, part(0));
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code, ErrorCode::kUnavailable);
  // A few calls fail, and say so, before the peer comes.
  EXPECT_TRUE(eventually([&] { return !one.transport->peers().at(0).reason.empty(); }));
  EXPECT_NE(one.transport->peers().at(0).reason, "");
  EXPECT_EQ(one.transport->peers().at(0).state, PeerState::kConnecting);
  EXPECT_EQ(one.transport->trouble(0), one.transport->peers().at(0).reason);
  PeerRig zero(folder, 0, {1});
  EXPECT_EQ(zero.transport->trouble(1), "it has not called yet");
  EXPECT_EQ(zero.transport->peers().at(0).state, PeerState::kWaiting);
  zero.start();
  EXPECT_TRUE(zero.sink.until_hello(1));
  EXPECT_TRUE(one.sink.until_hello(0));
  EXPECT_EQ(one.transport->peers().at(0).reason, "");
  EXPECT_EQ(one.transport->trouble(0), "");
}

TEST(GrpcPeerTransport, MeetsARestartedPeer) {
  for (const NodeId restarted : {0u, 1u}) {
    TempFolder folder;
    const NodeId other = 1 - restarted;
    PeerRig stays(folder, other, {restarted});
    stays.start();
    for (std::uint64_t generation = 1; generation <= 3; ++generation) {
      PeerRig comes(folder, restarted, {other}, generation);
      comes.start();
      ASSERT_TRUE(stays.sink.until_hello(restarted));
      ASSERT_TRUE(comes.sink.until_hello(other));
      ASSERT_TRUE(stays.transport->send(restarted, part(generation)));
      ASSERT_EQ(next_sequence(comes.sink), generation);
    }
    EXPECT_NE(stays.sink.until_down(restarted), "(never)");
    // Hello and end alternate, whatever came between.
    bool up = false;
    for (const RecordingSink::Event& event : stays.sink.events()) {
      EXPECT_EQ(event.message.has_value(), !up);
      up = event.message.has_value();
    }
  }
}

TEST(GrpcPeerTransport, RefusesAStranger) {
  TempFolder folder;
  PeerRig zero(folder, 0, {1});
  PeerRig stranger(folder, 2, {0});
  zero.start();
  stranger.start();
  EXPECT_TRUE(eventually([&] { return !stranger.transport->peers().at(0).reason.empty(); }));
  EXPECT_EQ(stranger.transport->peers().at(0).reason,
            "node 0 does not know node 2: it is not among its configured peers");
  EXPECT_TRUE(zero.sink.events().empty());
}

TEST(GrpcPeerTransport, RefusesASecondDaemonWithTheSameId) {
  TempFolder folder;
  PeerRig zero(folder, 0, {1});
  PeerRig one(folder, 1, {0}, 11);
  zero.start();
  one.start();
  ASSERT_TRUE(zero.sink.until_hello(1));
  TempFolder elsewhere;
  std::filesystem::create_symlink(folder / "0.sock", elsewhere / "0.sock");
  PeerRig twin(elsewhere, 1, {0}, 12);
  twin.start();
  EXPECT_TRUE(eventually([&] { return !twin.transport->peers().at(0).reason.empty(); }));
  EXPECT_THAT(twin.transport->peers().at(0).reason, HasSubstr("node id 1 is already in use"));
  EXPECT_EQ(zero.transport->peers().at(0).state, PeerState::kUp);
  EXPECT_EQ(zero.transport->peers().at(0).breaks, 0u);
}

// A refused daemon calls again and again: the log has the reason once.
TEST(GrpcPeerTransport, LogsTheReasonOfARefusalOnce) {
  TempFolder folder;
  const std::string path = folder / "log";
  const UniqueFd file(::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
  Logger log(LoggerOptions{.level = LogLevel::kInfo, .fd = file.get()});
  PeerRig zero(folder, 0, {1}, 1, {}, log);
  PeerRig one(folder, 1, {0}, 11);
  zero.start();
  one.start();
  ASSERT_TRUE(zero.sink.until_hello(1));
  TempFolder elsewhere;
  std::filesystem::create_symlink(folder / "0.sock", elsewhere / "0.sock");
  PeerRig twin(elsewhere, 1, {0}, 12);
  twin.start();
  const auto lines = [&] {
    std::ifstream text(path);
    int found = 0;
    for (std::string line; std::getline(text, line);) {
      found += line.find("refused a peer at a Unix socket: node id 1 is already in use") !=
               std::string::npos;
    }
    return found;
  };
  EXPECT_TRUE(eventually([&] { return lines() > 0; }));
  std::this_thread::sleep_for(std::chrono::seconds(1));  // it calls every 200 ms
  EXPECT_EQ(lines(), 1);
}

TEST(GrpcPeerTransport, RefusesAPeerThatIsNotWhoItShouldBe) {
  TempFolder folder;
  // Who calls "node 0" reaches node 1, which knows node 2.
  PeerRig one(folder, 1, {2});
  std::filesystem::create_symlink(folder / "1.sock", folder / "0.sock");
  PeerRig two(folder, 2, {0});
  one.start();
  two.start();
  EXPECT_TRUE(eventually([&] { return !two.transport->peers().at(0).reason.empty(); }));
  EXPECT_THAT(two.transport->peers().at(0).reason,
              HasSubstr("says that it is node 1: check the peers' ids and addresses"));
  EXPECT_TRUE(two.sink.events().empty());
}

TEST(GrpcPeerTransport, APeerThatDoesNotReadIsCutOff) {
  TempFolder folder;
  PeerTransportOptions options;
  options.queue_bytes_max = 1 << 20;
  PeerRig zero(folder, 0, {1}, 1, options);
  zero.start();
  // A caller that says Hello and never reads again.
  const auto channel =
      grpc::CreateChannel("unix:" + (folder / "0.sock"), grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  const auto stream = v1::Peer::NewStub(channel)->Connect(&context);
  v1::PeerMessage hello;
  hello.mutable_hello()->set_node(1);
  ASSERT_TRUE(stream->Write(hello));
  ASSERT_TRUE(zero.sink.until_hello(1));
  Status status;
  for (int i = 0; i < 10'000 && status; ++i) status = zero.transport->send(1, part(0, 60'000));
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kLimitExceeded);
  EXPECT_THAT(zero.sink.until_down(1), HasSubstr("does not take messages"));
  context.TryCancel();
}

TEST(GrpcPeerTransport, AStreamWhoseEndIsNotTakenIsCancelled) {
  TempFolder folder;
  PeerTransportOptions options;
  options.hello_timeout = std::chrono::seconds(2);
  PeerRig zero(folder, 0, {1}, 1, options);
  zero.start();
  const auto channel =
      grpc::CreateChannel("unix:" + (folder / "0.sock"), grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  const auto stream = v1::Peer::NewStub(channel)->Connect(&context);
  v1::PeerMessage hello;
  hello.mutable_hello()->set_node(1);
  ASSERT_TRUE(stream->Write(hello));
  ASSERT_TRUE(zero.sink.until_hello(1));
  // More than the connection's window: a write stays under way, and the status behind it.
  for (int i = 0; i < 400; ++i) ASSERT_TRUE(zero.transport->send(1, part(0, 60'000)));
  zero.transport->disconnect(1, "enough");
  EXPECT_TRUE(eventually([&] { return zero.transport->streams() == 0; }));
  context.TryCancel();
}

// A daemon that floods: what its messages are to be done with is not queued without bound, and the
// pressure goes back to it.
TEST(GrpcPeerTransport, NothingMoreIsReadFromAPeerWhileTheSinkHasEnoughToDo) {
  TempFolder folder;
  PeerTransportOptions few, short_queue;
  few.unread_messages_max = 8;
  short_queue.queue_bytes_max = 1 << 20;
  PeerRig zero(folder, 0, {1}, 1, few), one(folder, 1, {0}, 1, short_queue);
  zero.start();
  one.start();
  ASSERT_TRUE(zero.sink.until_hello(1));
  ASSERT_TRUE(one.sink.until_hello(0));
  constexpr std::uint64_t kMessages = 100;
  for (std::uint64_t i = 0; i < kMessages; ++i) ASSERT_TRUE(one.transport->send(0, part(i)));
  for (std::uint64_t i = 0; i < kMessages; ++i) {
    // The event before has been taken, none of those behind it.
    EXPECT_LE(zero.sink.events().size(), 1 + i + few.unread_messages_max);
    ASSERT_EQ(next_sequence(zero.sink), i);
  }
  // One that does not stop has its own queue full in the end, and nothing of ours has grown.
  Status status;
  for (int i = 0; i < 2'000 && status; ++i) status = one.transport->send(0, part(0, 60'000));
  ASSERT_FALSE(status) << "120 MB were read although nobody took them";
  EXPECT_THAT(status.error().message, HasSubstr("does not take messages"));
  EXPECT_LE(zero.sink.events().size(), 1 + kMessages + few.unread_messages_max);
  // Nor does it get more in by calling again.
  EXPECT_TRUE(zero.sink.until_hello(1)) << "as soon as the rest is taken";
}

/// A daemon of another make: answers each call with Hello, then with bytes that are no message.
class Babbler final : public grpc::CallbackGenericService {
 public:
  explicit Babbler(NodeId node) {
    v1::PeerMessage hello;
    hello.mutable_hello()->set_node(node);
    hello_ = hello.SerializeAsString();
  }
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    ++calls;
    return new Reactor(hello_);
  }
  std::atomic<int> calls = 0;

 private:
  class Reactor final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Reactor(const std::string& hello)
        : hello_(buffer(hello)), babble_(buffer("\xff\xff")) {
      StartRead(&incoming_);
      StartWrite(&hello_);
    }
    void OnWriteDone(bool) override {
      if (!std::exchange(babbled_, true)) StartWrite(&babble_);
    }
    void OnReadDone(bool ok) override {
      if (ok) return StartRead(&incoming_);
      Finish(grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    static grpc::ByteBuffer buffer(const std::string& bytes) {
      const grpc::Slice slice(bytes);
      return {&slice, 1};
    }
    grpc::ByteBuffer hello_, babble_, incoming_;
    bool babbled_ = false;
  };
  std::string hello_;
};

TEST(GrpcPeerTransport, AStreamThatCannotBeReadAnyMoreIsDownAndOpenedAgain) {
  TempFolder folder;
  Babbler babbler(0);
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + (folder / "0.sock"), grpc::InsecureServerCredentials());
  builder.RegisterCallbackGenericService(&babbler);
  const auto server = builder.BuildAndStart();
  ASSERT_TRUE(server);
  PeerRig one(folder, 1, {0});
  one.start();
  ASSERT_TRUE(one.sink.until_hello(0));
  EXPECT_THAT(one.sink.until_down(0), HasSubstr("nothing more can be read"));
  const PeerInfo info = one.transport->peers().at(0);
  EXPECT_GE(info.breaks, 1u);
  EXPECT_FALSE(info.reason.empty());
  EXPECT_TRUE(one.sink.until_hello(0)) << "it is called again";
  EXPECT_GE(babbler.calls, 2);
  one.stop();
  server->Shutdown(std::chrono::system_clock::now());
}

/// What a hand-made caller is told.
grpc::Status call(const TempFolder& folder, const std::vector<v1::PeerMessage>& messages) {
  const auto channel =
      grpc::CreateChannel("unix:" + (folder / "0.sock"), grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  const auto stream = v1::Peer::NewStub(channel)->Connect(&context);
  for (const v1::PeerMessage& message : messages) stream->Write(message);
  v1::PeerMessage answer;
  while (stream->Read(&answer)) {
  }
  return stream->Finish();
}

TEST(GrpcPeerTransport, AnswersNonsenseWithAReason) {
  TempFolder folder;
  PeerTransportOptions options;
  options.hello_timeout = std::chrono::milliseconds(1500);
  PeerRig zero(folder, 0, {1}, 1, options);
  EXPECT_EQ(call(folder, {}).error_message(), "node 0 is still starting");
  zero.start();
  EXPECT_EQ(call(folder, {}).error_message(), "no Hello came within 1500 ms");
  v1::PeerMessage ready, hello, self, unknown;
  ready.mutable_job_ready()->set_job("x");
  EXPECT_EQ(call(folder, {ready}).error_message(), "the first message was not Hello");
  hello.mutable_hello()->set_node(1);
  EXPECT_EQ(call(folder, {hello, hello}).error_message(), "a second Hello on one stream");
  EXPECT_EQ(call(folder, {hello, unknown}).error_message(),
            "peer message of a kind that this version does not know");
  self.mutable_hello()->set_node(0);
  const grpc::Status status = call(folder, {self});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  PeerRig two(folder, 2, {0, 1});
  EXPECT_EQ(zero.transport->peers().at(0).state, PeerState::kWaiting);
}

TEST(GrpcPeerTransport, TheHigherIdCalls) {
  TempFolder folder;
  PeerRig zero(folder, 0, {});
  TempFolder elsewhere;
  std::filesystem::create_symlink(elsewhere / "1.sock", folder / "1.sock");
  PeerRig one(elsewhere, 1, {0});
  one.start();
  v1::PeerMessage hello;
  hello.mutable_hello()->set_node(0);
  const auto channel =
      grpc::CreateChannel("unix:" + (elsewhere / "1.sock"), grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  const auto stream = v1::Peer::NewStub(channel)->Connect(&context);
  stream->Write(hello);
  v1::PeerMessage answer;
  EXPECT_FALSE(stream->Read(&answer));
  EXPECT_EQ(stream->Finish().error_message(),
            "node 0 has the lower id and must wait to be called by node 1");
}

TEST(GrpcPeerTransport, ManyPeersAllMeet) {
  TempFolder folder;
  constexpr NodeId kNodes = 5;
  std::vector<std::unique_ptr<PeerRig>> rigs;
  for (NodeId node = 0; node < kNodes; ++node) {
    std::vector<NodeId> peers;
    for (NodeId other = 0; other < kNodes; ++other) {
      if (other != node) peers.push_back(other);
    }
    rigs.push_back(std::make_unique<PeerRig>(folder, node, peers));
    rigs.back()->start();
  }
  for (auto& rig : rigs) {
    for (NodeId others = 0; others + 1 < kNodes; ++others) {
      const auto event = rig->sink.next();
      ASSERT_TRUE(event && event->message);
      EXPECT_TRUE(std::holds_alternative<PeerHello>(*event->message));
    }
  }
}

TEST(GrpcPeerTransport, LeavesNothingBehind) {
  TempFolder folder;
  {
    PeerRig zero(folder, 0, {1});
    PeerRig one(folder, 1, {0});
    zero.start();
    one.start();
    ASSERT_TRUE(one.sink.until_hello(0));
  }
  EXPECT_TRUE(folder.empty());
}

}  // namespace
}  // namespace mk::daemon
