// Who may look at a daemon, who may change it, and what the log says of it afterwards.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "daemon/config/config.h"
#include "proto/mkernel/v1/admin.grpc.pb.h"
#include "proto/mkernel/v1/peer.grpc.pb.h"
#include "tests/daemon/service/process_rig.h"

namespace mk::daemon {
namespace {

namespace v1 = ::mkernel::v1;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kNobody = "65534";

class AdminRights : public testing::Test {
 protected:
  /// `as`: a command that runs it as another user.
  void start(const std::string& config, std::vector<std::string> as = {}) {
    std::ofstream(folder / "toml") << "socket.path = '" << folder / "c.sock"
                                   << "'\n"
                                   << config;
    as.insert(as.end(), {MK_MKERNELD, "--config", folder / "toml", "--fabric", "null",
                         "--ready-file", folder / "ready"});
    daemon = std::make_unique<Program>(folder, as);
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(folder / "ready"); }))
        << daemon->err();
    listen = nlohmann::json::parse(read_file(folder / "ready"))["listen"];
  }

  std::unique_ptr<v1::Admin::Stub> stub(const std::string& target) {
    return v1::Admin::NewStub(grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
  }
  template <class Request, class Response>
  grpc::Status ask(const std::string& target,
                   grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                           Response*),
                   const Request& request = {}) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    Response response;
    return (*stub(target).*method)(&context, request, &response);
  }
  grpc::Status look(const std::string& target) { return ask(target, &v1::Admin::Stub::GetStatus); }
  grpc::Status drain(const std::string& target) { return ask(target, &v1::Admin::Stub::Drain); }

  /// mkctl as another user; its exit code and what it said.
  std::pair<int, std::string> as_nobody(const std::string& group, const std::string& address,
                                        const std::string& command) {
    Program program(folder, {"/usr/bin/setpriv", "--reuid", kNobody, "--regid", kNobody,
                             group.empty() ? "--clear-groups" : "--groups=" + group, MK_MKCTL,
                             "--address", address, "--timeout", "30s", command});
    const int code = program.wait();
    return {code, program.out() + program.err()};
  }

  std::string admin() const { return "unix:" + (folder / "c-admin.sock"); }

  TempFolder folder;
  std::unique_ptr<Program> daemon;
  std::string listen;
};

TEST_F(AdminRights, OverTcpWithoutTlsOneMayOnlyLook) {
  start("listen = '127.0.0.1:0'\n");
  EXPECT_TRUE(look(listen).ok());
  const v1::TerminateJobRequest terminate;
  v1::SetJobRequest set;
  set.set_job("job");
  set.set_weight(9);
  for (const grpc::Status& refused : {drain(listen), ask(listen, &v1::Admin::Stub::Resume),
                                      ask(listen, &v1::Admin::Stub::TerminateJob, terminate),
                                      ask(listen, &v1::Admin::Stub::SetJob, set)}) {
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(refused.error_message(), HasSubstr("may only look"));
    EXPECT_THAT(refused.error_message(), HasSubstr(admin())) << "where to go instead";
  }
  EXPECT_THAT(daemon->err(), HasSubstr("audit: refused Drain to ipv4:127.0.0.1:"));
  EXPECT_THAT(daemon->err(), HasSubstr("\"result\":\"refused\""));
  EXPECT_THAT(daemon->err(), Not(HasSubstr("draining")));
}

