// Certificates that get faults while daemons run: what a daemon and its peers say of them.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>

#include "shm/host/unique_fd.h"
#include "tests/daemon/service/process_rig.h"
#include "tests/daemon/tls/certificate_maker.h"

namespace mk::daemon {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// A port of this machine that nobody has just now.
std::uint16_t free_port() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof name;
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof name), 0);
  EXPECT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&name), &bytes), 0);
  return ::ntohs(name.sin_port);
}

class RunningCertificates : public testing::Test {
 protected:
  /// Node `node` of two, with the certificate of `owner` and the CA `ca`.
  std::string configure(int node, const std::string& owner, const std::string& signer) {
    const std::string id = std::to_string(node);
    const std::string file = folder / (id + ".toml");
    std::ofstream(file) << "node_id = " << id << "\nlisten = '127.0.0.1:" << ports[node]
                        << "'\n[socket]\npath = '" << folder / (id + ".sock")
                        << "'\n[metrics]\nlisten = '127.0.0.1:0'\n[fabric]\nname = 'null'\n"
                        << "[log]\nformat = 'text'\n[[peer]]\nid = " << 1 - node << "\naddress = '"
                        << address(1 - node) << "'\n[tls]\ncert = '"
                        << folder / (owner + "-cert.pem") << "'\nkey = '"
                        << folder / (owner + "-key.pem") << "'\nca = '"
                        << folder / (signer + ".pem") << "'\n";
    return file;
  }
  std::string address(int node) const { return "127.0.0.1:" + std::to_string(ports[node]); }
  std::unique_ptr<Program> start(int node, const std::string& owner, const std::string& signer) {
    const std::string ready = folder / (std::to_string(node) + ".ready");
    auto daemon = std::make_unique<Program>(
        folder, std::vector<std::string>{MK_MKERNELD, "--config", configure(node, owner, signer),
                                         "--ready-file", ready});
    EXPECT_TRUE(eventually([&] { return std::filesystem::exists(ready); })) << daemon->err();
    return daemon;
  }
  struct Seen {
    int code;
    std::string out, err;
  };
  Seen mkctl(int node, const std::vector<std::string>& arguments) {
    const std::string socket = "unix:" + (folder / (std::to_string(node) + "-admin.sock"));
    std::vector<std::string> command{MK_MKCTL, "--timeout", "30s", "--address", socket};
    command.insert(command.end(), arguments.begin(), arguments.end());
    Program program(folder, command, {"MKCTL_ADDRESS", "MKERNELD_CONFIG"});
    const int code = program.wait();
    return {code, program.out(), program.err()};
  }
  /// Until `mkctl status` of `node` says each of `parts`.
  bool status_says(int node, const std::vector<std::string>& parts) {
    std::string last;
    const bool said = eventually([&] {
      last = mkctl(node, {"status"}).out;
      return std::ranges::all_of(
          parts, [&](const std::string& part) { return last.find(part) != std::string::npos; });
    });
    EXPECT_TRUE(said) << last;
    return said;
  }

  TempFolder folder;
  CertificateMaker ca{folder.path(), "ca"};
  const std::uint16_t ports[2] = {free_port(), free_port()};
};

TEST_F(RunningCertificates, ADaemonWhoseKeyIsReplacedByAnotherIsNotReadyUntilItIsMended) {
  ca.make("node");
  ca.make("other");
  const auto daemon = start(0, "node", "ca");
  EXPECT_EQ(mkctl(0, {"ready"}).code, 0);
  std::filesystem::copy(folder / "other-key.pem", folder / "node-key.pem",
                        std::filesystem::copy_options::overwrite_existing);
  Seen ready{};
  EXPECT_TRUE(eventually([&] { return (ready = mkctl(0, {"ready"})).code == 1; }));
  EXPECT_THAT(ready.err, AllOf(HasSubstr("is not ready: tls.key "), HasSubstr("does not belong to"),
                               Not(HasSubstr("to connect"))));
  status_says(0, {"node 0: not ready", "node-key.pem does not belong to tls.cert"});
  EXPECT_THAT(mkctl(0, {"metrics"}).out, HasSubstr("mkernel_tls_certificate_faults"));
  ca.make("node");
  EXPECT_TRUE(eventually([&] { return mkctl(0, {"ready"}).code == 0; }));
  EXPECT_TRUE(eventually([&] {
    return daemon->err().find("nothing is wrong with the certificates") != std::string::npos;
  }));
}

