/// \file
/// Text that comes from outside. This says what of it may be shown to users, logs, JSON and
/// protobuf. It cuts text to a length without leaving half a character behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "shm/limits.h"

namespace mk::shm {

/// The longest prefix of at most `bytes_max` bytes that does not end inside a UTF-8 character.
/// Bytes that are not UTF-8 are cut where they are.
constexpr std::string_view clip_utf8(std::string_view text, std::size_t bytes_max) {
  if (text.size() <= bytes_max) return text;
  const auto continues = [&](std::size_t i) {
    return (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80;
  };
  std::size_t end = bytes_max;
  // A character has at most three continuation bytes; more of them in a row are no UTF-8.
  for (int back = 0; back < 3 && end > 0 && continues(end); ++back) --end;
  return text.substr(0, continues(end) ? bytes_max : end);
}

/// Bytes of the character at the front of `text`, which is not empty: one of UTF-8 (RFC 3629: no
/// overlong form, no surrogate) that is no control character. 0: there is none.
constexpr std::size_t plain_character(std::string_view text) {
  const auto byte = [&](std::size_t i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i]));
  };
  const std::uint32_t first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const std::size_t bytes = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  if (bytes == 0 || first > 0xf4 || bytes > text.size()) return 0;
  std::uint32_t code = first & (0x7fu >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  const std::uint32_t least = bytes == 2 ? 0xa0u : bytes == 3 ? 0x800u : 0x10000u;  // 0x80: C1
  if (code < least || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return 0;
  return bytes;
}

/// Whether `text` is UTF-8 without control characters. Names that others get to see must be.
constexpr bool is_plain_text(std::string_view text) {
  while (!text.empty()) {
    const std::size_t bytes = plain_character(text);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

/// Whether `text` is a PCI address as Linux writes it: "0000:1b:00.0", in small letters.
constexpr bool is_pci_address(std::string_view text) {
  constexpr std::string_view kForm = "xxxx:xx:xx.x";
  if (text.size() != kForm.size()) return false;
  for (std::size_t i = 0; i < kForm.size(); ++i) {
    const char c = text[i];
    const bool fits =
        kForm[i] != 'x' ? c == kForm[i] : (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
    if (!fits) return false;
  }
  return true;
}

/// Whether `name` can be a job's: 1 to kJobNameBytesMax bytes of printable ASCII without spaces.
constexpr bool is_job_name(std::string_view name) {
  if (name.empty() || name.size() > kJobNameBytesMax) return false;
  for (const char c : name) {
    if (c <= ' ' || c >= 0x7f) return false;
  }
  return true;
}

/// `text` with each byte that is not plain text written as "\xe9", cut to `bytes_max` bytes.
inline std::string plain_text(std::string_view text, std::size_t bytes_max) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string plain;
  while (!text.empty() && plain.size() < bytes_max) {
    const std::size_t bytes = plain_character(text);
    if (bytes != 0) {
      plain += text.substr(0, bytes);
    } else {
      const auto byte = static_cast<unsigned char>(text[0]);
      plain += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  plain.resize(clip_utf8(plain, bytes_max).size());
  return plain;
}

}  // namespace mk::shm
