#include "daemon/mkctl/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <span>
#include <string_view>

namespace mk::mkctl {
namespace {

/// Columns that a terminal needs for UTF-8 text, counting one per character.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

std::string scaled(double value, std::span<const std::string_view> units) {
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < units.size()) {
    value /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f}{}", value, units[0]);
  const int digits = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f}{}", value, digits, units[unit]);
}

}  // namespace

std::string printable(const std::string& text) {
  std::string out = text;
  std::replace_if(
      out.begin(), out.end(),
      [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, '?');
  return out;
}

std::string Table::text() const {
  const std::size_t columns = header_.size();
  std::vector<std::size_t> widths(columns);
  std::vector<bool> right(columns, !rows_.empty()), shown(columns, rows_.empty());
  for (std::size_t c = 0; c < columns; ++c) {
    widths[c] = width(header_[c]);
    for (const auto& row : rows_) {
      widths[c] = std::max(widths[c], width(row[c]));
      const bool number = !row[c].empty() && std::isdigit(static_cast<unsigned char>(row[c][0]));
      shown[c] = shown[c] || !row[c].empty();
      right[c] = right[c] && (number || row[c] == "-");
    }
  }
  std::string out;
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (std::size_t c = 0; c < columns; ++c) {
      if (!shown[c]) continue;
      const std::string cell = printable(cells[c]);
      const std::string pad(widths[c] - width(cell), ' ');
      if (!text.empty()) text += "  ";
      text += right[c] ? pad + cell : cell + pad;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  line(header_);
  for (const auto& row : rows_) line(row);
  return out;
}

std::string human_bytes(double bytes) {
  static constexpr std::array<std::string_view, 6> kUnits{" B", " KB", " MB", " GB", " TB", " PB"};
  return scaled(bytes, kUnits);
}

std::string human_count(double count) {
  static constexpr std::array<std::string_view, 5> kUnits{"", " k", " M", " G", " T"};
  return scaled(count, kUnits);
}

std::string human_duration(std::uint64_t ns) {
  static constexpr std::array<std::string_view, 4> kUnits{" ns", " us", " ms", " s"};
  return scaled(static_cast<double>(ns), kUnits);
}

std::string human_age(std::uint64_t ns) {
  const std::uint64_t seconds = ns / 1'000'000'000;
  if (seconds < 60) return fmt::format("{}s", seconds);
  if (seconds < 3600) return fmt::format("{}m {}s", seconds / 60, seconds % 60);
  if (seconds < 86400) return fmt::format("{}h {}m", seconds / 3600, seconds / 60 % 60);
  return fmt::format("{}d {}h", seconds / 86400, seconds / 3600 % 24);
}

}  // namespace mk::mkctl
