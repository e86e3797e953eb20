/// \file
/// Text for users: tables with aligned columns, and quantities with units.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mk::mkctl {

/// Rows of cells under a header. A column whose cells all start with a digit is aligned to the
/// right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  /// As many cells as the header has.
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  bool empty() const { return rows_.empty(); }
  /// Lines, each with its newline; cells have control characters replaced.
  std::string text() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

std::string human_bytes(double bytes);         ///< "1.50 GB", powers of ten
std::string human_count(double count);         ///< "12.3 M"
std::string human_duration(std::uint64_t ns);  ///< "850 ns", "12.3 us", "4.05 s"
std::string human_age(std::uint64_t ns);       ///< "3d 4h", "5m 12s", "0s"
/// `text` with control characters replaced, so that nothing from outside moves the cursor.
std::string printable(const std::string& text);

}  // namespace mk::mkctl
