/// \file
/// Reads shm/ABI.md: its tables by heading, and its code blocks.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace mk::shm::test {

/// A table's rows; a cell by the name of its column.
using Row = std::map<std::string, std::string>;
using Table = std::vector<Row>;

class AbiDocument {
 public:
  AbiDocument() {
    std::ifstream file(MK_ABI_DOCUMENT);
    EXPECT_TRUE(file) << "cannot read " << MK_ABI_DOCUMENT;
    std::string heading;
    std::vector<std::string> columns;
    bool in_block = false;
    for (std::string line; std::getline(file, line);) {
      if (line.rfind("```", 0) == 0) {
        in_block = !in_block;
        continue;
      }
      if (in_block) {
        blocks_[heading] += line + "\n";
      } else if (line.rfind('#', 0) == 0) {
        heading = line.substr(line.find_first_not_of("# "));
        columns.clear();
      } else if (line.rfind("|--", 0) == 0) {
        continue;
      } else if (line.rfind('|', 0) == 0) {
        const std::vector<std::string> cells = split(line);
        if (columns.empty()) {
          columns = cells;
          continue;
        }
        EXPECT_EQ(cells.size(), columns.size()) << line;
        Row row;
        for (std::size_t i = 0; i < cells.size() && i < columns.size(); ++i)
          row[columns[i]] = cells[i];
        tables_[heading].push_back(row);
      } else {
        text_ += line + "\n";
        columns.clear();
      }
    }
  }

  /// All of it but its tables and code blocks.
  const std::string& text() const { return text_; }
  const Table& table(const std::string& heading) const {
    static const Table kNone;
    const auto found = tables_.find(heading);
    EXPECT_TRUE(found != tables_.end()) << "ABI.md has no table under '" << heading << "'";
    return found == tables_.end() ? kNone : found->second;
  }
  std::string block(const std::string& heading) const {
    const auto found = blocks_.find(heading);
    return found == blocks_.end() ? "" : found->second;
  }

 private:
  static std::vector<std::string> split(const std::string& line) {
    std::vector<std::string> cells;
    for (std::size_t begin = 1; begin < line.size();) {
      const std::size_t end = line.find('|', begin);
      const std::string cell = line.substr(begin, end - begin);
      const std::size_t first = cell.find_first_not_of(' ');
      cells.push_back(
          first == cell.npos ? "" : cell.substr(first, cell.find_last_not_of(' ') - first + 1));
      if (end == line.npos) break;
      begin = end + 1;
    }
    return cells;
  }

  std::string text_;
  std::map<std::string, Table> tables_;
  std::map<std::string, std::string> blocks_;
};

inline std::uint64_t number(const Row& row, const std::string& column) {
  const auto found = row.find(column);
  EXPECT_TRUE(found != row.end() && !found->second.empty()) << "no column " << column;
  return found == row.end() ? 0 : std::strtoull(found->second.c_str(), nullptr, 10);
}

}  // namespace mk::shm::test
