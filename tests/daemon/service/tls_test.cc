// Mutual TLS between daemons on TCP, with certificates made for the occasion.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "proto/mkernel/v1/admin.grpc.pb.h"
#include "tests/daemon/service/peer_rig.h"
#include "tests/daemon/service/process_rig.h"

namespace mk::daemon {
namespace {

/// A CA and one certificate for localhost, by the openssl program; false when there is none.
bool make_certificates(const TempFolder& folder) {
  const std::string script =
      "cd " + folder.path() +
      " && openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2"
      " -subj /CN=test-ca"
      " && openssl req -newkey rsa:2048 -nodes -keyout key.pem -out request -subj /CN=node"
      " && printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' >extensions"
      " && openssl x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -days 2"
      " -extfile extensions -out cert.pem";
  return std::system(("( " + script + " ) >/dev/null 2>&1").c_str()) == 0;
}

class Tls : public testing::Test {
 protected:
  void SetUp() override {
    if (!make_certificates(folder)) GTEST_SKIP() << "no openssl program";
    auto texts = read_tls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem");
    ASSERT_TRUE(texts) << texts.error().message;
    tls = *texts;
  }
  TempFolder folder;
  TlsTexts tls;
};

TEST_F(Tls, PeersMeetAndStrangersDoNot) {
  Logger& logger = PeerRig::logger();
  RecordingSink sink0({.node = 0, .generation = 1}), sink1({.node = 1, .generation = 2});
  PeerTransportOptions options0, options1;
  options0.node = 0;
  options0.peers = {{1, {.host = "localhost", .port = 1}}};  // never called: node 1 calls
  GrpcPeerTransport zero(options0, sink0, logger);
  auto server0 = GrpcServer::listen({.host = "127.0.0.1", .port = 0}, tls, {&zero.service()});
  ASSERT_TRUE(server0) << server0.error().message;
  zero.start();

  options1.node = 1;
  options1.peers = {{0, {.host = "localhost", .port = (*server0)->address().port}}};
  {
    GrpcPeerTransport without(options1, sink1, logger);
    without.start();
    ASSERT_TRUE(eventually([&] { return !without.peers().at(0).reason.empty(); }));
    without.stop();
    EXPECT_TRUE(sink1.events().empty());
  }
  options1.tls_cert = tls.cert;
  options1.tls_key = tls.key;
  options1.tls_ca = tls.ca;
  GrpcPeerTransport one(options1, sink1, logger);
  one.start();
  EXPECT_TRUE(sink0.until_hello(1));
  EXPECT_TRUE(sink1.until_hello(0)) << one.peers().at(0).reason;
  one.stop();
  zero.stop();
  (*server0)->shutdown(std::chrono::system_clock::now());
}

TEST_F(Tls, FilesThatAreNoPemAreNamed) {
  std::ofstream(folder / "junk") << "hello";
  const auto texts = read_tls(folder / "cert.pem", folder / "junk", folder / "ca.pem");
  ASSERT_FALSE(texts);
  EXPECT_THAT(texts.error().message, testing::HasSubstr("junk is not a PEM file"));
}

}  // namespace
}  // namespace mk::daemon
