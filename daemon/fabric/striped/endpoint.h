/// \file
/// Several endpoints of one fabric as one: what a rail with several NICs is. Declares the maker
/// only.
#pragma once

#include <memory>
#include <vector>

#include "daemon/fabric/fabric.h"
#include "shm/limits.h"

namespace mk::fabric {

/// `stripes`: two or more, with the same contract. Links are made stripe by stripe, so both ends
/// must have as many.
Result<std::unique_ptr<Endpoint>> make_striped_endpoint(
    std::vector<std::unique_ptr<Endpoint>> stripes);

/// Which stripe carries a flag's writes: always the same one, so that the epochs of one flag stay
/// in order, and those of a batch's consecutive flags the same one, so that they stay one
/// submission.
constexpr std::uint32_t stripe_of(std::uint32_t flag_index, std::uint32_t stripes) {
  constexpr std::uint32_t kTogether = shm::kBatchMax;
  return flag_index / kTogether % stripes;
}

}  // namespace mk::fabric
