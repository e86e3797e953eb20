// Mutual TLS between daemons on TCP, with certificates made for the occasion.
#include <gmock/gmock.h>
#include <grpc/grpc_security_constants.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "proto/mkernel/v1/admin.grpc.pb.h"
#include "tests/daemon/service/peer_rig.h"
#include "tests/daemon/service/process_rig.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;

bool run_quietly(const std::string& script) {
  return std::system(("( " + script + " ) >/dev/null 2>&1").c_str()) == 0;
}

/// A certificate of the folder's CA, made out to `names` ("DNS:localhost"): NAME-cert.pem and
/// NAME-key.pem, which take the place of older ones each at once.
bool make_certificate(const TempFolder& folder, const std::string& name, const std::string& names) {
  return run_quietly("cd " + folder.path() +
                     " && openssl req -newkey rsa:2048 -nodes -keyout new-key -out request"
                     " -subj /CN=" +
                     name + " && printf 'subjectAltName=" + names +
                     "' >extensions"
                     " && openssl x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial"
                     " -days 2 -extfile extensions -out new-cert"
                     " && mv new-key " +
                     name + "-key.pem && mv new-cert " + name + "-cert.pem");
}

/// A CA, and a certificate for localhost, by the openssl program; false when there is none.
bool make_certificates(const TempFolder& folder) {
  return run_quietly("cd " + folder.path() +
                     " && openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem"
                     " -days 2 -subj /CN=test-ca") &&
         make_certificate(folder, "node", "DNS:localhost,IP:127.0.0.1");
}

class Tls : public testing::Test {
 protected:
  void SetUp() override {
    if (!make_certificates(folder)) GTEST_SKIP() << "no openssl program";
    auto texts = read_tls(folder / "node-cert.pem", folder / "node-key.pem", folder / "ca.pem");
    ASSERT_TRUE(texts) << texts.error().message;
    tls = *texts;
  }
  TempFolder folder;
  TlsTexts tls;
};

/// A daemon that listens on TCP.
class TlsDaemon : public Tls {
 protected:
  /// `more`: of its configuration.
  void start(const std::string& more) {
    std::ofstream(folder / "toml")
        << "listen = '127.0.0.1:0'\n[socket]\npath = '" << folder / "c.sock"
        << "'\n"
        << more << "[tls]\ncert = '" << folder / "node-cert.pem"
        << "'\nkey = '" << folder / "node-key.pem"
        << "'\nca = '" << folder / "ca.pem"
        << "'\n";
    daemon = std::make_unique<Program>(
        folder, std::vector<std::string>{MK_MKERNELD, "--config", folder / "toml", "--fabric",
                                         "null", "--ready-file", folder / "ready"});
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(folder / "ready"); }))
        << daemon->err();
    const std::string line = read_file(folder / "ready");
    const std::size_t colon = line.find("127.0.0.1:");
    ASSERT_NE(colon, std::string::npos) << line;
    port = static_cast<std::uint16_t>(std::atoi(line.c_str() + colon + 10));
  }
  std::unique_ptr<Program> daemon;
  std::uint16_t port = 0;
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
  options1.tls = tls;
  GrpcPeerTransport one(options1, sink1, logger);
  one.start();
  EXPECT_TRUE(sink0.until_hello(1));
  EXPECT_TRUE(sink1.until_hello(0)) << one.peers().at(0).reason;
  one.stop();
  zero.stop();
  (*server0)->shutdown(std::chrono::system_clock::now());
}

