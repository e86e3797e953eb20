// Two daemons in two processes: the peer is this program again, started with --peer, talked to over
// its standard input and output. It verifies what arrives; then it is killed in mid-transfer.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>

#include "tests/daemon/fabric/fabric_fixture.h"

extern char** environ;

namespace mk::fabric {
namespace {

constexpr std::uint32_t kSlotBytes = 300'007;
constexpr std::uint32_t kSlots = 24;

std::string to_hex(const Bytes& bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  return text;
}

Bytes from_hex(const std::string& text) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoul(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

FabricSetup setup_named(const std::string& name) {
  for (FabricSetup& setup : all_setups()) {
    if (setup.name == name) return setup;
  }
  throw std::runtime_error("no setup " + name);
}

/// The peer's program: tells its address and keys, checks every slot when its flag shows, tells the
/// result, then goes on receiving until somebody kills it (or its deadline passes).
int run_peer(const std::string& name) {
  Node node(setup_named(name));
  const Memory target = node.memory(kSlots * std::uint64_t{kSlotBytes});
  std::cout << to_hex(node.endpoint->address()) << '\n'
            << to_hex(node.flags.region->key()) << '\n'
            << to_hex(target.region->key()) << std::endl;
  std::vector<std::byte> expected(kSlotBytes);
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    if (!pump({&node}, [&] { return node.flag(slot) == 1; })) {
      std::cout << "slot " << slot << " did not arrive" << std::endl;
      return 1;
    }
    fill_random(expected, slot);
    if (std::memcmp(expected.data(), target.data() + slot * std::uint64_t{kSlotBytes},
                    kSlotBytes) != 0) {
      std::cout << "slot " << slot << " is wrong" << std::endl;
      return 1;
    }
  }
  std::cout << "intact" << std::endl;
  pump({&node}, [] { return false; });
  return 0;
}

class Peer {
 public:
  explicit Peer(const std::string& name) {
    int out[2];
    if (::pipe2(out, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    std::string program = "/proc/self/exe";
    std::string flag = "--peer";
    std::string argument = name;
    char* const arguments[] = {program.data(), flag.data(), argument.data(), nullptr};
    if (::posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, environ) != 0)
      pid_ = -1;
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(out[1]);
    from_ = ::fdopen(out[0], "r");
  }
  ~Peer() {
    kill();
    ::fclose(from_);
  }
  std::string line() {
    std::string text;
    for (int c = std::fgetc(from_); c != EOF && c != '\n'; c = std::fgetc(from_))
      text += static_cast<char>(c);
    return text;
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  std::FILE* from_ = nullptr;
};

class TwoProcessTest : public FabricTest {};

TEST_P(TwoProcessTest, DataArrivesIntactAndAKilledPeerBringsTheLinkDown) {
  FabricSetup setup = GetParam();
  setup.config.write_timeout_ns = 2'000'000'000;
  Node a(setup);
  Peer peer(setup.name);
  const Bytes address = from_hex(peer.line());
  const Bytes flags_key = from_hex(peer.line());
  const Bytes target_key = from_hex(peer.line());
  const auto id = a.endpoint->connect(address, "node 1 rail 0");
  ASSERT_TRUE(id) << id.error().message;
  auto flags = a.endpoint->import_region(*id, flags_key);
  ASSERT_TRUE(flags) << flags.error().message;
  const TestLink link{*id, std::move(*flags)};
  const auto remote = a.endpoint->import_region(link.id, target_key);
  ASSERT_TRUE(remote) << remote.error().message;

  const Memory source = a.memory(kSlots * std::uint64_t{kSlotBytes});
  std::vector<Write> writes;
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    const std::uint64_t at = slot * std::uint64_t{kSlotBytes};
    fill_random({source.data() + at, kSlotBytes}, slot);
    writes.push_back(make_write(link, slot, 1, slot, source, at, **remote, at, kSlotBytes));
  }
  ASSERT_TRUE(post_all(a, link.id, writes, {&a}));
  ASSERT_TRUE(pump({&a}, [&] { return a.completed.size() == kSlots && a.settled(); }));
  ASSERT_EQ(peer.line(), "intact");

  std::uint64_t cookie = 1000;
  const auto feed = [&] {
    while (cookie - 1000 + kSlots - a.total(a.completed) - a.total(a.failed) < 8) {
      const Write write = make_write(link, 0, 2, cookie, source, 0, **remote, 0, kSlotBytes);
      if (a.endpoint->post(link.id, {&write, 1}) == 0) break;
      ++cookie;
    }
  };
  ASSERT_TRUE(pump({&a}, [&] {
    feed();
    return a.total(a.completed) > kSlots + 20;
  }));
  peer.kill();
  ASSERT_TRUE(pump({&a}, [&] {
    feed();
    return a.links_down.contains(link.id);
  }));
  ASSERT_TRUE(pump(
      {&a}, [&] { return a.total(a.completed) + a.total(a.failed) == cookie - 1000 + kSlots; }));
  EXPECT_NE(a.endpoint->link_reason(link.id).find("node 1 rail 0"), std::string::npos);
}

std::vector<FabricSetup> across_processes() {
  std::vector<FabricSetup> setups = all_setups();
  // One endpoint of each kind is in each process, so both ways of loopback are the same here.
  std::erase_if(setups, [](const FabricSetup& setup) { return setup.name == "loopback_mapped"; });
  return setups;
}

INSTANTIATE_TEST_SUITE_P(Fabrics, TwoProcessTest, testing::ValuesIn(across_processes()),
                         setup_name);

}  // namespace
}  // namespace mk::fabric

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--peer") return mk::fabric::run_peer(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
