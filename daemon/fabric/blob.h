/// \file
/// The small byte strings that endpoints hand to their peers (addresses, region keys), and the
/// random numbers in them.
#pragma once

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

#include "daemon/fabric/fabric.h"

namespace mk::fabric {

/// 128 unguessable bits: an endpoint's identity, or the proof that a peer was given a region.
using Token = std::array<std::uint8_t, 16>;

/// A fresh token from the kernel.
inline Result<Token> make_token() {
  Token token{};
  std::size_t filled = 0;
  while (filled < token.size()) {
    const ssize_t got = ::getrandom(token.data() + filled, token.size() - filled, 0);
    if (got < 0 && errno != EINTR) return fail_errno(errno, "the kernel gave no random numbers");
    if (got > 0) filled += static_cast<std::size_t>(got);
  }
  return token;
}

/// Equal, in a time that does not tell where two tokens differ.
inline bool same_token(const Token& a, const Token& b) {
  std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference = static_cast<std::uint8_t>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

inline std::string token_text(const Token& token) {
  std::string text;
  for (const std::uint8_t byte : token) text += fmt::format("{:02x}", byte);
  return text;
}

/// A plain struct as bytes. Peers run the same byte order (the ABI is little-endian), and a leading
/// `magic` that names the struct and its version refuses everything else.
template <class T>
Bytes to_blob(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  Bytes bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

/// The struct back, or nullopt when the bytes are none (wrong length or magic).
template <class T>
std::optional<T> from_blob(std::span<const std::byte> bytes) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (bytes.size() != sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  if (value.magic != T::kMagic) return std::nullopt;
  return value;
}

}  // namespace mk::fabric
