/// \file
/// Cutting text to a length without leaving half a character behind.
#pragma once

#include <cstddef>
#include <string_view>

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

}  // namespace mk::shm
