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
  tuning.partition = static_cast<Partition>(std::min<std::uint64_t>(given->partition, 0xff));
  tuning.transport = static_cast<Transport>(std::min<std::uint64_t>(given->transport, 0xff));
  if (given->machine_file != nullptr) tuning.machine_file = given->machine_file;
  if (given->tuned_file != nullptr) tuning.tuned_file = given->tuned_file;
  return tuning;
}

Status check_stats(const mk_launch_stats* to) {
  // A caller of the first release knows no partition.
  constexpr std::size_t kLeast = offsetof(mk_launch_stats, partition_first);
  return to != nullptr ? check_out_struct(to, kLeast, "mk_launch_stats") : Status{};
}

void fill(mk_launch_stats* to, const LaunchStats& stats) {
  if (to == nullptr) return;
  to->epoch = stats.epoch;
  to->mode = static_cast<std::uint32_t>(stats.mode);
  to->total_ns = stats.total_ns;
  to->compute_ns = stats.compute_ns;
  to->compute_wait_ns = stats.compute_wait_ns;
  to->network_bytes = stats.network_bytes;
  to->network_commands = stats.network_commands;
  to->estimated_fused_ns = stats.estimated_fused_ns;
  to->estimated_unfused_ns = stats.estimated_unfused_ns;
  to->nonfinite_partials = stats.nonfinite_partials;
  if (to->struct_bytes < sizeof *to) return;
  to->partition_first = stats.partition_first;
  to->partition_last = stats.partition_last;
  to->partition_moves = stats.partition_moves;
  to->partition_turns = stats.partition_turns;
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
