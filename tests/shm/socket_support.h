/// \file
/// What the tests of framed sockets share: connected pairs, raw frames as a foreign peer sends
/// them, descriptors that can be told apart.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shm/host/buffer_file.h"
#include "shm/host/unix_socket.h"
#include "support.h"

namespace mk::shm::test {

using Bytes = std::vector<std::byte>;

inline constexpr int kGenerousSeconds = 60;

inline Bytes pattern(std::size_t size, std::uint32_t seed = 1) {
  Bytes bytes(size);
  std::uint32_t state = seed;
  for (auto& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

struct Pair {
  Pair() : Pair(std::move(*FrameSocket::pair())) {}
  explicit Pair(std::pair<FrameSocket, FrameSocket> both)
      : a(std::move(both.first)), b(std::move(both.second)) {}
  FrameSocket a;
  FrameSocket b;
};

/// One descriptor of known content.
inline BufferFile numbered(std::uint8_t number) {
  auto made = BufferFile::create("numbered", 4096);
  EXPECT_TRUE(made);
  made->data()[0] = static_cast<std::byte>(number);
  return std::move(*made);
}

inline std::uint8_t number_of(const UniqueFd& fd) {
  std::uint8_t number = 0;
  EXPECT_EQ(::pread(fd.get(), &number, 1, 0), 1);
  return number;
}

inline Bytes raw_frame(std::uint32_t payload_bytes, std::uint16_t type, std::uint16_t reserved,
                       std::size_t sent_payload) {
  const FrameHeader header{payload_bytes, type, reserved, 5};
  Bytes bytes(sizeof header + sent_payload);
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

/// Sends as a peer that does not use our code would.
inline void send_raw(int socket, std::span<const std::byte> bytes, std::span<const int> fds = {}) {
  std::vector<char> control(CMSG_SPACE(fds.size_bytes()));
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* entry = CMSG_FIRSTHDR(&message);
    entry->cmsg_level = SOL_SOCKET;
    entry->cmsg_type = SCM_RIGHTS;
    entry->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(entry), fds.data(), fds.size_bytes());
  }
  ASSERT_EQ(::sendmsg(socket, &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

inline void expect_error(const Error& error, ErrorCode code, const std::string& says) {
  EXPECT_EQ(error.code, code) << error.message;
  EXPECT_NE(error.message.find(says), std::string::npos) << error.message;
}

/// While it lives, this process can open no further descriptor.
class NoFdsLeft {
 public:
  NoFdsLeft() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit none{0, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  NoFdsLeft(const NoFdsLeft&) = delete;
  NoFdsLeft& operator=(const NoFdsLeft&) = delete;
  ~NoFdsLeft() { end(); }
  void end() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }

 private:
  rlimit before_{};
};

}  // namespace mk::shm::test
