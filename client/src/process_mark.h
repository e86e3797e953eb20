/// \file
/// What a child of fork() may do with its parent's sessions: nothing. It has a copy of their
/// memory, but none of their threads, and its messages would be taken for the parent's. So what
/// belongs to a session knows which process made it. A child closes the parent's sockets at once,
/// answers calls with an error, and leaves what it would have to wait for as it is.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "shm/host/result.h"

namespace mk::client {

/// The process that made it.
class ProcessMark {
 public:
  ProcessMark();
  /// Whether the calling process is that one. Cheap, and callable whatever other threads hold.
  bool is_here() const;
  /// kUnsupported in a forked child.
  Status check() const;

 private:
  pid_t pid_;
  std::uint64_t forks_;
};

/// While it lives, a child of fork() closes its copy of `fd` before it goes on: what the parent
/// does not hold any more, its peer then sees as closed, whatever children live on.
class ClosedInChildren {
 public:
  explicit ClosedInChildren(int fd);
  ~ClosedInChildren();
  ClosedInChildren(const ClosedInChildren&) = delete;
  ClosedInChildren& operator=(const ClosedInChildren&) = delete;

 private:
  int fd_;
};

/// Keeps `object` for the rest of the process's life.
void keep_for_ever(void* object);

/// Deletes an object where it was made. In a forked child its destructor might wait for ever for
/// threads that are not there, so there the object stays.
template <class T>
struct DeleteAtHome {
  ProcessMark mark{};
  void operator()(T* object) const {
    if (mark.is_here()) {
      delete object;
    } else {
      keep_for_ever(object);
    }
  }
};

/// A unique_ptr for what has threads, or memory that only its own process may give back.
template <class T>
class AtHome : public std::unique_ptr<T, DeleteAtHome<T>> {
  using Base = std::unique_ptr<T, DeleteAtHome<T>>;

 public:
  AtHome() = default;
  AtHome(std::unique_ptr<T> made) : Base(made.release()) {}  // NOLINT: takes it over
};

}  // namespace mk::client
