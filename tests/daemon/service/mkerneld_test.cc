// mkerneld as a process: how it starts, says that it is ready, refuses, and ends.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <nlohmann/json.hpp>

#include "daemon/rpc/grpc_channel.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"
#include "shm/host/unique_fd.h"
#include "tests/daemon/service/process_rig.h"
#include "tests/daemon/service/raw_client.h"

namespace mk::daemon {
namespace {

namespace v1 = ::mkernel::v1;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class Mkerneld : public testing::Test {
 protected:
  /// A daemon in the folder; `more` may override.
  std::vector<std::string> command(const std::string& node, std::vector<std::string> more = {}) {
    std::vector<std::string> all{MK_MKERNELD,
                                 "--node-id",
                                 node,
                                 "--listen",
                                 "unix:" + (folder / (node + ".peer")),
                                 "--socket",
                                 folder / (node + ".sock"),
                                 "--fabric",
                                 "null",
                                 "--ready-file",
                                 folder / (node + ".ready")};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  std::vector<std::string> command_peer(const std::string& node, const std::string& peer) {
    return command(node, {"--peer", peer + "=unix:" + (folder / (peer + ".peer"))});
  }
  nlohmann::json ready(const std::string& node) {
    const std::string path = folder / (node + ".ready");
    if (!eventually([&] { return std::filesystem::exists(path); })) return {};
    return nlohmann::json::parse(read_file(path));
  }
  v1::GetStatusResponse status(const std::string& target) {
    const auto stub =
        v1::Admin::NewStub(grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    v1::GetStatusResponse response;
    stub->GetStatus(&context, {}, &response);
    return response;
  }
  bool peer_up(const std::string& node) {
    const auto response = status("unix:" + (folder / (node + ".peer")));
    return response.peers_size() == 1 && response.peers(0).state() == v1::PeerStatus::STATE_UP;
  }

  TempFolder folder;
};

TEST_F(Mkerneld, IsReadyServesAndStopsOnSigterm) {
  {
    Program daemon(folder, command("0"));
    const auto line = ready("0");
    EXPECT_EQ(line["node"], 0);
    EXPECT_EQ(line["pid"], daemon.pid());
    EXPECT_EQ(line["listen"], "unix:" + (folder / "0.peer"));
    EXPECT_EQ(line["socket"], folder / "0.sock");
    EXPECT_EQ(status("unix:" + (folder / "0.peer")).health(), v1::GetStatusResponse::HEALTH_OK);
    daemon.signal(SIGTERM);
    EXPECT_EQ(daemon.wait(), 0) << daemon.err();
    EXPECT_THAT(daemon.err(), HasSubstr("is ready"));
    EXPECT_THAT(daemon.err(), HasSubstr("SIGTERM: stopping"));
    EXPECT_EQ(daemon.out(), "");
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_THAT(entry.path().string(), HasSubstr(".lock")) << "was left behind";
  }
}

TEST_F(Mkerneld, ACrashLeavesACoreAndNoFileOfALibrary) {
  // By a process that would write a core, into a folder of its own.
  const rlimit none{0, 0};
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGILL}) {
    SCOPED_TRACE(signal);
    const std::string place = folder / fmt::format("crash-{}", signal);
    std::filesystem::create_directory(place);
    const auto before = std::filesystem::current_path();
    std::filesystem::current_path(place);
    Program daemon(folder, command("0"));
    std::filesystem::current_path(before);
    ASSERT_EQ(ready("0")["pid"], daemon.pid()) << daemon.err();
    ASSERT_EQ(::prlimit(daemon.pid(), RLIMIT_CORE, &none, nullptr), 0);
    // What the watchdog of systemd does (WatchdogSignal), and what memory errors do.
    daemon.signal(signal);
    EXPECT_EQ(daemon.wait(), 128 + signal) << daemon.err();
    EXPECT_TRUE(std::filesystem::is_empty(place));
    std::filesystem::remove(folder / "0.ready");
  }
}

TEST_F(Mkerneld, StopsOnSigintToo) {
  Program daemon(folder, command("0"));
  ready("0");
  daemon.signal(SIGINT);
  EXPECT_EQ(daemon.wait(), 0) << daemon.err();
}

TEST_F(Mkerneld, TellsTheRealPortThroughAPipe) {
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  Program daemon(folder, {MK_MKERNELD, "--listen", "127.0.0.1:0", "--socket", folder / "s",
                          "--fabric", "null", "--ready-fd", std::to_string(pipe[1])});
  ::close(pipe[1]);
  std::string text;
  char buffer[512];
  for (ssize_t n; (n = ::read(pipe[0], buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(n));
  }
  ::close(pipe[0]);
  const auto line = nlohmann::json::parse(text, nullptr, false);
  ASSERT_FALSE(line.is_discarded()) << text << daemon.err();
  const std::string listen = line["listen"];
  EXPECT_THAT(listen, testing::StartsWith("127.0.0.1:"));
  EXPECT_NE(listen, "127.0.0.1:0");
  EXPECT_EQ(status(listen).listen(), listen);

  // Nobody shares the port.
  Program second(folder, {MK_MKERNELD, "--listen", listen, "--socket", folder / "s2", "--fabric",
                          "null", "--log-format", "text"});
  EXPECT_EQ(second.wait(), 1);
  EXPECT_THAT(second.err(), HasSubstr("cannot listen on " + listen + ": another process holds"));
}

TEST_F(Mkerneld, ASecondOneOnTheSameSocketSaysWhoHoldsIt) {
  Program first(folder, command("0"));
  ready("0");
  Program same_socket(folder, {MK_MKERNELD, "--listen", "unix:" + (folder / "x"), "--socket",
                               folder / "0.sock", "--fabric", "null"});
  EXPECT_EQ(same_socket.wait(), 1);
  EXPECT_THAT(same_socket.err(), HasSubstr("0.sock"));
  EXPECT_THAT(same_socket.err(), HasSubstr(fmt::format("process {}", first.pid())));
  Program same_listen(folder, {MK_MKERNELD, "--listen", "unix:" + (folder / "0.peer"), "--socket",
                               folder / "y.sock", "--fabric", "null"});
  EXPECT_EQ(same_listen.wait(), 1);
  EXPECT_THAT(same_listen.err(), HasSubstr(fmt::format("process {}:", first.pid())));
  // The first one has not noticed.
  EXPECT_EQ(status("unix:" + (folder / "0.peer")).health(), v1::GetStatusResponse::HEALTH_OK);
  EXPECT_TRUE(RawClient::attach(folder / "0.sock", "job"));
}

TEST_F(Mkerneld, ReplacesWhatAKilledOneLeft) {
  {
    Program killed(folder, command("0"));
    ready("0");
    killed.signal(SIGKILL);
    EXPECT_EQ(killed.wait(), 128 + SIGKILL);
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "0.sock"));
  EXPECT_TRUE(std::filesystem::exists(folder / "0.peer"));
  std::filesystem::remove(folder / "0.ready");
  Program next(folder, command("0"));
  ready("0");
  EXPECT_TRUE(RawClient::attach(folder / "0.sock", "job")) << next.err();
  EXPECT_EQ(status("unix:" + (folder / "0.peer")).health(), v1::GetStatusResponse::HEALTH_OK);
  next.signal(SIGTERM);
  EXPECT_EQ(next.wait(), 0);
}

TEST_F(Mkerneld, DrainsForAsLongAsConfigured) {
  std::ofstream(folder / "toml") << "[limits]\ndrain = '300ms'\n";
  Program daemon(folder, command("0", {"--config", folder / "toml"}));
  ready("0");
  auto client = RawClient::attach(folder / "0.sock", "stays");
  ASSERT_TRUE(client) << client.error().message;
  daemon.signal(SIGTERM);
  EXPECT_TRUE(client->wait_for(shm::MessageType::kSessionFailed));
  EXPECT_EQ(daemon.wait(), 0) << daemon.err();
}

TEST_F(Mkerneld, ASecondSignalEndsItAtOnce) {
  std::ofstream(folder / "toml") << "[limits]\ndrain = '3600s'\n";
  Program daemon(folder, command("0", {"--config", folder / "toml"}));
  ready("0");
  auto client = RawClient::attach(folder / "0.sock", "stays");
  ASSERT_TRUE(client) << client.error().message;
  daemon.signal(SIGTERM);
  EXPECT_TRUE(eventually([&] { return daemon.err().find("stopping") != std::string::npos; }));
  EXPECT_TRUE(daemon.running());
  // The signal is unblocked just before that line is written.
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait(), 1);
  EXPECT_THAT(daemon.err(), HasSubstr("second signal"));
}

TEST_F(Mkerneld, TwoMeetPartAndMeetAgain) {
  Program one(folder, command_peer("1", "0"));
  auto zero = std::make_unique<Program>(folder, command_peer("0", "1"));
  ready("0");
  ready("1");
  EXPECT_TRUE(eventually([&] { return peer_up("0") && peer_up("1"); })) << one.err();
  zero->signal(SIGKILL);
  zero->wait();
  EXPECT_TRUE(eventually([&] { return !peer_up("1"); }));
  zero = std::make_unique<Program>(folder, command_peer("0", "1"));
  EXPECT_TRUE(eventually([&] { return peer_up("0") && peer_up("1"); })) << one.err();
}

TEST_F(Mkerneld, NoticesAPeerThatAnswersNoMore) {
  for (const std::string frozen : {"0", "1"}) {
    const std::string other = frozen == "0" ? "1" : "0";
    Program stopped(folder, command_peer(frozen, other));
    Program observer(folder, command_peer(other, frozen));
    ready(frozen);
    ready(other);
    ASSERT_TRUE(eventually([&] { return peer_up(frozen) && peer_up(other); }));
    stopped.signal(SIGSTOP);
    EXPECT_TRUE(eventually([&] { return !peer_up(other); }));
    stopped.signal(SIGCONT);
    EXPECT_TRUE(eventually([&] { return peer_up(frozen) && peer_up(other); }));
    stopped.signal(SIGTERM);
    observer.signal(SIGTERM);
    EXPECT_EQ(stopped.wait(), 0);
    EXPECT_EQ(observer.wait(), 0);
  }
}

TEST_F(Mkerneld, ChecksItsConfiguration) {
  std::ofstream(folder / "good") << "node_id = 5\n[fabric]\nname = 'ofi'\n";
  Program good(
      folder, {MK_MKERNELD, "--config", folder / "good", "--check-config", "--fabric", "loopback"});
  EXPECT_EQ(good.wait(), 0);
  EXPECT_THAT(good.out(), HasSubstr("node_id = 5\n"));
  EXPECT_THAT(good.out(), HasSubstr("name = \"loopback\"\n"));

  std::ofstream(folder / "bad") << "nodeid = 5\n[log]\nlevel = 3\n";
  Program bad(folder, {MK_MKERNELD, "--config", folder / "bad", "--check-config"});
  EXPECT_EQ(bad.wait(), 2);
  EXPECT_THAT(bad.err(), HasSubstr((folder / "bad") + ":1:1: nodeid: unknown key; did you mean "
                                                      "\"node_id\"?"));
  EXPECT_THAT(bad.err(), HasSubstr((folder / "bad") + ":3:9: log.level: a string in quotes"));
  EXPECT_EQ(bad.out(), "");

  Program absent(folder, {MK_MKERNELD, "--config", folder / "absent"});
  EXPECT_EQ(absent.wait(), 2);
  EXPECT_THAT(absent.err(), HasSubstr("absent does not exist"));
  Program usage(folder, {MK_MKERNELD, "--nonsense"});
  EXPECT_EQ(usage.wait(), 2);
  EXPECT_THAT(usage.err(), HasSubstr("--nonsense"));
  Program version(folder, {MK_MKERNELD, "--version"});
  EXPECT_EQ(version.wait(), 0);
  EXPECT_NE(version.out(), "");
}

TEST_F(Mkerneld, SaysWhatItCannotOpen) {
  Program folderless(folder, {MK_MKERNELD, "--listen", "unix:" + (folder / "x"), "--socket",
                              folder / "absent/s", "--fabric", "null", "--log-format", "text"});
  EXPECT_EQ(folderless.wait(), 1);
  EXPECT_THAT(folderless.err(), HasSubstr("absent/s"));
  Program listen(folder, {MK_MKERNELD, "--listen", "unix:" + (folder / "absent/x"), "--socket",
                          folder / "s", "--fabric", "null", "--log-format", "text"});
  EXPECT_EQ(listen.wait(), 1);
  EXPECT_THAT(listen.err(), HasSubstr("cannot listen on unix:" + (folder / "absent/x")));
  std::ofstream(folder / "tls") << "[tls]\ncert='/absent.pem'\nkey='/k'\nca='/c'\n";
  Program tls(folder, command("0", {"--config", folder / "tls", "--log-format", "text"}));
  EXPECT_EQ(tls.wait(), 1);
  EXPECT_THAT(tls.err(), HasSubstr("cannot open tls.cert /absent.pem"));
  EXPECT_FALSE(std::filesystem::exists(folder / "0.sock"));
}

/// What systemd would hear.
class NotifySocket {
 public:
  explicit NotifySocket(const TempFolder& folder) : path_(folder / "notify") {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof address.sun_path - 1);
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    const timeval patience{60, 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }
  std::string next() const {
    char text[1024];
    const ssize_t n = ::recv(fd_.get(), text, sizeof text, 0);
    return {text, static_cast<std::size_t>(std::max<ssize_t>(n, 0))};
  }
  /// The next one that has `part` in it; empty when none comes.
  std::string next_with(const std::string& part) const {
    std::string text;
    do {
      text = next();
    } while (!text.empty() && text.find(part) == std::string::npos);
    return text;
  }
  std::string variable() const { return "NOTIFY_SOCKET=" + path_; }

