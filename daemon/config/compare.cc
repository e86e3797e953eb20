#include "daemon/config/compare.h"

#include <map>

namespace mk::daemon {
namespace {

using Keys = std::map<std::string, std::string>;

/// Every key with its value, from print_config's lines: "[table]", "[[list]]", "key = value".
Keys keys_of(const Config& config) {
  Keys keys;
  std::map<std::string, int> tables_of_list;
  std::string prefix;
  const std::string text = print_config(config);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    const std::string_view line = std::string_view(text).substr(at, end - at);
    at = end + 1;
    if (line.starts_with("[[")) {
      const std::string list(line.substr(2, line.size() - 4));
      prefix = fmt::format("{}[{}].", list, tables_of_list[list]++);
    } else if (line.starts_with("[")) {
      prefix = fmt::format("{}.", line.substr(1, line.size() - 2));
    } else if (const std::size_t equals = line.find(" = "); equals != line.npos) {
      keys[prefix + std::string(line.substr(0, equals))] = line.substr(equals + 3);
    }
  }
  return keys;
}

}  // namespace

bool is_live_key(std::string_view key) {
  return key == "log.level" || key == "limits.drain" || key.starts_with("job[") ||
         key.starts_with("peer[");
}

std::vector<ConfigChange> compare_configs(const Config& before, const Config& after) {
  const Keys old_keys = keys_of(before);
  Keys new_keys = keys_of(after);
  for (const auto& [key, value] : old_keys) new_keys.try_emplace(key);  // gone: an empty value
  std::vector<ConfigChange> changes;
  for (const auto& [key, value] : new_keys) {
    const auto old = old_keys.find(key);
    const std::string before_text = old == old_keys.end() ? "" : old->second;
    if (before_text != value) changes.push_back({key, before_text, value, is_live_key(key)});
  }
  return changes;
}

}  // namespace mk::daemon
