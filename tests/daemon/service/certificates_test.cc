// Certificates with faults: found before a daemon starts, and when it does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/daemon/service/process_rig.h"
#include "tests/daemon/tls/certificate_maker.h"

namespace mk::daemon {
namespace {

using testing::HasSubstr;

class DaemonCertificates : public testing::Test {
 protected:
  /// A daemon with the certificate of `owner`.
  std::string configure(const std::string& owner, const std::string& tables = "") {
    const std::string file = folder / (owner + ".toml");
    std::ofstream(file) << "listen = '127.0.0.1:0'\n[socket]\npath = '"
                        << folder / (owner + ".sock")
                        << "'\n[fabric]\nname = 'null'\n[log]\nformat = 'text'\n[tls]\ncert = '"
                        << folder / (owner + "-cert.pem") << "'\nkey = '"
                        << folder / (owner + "-key.pem") << "'\nca = '" << folder / "ca.pem"
                        << "'\n"
                        << tables;
    return file;
  }
  struct Seen {
    int code;
    std::string out, err;
  };
  /// One check of `mkctl doctor`.
  nlohmann::json doctor(const std::string& config, const std::string& id) {
    Program program(folder, {MK_MKCTL, "--config", config, "doctor", "--json"},
                    {"MKCTL_ADDRESS", "MKERNELD_CONFIG"});
    program.wait();
    const auto answer = nlohmann::json::parse(program.out(), nullptr, false);
    if (answer.is_discarded()) return {{"result", program.err()}, {"evidence", ""}};
    for (const nlohmann::json& check : answer["checks"]) {
      if (check["id"] == id) return check;
    }
    return {{"result", "absent"}, {"evidence", ""}};
  }
  TempFolder folder;
  CertificateMaker ca{folder.path(), "ca"};
};

TEST_F(DaemonCertificates, AnUnfitFileIsFoundBeforeTheStart) {
  ca.make("node");
  ca.make("other");
  const auto check = [&](const std::string& file) {
    Program program(folder, {MK_MKERNELD, "--config", file, "--check-config"});
    const int code = program.wait();
    return Seen{code, program.out(), program.err()};
  };
  EXPECT_EQ(check(configure("node")).code, 0);
  std::filesystem::copy(folder / "other-key.pem", folder / "node-key.pem",
                        std::filesystem::copy_options::overwrite_existing);
  const Seen mixed = check(configure("node"));
  EXPECT_EQ(mixed.code, 2);
  EXPECT_EQ(mixed.out, "");
  EXPECT_THAT(mixed.err, HasSubstr("node-key.pem does not belong to tls.cert"));
  ca.make("old", {.from_s = -7200, .until_s = -3600});
  const Seen old = check(configure("old"));
  EXPECT_EQ(old.code, 2);
  EXPECT_THAT(old.err, HasSubstr("old-cert.pem expired on 20"));
  // Who starts it all the same hears it at once; nothing claims to be ready.
  Program daemon(folder,
                 {MK_MKERNELD, "--config", configure("node"), "--ready-file", folder / "ready"});
  EXPECT_EQ(daemon.wait(), 1);
  EXPECT_THAT(daemon.err(), HasSubstr("node-key.pem does not belong to tls.cert"));
  EXPECT_FALSE(std::filesystem::exists(folder / "ready"));
  const nlohmann::json files = doctor(configure("old"), "tls.files");
  EXPECT_EQ(files["result"], "FAIL");
  EXPECT_THAT(files["evidence"].get<std::string>(), HasSubstr("old-cert.pem expired on 20"));
}

TEST_F(DaemonCertificates, ACertificateThatDoesNotNameItsOwnAddressIsDoubted) {
  ca.make("node");
  ca.make("elsewhere", {.names = "DNS:node7.cluster"});
  const auto warning = [&](const std::string& file) {
    Program program(folder, {MK_MKERNELD, "--config", file, "--check-config"});
    // The other nodes may know it by that name: [[peer]] name.
    EXPECT_EQ(program.wait(), 0);
    return program.err();
  };
  EXPECT_EQ(warning(configure("node")), "");
  const std::string doubt = "is made out to 'node7.cluster', and not to '127.0.0.1' (listen)";
  EXPECT_THAT(warning(configure("elsewhere")), HasSubstr(doubt));
  EXPECT_THAT(doctor(configure("node"), "tls.files")["evidence"].get<std::string>(),
              testing::Not(HasSubstr("(listen)")));
  const nlohmann::json files = doctor(configure("elsewhere"), "tls.files");
  EXPECT_EQ(files["result"], "WARN");
  EXPECT_THAT(files["evidence"].get<std::string>(), HasSubstr(doubt));
}

TEST_F(DaemonCertificates, TheDoctorTriesThoseOfReachablePeers) {
  ca.make("node");
  ca.make("peer");
  ca.make("old", {.from_s = -7200, .until_s = -3600});
  ca.make("elsewhere", {.names = "DNS:node7.cluster"});
  CertificateMaker(folder.path(), "stranger").make("strange");
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {"peer", {"accepted"}},
      {"old", {"its certificate expired on 20"}},
      {"elsewhere", {"made out to 'node7.cluster', and not to '127.0.0.1'"}},
      {"strange",
       {"its certificate is not signed by tls.ca " + folder.path() + "/ca.pem of this"}}};
  for (const auto& [owner, parts] : cases) {
    SCOPED_TRACE(owner);
    const std::string ready = folder / (owner + ".ready");
    const Program peer(folder, {MK_MKERNELD, "--config", configure(owner), "--node-id", "1",
                                "--ready-file", ready});
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(ready); })) << peer.err();
    const std::string address = nlohmann::json::parse(read_file(ready))["listen"];
    const nlohmann::json seen =
        doctor(configure("node", "[[peer]]\nid = 1\naddress = '" + address + "'\n"), "tls.peers");
    EXPECT_EQ(seen["result"], owner == "peer" ? "PASS" : "FAIL");
    const std::string evidence = seen["evidence"];
    EXPECT_THAT(evidence, HasSubstr("node 1 (" + address + "): "));
    for (const std::string& part : parts) EXPECT_THAT(evidence, HasSubstr(part));
  }
}

}  // namespace
}  // namespace mk::daemon
