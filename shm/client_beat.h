/// \file
/// A client's sign of life: its monitor thread counts up, four times a second, in the first
/// reserved word of the client's line. 0: a client that does not say.
#pragma once

#include "shm/layout.h"

namespace mk::shm {

inline std::uint64_t* client_beats(SegmentHeader& header) { return &header.reserved4[0]; }

}  // namespace mk::shm
