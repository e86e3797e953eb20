/// \file
/// The order of a rank of an operator that sums, of one node, where the rank adds up the tiles that
/// it owns as it computes them: all other ranks need its tiles of theirs, and its own ones need all
/// of theirs, so its own come late. Compiles for host and device.
///
///     `lead` tiles of the others',
///     `rounds` times: locals - 1 tiles of the others', one of its own,
///     `rest` tiles of the others' that are left, then its own that are left
///
/// The lead gives the others' partials time to arrive; the rounds spread what goes out over the
/// launch. Every rank goes through each owner's tiles in their order, so a partial that tile t of
/// a rank's own waits for comes, on any rank, before that rank's own tile t or a later one: nobody
/// waits in a circle, whatever lead each has.
#pragma once

#include <cstdint>

#include "kernels/comm/divisor.h"
#include "shm/platform.h"

namespace mk::kernels {

struct OwnSteps {
  std::uint32_t lead = ~0u;  ///< as it is: no step is of an own tile
  std::uint32_t rounds = 0;
  std::uint32_t rest = 0;
  Divisor locals;

  /// Of `others` and `own` tiles; at least `lead` others first, if there are so many.
  static MK_HOST_DEVICE OwnSteps of(std::uint32_t others, std::uint32_t own, std::uint32_t locals,
                                    std::uint32_t lead) {
    OwnSteps steps;
    steps.locals = Divisor(locals);
    steps.lead = lead < others ? lead : others;
    const std::uint32_t fit = (others - steps.lead) / (locals - 1);
    steps.rounds = fit < own ? fit : own;
    steps.rest = others - steps.lead - steps.rounds * (locals - 1);
    return steps;
  }
  /// Whether a rank goes by it.
  MK_HOST_DEVICE bool any() const { return locals.value() > 1; }
  /// Whether the step is of a tile of the rank's own.
  MK_HOST_DEVICE bool is_own(std::uint32_t step) const {
    if (step < lead) return false;
    step -= lead;
    const std::uint32_t in_rounds = rounds * locals.value();
    return step < in_rounds ? step % locals == locals.value() - 1 : step - in_rounds >= rest;
  }
  /// Its place among the own tiles, or among the others'.
  MK_HOST_DEVICE std::uint32_t index(std::uint32_t step) const {
    if (step < lead) return step;
    const std::uint32_t after = step - lead;
    const std::uint32_t in_rounds = rounds * locals.value();
    if (after < in_rounds) {
      const std::uint32_t round = after / locals;
      return is_own(step) ? round : lead + after - round;
    }
    const std::uint32_t last = after - in_rounds;
    return last < rest ? lead + in_rounds - rounds + last : rounds + last - rest;
  }
};

}  // namespace mk::kernels