 private:
  const std::string path_;
  const UniqueFd fd_{::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
};

TEST_F(Mkerneld, NotifiesSystemd) {
  const NotifySocket systemd(folder);
  Program daemon(folder, command("0"), {systemd.variable()});
  EXPECT_THAT(systemd.next(),
              HasSubstr("READY=1\nSTATUS=node 0: 0 sessions of 0 jobs, 0 of 0 links up"));
  daemon.signal(SIGTERM);
  const std::string stopping = systemd.next();
  EXPECT_THAT(stopping, HasSubstr("STOPPING=1"));
  EXPECT_THAT(stopping, HasSubstr("EXTEND_TIMEOUT_USEC=10500000\n"));  // 0.5 s to drain, 10 s more
  EXPECT_EQ(daemon.wait(), 0);
}

TEST_F(Mkerneld, FeedsTheWatchdogWhileItIsIdle) {
  const NotifySocket systemd(folder);
  Program daemon(folder, command("0", {"--rails", "3"}),
                 {systemd.variable(), "WATCHDOG_USEC=600000", "WATCHDOG_PID"});
  systemd.next_with("READY=1");
  for (int i = 0; i < 5; ++i) EXPECT_THAT(systemd.next_with("WATCHDOG=1"), HasSubstr("WATCHDOG=1"));
  EXPECT_THAT(daemon.err(), Not(HasSubstr("no progress")));
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait(), 0);
}

TEST_F(Mkerneld, DaemonsThatDisagreeAboutRailsSayWhatToConfigure) {
  const auto one_of_two = [&](const std::string& node, const std::string& peer,
                              const std::string& rails) {
    auto all = command_peer(node, peer);
    all.insert(all.end(), {"--rails", rails, "--log-format", "text"});
    return all;
  };
  Program first(folder, one_of_two("0", "1", "1"));
  Program second(folder, one_of_two("1", "0", "2"));
  // Node 0 is called, and refuses.
  EXPECT_TRUE(eventually([&] {
    return first.err().find("it has 2 rails and this daemon 1; configure as many on all nodes") !=
           std::string::npos;
  })) << first.err();
  // From the hello until the refusal, at every try, their stream is up.
  EXPECT_TRUE(eventually([&] { return !peer_up("0"); }));
  EXPECT_TRUE(eventually([&] { return !peer_up("1"); }));
  second.signal(SIGTERM);
  EXPECT_EQ(second.wait(), 0);
  // As many: "auto" of a fabric without NICs of its own.
  Program alike(folder, one_of_two("1", "0", "auto"));
  EXPECT_TRUE(eventually([&] { return peer_up("0"); })) << first.err() << alike.err();
  EXPECT_THAT(first.err(), Not(HasSubstr("on other NICs")));
}

TEST_F(Mkerneld, ReloadsOnSighup) {
  const NotifySocket systemd(folder);
  const auto configure = [this](const std::string& text) {
    std::ofstream(folder / "toml") << text;
  };
  const auto reload = [&](Program& daemon) {
    daemon.signal(SIGHUP);
    EXPECT_THAT(systemd.next_with("RELOADING=1"), HasSubstr("MONOTONIC_USEC="));
    EXPECT_THAT(systemd.next_with("READY=1"), HasSubstr("STATUS=node 0"));
    return daemon.err();
  };
  // What GetStatus says of the last reload: what `mkctl status` shows.
  const auto problems = [&] {
    const auto admin = mkernel::v1::Admin::NewStub(
        open_channel({.unix_socket = true, .path = folder / "0-admin.sock"}, {}));
    grpc::ClientContext context;
    mkernel::v1::GetStatusResponse status;
    EXPECT_TRUE(admin->GetStatus(&context, {}, &status).ok());
    return std::string(fmt::format("{}", fmt::join(status.problems(), "; ")));
  };
  configure("[limits]\ndrain = '3600s'\n");
  Program daemon(folder, command("0", {"--config", folder / "toml", "--log-format", "text"}),
                 {systemd.variable()});
  systemd.next_with("READY=1");
  EXPECT_THAT(reload(daemon), HasSubstr("SIGHUP: the configuration has not changed"));

  configure("[limits]\ndrain = '200ms'\n[fabric]\nrails = 0\n");
  EXPECT_THAT(reload(daemon),
              HasSubstr("is kept, since the new one is not valid: " + (folder / "toml") +
                        ":4:9: fabric.rails: a whole number from 1 to"));
  EXPECT_THAT(problems(), AllOf(HasSubstr("the last reload was refused: "),
                                HasSubstr("fabric.rails: a whole number from 1 to")));
  configure("[limits]\ndrain = '200ms'\nsessions = 3\n[log]\nformat = 'text'\n");
  EXPECT_THAT(reload(daemon), HasSubstr("these changes need a restart of mkerneld: "
                                        "limits.sessions 64 -> 3"));
  EXPECT_THAT(problems(), HasSubstr("limits.sessions 64 -> 3"));
  configure("[limits]\ndrain = '200ms'\n[log]\nlevel = 'warning'\n[[job]]\npattern='a*'\n");
  daemon.signal(SIGHUP);
  EXPECT_THAT(systemd.next_with("READY=1"), HasSubstr("READY=1"));
  EXPECT_EQ(problems(), "");

  // What was refused together with other keys has not been taken over before; now it has.
  auto client = RawClient::attach(folder / "0.sock", "stays");
  ASSERT_TRUE(client) << client.error().message;
  daemon.signal(SIGTERM);
  EXPECT_THAT(systemd.next_with("STOPPING=1"), HasSubstr("EXTEND_TIMEOUT_USEC=10200000\n"));
  EXPECT_TRUE(client->wait_for(shm::MessageType::kSessionFailed));
  EXPECT_EQ(daemon.wait(), 0) << daemon.err();
  EXPECT_THAT(daemon.err(), Not(HasSubstr("stopping")));  // below the new level
}

/// Runs a command as systemd does for a service with a socket unit.
std::vector<std::string> activated(int socket, const std::vector<std::string>& command) {
  std::vector<std::string> all{
      "/bin/bash", "-c",
      fmt::format("exec 3<&{}; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\"", socket), "bash"};
  all.insert(all.end(), command.begin(), command.end());
  return all;
}

TEST_F(Mkerneld, TakesTheClientSocketThatSystemdHolds) {
  const std::string path = folder / "0.sock";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM, 0));
  ASSERT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(socket.get(), 16), 0);
  for (int run = 0; run < 2; ++run) {  // the socket outlives the daemon
    std::filesystem::remove(folder / "0.ready");
    Program daemon(folder, activated(socket.get(), command("0")));
    ready("0");
    EXPECT_TRUE(RawClient::attach(path, "job")) << daemon.err();
    daemon.signal(SIGTERM);
    EXPECT_EQ(daemon.wait(), 0) << daemon.err();
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  Program other(folder, activated(socket.get(), {MK_MKERNELD, "--socket", folder / "other.sock",
                                                 "--fabric", "null"}));
  EXPECT_EQ(other.wait(), 1);
  EXPECT_THAT(other.err(), HasSubstr("give ListenStream= of mkerneld.socket that path"));
}

}  // namespace
}  // namespace mk::daemon
