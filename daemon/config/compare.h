/// \file
/// What differs between two configurations, and whether a running daemon can take it over.
#pragma once

#include <string>
#include <vector>

#include "daemon/config/config.h"

namespace mk::daemon {

/// One key, named as in the file; tables of a list are numbered: "peer[0].address".
struct ConfigChange {
  std::string key;
  std::string before, after;  ///< as TOML; empty: the key is not there
  bool live = false;          ///< takes effect without a restart

  friend bool operator==(const ConfigChange&, const ConfigChange&) = default;
};

/// All keys whose values differ, in the order of the keys' names.
std::vector<ConfigChange> compare_configs(const Config& before, const Config& after);

/// Whether a running daemon takes over a change of this key.
bool is_live_key(std::string_view key);

}  // namespace mk::daemon
