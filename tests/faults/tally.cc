#include "tests/faults/tally.h"

#include <algorithm>

namespace mk::faults {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

nlohmann::json Tally::to_json() const {
  nlohmann::json out;
  out["repetitions"] = repetitions;
  if (!error_ms.empty()) {
    out["errors"] = error_ms.size();
    out["death_to_error_ms_median"] = median(error_ms);
    out["death_to_error_ms_max"] = *std::max_element(error_ms.begin(), error_ms.end());
  }
  if (!detection_ms.empty()) {
    out["detection_to_error_ms_median"] = median(detection_ms);
    out["detection_to_error_ms_max"] = *std::max_element(detection_ms.begin(), detection_ms.end());
  }
  if (!neighbour.empty()) {
    out["neighbour_throughput_median"] = median(neighbour);
    out["neighbour_throughput_min"] = *std::min_element(neighbour.begin(), neighbour.end());
  }
  return out;
}

}  // namespace mk::faults
