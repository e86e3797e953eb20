// A loopback link whose peer answers late, twice, wrongly or not at all: a region is never taken
// for another. A peer that hangs costs one time-out.
#include <dirent.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/daemon/fabric/fabric_fixture.h"
#include "tests/daemon/fabric/fake_loopback_peer.h"

namespace {

/// While it is on, every look for a connection finds one, whose owner has gone again.
std::atomic<bool> flood{false};
std::atomic<int> flooded{0};

}  // namespace

// In libc's place.
extern "C" int accept4(int fd, sockaddr* address, socklen_t* bytes, int flags) {
  int ends[2];
  if (!flood) return static_cast<int>(::syscall(SYS_accept4, fd, address, bytes, flags));
  if (::socketpair(AF_UNIX, SOCK_STREAM | flags, 0, ends) != 0) return -1;
  ::close(ends[1]);
  ++flooded;
  return ends[0];
}

namespace mk::fabric {
namespace {

using loopback::FakePeer;
using loopback::Key;
using loopback::Message;

const std::string kPeer = "node 7 rail 1";

FabricSetup setup_with_timeout(std::chrono::nanoseconds timeout) {
  FabricSetup setup;
  setup.config.connect_timeout_ns = static_cast<std::uint64_t>(timeout.count());
  return setup;
}
FabricSetup patient() { return setup_with_timeout(std::chrono::seconds(60)); }
/// For peers that are meant to be too late.
FabricSetup impatient() { return setup_with_timeout(std::chrono::seconds(1)); }

shm::BufferFile make_file(std::byte fill) {
  auto file = FakePeer::need(shm::BufferFile::create("fake-peer", 4096));
  std::memset(file.data(), std::to_integer<int>(fill), file.bytes());
  return file;
}

void answer_region(shm::FrameSocket& socket, std::uint64_t request, std::span<const std::byte> key,
                   std::span<const int> fds) {
  (void)socket.queue_send(static_cast<std::uint16_t>(Message::kRegion), request, key, fds);
}

bool wait_until(const std::function<bool()>& done) {
  for (int i = 0; i < 60'000 && !done(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return done();
}

/// Impatient nodes may have to try more than once: only what is asked later is meant to be too
/// late.
LinkId connect(Node& node, const FakePeer& peer) {
  auto link = node.endpoint->connect(peer.address(), kPeer);
  for (int i = 0; i < 60 && !link && link.error().code == ErrorCode::kTimeout; ++i)
    link = node.endpoint->connect(peer.address(), kPeer);
  return FakePeer::need(std::move(link));
}

/// One import of `key`, which has to fail.
Error import_fails(Node& node, LinkId link, const Key& key) {
  const auto region = node.endpoint->import_region(link, to_blob(key));
  EXPECT_FALSE(region);
  const Error error = region ? Error{} : region.error();
  EXPECT_NE(error.message.find(kPeer), std::string::npos) << error.message;
  return error;
}

/// The link says once that it is down and why, keeps nothing of what was outstanding, and neither
/// imports nor writes any more.
void expect_down(Node& node, LinkId link, const Key& key) {
  EXPECT_EQ(import_fails(node, link, key).code, ErrorCode::kLinkDown);
  const std::string reason = node.endpoint->link_reason(link);
  EXPECT_NE(reason.find(kPeer), std::string::npos) << reason;
  ASSERT_TRUE(pump({&node}, [&] { return node.links_down.contains(link); }));
  Write late;
  late.cookie = 1'000;
  EXPECT_EQ(node.endpoint->post(link, {&late, 1}), 1u);
  ASSERT_TRUE(pump({&node}, [&] { return node.failed.contains(1'000); }));
  EXPECT_EQ(node.links_down[link], 1);
}

std::size_t open_fds() {
  std::size_t count = 0;
  DIR* const directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

TEST(LoopbackPeerTest, AnAnswerAfterTheTimeOutIsNotTakenForTheNextQuestions) {
  const shm::BufferFile first = make_file(std::byte{1});
  const shm::BufferFile second = make_file(std::byte{2});
  std::atomic<bool> may_answer{false};
  FakePeer peer([&](shm::FrameSocket& socket, const shm::Frame& question) {
    wait_until([&] { return may_answer.load(); });
    const int fd = first.fd();
    answer_region(socket, question.request, question.payload, std::span(&fd, 1));
  });
  const Key first_key = peer.key_for(first);
  const Key second_key = peer.key_for(second);
  Node node(impatient());
  const LinkId link = connect(node, peer);
  Write outstanding;
  outstanding.cookie = 5;
  ASSERT_EQ(node.endpoint->post(link, {&outstanding, 1}), 1u);

  EXPECT_EQ(import_fails(node, link, first_key).code, ErrorCode::kTimeout);
  may_answer = true;
  ASSERT_TRUE(wait_until([&] { return peer.answered() == 1; }));
  EXPECT_EQ(import_fails(node, link, second_key).code, ErrorCode::kLinkDown)
      << "the second region would be the first one's memory";
  expect_down(node, link, second_key);
  EXPECT_EQ(node.failed[5], 1);
  EXPECT_EQ(node.completed.count(5), 0u);
}

TEST(LoopbackPeerTest, AHungPeerCostsOneTimeOutForAllItsRegions) {
  std::atomic<bool> done{false};
  std::atomic<int> asked{0};
  FakePeer peer([&](shm::FrameSocket&, const shm::Frame&) {
    ++asked;
    wait_until([&] { return done.load(); });
  });
  const shm::BufferFile file = make_file(std::byte{1});
  Node node(impatient());
  const LinkId link = connect(node, peer);
  EXPECT_EQ(import_fails(node, link, peer.key_for(file)).code, ErrorCode::kTimeout);
  for (int i = 0; i < 100; ++i)
    EXPECT_EQ(import_fails(node, link, peer.key_for(file)).code, ErrorCode::kLinkDown);
  expect_down(node, link, peer.key_for(file));
  done = true;
  ASSERT_TRUE(wait_until([&] { return peer.answered() == 1; }));
  EXPECT_EQ(asked, 1) << "nobody asks over a link that is down";

  // The endpoint goes on, with another peer.
  Node other(patient());
  EXPECT_NO_THROW(join(node, other));
}

TEST(LoopbackPeerTest, AnAnswerGivenTwiceIsDroppedWithItsDescriptors) {
  const shm::BufferFile files[] = {make_file(std::byte{0}), make_file(std::byte{0})};
  std::vector<Key> keys;
  FakePeer peer([&](shm::FrameSocket& socket, const shm::Frame& question) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (question.payload != to_blob(keys[i])) continue;
      const int fd = files[i].fd();
      for (int twice = 0; twice < 2; ++twice)
        answer_region(socket, question.request, question.payload, std::span(&fd, 1));
    }
  });
  for (const auto& file : files) keys.push_back(peer.key_for(file));
  Node node(patient());
  const LinkId link = connect(node, peer);
  const Memory source = node.memory(4096);
  std::size_t fds = 0;
  for (std::uint64_t round = 0; round < 10; ++round) {
    const std::size_t i = round % 2;
    const auto region = node.endpoint->import_region(link, to_blob(keys[i]));
    ASSERT_TRUE(region) << region.error().message;
    source.data()[0] = static_cast<std::byte>(round + 1);
    Write write;
    write.src = source.region.get();
    write.dst = region->get();
    write.bytes = 1;
    write.cookie = round;
    ASSERT_EQ(node.endpoint->post(link, {&write, 1}), 1u);
    ASSERT_TRUE(pump({&node}, [&] { return node.completed.contains(round); }));
    ASSERT_EQ(files[i].data()[0], static_cast<std::byte>(round + 1)) << "round " << round;
    // The fake holds copies of descriptors for as long as it is at its second answer.
    ASSERT_TRUE(wait_until([&] { return peer.answered() == static_cast<int>(round) + 1; }));
    if (round == 1) fds = open_fds();
    if (round > 1) {
      ASSERT_EQ(open_fds(), fds) << "round " << round;
    }
  }
  EXPECT_TRUE(node.links_down.empty());
}

TEST(LoopbackPeerTest, AReplyForAnotherRegionBringsTheLinkDown) {
  const shm::BufferFile file = make_file(std::byte{1});
  Key other;
  FakePeer peer([&](shm::FrameSocket& socket, const shm::Frame& question) {
    const int fd = file.fd();
    answer_region(socket, question.request, to_blob(other), std::span(&fd, 1));
  });
  const Key asked = peer.key_for(file);
  other = asked;
  other.region += 1;
  Node node(patient());
  const LinkId link = connect(node, peer);
  const Error error = import_fails(node, link, asked);
  EXPECT_EQ(error.code, ErrorCode::kProtocol);
  EXPECT_NE(error.message.find("another region"), std::string::npos) << error.message;
  expect_down(node, link, asked);
}

TEST(LoopbackPeerTest, GarbageRepliesBringTheLinkDownAndLeakNothing) {
  const shm::BufferFile file = make_file(std::byte{1});
  const int fd = file.fd();
  const int two[] = {fd, fd};
  const std::span one(&fd, 1);
  const auto say = [](shm::FrameSocket& socket, Message type, std::uint64_t request,
                      std::span<const std::byte> payload, std::span<const int> fds) {
    (void)socket.queue_send(static_cast<std::uint16_t>(type), request, payload, fds);
  };
  const std::pair<const char*, FakePeer::Answer> garbage[] = {
      {"a welcome",
       [&](auto& s, const auto& q) { say(s, Message::kWelcome, q.request, q.payload, one); }},
      {"a question",
       [&](auto& s, const auto& q) { say(s, Message::kGetRegion, q.request, q.payload, one); }},
      {"a later request",
       [&](auto& s, const auto& q) { say(s, Message::kRegion, q.request + 1, q.payload, one); }},
      {"no request", [&](auto& s, const auto& q) { say(s, Message::kRegion, 0, q.payload, one); }},
      {"no descriptor",
       [&](auto& s, const auto& q) { say(s, Message::kRegion, q.request, q.payload, {}); }},
      {"two descriptors",
       [&](auto& s, const auto& q) { say(s, Message::kRegion, q.request, q.payload, two); }},
      {"no key", [&](auto& s, const auto& q) { say(s, Message::kRegion, q.request, {}, one); }},
      {"half a key",
       [&](auto& s, const auto& q) {
         say(s, Message::kRegion, q.request, std::span(q.payload).first(30), one);
       }},
      {"a refusal of two bytes",
       [&](auto& s, const auto& q) { say(s, Message::kRefused, q.request, Bytes(2), one); }},
      {"a refusal without an error",
       [&](auto& s, const auto& q) { say(s, Message::kRefused, q.request, Bytes(9), one); }},
      {"no frame",
       [&](auto& s, const auto&) {
         const Bytes noise(64, std::byte{0xFF});
         EXPECT_EQ(::write(s.fd(), noise.data(), noise.size()), 64);
       }},
  };
  const std::size_t fds = open_fds();
  for (const auto& [name, answer] : garbage) {
    SCOPED_TRACE(name);
    FakePeer peer(answer);
    const Key key = peer.key_for(file);
    Node node(patient());
    const LinkId link = connect(node, peer);
    EXPECT_EQ(import_fails(node, link, key).code, ErrorCode::kProtocol);
    expect_down(node, link, key);
  }
  EXPECT_EQ(open_fds(), fds);
}

TEST(LoopbackPeerTest, ARefusalLeavesTheLinkUp) {
  const shm::BufferFile file = make_file(std::byte{1});
  std::atomic<bool> refuse{true};
  FakePeer peer([&](shm::FrameSocket& socket, const shm::Frame& question) {
    if (refuse) {
      (void)socket.queue_send(static_cast<std::uint16_t>(Message::kRefused), question.request,
                              loopback::refusal({ErrorCode::kPermission, "not yours"}), {});
      return;
    }
    const int fd = file.fd();
    answer_region(socket, question.request, question.payload, std::span(&fd, 1));
  });
  Node node(patient());
  const LinkId link = connect(node, peer);
  const Error error = import_fails(node, link, peer.key_for(file));
  EXPECT_EQ(error.code, ErrorCode::kPermission);
  EXPECT_NE(error.message.find("not yours"), std::string::npos) << error.message;
  refuse = false;
  const auto region = node.endpoint->import_region(link, to_blob(peer.key_for(file)));
  EXPECT_TRUE(region) << region.error().message;
  EXPECT_TRUE(node.endpoint->link_reason(link).empty());
  node.poll();
  EXPECT_TRUE(node.links_down.empty());
}

TEST(LoopbackPeerTest, APeerThatHangsUpInsteadOfAnsweringIsGone) {
  FakePeer peer([](shm::FrameSocket& socket, const shm::Frame&) { socket.shutdown(); });
  const shm::BufferFile file = make_file(std::byte{1});
  Node node(patient());
  const LinkId link = connect(node, peer);
  EXPECT_EQ(import_fails(node, link, peer.key_for(file)).code, ErrorCode::kUnavailable);
  expect_down(node, link, peer.key_for(file));
}

TEST(LoopbackPeerTest, QuestionsAreAnsweredWhileConnectionsNeverEnd) {
  const Node node(patient());
  const Bytes address = node.endpoint->address();
  const std::string name = loopback::socket_name(from_blob<loopback::Address>(address)->endpoint);
  auto peer = FakePeer::need(shm::FrameSocket::connect(name, std::chrono::seconds(20)));
  const auto answered = [&](std::uint64_t request) {
    EXPECT_TRUE(peer.queue_send(static_cast<std::uint16_t>(Message::kHello), request, address, {}));
    const auto answer = peer.receive(std::chrono::steady_clock::now() + std::chrono::seconds(20));
    return answer && answer->request == request &&
           answer->type == static_cast<std::uint16_t>(Message::kWelcome);
  };
  EXPECT_TRUE(answered(1));
  flood = true;
  // It waits for ever, so the listener has always something to take.
  const auto waiting = shm::FrameSocket::connect(name, std::chrono::seconds(20));
  EXPECT_TRUE(waiting);
  EXPECT_TRUE(wait_until([] { return flooded > 0; }));
  EXPECT_TRUE(answered(2));
  flood = false;
}

}  // namespace
}  // namespace mk::fabric
