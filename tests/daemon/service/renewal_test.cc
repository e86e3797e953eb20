// Files of [tls] that are replaced while daemons run: one that calls takes each of them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/daemon/service/peer_rig.h"
#include "tests/daemon/service/process_rig.h"
#include "tests/daemon/tls/certificate_maker.h"

namespace mk::daemon {
namespace {

/// Node 1, which calls node 0, each with files of its own.
class RenewedFiles : public testing::Test {
 protected:
  /// Node 0, from its start to its end.
  struct Called {
    Called(const TlsTexts& tls, std::uint16_t port, std::uint64_t generation)
        : sink({.node = 0, .generation = generation}),
          transport(options(tls), sink, PeerRig::logger()) {
      auto listening =
          GrpcServer::listen({.host = "127.0.0.1", .port = port}, tls, {&transport.service()});
      EXPECT_TRUE(listening) << listening.error().message;
      if (listening) server = std::move(*listening);
      transport.start();
    }
    ~Called() {
      transport.stop();
      if (server) server->shutdown(std::chrono::system_clock::now());
    }
    static PeerTransportOptions options(const TlsTexts& tls) {
      PeerTransportOptions options;
      options.peers = {{1, {.host = "localhost", .port = 1}}};  // never called: node 1 calls
      options.tls = tls;
      return options;
    }
    RecordingSink sink;
    GrpcPeerTransport transport;
    std::unique_ptr<GrpcServer> server;
  };

  void SetUp() override {
    for (const char* node : {"0", "1"}) {
      old_ca.make(node);
      trust(node, {"old"});
    }
    restart_zero();
    PeerTransportOptions options;
    options.node = 1;
    options.peers = {{0, {.host = "localhost", .port = zero->server->address().port}}};
    options.tls = files("1");
    options.backoff_max = std::chrono::milliseconds(200);
    one = std::make_unique<GrpcPeerTransport>(options, sink, PeerRig::logger());
    one->start();
    ASSERT_TRUE(zero->sink.until_hello(1)) << one->peers().at(0).reason;
  }
  void TearDown() override { one->stop(); }

  TlsTexts files(const std::string& node) {
    const auto texts = read_tls(folder / (node + "-cert.pem"), folder / (node + "-key.pem"),
                                folder / (node + "-ca.pem"));
    EXPECT_TRUE(texts) << texts.error().message;
    return texts ? *texts : TlsTexts{};
  }
  /// From now on the node's file of CAs has these.
  void trust(const std::string& node, const std::vector<std::string>& authorities) {
    const std::string path = folder / (node + "-ca.pem");
    {
      std::ofstream file(path + ".new");
      for (const std::string& one : authorities) file << read_file(folder / (one + ".pem"));
    }
    std::filesystem::rename(path + ".new", path);
  }
  void restart_zero() {
    const std::uint16_t port = zero ? zero->server->address().port : std::uint16_t{0};
    zero.reset();
    zero = std::make_unique<Called>(files("0"), port, ++generation);
  }

  TempFolder folder;
  CertificateMaker old_ca{folder.path(), "old"}, new_ca{folder.path(), "new"};
  std::uint64_t generation = 0;
  RecordingSink sink{{.node = 1, .generation = 99}};
  std::unique_ptr<Called> zero;
  std::unique_ptr<GrpcPeerTransport> one;
};

TEST_F(RenewedFiles, AChangeOfTheCaAloneReachesTheCaller) {
  for (const char* node : {"0", "1"}) trust(node, {"old", "new"});
  new_ca.make("0");
  restart_zero();
  EXPECT_TRUE(zero->sink.until_hello(1)) << one->peers().at(0).reason;
}

TEST_F(RenewedFiles, AKeyThatComesAfterItsCertificateReachesTheCaller) {
  const std::string certificate = folder / "1-cert.pem", key = folder / "1-key.pem";
  std::filesystem::copy_file(key, folder / "old-key");
  old_ca.make("1");
  std::filesystem::rename(key, folder / "new-key");
  std::filesystem::rename(folder / "old-key", key);
  // With a certificate and a key that are not each other's, no connection comes up.
  EXPECT_TRUE(eventually([&] {
    zero->transport.disconnect(1, "again");
    const PeerInfo peer = one->peers().at(0);
    return peer.state != PeerState::kUp && !peer.reason.empty() &&
           peer.reason.find("again") == std::string::npos;
  }));
  std::filesystem::rename(folder / "new-key", key);
  EXPECT_TRUE(eventually([&] { return one->peers().at(0).state == PeerState::kUp; }))
      << one->peers().at(0).reason;
}

}  // namespace
}  // namespace mk::daemon
