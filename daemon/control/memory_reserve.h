/// \file
/// Memory that is kept for the control path: when nothing else is left, operator new gets it, so
/// that the daemon can still end what took the rest.
#pragma once

#include <cstddef>

namespace mk::daemon {

/// One per process, since it is the process's new-handler. Thread-safe.
class MemoryReserve {
 public:
  static constexpr std::size_t kBytes = 16u << 20;

  /// Takes the memory, touched so that it is really there, and installs the handler.
  static void install();
  /// The process's; null before `install`.
  static MemoryReserve* installed();

  /// Whether it has been given away.
  bool spent() const;
  /// Takes it again, when twice as much is free; false when it is not.
  bool restore();

 private:
  MemoryReserve() = default;
};

}  // namespace mk::daemon
