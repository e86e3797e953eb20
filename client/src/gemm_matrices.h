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

/// A public launch's; 0 pitches: without gaps, until checked_matrices() has filled them in.
inline kernels::GemmMatrices matrices_of(const GemmArguments& given) {
  return {given.a, given.b, given.c, given.gathered, given.bias, given.lda, given.ldb, given.ldc};
}

/// `given` with its pitches, where they are 0 those of matrices without gaps. kInvalidArgument,
/// with the numbers, when rows overlap each other, or what is written shares memory with anything
/// else. Also, `on_device`, when the copy engine cannot go by an address or a pitch. Matrices that
/// are missing are for the executor to refuse.
Result<kernels::GemmMatrices> checked_matrices(std::string_view op, const DeviceShape& shape,
                                               const GemmRows& rows,
                                               const kernels::GemmMatrices& given, bool on_device);

}  // namespace mk