TEST_F(RunningCertificates, AnExpiredCertificateIsNamedOnBothSides) {
  ca.make("node");
  ca.make("old", {.from_s = -7200, .until_s = -3600});
  const auto good = start(0, "node", "ca");
  const auto old = start(1, "old", "ca");
  status_says(0, {"node 1 (" + address(1) + ")", "its certificate expired on 20"});
  status_says(1, {"node 0 (" + address(0) + ")", "tls.cert " + (folder / "old-cert.pem"),
                  "old-cert.pem expired on 20", "it refuses that, and `mkctl status` there"});
  EXPECT_THAT(good->err(), HasSubstr("node 1 (" + address(1) +
                                     ") is kept away by TLS: its certificate expired on 20"));
  EXPECT_THAT(old->err(),
              AllOf(HasSubstr("old-cert.pem expired on 20"), HasSubstr("node 0 (" + address(0) +
                                                                       ") is kept away by TLS: it "
                                                                       "closes the connection once "
                                                                       "it has seen tls.cert")));
  // Each try to connect fails, ten a second: the log says it once.
  const auto lines_with = [](const Program& daemon, const std::string& words) {
    const std::string log = daemon.err();
    std::size_t count = 0;
    for (std::size_t at = log.find(words); at != log.npos; at = log.find(words, at + 1)) ++count;
    return count;
  };
  EXPECT_TRUE(eventually([&] {
    const std::string status = mkctl(0, {"status"}).out;
    return std::regex_search(status, std::regex("; [2-9][0-9] from there"));
  }));
  EXPECT_LE(lines_with(*good, "a TLS handshake with"), 2u) << good->err();
  EXPECT_LE(lines_with(*old, "gRPC: "), 5u) << old->err();
  // A new certificate is all that it takes.
  ca.make("old");
  EXPECT_TRUE(eventually([&] { return mkctl(0, {"status"}).code == 0; }));
  EXPECT_TRUE(eventually([&] { return mkctl(1, {"status"}).code == 0; }));
}

TEST_F(RunningCertificates, AWrongCaIsNamedOnBothSides) {
  const CertificateMaker stranger(folder.path(), "stranger");
  ca.make("node");
  stranger.make("strange");
  const auto zero = start(0, "node", "ca");
  const auto one = start(1, "strange", "stranger");
  for (const int node : {0, 1}) {
    const std::string its_ca = folder / (node == 0 ? "ca.pem" : "stranger.pem");
    status_says(node, {"its certificate is not signed by tls.ca " + its_ca + " of this node",
                       "it refuses that, and `mkctl status` there says why"});
    const Program& daemon = node == 0 ? *zero : *one;
    EXPECT_THAT(daemon.err(), HasSubstr(address(1 - node) + ") is kept away by TLS: its "
                                                            "certificate is not signed by"));
  }
}

TEST_F(RunningCertificates, ACertificateOfAnotherNodeIsNamed) {
  ca.make("node");
  ca.make("elsewhere", {.names = "DNS:node7.cluster"});
  const auto zero = start(0, "node", "ca");
  const auto one = start(1, "elsewhere", "ca");
  status_says(0, {"its certificate is made out to 'node7.cluster', and not to '127.0.0.1'"});
  EXPECT_TRUE(eventually([&] {
    return zero->err().find("refused a peer at ipv4:127.0.0.1:") != std::string::npos;
  })) << zero->err();
}

}  // namespace
}  // namespace mk::daemon
