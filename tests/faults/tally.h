/// \file
/// What one kind of fault has shown over all its repetitions, and how that is written down.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

namespace mk::faults {

struct Tally {
  std::uint32_t repetitions = 0;
  std::vector<double> error_ms;      ///< from a death to the error at each survivor
  std::vector<double> detection_ms;  ///< from its detection by the survivor's daemon to the error
  std::vector<double> neighbour;     ///< the neighbour's rate of launches during it over before

  nlohmann::json to_json() const;
};

/// 0 when there are none.
double median(std::vector<double> values);

}  // namespace mk::faults
