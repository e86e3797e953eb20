/// \file
/// The GPUs that are there.
#pragma once

namespace mk::test {

/// Devices present; 0 without a driver.
int device_count();

/// Kernels of device `from` may read and write what lies on `to`. Ends the process if not.
void allow_access(int from, int to);

}  // namespace mk::test
