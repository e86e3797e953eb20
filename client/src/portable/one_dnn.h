/// \file
/// oneDNN, opened when the CPU executor is first asked for.
#pragma once

#include "shm/host/result.h"

namespace mk {

/// Opens the library once; kUnsupported says what is missing and how to get it. Any thread.
Status one_dnn_available();

}  // namespace mk