TEST_F(Tls, ANodeIsSpokenForByACertificateWithItsName) {
  ASSERT_TRUE(make_certificate(folder, "other", "DNS:node7.cluster"));
  const auto other =
      read_tls(folder / "other-cert.pem", folder / "other-key.pem", folder / "ca.pem");
  ASSERT_TRUE(other) << other.error().message;
  // Of the same CA in all cases: what differs is what node 0 expects of node 1.
  struct Case {
    TlsTexts shown;
    PeerConfig expected;
    bool meets;
  };
  const Address localhost{.host = "localhost", .port = 1};
  for (const Case& one :
       {Case{tls, {1, localhost, ""}, true}, Case{*other, {1, localhost, ""}, false},
        Case{*other, {1, localhost, "node7.cluster"}, true},
        Case{tls, {1, localhost, "node7.cluster"}, false},
        Case{tls, {1, {.host = "127.0.0.1", .port = 1}, ""}, true},
        Case{tls, {1, {.host = "127.0.0.2", .port = 1}, ""}, false}}) {
    SCOPED_TRACE(fmt::format("{}, '{}'", one.expected.address.text(), one.expected.name));
    RecordingSink sink0({.node = 0, .generation = 1}), sink1({.node = 1, .generation = 2});
    PeerTransportOptions options0, options1;
    options0.node = 0;
    options0.peers = {one.expected};
    GrpcPeerTransport zero(options0, sink0, PeerRig::logger());
    auto server0 = GrpcServer::listen({.host = "127.0.0.1", .port = 0}, tls, {&zero.service()});
    ASSERT_TRUE(server0) << server0.error().message;
    zero.start();
    options1.node = 1;
    options1.peers = {{0, {.host = "localhost", .port = (*server0)->address().port}}};
    options1.tls = one.shown;
    GrpcPeerTransport node1(options1, sink1, PeerRig::logger());
    node1.start();
    if (one.meets) {
      EXPECT_TRUE(sink0.until_hello(1));
    } else {
      EXPECT_TRUE(eventually([&] {
        return node1.peers().at(0).reason.find("does not speak for node 1") != std::string::npos;
      })) << node1.peers().at(0).reason;
      EXPECT_TRUE(sink0.events().empty());
    }
    node1.stop();
    zero.stop();
    (*server0)->shutdown(std::chrono::system_clock::now());
  }
}

TEST_F(Tls, TheCallersNameForAServerMayDifferFromItsAddress) {
  ASSERT_TRUE(make_certificate(folder, "other", "DNS:node7.cluster"));
  const auto other =
      read_tls(folder / "other-cert.pem", folder / "other-key.pem", folder / "ca.pem");
  ASSERT_TRUE(other);
  RecordingSink sink({.node = 0, .generation = 1});
  GrpcPeerTransport zero({.node = 0}, sink, PeerRig::logger());
  auto server = GrpcServer::listen({.host = "127.0.0.1", .port = 0}, *other, {&zero.service()});
  ASSERT_TRUE(server);
  for (const std::string name : {"", "node7.cluster", "node8.cluster"}) {
    ChannelOptions options;
    options.tls = tls;
    options.tls_name = name;
    const auto channel = open_channel((*server)->address(), options);
    // Long for the one that is let in; short for those that never are.
    const std::chrono::seconds patience(name == "node7.cluster" ? 30 : 2);
    const bool up = channel->WaitForConnected(std::chrono::system_clock::now() + patience);
    EXPECT_EQ(up, name == "node7.cluster") << name;
  }
  zero.stop();
  (*server)->shutdown(std::chrono::system_clock::now());
}

