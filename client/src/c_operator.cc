#include <algorithm>
#include <cstring>

#include "client/src/c_operator.h"
#include "mkernel/mkernel.h"

namespace mk::c_api {

Result<Tuning> tuning_of(const mk_tuning* given) {
  Tuning tuning;
  if (given == nullptr) return tuning;
  // A caller of the first release knows no more.
  MK_RETURN_IF_ERROR(check_grown_struct(given, offsetof(mk_tuning, batch_invariant),
                                        sizeof(mk_tuning), "mk_tuning"));
  mk_tuning whole{};
  std::memcpy(&whole, given, std::min(given->struct_bytes, sizeof whole));
  given = &whole;
  tuning.executor = static_cast<Executor>(given->executor);
  tuning.tile_m = given->tile_m;
  tuning.tile_n = given->tile_n;
  tuning.chunk_bytes = given->chunk_bytes;
  tuning.compute_sms = given->compute_sms;
  tuning.reduce_sms = given->reduce_sms;
  tuning.send_sms = given->send_sms;
  tuning.receive_sms = given->receive_sms;
  tuning.share_sms = given->share_sms;
  tuning.pull_sms = given->pull_sms;
  if (given->wait_timeout_ms != 0)
    tuning.wait_timeout = std::chrono::milliseconds{given->wait_timeout_ms};
  tuning.count_nonfinite = given->count_nonfinite != 0;
  tuning.batch_invariant = given->batch_invariant != 0;
  tuning.own_workspace = given->own_workspace != 0;
  tuning.rates = {given->flops_per_s, given->local_bytes_per_s, given->network_bytes_per_s,
                  given->command_ns, given->step_ns};
  tuning.exchange = static_cast<Exchange>(std::min(given->exchange, 0xffu));
  if (given->machine_file != nullptr) tuning.machine_file = given->machine_file;
  if (given->tuned_file != nullptr) tuning.tuned_file = given->tuned_file;
  return tuning;
}

Result<Found> nothing_of(const char* name, std::uint32_t what) {
  if (what < MK_INPUT || what > MK_FIRST_EXPERT) {
    return fail(ErrorCode::kInvalidArgument, "mk_op_query was asked for {}, which is nothing",
                what);
  }
  static constexpr const char* kNames[] = {"MK_INPUT", "MK_OUTPUT", "MK_ROWS", "MK_EXPERT_OFFSETS",
                                           "MK_FIRST_EXPERT"};
  return fail(ErrorCode::kUnsupported, "{} has no {}", name, kNames[what - MK_INPUT]);
}

}  // namespace mk::c_api
