/// \file
/// `--partition` of the operators that have a choice (client/tools/partition_choice.h).
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "client/tools/partition_choice.h"

namespace mk::bench {

inline void add_partition_option(CLI::App& command, std::string& partition) {
  command.add_option("--partition", partition, tools::kPartitionHelp)
      ->check(tools::PartitionChoice::check, "CHOICE")
      ->capture_default_str();
}

}  // namespace mk::bench
