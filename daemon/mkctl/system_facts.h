/// \file
/// What a support archive tells of this machine.
#pragma once

#include <string>
#include <vector>

namespace mk::mkctl {

/// One file of the archive.
struct Fact {
  std::string file;  ///< its path in the archive
  std::string text;  ///< without secrets
  std::string from;  ///< the file or command it came from
  bool good = true;  ///< false: it could not be had, and `text` says why
};

/// Kernel, distribution, CPUs, memory, limits, NICs, GPUs' driver, the daemon's unit.
std::vector<Fact> system_facts();
/// The last of the daemon's log, where the journal has it and we may read it.
Fact daemon_log();

/// Runs a shell command of our own, never one with words from outside; at most 10 s.
Fact command_fact(const std::string& file, const std::string& command);

}  // namespace mk::mkctl
