/// \file
/// What a machine can: the numbers by which the planner predicts how long a launch takes
/// (model.h). Start reading here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "shm/host/expected.h"

namespace mk::kernels::plan {

/// Who executes: the kernels of a GPU, or threads of a CPU.
enum class MachineKind : std::uint8_t { kGpu, kCpu };

/// One rank's machine. Times are in us, rates in GB/s (1e9 bytes), unless a name says otherwise. A
/// GPU's numbers below are those of one GPU; the rates of warpgroups are of one warpgroup of 128
/// threads beside a product. Plain data; equal machines predict equal times.
struct Machine {
  MachineKind kind = MachineKind::kGpu;
  std::string name;         ///< "H100", as in tuned.json
  std::uint32_t sms = 132;  ///< of a CPU: cores

  // Products. A tile takes a time for each 64 of K, and one for its prologue and epilogue.
  double step_us_256 = 0;      ///< 128 x 256
  double step_us_128 = 0;      ///< 128 x 128
  double step_us_64 = 0;       ///< 128 x 64
  double step_us_64_rows = 0;  ///< 64 x 128, which one math warpgroup multiplies
  double step_us_box = 0;      ///< more of it for each shard after a tile's first (AgGemmSchedule)
  double l2_share_128 = 0;     ///< how much longer those of 128 columns take, as B outgrows L2
  double l2_mb_128 = 0;        ///< with B so large (1e6 bytes) it is half of that
  double weights_gb_s = 0;     ///< at which a product reads its weights from memory, once at least
  double weights_sm_gb_s = 0;  ///< one SM's part of that, at most: of experts, beside other roles
  double l2_mb = 0;  ///< with B so large (1e6 bytes) later passes read half of it from memory again
  double weights_overlap = 0;  ///< exponent: how sharply a product hides what it reads of them
  double tile_us_256 = 0;
  double tile_us_128 = 0;
  double attention_share = 0;     ///< of a long product's rate that attention has
  double experts_share = 0;       ///< the same of experts' products
  double power_slowdown = 0;      ///< of a long product at the power limit, as a share of its time
  double power_slowdown_128 = 0;  ///< more of it: tiles of 128 columns move more bytes for a flop
  double power_after_us = 0;      ///< a product so long has half of that
  double whole_waves_share = 0;   ///< 1: a part of a wave takes a wave; 0: its part of one

  // NVLink, to all peers of the node together, in one direction.
  double link_gb_s = 0;        ///< tiles and sums
  double rows_link_gb_s = 0;   ///< rows that warpgroups copy
  double link_sharpness = 0;   ///< exponent by which warpgroups' rates saturate a link
  double crowding = 0;         ///< loss for each 100 warpgroups beyond crowded_above, several peers
  double copy_gb_s = 0;        ///< one warpgroup's rows to the peers
  double pass_on_gb_s = 0;     ///< the same of rows that have come over the network
  double chunk_flag_us = 0;    ///< for each chunk of rows
  double last_part_share = 0;  ///< of a warpgroup's time for a part of a chunk: rows come later
  double many_parts_share = 0;   ///< of the copies' time, where chunks have many parts
  double copy_beside_share = 0;  ///< of the shorter of product and copies that the product feels
  double engine_gb_s = 0;        ///< copy engines
  double engine_copy_us = 0;     ///< of each peer's copies of rows besides their bytes
  double engine_each_us = 0;     ///< of each copy among many that follow each other

  // Sums.
  double hbm_gb_s = 0;            ///< that sums read and write when no product runs beside them
  double sum_gb_s = 0;            ///< one warpgroup, within the node, GEMM + ReduceScatter
  double sum_out_gb_s = 0;        ///< one warpgroup: results stored on the peers
  double sums_link_gb_s = 0;      ///< results stored on the peers when no product runs
  double sum_sent_gb_s = 0;       ///< one warpgroup: sums for the network, GEMM + ReduceScatter
  double sum_sent_ar_gb_s = 0;    ///< the same, GEMM + AllReduce
  double sum_come_gb_s = 0;       ///< one warpgroup: what came over the network, to the peers
  double store_beside_share = 0;  ///< of the shorter of product and stores that the longer feels
  double last_wave_share = 0;     ///< of the last wave's tiles that nobody has summed at the end
  double own_share = 0;           ///< of the sums' time that a launch takes longer whose math sums

