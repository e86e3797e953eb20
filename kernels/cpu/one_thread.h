/// \file
/// Keeps oneDNN from spreading work over threads of its own: Debian's build uses OpenMP (libgomp),
/// and every block is already a thread.
#pragma once

namespace mk::kernels {

/// Makes OpenMP regions that the calling thread starts run on it alone.
void use_one_thread();

/// The same for a scope: oneDNN plans a primitive for the number of threads it sees when the
/// primitive is made.
class OneThreadScope {
 public:
  OneThreadScope();
  ~OneThreadScope();
  OneThreadScope(const OneThreadScope&) = delete;
  OneThreadScope& operator=(const OneThreadScope&) = delete;

 private:
  int before_;
};

}  // namespace mk::kernels
