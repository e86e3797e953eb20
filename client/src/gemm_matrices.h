/// \file
/// The matrices of a product over all ranks, as a caller gives them: pitches filled in, and checked
/// before either executor sees them.
#pragma once

#include <cstdint>
#include <string_view>

#include "client/src/device_operator.h"
#include "mkernel/types.h"

namespace mk {

/// Rows that a rank brings of A, and gets of C.
struct GemmRows {
  std::uint64_t a = 0;
  std::uint64_t c = 0;
};

/// `given` with its pitches, where they are 0 those of matrices without gaps. kInvalidArgument,
/// with the numbers, when rows overlap each other, or what is written shares memory with anything
/// else. Also, `on_device`, when the copy engine cannot go by an address or a pitch. Matrices that
/// are missing are for the executor to refuse.
Result<DeviceArguments> checked_matrices(std::string_view op, const DeviceShape& shape,
                                         const GemmRows& rows, const DeviceArguments& given,
                                         bool on_device);

}  // namespace mk