  // The network, one rail.
  double network_gb_s = 0;
  double network_latency_us = 0;   ///< of the first command to its arrival's use
  double network_fill_chunks = 0;  ///< chunks that go by themselves
  double network_command_us = 0;   ///< of each command besides its bytes
  double network_fill_tiles = 0;   ///< tiles before the first chunk of a node's sums goes
  double sockets_gb_s = 0;         ///< a rail over sockets, whose daemons stage GPU memory
  double sockets_latency_us = 0;   ///< and its first command's
  double copy_for_network_us = 0;  ///< rows that are not in place: once, besides their copy

  // Launches: begin, end, flags; and how sharply the longest part hides the others (exponents).
  double launch_us_ag = 0;
  double launch_us_rs = 0;
  double launch_us_ar = 0;
  double overlap_ag = 0;
  double overlap_rs = 0;
  double overlap_ar = 0;
  double launch_us_accounted = 0;  ///< of what the plan's account predicts (account.h)
  double overlap_accounted = 0;
  double arrival_tiles = 0;  ///< tiles still to compute when the last rows have come

  // The unfused form: begin, and what its phases take as a share of the fused legs' time.
  double unfused_us_ag = 0;
  double unfused_us_rs = 0;
  double unfused_us_ar = 0;
  double unfused_link_ag = 0;
  double unfused_link_rs = 0;
  double unfused_link_ar = 0;
  double unfused_network_ag = 0;
  double unfused_network_rs = 0;
  double unfused_network_ar = 0;
  double unfused_sum_share = 0;

  // A CPU's: of one thread with a core, and of what goes on beside it.
  double cpu_gflops = 0;
  double cpu_f32_gflops = 0;  ///< where 16-bit products go through fp32
  double cpu_memory_gb_s = 0;
  double cpu_step_us = 0;           ///< a chunk's way where every block has a core
  double cpu_step_in_turns_us = 0;  ///< and where they take turns
  double cpu_command_us = 0;
  double cpu_network_in_turns_gb_s = 0;

  friend bool operator==(const Machine&, const Machine&) = default;
};

/// Warpgroups above which they get into each other's way on a link to several peers.
inline constexpr double kCrowdedAbove = 36;

/// A machine file's text, which names every number of its kind and nothing else. `source`: for
/// messages. kInvalidArgument names the key that is missing, unknown, not a number or out of range.
Result<Machine> parse_machine(std::string_view text, std::string_view source);
/// The same from a file. kNotFound, kSystem, kInvalidArgument.
Result<Machine> load_machine(const std::string& path);
/// What parse_machine reads back to an equal machine.
std::string machine_text(const Machine& machine);

/// The shipped machine files: "H100", "H200", "CPU". kNotFound names those that there are.
Result<Machine> shipped_machine(std::string_view name);

/// The machine with the network's numbers for the kind of fabric of that name (as a daemon says it:
/// "loopback", "verbs", "ofi:efa", "ofi:tcp;ofi_rxm"): those of sockets, or its own. `bytes_per_s`:
/// what the daemon knows of its links, which counts more, within a tenth; 0: nothing.
Machine machine_on_fabric(const Machine& machine, std::string_view fabric, double bytes_per_s = 0);

/// For a GPU whose name no shipped file has: the file of the nearest kind, with its SMs, and a
/// `warning` that says so and how to measure.
struct DerivedMachine {
  Machine machine;
  std::string warning;  ///< empty: a shipped file fits
};
DerivedMachine machine_for_gpu(std::string_view device_name, std::uint32_t sms);

}  // namespace mk::kernels::plan
