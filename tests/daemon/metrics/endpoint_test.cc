// The HTTP side: what is answered, what is refused, who is cut off, and how soon it ends.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "daemon/metrics/metrics.h"
#include "shm/host/unique_fd.h"

namespace mk::daemon {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class Endpoint : public testing::Test {
 protected:
  Endpoint() {
    auto made = MetricsEndpoint::listen({.host = "127.0.0.1", .port = 0}, [] {
      MetricsSample sample;
      sample.version = "1.2.3";
      return sample;
    });
    EXPECT_TRUE(made) << made.error().message;
    endpoint = std::move(*made);
  }

  UniqueFd connect() const {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(endpoint->address().port);
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    return fd;
  }
  /// Sends the parts one by one and reads until the end.
  std::string ask(const std::vector<std::string>& parts) const {
    const UniqueFd fd = connect();
    for (const std::string& part : parts) ::send(fd.get(), part.data(), part.size(), MSG_NOSIGNAL);
    std::string text;
    char bytes[4096];
    for (ssize_t n; (n = ::recv(fd.get(), bytes, sizeof bytes, 0)) > 0;) {
      text.append(bytes, static_cast<std::size_t>(n));
    }
    return text;
  }

  std::unique_ptr<MetricsEndpoint> endpoint;
};

TEST_F(Endpoint, ServesTheFamiliesAsText) {
  const std::string text = ask({"GET /met", "rics?x=1 HTTP/1.1\r\nHost: a\r\n", "\r\n"});
  EXPECT_THAT(text, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(text, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(text, HasSubstr("\r\n\r\n# HELP mkernel_build_info"));
  EXPECT_THAT(text, HasSubstr("mkernel_build_info{version=\"1.2.3\""));
  const std::size_t body = text.find("\r\n\r\n") + 4;
  EXPECT_THAT(text, HasSubstr("Content-Length: " + std::to_string(text.size() - body) + "\r\n"));
  EXPECT_THAT(ask({"HEAD /metrics HTTP/1.1\r\n\r\n"}), EndsWith("\r\n\r\n"));
}

TEST_F(Endpoint, RefusesEverythingElse) {
  EXPECT_THAT(ask({"GET / HTTP/1.1\r\n\r\n"}), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(ask({"POST /metrics HTTP/1.1\r\n\r\n"}), StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(ask({"\r\n\r\n"}), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(ask({std::string(20'000, 'x')}), Not(HasSubstr("200")));
  EXPECT_THAT(ask({"GET /metrics HTTP/1.1\r\nX: " + std::string(20'000, 'x') + "\r\n\r\n"}),
              Not(HasSubstr("200")));
  EXPECT_THAT(ask({"GET /metrics HTTP/1.1\r\n\r\n"}), StartsWith("HTTP/1.1 200 "));
}

/// Until the other side hangs up.
void read_to_end(const UniqueFd& fd) {
  char byte;
  while (::recv(fd.get(), &byte, 1, 0) > 0) {
  }
}

TEST_F(Endpoint, CutsOffWhoSaysNothingOrTooSlowly) {
  const UniqueFd silent = connect(), slow = connect();
  // No byte moves the deadline: one that sends a byte now and then is cut off, too.
  for (int sent = 0; ::send(slow.get(), "G", 1, MSG_NOSIGNAL) == 1 && sent < 1000; ++sent) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  read_to_end(slow);
  read_to_end(silent);
}

TEST_F(Endpoint, AHundredSilentConnectionsStopNoScrape) {
  // Whether a scrape is answered before the youngest of them has had its two seconds: on a machine
  // that gives this test no CPU for so long, by another try.
  bool before = false;
  for (int tries = 0; tries < 5 && !before; ++tries) {
    std::vector<UniqueFd> silent;
    for (int i = 0; i < 100; ++i) {
      silent.push_back(connect());
      if (i % 2 == 0) ::send(silent.back().get(), "GET /me", 7, MSG_NOSIGNAL);
    }
    EXPECT_THAT(ask({"GET /metrics HTTP/1.1\r\n\r\n"}), StartsWith("HTTP/1.1 200 "));
    char byte;
    before = ::recv(silent.back().get(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }
  EXPECT_TRUE(before);
}

TEST_F(Endpoint, EndsAtOnceWhoeverIsConnected) {
  const UniqueFd silent = connect();
  const auto begin = std::chrono::steady_clock::now();
  endpoint.reset();
  // Not after the 2 s that it gives a client for its request.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1900));
}

TEST_F(Endpoint, SaysWhenThePortIsTaken) {
  const auto second = MetricsEndpoint::listen(endpoint->address(), [] { return MetricsSample{}; });
  ASSERT_FALSE(second);
  EXPECT_THAT(second.error().message, HasSubstr("cannot serve metrics on 127.0.0.1:"));
}

}  // namespace
}  // namespace mk::daemon