TEST_F(AdminRights, TheAdminSocketIsOfItsOwnAndEveryChangeIsRecorded) {
  start("listen = '127.0.0.1:0'\n[log]\nlevel = 'error'\nformat = 'json'\n");
  struct stat status {};
  ASSERT_EQ(::stat((folder / "c-admin.sock").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0660u);
  EXPECT_TRUE(look(admin()).ok());
  EXPECT_TRUE(drain(admin()).ok());
  EXPECT_TRUE(ask(admin(), &v1::Admin::Stub::Resume).ok());
  v1::SetJobRequest set;
  set.set_job("job");
  set.set_weight(0);
  EXPECT_EQ(ask(admin(), &v1::Admin::Stub::SetJob, set).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  // Whatever the level: who, what, and what came of it.
  const std::string who = fmt::format("uid {}, pid {}", ::geteuid(), ::getpid());
  std::vector<std::string> lines;
  std::istringstream log(daemon->err());
  for (std::string line; std::getline(log, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 3u) << daemon->err();
  EXPECT_THAT(lines[0], HasSubstr("audit: Drain by " + who + ": done"));
  EXPECT_THAT(lines[1], HasSubstr("audit: Resume by " + who + ": done"));
  const auto last = nlohmann::json::parse(lines[2]);
  EXPECT_EQ(last["fields"]["audit"], "SetJob");
  EXPECT_EQ(last["fields"]["who"], who);
  EXPECT_EQ(last["fields"]["result"], "failed");
  EXPECT_THAT(last["message"].get<std::string>(), HasSubstr("weight: 0"));
}

TEST_F(AdminRights, PeersAreNotServedAtTheAdminSocket) {
  start("listen = '127.0.0.1:0'\n");
  const auto peer =
      v1::Peer::NewStub(grpc::CreateChannel(admin(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  const auto stream = peer->Connect(&context);
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(AdminRights, AUnixListenSocketGivesItsUserBothRights) {
  start("listen = 'unix:" + (folder / "peer") + "'\n[admin]\nsocket = ''\n");
  EXPECT_FALSE(std::filesystem::exists(folder / "c-admin.sock"));
  EXPECT_TRUE(drain(listen).ok());
  EXPECT_THAT(daemon->err(), HasSubstr(fmt::format("by uid {}, pid", ::geteuid())));
}

TEST_F(AdminRights, OtherUsersLookAndTheGroupChanges) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  ::chmod(folder.path().c_str(), 0755);
  // Group 1 of Debian is "daemon".
  start("listen = '127.0.0.1:0'\n[admin]\nmode = '0666'\ngroup = 'daemon'\n");
  if (as_nobody("", admin(), "version").first == 127) GTEST_SKIP() << "mkctl is out of reach";
  EXPECT_EQ(as_nobody("", admin(), "status").first, 0);
  const auto [code, said] = as_nobody("", admin(), "resume");
  EXPECT_EQ(code, 1);
  EXPECT_THAT(said, HasSubstr("a member of group daemon"));
  EXPECT_THAT(daemon->err(), HasSubstr("audit: refused Resume to uid 65534, pid"));
  EXPECT_EQ(as_nobody("1", admin(), "resume").first, 0);
  EXPECT_THAT(daemon->err(), HasSubstr("audit: Resume by uid 65534, pid"));
}

TEST_F(AdminRights, ADaemonThatIsNotRootGivesItsSocketToAGroupOfItsOwn) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  ::chmod(folder.path().c_str(), 0777);
  const std::vector<std::string> as_nobody{"/usr/bin/setpriv", "--reuid",        kNobody,
                                           "--regid",          kNobody,          "--groups=1",
                                           "--inh-caps=-all",  "--bounding-set", "-all"};
  Program reach(
      folder, {"/usr/bin/setpriv", "--reuid", kNobody, "--clear-groups", MK_MKERNELD, "--version"});
  if (reach.wait() != 0) GTEST_SKIP() << "mkerneld is out of reach";
  start("listen = '127.0.0.1:0'\n[admin]\ngroup = 'daemon'\n", as_nobody);
  struct stat status {};
  ASSERT_EQ(::stat((folder / "c-admin.sock").c_str(), &status), 0);
  EXPECT_EQ(status.st_gid, 1u);
  EXPECT_EQ(status.st_mode & 0777, 0660u);
  daemon.reset();
  // Group 2 of Debian is "bin", of which this daemon is no member.
  std::ofstream(folder / "toml") << "socket.path = '" << folder / "c.sock"
                                 << "'\n[admin]\ngroup = 'bin'\n";
  std::vector<std::string> command = as_nobody;
  command.insert(command.end(), {MK_MKERNELD, "--config", folder / "toml", "--fabric", "null"});
  Program refused(folder, command);
  EXPECT_EQ(refused.wait(), 1);
  EXPECT_THAT(refused.err(), HasSubstr("SupplementaryGroups="));
}

TEST_F(AdminRights, ACheckOfTheConfigurationKnowsTheGroups) {
  std::ofstream(folder / "toml") << "[admin]\ngroup = 'no-such-group'\n";
  Program check(folder, {MK_MKERNELD, "--config", folder / "toml", "--check-config"});
  EXPECT_EQ(check.wait(), 2);
  EXPECT_THAT(check.err(), HasSubstr("this machine has no group 'no-such-group'"));
}

TEST_F(AdminRights, AClosedSocketKeepsOthersOut) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  ::chmod(folder.path().c_str(), 0755);
  start("listen = '127.0.0.1:0'\n");
  EXPECT_EQ(as_nobody("", admin(), "status").first, 3) << "mode 0660";
}

TEST_F(AdminRights, JobsAreSetAndReset) {
  start("listen = '127.0.0.1:0'\n[[job]]\npattern = 'a*'\nweight = 5\nrate = '2GB/s'\n");
  const auto set = [&](const v1::SetJobRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    v1::SetJobResponse response;
    const auto status = stub(admin())->SetJob(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  v1::SetJobRequest request;
  request.set_job("alpha");
  EXPECT_EQ(set(request).weight(), 5u);
  request.set_weight(7);
  request.set_commands_per_second(100);
  auto now = set(request);
  EXPECT_EQ(now.weight(), 7u);
  EXPECT_EQ(now.bytes_per_second(), 2e9);
  EXPECT_EQ(now.commands_per_second(), 100);
  EXPECT_EQ(now.sessions(), 0u);
  // Step by step; what is not named stays.
  v1::SetJobRequest rate;
  rate.set_job("alpha");
  rate.set_bytes_per_second(0);
  now = set(rate);
  EXPECT_EQ(now.weight(), 7u);
  EXPECT_EQ(now.bytes_per_second(), 0);
  v1::SetJobRequest reset;
  reset.set_job("alpha");
  reset.set_reset(true);
  now = set(reset);
  EXPECT_EQ(now.weight(), 5u);
  EXPECT_EQ(now.bytes_per_second(), 2e9);
  EXPECT_EQ(now.commands_per_second(), 0);
}

}  // namespace
}  // namespace mk::daemon
