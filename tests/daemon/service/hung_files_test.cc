// Certificate files on a mount that hangs: nobody waits for them. A FIFO stands for such a file.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <future>

#include "daemon/tls/peer_watch.h"
#include "shm/host/unique_fd.h"
#include "tests/daemon/service/peer_rig.h"
#include "tests/daemon/service/process_rig.h"

namespace mk::daemon {
namespace {

class HungFiles : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::mkfifo(cert.c_str(), 0600), 0); }
  void TearDown() override { let_go(); }
  /// Somebody reads the certificate, and gets nothing until `let_go`.
  bool read_hangs() {
    return eventually([&] {
      writer.reset(::open(cert.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
      return writer.valid();
    });
  }
  void let_go() {
    ::unlink(cert.c_str());
    writer.reset();
  }
  /// Whether `call` returns while the read hangs.
  template <class Call>
  bool returns(Call call) {
    auto done = std::async(std::launch::async, call);
    const bool in_time = done.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    if (!in_time) let_go();
    return in_time;
  }
  TempFolder folder;
  const std::string cert = folder / "cert.pem";
  UniqueFd writer;
};

TEST_F(HungFiles, HoldUpNoCallOfThePeerTransport) {
  RecordingSink sink({.node = 1, .generation = 1});
  PeerTransportOptions options;
  options.node = 1;
  options.peers = {{0, {.host = "127.0.0.1", .port = 1}}};
  options.tls = {"cert", "key", "ca", cert, cert, cert};
  GrpcPeerTransport transport(options, sink, PeerRig::logger());
  auto started = std::async(std::launch::async, [&] { transport.start(); });
  ASSERT_TRUE(read_hangs());
  EXPECT_TRUE(returns([&] { return transport.describe(0); }));
  EXPECT_TRUE(returns([&] { return transport.send(0, PeerMessage(PeerHello{})); }));
  EXPECT_TRUE(returns([&] { transport.stop(); }));
  let_go();
}

TEST_F(HungFiles, HoldUpNoStopOfTheWatch) {
  CertificateWatch watch({"tls", cert, cert, cert},
                         {.targets = [] { return std::vector<CertificateWatch::Target>(); },
                          .own = [](const TlsReport&) {},
                          .peer = [](std::uint32_t, const std::string&) {}});
  ASSERT_TRUE(read_hangs());
  EXPECT_TRUE(returns([&] { watch.stop(); }));
}

}  // namespace
}  // namespace mk::daemon
