/// \file
/// The terminal of a full-screen program: its own screen, keys one by one, its size. Everything is
/// as it was when this goes, also after SIGINT, SIGTERM and SIGHUP.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "daemon/mkctl/top_screen.h"
#include "shm/host/result.h"

namespace mk::mkctl {

class Terminal {
 public:
  /// Takes over stdin and stdout; an error when either is no terminal. One at a time.
  static Result<Terminal> open();
  ~Terminal();
  Terminal(Terminal&& other) noexcept;
  Terminal& operator=(Terminal&&) = delete;

  ScreenSize size() const;
  void show(const std::vector<std::string>& lines);

  struct Event {
    std::vector<int> keys;  ///< pressed
    bool woken = false;     ///< `wake_fd` was readable
    bool ended = false;     ///< by a signal, or the terminal is gone
  };
  /// Waits for a key, a new size, a signal or `wake_fd`, at most `patience`.
  Event wait(int wake_fd, std::chrono::milliseconds patience);

 private:
  Terminal() = default;
  bool owns_ = false;
  std::string pending_;  ///< of a key that is more than one byte
};

/// The keys in what a terminal sent; what is not complete yet stays in `bytes`. `all`: an escape
/// that nothing follows is the key.
std::vector<int> parse_keys(std::string& bytes, bool all);

}  // namespace mk::mkctl
