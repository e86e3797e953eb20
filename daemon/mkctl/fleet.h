/// \file
/// All daemons of one command: asked side by side, printed in order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/mkctl/daemon.h"

namespace mk::mkctl {

class Fleet {
 public:
  /// Daemons asked at once.
  static constexpr std::size_t kParallelMax = 16;

  /// `command`: its name, for the JSON.
  Fleet(std::vector<Target> targets, std::string command, bool json);

  std::vector<std::unique_ptr<Daemon>>& daemons() { return daemons_; }
  bool several() const { return daemons_.size() > 1; }
  bool json() const { return json_; }

  /// Asks each daemon, prints each answer in the daemons' order (errors to stderr), returns the
  /// exit code. Of several, an error of one leaves the others alone.
  int each(const std::function<Answer(Daemon&)>& ask);
  /// Asks each daemon; the answers in their order.
  std::vector<Answer> collect(const std::function<Answer(Daemon&)>& ask);
  /// Prints one answer that is not one daemon's own; returns its code.
  int print(const Answer& answer) const;

  /// The JSON of one object of this command.
  Json envelope(const Json& body) const { return mkctl::envelope(command_, body); }

 private:
  std::vector<std::unique_ptr<Daemon>> daemons_;
  const std::string command_;
  const bool json_;
};

}  // namespace mk::mkctl