TEST_F(Tls, NewCertificatesAreTakenWithoutARestart) {
  RecordingSink sink0({.node = 0, .generation = 1}), sink1({.node = 1, .generation = 2});
  PeerTransportOptions options0, options1;
  options0.node = 0;
  options0.peers = {{1, {.host = "localhost", .port = 1}, "second"}};
  options0.tls = tls;
  GrpcPeerTransport zero(options0, sink0, PeerRig::logger());
  auto server0 = GrpcServer::listen({.host = "127.0.0.1", .port = 0}, tls, {&zero.service()});
  ASSERT_TRUE(server0);
  zero.start();
  options1.node = 1;
  options1.peers = {{0, {.host = "localhost", .port = (*server0)->address().port}}};
  options1.tls = tls;
  GrpcPeerTransport one(options1, sink1, PeerRig::logger());
  one.start();
  // Node 0 wants a name that node 1 does not have yet.
  ASSERT_TRUE(eventually([&] {
    return one.peers().at(0).reason.find("does not speak for node 1") != std::string::npos;
  })) << one.peers().at(0).reason;
  const auto serial = [&] {
    ChannelOptions options;
    options.tls = tls;
    const auto stub = mkernel::v1::Admin::NewStub(
        open_channel({.host = "localhost", .port = (*server0)->address().port}, options));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    mkernel::v1::GetVersionResponse none;
    stub->GetVersion(&context, {}, &none);  // UNIMPLEMENTED; the certificate is what counts
    const auto values =
        context.auth_context()->FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME);
    return values.empty() ? std::string() : std::string(values[0].data(), values[0].size());
  };
  const std::string before = serial();
  ASSERT_FALSE(before.empty());
  ASSERT_TRUE(make_certificate(folder, "node", "DNS:localhost,IP:127.0.0.1,DNS:second"));
  EXPECT_TRUE(sink0.until_hello(1)) << "the caller reads its files before each call";
  EXPECT_TRUE(eventually([&] { return serial() != before; })) << "the server watches its own";
  // While the files are broken nobody new gets in, who is there stays, and good ones mend it.
  std::ofstream(folder / "node-cert.pem") << "junk";
  EXPECT_TRUE(eventually([&] { return serial().empty(); }));
  EXPECT_EQ(one.peers().at(0).state, PeerState::kUp);
  ASSERT_TRUE(make_certificate(folder, "node", "DNS:localhost,IP:127.0.0.1,DNS:second"));
  EXPECT_TRUE(eventually([&] { return !serial().empty(); }));
  one.stop();
  zero.stop();
  (*server0)->shutdown(std::chrono::system_clock::now());
}

TEST_F(TlsDaemon, OnlyNamedCertificatesChangeTheDaemon) {
  ASSERT_TRUE(make_certificate(folder, "admin", "DNS:admin.cluster"));
  start("[admin]\nwriters = ['admin.cluster']\n");
  const auto answers = [&](const std::string& who) {
    ChannelOptions options;
    if (!who.empty()) {
      options.tls =
          *read_tls(folder / (who + "-cert.pem"), folder / (who + "-key.pem"), folder / "ca.pem");
    }
    const auto stub =
        mkernel::v1::Admin::NewStub(open_channel({.host = "localhost", .port = port}, options));
    grpc::ClientContext look, change;
    for (auto* context : {&look, &change}) {
      context->set_deadline(std::chrono::system_clock::now() + kPatience);
    }
    mkernel::v1::GetStatusResponse status;
    mkernel::v1::ResumeResponse resumed;
    return std::pair(stub->GetStatus(&look, {}, &status).error_code(),
                     stub->Resume(&change, {}, &resumed).error_code());
  };
  using enum grpc::StatusCode;
  EXPECT_EQ(answers(""), std::pair(UNAVAILABLE, UNAVAILABLE)) << "no certificate, no word";
  EXPECT_EQ(answers("node"), std::pair(OK, PERMISSION_DENIED));
  EXPECT_EQ(answers("admin"), std::pair(OK, OK));
  EXPECT_THAT(daemon->err(), HasSubstr("audit: refused Resume to certificate 'localhost', "));
  EXPECT_THAT(daemon->err(), HasSubstr("'node' at ipv4:127.0.0.1:"));
  EXPECT_THAT(daemon->err(), HasSubstr("audit: Resume by certificate 'admin.cluster', "));
  EXPECT_THAT(daemon->err(), HasSubstr("'admin' at ipv4:127.0.0.1:"));
}

