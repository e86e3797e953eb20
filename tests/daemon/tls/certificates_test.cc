// The faults of certificate files, one by one.
#include "daemon/tls/certificates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "daemon/tls/own_files.h"
#include "tests/daemon/service/temp_folder.h"
#include "tests/daemon/tls/certificate_maker.h"

namespace mk::daemon {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using Kind = TlsFault::Kind;

class Certificates : public testing::Test {
 protected:
  TlsFiles files(const std::string& owner, const std::string& signer = "ca") const {
    return {"tls", folder / (owner + "-cert.pem"), folder / (owner + "-key.pem"),
            folder / (signer + ".pem")};
  }
  /// "kind: text" would do, but tests ask for both.
  static std::vector<TlsFault> faults(const TlsFiles& files) {
    return look_at(files, unix_now()).faults;
  }
  static auto fault(Kind kind, const std::string& part) {
    return AllOf(testing::Field(&TlsFault::kind, kind),
                 testing::Field(&TlsFault::text, HasSubstr(part)));
  }
  TempFolder folder;
  CertificateMaker ca{folder.path(), "ca"};
};

TEST_F(Certificates, GoodOnesHaveNoFault) {
  ca.make("node");
  TlsFiles node = files("node");
  node.names = {"localhost", "127.0.0.1"};
  const std::int64_t now = unix_now();
  const TlsReport report = look_at(node, now);
  EXPECT_THAT(report.faults, IsEmpty());
  EXPECT_THAT(report.names, ElementsAre("localhost", "127.0.0.1"));
  ASSERT_TRUE(report.expires);
  EXPECT_NEAR(static_cast<double>(*report.expires), static_cast<double>(now + 86'400), 60);
}

TEST_F(Certificates, FilesThatAreMissingOrNoPemAreNamed) {
  ca.make("node");
  TlsFiles absent = files("node");
  absent.key = folder / "absent.pem";
  EXPECT_THAT(faults(absent), ElementsAre(fault(Kind::kFile, "tls.key " + absent.key +
                                                                 " cannot be read: No such file")));
  std::ofstream(folder / "junk.pem") << "hello\n";
  for (auto which : {&TlsFiles::cert, &TlsFiles::key, &TlsFiles::ca}) {
    TlsFiles junk = files("node");
    junk.*which = folder / "junk.pem";
    const auto found = faults(junk);
    ASSERT_THAT(found, SizeIs(1));
    EXPECT_THAT(found[0].text, HasSubstr("junk.pem holds no "));
    EXPECT_TRUE(found[0].dead());
  }
}

TEST_F(Certificates, AKeyOfAnotherCertificateIsNoPair) {
  ca.make("node");
  ca.make("other");
  TlsFiles mixed = files("node");
  mixed.key = folder / "other-key.pem";
  const auto found = faults(mixed);
  EXPECT_THAT(found, ElementsAre(fault(Kind::kPair,
                                       mixed.key + " does not belong to tls.cert " + mixed.cert)));
  EXPECT_TRUE(found.at(0).dead());
}

TEST_F(Certificates, DatesAreSaidWithTheTime) {
  ca.make("old", {.from_s = -7200, .until_s = -3600});
  ca.make("new", {.from_s = 3600, .until_s = 7200});
  const TlsReport old = look_at(files("old"), unix_now());
  ASSERT_TRUE(old.expires);
  EXPECT_THAT(old.faults, ElementsAre(fault(Kind::kDates,
                                            "old-cert.pem expired on " + utc_text(*old.expires))));
  EXPECT_FALSE(old.faults.at(0).dead());
  EXPECT_THAT(faults(files("new")), ElementsAre(fault(Kind::kDates, "is not valid before ")));
  // The same files, seen at other times.
  EXPECT_THAT(look_at(files("new"), unix_now() + 5000).faults, IsEmpty());
  EXPECT_THAT(look_at(files("new"), unix_now() + 9000).faults,
              ElementsAre(fault(Kind::kDates, "expired on ")));
}

TEST_F(Certificates, AnotherCaHasNotSigned) {
  const CertificateMaker stranger(folder.path(), "stranger");
  ca.make("node");
  EXPECT_THAT(faults(files("node", "stranger")),
              ElementsAre(fault(Kind::kChain, "is not signed by tls.ca " + folder.path() +
                                                  "/stranger.pem (unable to get local issuer")));
}

TEST_F(Certificates, ACaMayExpireFirst) {
  const CertificateMaker late(folder.path(), "late", {.from_s = -7200, .until_s = -60});
  late.make("node");
  EXPECT_THAT(faults(files("node", "late")), ElementsAre(fault(Kind::kDates, "a CA of tls.cert ")));
}

TEST_F(Certificates, NamesAreThoseThatOthersKnow) {
  ca.make("node", {.names = "DNS:node7.cluster,IP:10.0.0.7"});
  TlsFiles node = files("node");
  for (const std::string name : {"node7.cluster", "10.0.0.7"}) {
    node.names = {name};
    EXPECT_THAT(faults(node), IsEmpty()) << name;
  }
  node.names = {"node8.cluster"};
  EXPECT_THAT(faults(node), ElementsAre(fault(Kind::kName,
                                              "is made out to 'node7.cluster', '10.0.0.7', and not "
                                              "to 'node8.cluster'")));
}

TEST_F(Certificates, ADaemonIsServerAndClient) {
  ca.make("server", {.use = "serverAuth"});
  ca.make("client", {.use = "clientAuth"});
  ca.make("both", {.use = "serverAuth,clientAuth"});
  EXPECT_THAT(faults(files("server")), ElementsAre(fault(Kind::kUse, "serverAuth and clientAuth")));
  EXPECT_THAT(faults(files("client")), ElementsAre(fault(Kind::kUse, "serverAuth and clientAuth")));
  EXPECT_THAT(faults(files("both")), IsEmpty());
  TlsFiles only_client = files("client");
  only_client.server = false;
  EXPECT_THAT(faults(only_client), IsEmpty());
}

TEST_F(Certificates, AConfigurationsNamesAreThoseItIsFoundBy) {
  Config config;
  config.node_id = 3;
  config.discovery.advertise = Address{.host = "node3.cluster", .port = 7171};
  EXPECT_THAT(tls_files(config).names, ElementsAre("node3.cluster"));
  config.discovery.kind = "dns";
  config.discovery.dns.name = "peers.cluster:7171";
  EXPECT_THAT(tls_files(config).names, ElementsAre("node-3.peers.cluster"));
  config.discovery.kind = "static";
  config.discovery.advertise.reset();
  EXPECT_THAT(tls_files(config).names, IsEmpty()) << "only the others know";
}

TEST_F(Certificates, ThoseOfEtcdAreLookedAt) {
  ca.make("node");
  Config config;
  EXPECT_THAT(certificate_faults(config, unix_now()), IsEmpty());
  config.discovery.etcd.cert = folder / "node-cert.pem";
  config.discovery.etcd.key = folder / "absent.pem";
  config.discovery.etcd.ca = folder / "ca.pem";
  EXPECT_THAT(certificate_faults(config, unix_now()),
              ElementsAre(HasSubstr("discovery.etcd.key " + folder.path() + "/absent.pem cannot")));
}

}  // namespace
}  // namespace mk::daemon
