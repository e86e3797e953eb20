// Connections that misbehave: garbage, slowness, crowds, descriptors, things that belong to others.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "tests/hostile/hostile_pair.h"

namespace mk::test {
namespace {

using daemon::test::SocketClient;

class HostileSocket : public HostileTest {};

/// A connection that knows nothing of frames.
UniqueFd connect_raw(const std::string& path) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const AsHostileUser user;
  EXPECT_EQ(0, ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address))
      << std::strerror(errno);
  const timeval patience{60, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  return fd;
}

bool send_raw(const UniqueFd& fd, const void* data, std::size_t bytes) {
  return ::send(fd.get(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

/// Everything the daemon says until it hangs up, as it is on the wire.
std::string read_to_end(const UniqueFd& fd) {
  std::string all;
  char buffer[4096];
  for (ssize_t got; (got = ::recv(fd.get(), buffer, sizeof buffer, 0)) > 0;) {
    all.append(buffer, static_cast<std::size_t>(got));
  }
  return all;
}

/// A frame's header for `bytes` of payload.
shm::FrameHeader frame(shm::MessageType type, std::uint32_t bytes) {
  shm::FrameHeader header{};
  header.payload_bytes = bytes;
  header.type = static_cast<std::uint16_t>(type);
  header.request = 1;
  return header;
}

void send_with_descriptors(const UniqueFd& socket, const void* data, std::size_t bytes,
                           const std::vector<int>& fds) {
  iovec part{const_cast<void*>(data), bytes};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  (void)::sendmsg(socket.get(), &message, MSG_NOSIGNAL);
}

TEST_F(HostileSocket, RandomBytes) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    const UniqueFd fd = connect_raw(socket());
    std::vector<std::uint64_t> noise(1 + random() % 4096);
    for (auto& word : noise) word = random();
    // Half of them begin with a believable length.
    if (seed % 2 == 0) {
      const auto header = frame(static_cast<shm::MessageType>(random() % 20),
                                static_cast<std::uint32_t>(random() % 512));
      send_raw(fd, &header, sizeof header);
    }
    send_raw(fd, noise.data(), noise.size() * 8);
    tried();
    ::shutdown(fd.get(), SHUT_WR);
    read_to_end(fd);  // it hangs up
  }
}

TEST_F(HostileSocket, AMalformedMessageOfEveryTypeEndsItsSession) {
  std::mt19937_64 random(3);
  for (std::uint16_t type = 0; type < 24; ++type) {
    SCOPED_TRACE(type);
    const std::string job = "malformed-" + std::to_string(type);
    auto attach = shm::Attach{};
    attach.job = job;
    const UniqueFd fd = connect_raw(socket());
    const auto ask = [&](const auto& message) {
      const auto payload = shm::encode_message(message);
      const auto header = frame(message.kType, static_cast<std::uint32_t>(payload.size()));
      ASSERT_TRUE(send_raw(fd, &header, sizeof header));
      ASSERT_TRUE(payload.empty() || send_raw(fd, payload.data(), payload.size()));
    };
    ask(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "hostile"});
    ask(attach);
    std::uint8_t noise[100];
    for (auto& byte : noise) byte = static_cast<std::uint8_t>(random());
    const auto header = frame(static_cast<shm::MessageType>(type), sizeof noise);
    send_raw(fd, &header, sizeof header);
    send_raw(fd, noise, sizeof noise);
    tried();
    // Out of turn, these two are refused before anyone looks inside; the session goes on.
    const bool refused = type == static_cast<std::uint16_t>(shm::MessageType::kHello) ||
                         type == static_cast<std::uint16_t>(shm::MessageType::kAttach);
    if (refused) ::shutdown(fd.get(), SHUT_WR);
    const std::string said = read_to_end(fd);
    EXPECT_NE(said.find(refused ? "came after attach" : ""), std::string::npos) << said;
    EXPECT_TRUE(shown_as_failed(job, refused ? " ended: " : "")) << said;
  }
}

TEST_F(HostileSocket, LengthsBeyondTheLimit) {
  for (const std::uint32_t bytes : {0xffffffffu, 0x80000000u, 4'194'305u}) {
    const UniqueFd fd = connect_raw(socket());
    const auto header = frame(shm::MessageType::kHello, bytes);
    ASSERT_TRUE(send_raw(fd, &header, sizeof header));
    EXPECT_NE(read_to_end(fd).find("malformed header"), std::string::npos);
    tried();
  }
}

TEST_F(HostileSocket, OneByteASecondEndsAtTheHandshakesDeadline) {
  const UniqueFd fd = connect_raw(socket());
  const auto payload = shm::encode_message(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "slow"});
  const auto header = frame(shm::MessageType::kHello, static_cast<std::uint32_t>(payload.size()));
  const auto* bytes = reinterpret_cast<const char*>(&header);
  std::size_t sent = 0;
  const auto deadline = patience();
  while (sent < sizeof header && send_raw(fd, bytes + sent, 1)) {
    ++sent;
    tried();
    std::this_thread::sleep_for(1s);
  }
  EXPECT_NE(read_to_end(fd).find("no attach within"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now(), deadline);
}

TEST_F(HostileSocket, AnAttachedClientMayBeSlowWithoutHoldingAnyoneUp) {
  HostileClient slow(socket());
  shm::Attach attach;
  attach.job = "slow";
  ASSERT_TRUE(slow.attach(attach));
  // Others come and go while half a request of it is there.
  const UniqueFd half = connect_raw(socket());
  const auto header = frame(shm::MessageType::kHello, 64);
  send_raw(half, &header, 7);
  tried();
  for (int i = 0; i < 20; ++i) {
    HostilePair pair(daemons());
    pair.commit(pair.right());
    EXPECT_TRUE(pair.all_completed());
    pair.expect_detaches();
  }
  EXPECT_TRUE(slow.call<shm::Done>(shm::Detach{}));
}

TEST_F(HostileSocket, AThousandConnections) {
  std::vector<UniqueFd> crowd;
  for (int i = 0; i < 1000; ++i) crowd.push_back(connect_raw(socket()));
  // The daemon comes to them when it can. Once it has, most are refused with the reason.
  std::size_t refused = 0;
  EXPECT_TRUE(eventually([&] {
    for (const UniqueFd& fd : crowd) {
      char buffer[512];
      const ssize_t got = ::recv(fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      const std::string said(buffer, static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
      refused += said.find("connections") != std::string::npos ? 1 : 0;
    }
    return refused >= crowd.size() / 2;
  })) << refused
      << " were refused";
  tried(crowd.size());
  crowd.clear();
  // Then there is room again.
  EXPECT_TRUE(eventually([&] {
    HostileClient client(socket());
    shm::Attach attach;
    attach.job = "after-the-crowd";
    return client.attach(attach).has_value() && client.call<shm::Done>(shm::Detach{}).has_value();
  }));
}

TEST_F(HostileSocket, DescriptorsByTheHundred) {
  std::vector<int> many;
  std::vector<UniqueFd> keep;
  for (int i = 0; i < 250; ++i) {
    keep.emplace_back(::eventfd(0, EFD_CLOEXEC));
    many.push_back(keep.back().get());
  }
  const auto hello = shm::encode_message(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "hostile"});
  const auto header = frame(shm::MessageType::kHello, static_cast<std::uint32_t>(hello.size()));
  for (int i = 0; i < 20; ++i) {
    // Many in one message; four, where none belongs; four with every byte of a header.
    UniqueFd fd = connect_raw(socket());
    send_with_descriptors(fd, &header, sizeof header, many);
    EXPECT_NE(read_to_end(fd).find("descriptors"), std::string::npos);
    tried(many.size() + 4 + 4 * sizeof header);

    fd = connect_raw(socket());
    send_with_descriptors(fd, &header, sizeof header, {many[0], many[1], many[2], many[3]});
    send_raw(fd, hello.data(), hello.size());
    EXPECT_NE(read_to_end(fd).find("it takes 0"), std::string::npos);

    fd = connect_raw(socket());
    for (std::size_t byte = 0; byte < sizeof header; ++byte) {
      send_with_descriptors(fd, reinterpret_cast<const char*>(&header) + byte, 1,
                            {many[0], many[1], many[2], many[3]});
    }
    EXPECT_NE(read_to_end(fd).find("descriptors"), std::string::npos);
  }
}

TEST_F(HostileSocket, MemoryThatIsNone) {
  HostilePair pair(daemons());
  UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(0, ::ftruncate(unsealed.get(), 8192));
  UniqueFd short_one(::memfd_create("short", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(0, ::ftruncate(short_one.get(), 4096));
  ASSERT_EQ(0, ::fcntl(short_one.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
  UniqueFd written(::memfd_create("read only", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(0, ::ftruncate(written.get(), 8192));
  ASSERT_EQ(0, ::fcntl(written.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE));
  UniqueFd read_only(
      ::open(("/proc/self/fd/" + std::to_string(unsealed.get())).c_str(), O_RDONLY | O_CLOEXEC));
  UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  UniqueFd folder(::open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  UniqueFd event(::eventfd(0, EFD_CLOEXEC));
  const int segment = pair.guilty.segment->fd();
  for (const int fd : {unsealed.get(), short_one.get(), written.get(), read_only.get(), null.get(),
                       folder.get(), event.get()}) {
    const auto reply =
        pair.guilty.call<shm::RegisterBufferReply>(shm::RegisterBuffer{8192, "none"}, {{fd}});
    EXPECT_FALSE(reply) << "descriptor " << fd;
    tried();
  }
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1} << 47,
                                    (std::uint64_t{1} << 48) + 1, ~std::uint64_t{0}}) {
    const int fd = pair.guilty.buffer->fd();
    tried();
    EXPECT_FALSE(
        pair.guilty.call<shm::RegisterBufferReply>(shm::RegisterBuffer{bytes, "none"}, {{fd}}));
  }
  // The session's own memory cannot be taken away under the daemon.
  EXPECT_NE(0, ::ftruncate(segment, 0));
  EXPECT_NE(0, ::ftruncate(segment, 1 << 20));
  EXPECT_NE(0, ::ftruncate(pair.guilty.buffer->fd(), 0));
  // Its pages can: they come back as zeros, also while they are being sent.
  for (int i = 0; i < 200; ++i) {
    pair.commit(pair.right());
    EXPECT_EQ(0, ::fallocate(pair.guilty.buffer->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                             0, HostilePair::kBytes));
    tried();
    ASSERT_TRUE(pair.all_completed());
  }
  pair.expect_detaches();
}

TEST_F(HostileSocket, ThePagesOfItsOwnRingsTakenAway) {
  HostilePair pair(daemons());
  pair.commit(pair.right());
  EXPECT_TRUE(pair.all_completed());
  EXPECT_EQ(0, ::fallocate(pair.guilty.segment->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                           static_cast<off_t>(pair.guilty.segment->bytes())));
  tried();
  // Zeros are no command in lap 0; the next one is out of step only if the client says so.
  pair.commit(pair.right());
  EXPECT_TRUE(daemon::test::eventually(
      [&] { return shm::load_acquire(&pair.guilty.segment->ring(0).control->completed) == 2; }));
  shm::store_relaxed(&pair.guilty.segment->ring(0).control->produced, std::uint64_t{2});
  pair.expect_detaches();
}

TEST_F(HostileSocket, WhatBelongsToOthers) {
  HostilePair pair(daemons());
  // Buffers by every handle, of this node's local ranks and of ranks that are not there.
  std::size_t opened = 0;
  for (const std::uint32_t local : {0u, 1u, 15u, 16u, 0xffffffffu}) {
    for (std::uint32_t handle = 0; handle <= 1025; handle += handle < 8 ? 1 : 113) {
      const auto reply = pair.guilty.call<shm::OpenPeerBufferReply>(
          shm::OpenPeerBuffer{local, static_cast<std::uint16_t>(handle)});
      tried();
      if (reply) {
        ++opened;
        EXPECT_EQ(local, 0u);
        EXPECT_EQ(handle, pair.handles[0]);
      }
    }
  }
  EXPECT_EQ(opened, 1u);  // its own
  for (const int handle : {0, 2, 3, 1024, 65535}) {
    tried();
    EXPECT_FALSE(
        pair.guilty.call<shm::Done>(shm::DeregisterBuffer{static_cast<std::uint16_t>(handle)}));
  }
  EXPECT_FALSE(pair.guilty.call<shm::AllocFlagsReply>(shm::AllocFlags{0xffffffff}));
  // The healthy job's name, ranks and rendezvous.
  for (const std::uint32_t rank : {0u, 1u}) {
    HostileClient intruder(socket(rank));
    shm::Attach attach;
    attach.job = "healthy";
    attach.rank = attach.node_rank = rank;
    attach.world = attach.nodes = 2;
    const Status status = intruder.attach(attach);
    tried();
    ASSERT_FALSE(status);
    // Its ranks are taken; another user does not even get to hear that.
    EXPECT_EQ(status.error().code,
              hostile_user() == ::geteuid() ? ErrorCode::kAlreadyExists : ErrorCode::kPermission)
        << status.error().message;
  }
  pair.expect_detaches();
}

TEST_F(HostileSocket, RequestsByTheThousandWhoseAnswersNobodyReads) {
  const auto held = [] { return holdings()[0].descriptors; };
  HostilePair pair(daemons());
  const std::size_t before = held();
  // Some answers are a descriptor each. What waits for the guilty stays in its socket; when that is
  // full, nothing more is taken from it.
  std::size_t sent = 0, most = 0;
  for (; sent < 200'000; ++sent) {
    const auto soon = std::chrono::steady_clock::now() + 500ms;
    const Status status = sent % 2 == 0
                              ? pair.guilty.try_post(shm::AllocFlags{0}, soon)
                              : pair.guilty.try_post(shm::OpenPeerBuffer{0, pair.handles[0]}, soon);
    if (!status) break;
    if (sent % 256 == 0) most = std::max(most, held());
  }
  tried(sent);
  EXPECT_LT(sent, 200'000u) << "requests are still taken";
  EXPECT_LE(std::max(most, held()), before + 4) << "after " << sent << " requests";
  // The job goes on meanwhile: what the other rank asks is answered.
  EXPECT_TRUE(pair.other.call<shm::AllocFlagsReply>(shm::AllocFlags{1}));
  pair.guilty.shut();
  const auto lost = pair.other.await<shm::SessionFailed>();
  ASSERT_TRUE(lost) << "after " << sent << " requests: " << lost.error().message;
  EXPECT_EQ(lost->code, ErrorCode::kPeerLost);
}

// The healthy job's buffers are mapped by its own daemon, and by the other one as a peer's.
TEST_F(HostileSocket, NoMemoryOfAClientIsInADumpOfADaemon) {
  for (std::uint32_t node = 0; node < 2; ++node) {
    std::ifstream smaps("/proc/" + std::to_string(daemons().process(node).pid()) + "/smaps");
    std::size_t buffers = 0;
    std::string mapping;
    for (std::string line; std::getline(smaps, line);) {
      // A mapping begins with its addresses, and its flags end it.
      if (line.find('-') < line.find(' ')) mapping = line;
      // The daemon's own files hold rings and flags, and no payload.
      if (!line.starts_with("VmFlags:") || mapping.find("/memfd:") == std::string::npos ||
          mapping.find("/memfd:mkernel-session-") != std::string::npos) {
        continue;
      }
      ++buffers;
      EXPECT_NE((line + ' ').find(" dd "), std::string::npos) << mapping << '\n' << line;
    }
    EXPECT_GE(buffers, 2u) << "of node " << node;
  }
  tried();
}

TEST_F(HostileSocket, MoreMemoryThanThereIsAndThenLargeFrames) {
  // Sparse files, as many as an address space holds: none of them costs the client anything.
  HostileClient client(socket());
  shm::Attach attach;
  attach.job = "sparse";
  ASSERT_TRUE(client.attach(attach));
  for (int i = 0; i < 80; ++i) {
    const auto file = shm::BufferFile::create("sparse", std::uint64_t{1} << 41);
    if (!file) break;  // our own address space is full
    const int fds[] = {file->fd()};
    const auto reply = client.call<shm::RegisterBufferReply>(
        shm::RegisterBuffer{std::uint64_t{1} << 41, "sparse"}, fds);
    tried();
    ASSERT_FALSE(reply);
    EXPECT_NE(reply.error().message.find("host memory"), std::string::npos)
        << reply.error().message;
  }
  // Then frames of the largest size, half sent, from clients who never say who they are.
  const std::vector<char> much(4 << 20);
  for (int i = 0; i < 64; ++i) {
    const UniqueFd fd = connect_raw(socket());
    const auto header = frame(shm::MessageType::kHello, 4 << 20);
    send_raw(fd, &header, sizeof header);
    (void)::send(fd.get(), much.data(), much.size() / 2, MSG_NOSIGNAL | MSG_DONTWAIT);
    tried();
    EXPECT_NE(read_to_end(fd).find("malformed header"), std::string::npos);
  }
  EXPECT_TRUE(client.call<shm::Done>(shm::Detach{}));
}

TEST_F(HostileSocket, ThreeHundredSessionsThatEndAtOnceAndNeverHangUp) {
  std::vector<std::unique_ptr<HostileClient>> left;
  std::size_t refused = 0;
  for (int i = 0; i < 300; ++i) {
    auto client = std::make_unique<HostileClient>(socket());
    shm::Attach attach;
    attach.job = "never-" + std::to_string(i);
    attach.world = attach.nodes = 2;
    attach.timeout_ms = 1;
    const Status attached = client->attach(attach);
    tried();
    if (attached) left.push_back(std::move(client));
    refused += attached ? 0 : 1;
  }
  EXPECT_GT(refused, 0u) << "no limit is reached";
  // All of them keep their sockets, and there is room for others' all the same.
  EXPECT_TRUE(eventually([&] {
    SocketClient client(socket());
    shm::Attach attach;
    attach.job = "after-the-crowd";
    return client.attach(attach).has_value() && client.call<shm::Done>(shm::Detach{}).has_value();
  }));
}

TEST_F(HostileSocket, SessionsComeAndDieAtEveryStep) {
  for (int step = 0; step < 60; ++step) {
    HostileClient client(socket());
    tried();
    if (step % 6 == 0) continue;  // connected
    if (step % 6 == 1) {
      EXPECT_TRUE(
          client.call<shm::HelloReply>(shm::Hello{shm::kAbiMajor, shm::kAbiMinor, "hostile"}));
      continue;
    }
    shm::Attach attach;
    attach.job = "dies-" + std::to_string(step);
    attach.world = attach.nodes = step % 6 == 2 ? 2 : 1;  // one waits for ever
    ASSERT_TRUE(client.attach(attach));
    if (step % 6 == 2) continue;
    ASSERT_TRUE(client.await<shm::JobUp>());
    if (step % 6 == 3) continue;
    ASSERT_TRUE(client.add_buffer(1 << 20));
    if (step % 6 == 4) continue;
    client.post(shm::Detach{});
    if (step % 12 == 5) client.shut();
  }
}

}  // namespace
}  // namespace mk::test
