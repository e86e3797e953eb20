/// \file
/// Signals that libraries take for themselves.
#pragma once

namespace mk::daemon {

/// SIGSEGV, SIGBUS, SIGILL, SIGFPE and SIGABRT end the process and leave a core, SIGINT and SIGTERM
/// end it as they would have. Providers of libfabric put handlers in their place when they are
/// loaded. These write a file of their own and exit with 1. Handlers of this program and of
/// sanitizers stay. Call it when the program starts, and again after anything that loads libraries.
void take_signals_back();

}  // namespace mk::daemon
