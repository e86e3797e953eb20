/// \file
/// Traces for Perfetto (ui.perfetto.dev) and chrome://tracing.
#pragma once

#include <nlohmann/json.hpp>
#include <span>

#include "tests/bench/mkbench/trace.h"

namespace mk::bench {

/// In the Trace Event Format: a process per rank with a thread per block, and a process whose
/// threads are the links. A chunk goes from commit to arrival, on as many lines as chunks are on
/// their way at once. Launches follow each other with a small gap, whatever time lay between them.
nlohmann::json chrome_trace(std::span<const LaunchTrace> launches);

}  // namespace mk::bench