TEST_F(TlsDaemon, MkctlAsksAnotherMachine) {
  ASSERT_TRUE(make_certificate(folder, "admin", "DNS:admin.cluster"));
  ASSERT_TRUE(run_quietly("cd " + folder.path() +
                          " && openssl req -x509 -newkey rsa:2048 -nodes -keyout stranger-key.pem"
                          " -out stranger-cert.pem -days 2 -subj /CN=stranger"));
  start("[admin]\nwriters = ['admin.cluster']\n");
  struct Seen {
    int code;
    std::string out, err;
  };
  const auto mkctl = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> command{MK_MKCTL, "--timeout", "30s"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    Program program(folder, command, {"MKCTL_ADDRESS", "MKERNELD_CONFIG"});
    const int code = program.wait();
    return Seen{code, program.out(), program.err()};
  };
  const auto as = [&](const std::string& who, std::vector<std::string> more) {
    more.insert(more.begin(), {"--tls-cert", folder / (who + "-cert.pem"), "--tls-key",
                               folder / (who + "-key.pem"), "--tls-ca", folder / "ca.pem"});
    return mkctl(more);
  };
  const std::string host = "localhost:" + std::to_string(port);
  const Seen status = as("node", {"--host", host, "status"});
  EXPECT_EQ(status.code, 0) << status.err;
  EXPECT_THAT(status.out, testing::StartsWith("node 0: ok\n"));
  // The configuration's files, where no others are named.
  EXPECT_EQ(mkctl({"--config", folder / "toml", "--host", host, "version"}).code, 0);
  const Seen several = as("node", {"--hosts", host + ",127.0.0.1:" + std::to_string(port), "--json",
                                   "session", "list"});
  EXPECT_EQ(several.code, 0) << several.err;
  EXPECT_THAT(several.out, HasSubstr("\"host\": \"127.0.0.1:" + std::to_string(port)));
  // To change something takes a certificate that is named for it.
  const Seen refused = as("node", {"--host", host, "resume"});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, HasSubstr("may only look at it here")) << refused.err;
  EXPECT_EQ(as("admin", {"--host", host, "resume"}).code, 0);
  // Nobody answers those who show no certificate, or one of another CA.
  const Seen strange = as("stranger", {"--host", host, "status"});
  for (const Seen& stranger : {strange, mkctl({"--host", host, "status"})}) {
    EXPECT_EQ(stranger.code, 3) << stranger.out;
    EXPECT_EQ(stranger.out, "");
    EXPECT_THAT(stranger.err, HasSubstr("no answer from " + host));
  }
  EXPECT_THAT(strange.err,
              testing::AllOf(HasSubstr("since TLS fails"), HasSubstr("is not signed by")));
  // Other faults of TLS are named, too, and gRPC adds no lines of its own.
  const auto fails_with = [&](const std::string& key, const std::string& authority,
                              const std::string& words) {
    const Seen seen = mkctl({"--host", host, "--tls-cert", folder / "node-cert.pem", "--tls-key",
                             folder / key, "--tls-ca", folder / authority, "status"});
    EXPECT_EQ(seen.code, 3);
    EXPECT_THAT(seen.err, testing::AllOf(testing::StartsWith("mkctl: no answer from " + host +
                                                             ", since TLS fails: "),
                                         HasSubstr(words)));
  };
  fails_with("admin-key.pem", "ca.pem", "does not belong to tls.cert");
  fails_with("node-key.pem", "stranger-cert.pem",
             "of the daemon: its certificate is not signed by");
  // The log and `status` say who they were, and why.
  for (const char* said : {"a TLS handshake with 127.0.0.1:",
                           "or not signed by tls.ca of this node", "it speaks no TLS"}) {
    EXPECT_THAT(daemon->err(), HasSubstr(said));
  }
  const std::string after = as("node", {"--host", host, "status"}).out;
  EXPECT_THAT(after, testing::StartsWith("node 0: ok\n")) << "strangers are no problem of its";
  EXPECT_THAT(after,
              testing::ContainsRegex("TLS handshakes that failed:\n  127[.]0[.]0[.]1:[0-9]+: "
                                     ".*; [0-9]+ from there, the last "));
}

TEST_F(Tls, FilesThatAreNoPemAreNamed) {
  std::ofstream(folder / "junk") << "hello";
  const auto texts = read_tls(folder / "node-cert.pem", folder / "junk", folder / "ca.pem");
  ASSERT_FALSE(texts);
  EXPECT_THAT(texts.error().message, HasSubstr("junk is not a PEM file"));
}

}  // namespace
}  // namespace mk::daemon
