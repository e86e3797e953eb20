#include "daemon/fabric/library_signals.h"

#include <dlfcn.h>
#include <signal.h>

#include <string_view>

namespace mk::daemon {
namespace {

/// Whether another library than a sanitizer's put the handler there.
bool of_a_library(const struct sigaction& action) {
  const bool informed = (action.sa_flags & SA_SIGINFO) != 0;
  if (!informed && (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN)) return false;
  void* const handler = informed ? reinterpret_cast<void*>(action.sa_sigaction)
                                 : reinterpret_cast<void*>(action.sa_handler);
  Dl_info owner{}, own{};
  if (::dladdr(handler, &owner) == 0 || owner.dli_fname == nullptr) return true;
  if (::dladdr(reinterpret_cast<void*>(&take_signals_back), &own) != 0 &&
      owner.dli_fbase == own.dli_fbase) {
    return false;
  }
  return std::string_view(owner.dli_fname).find("san.so") == std::string_view::npos;
}

}  // namespace

void take_signals_back() {
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGINT, SIGTERM}) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) != 0 || !of_a_library(action)) continue;
    ::signal(signal, SIG_DFL);
  }
}

}  // namespace mk::daemon
