/// \file
/// What `mkbench calibrate` measures of a machine, and the machine file (kernels/plan/machine.h)
/// that it makes of it: a shipped file's numbers, each kind of them at the rate that was measured.
#pragma once

#include "kernels/plan/machine.h"
#include "shm/host/result.h"

namespace mk::bench {

/// 0: not measured; the number stays.
struct CpuMeasured {
  std::uint32_t cores = 0;  ///< that this process may use
  double gflops = 0;        ///< of one core, 16-bit elements
  double f32_gflops = 0;    ///< by way of fp32
  double memory_gb_s = 0;   ///< read plus written, of all cores together
};
/// Takes some seconds. kUnsupported, kSystem.
Result<CpuMeasured> measure_cpu();
kernels::plan::Machine calibrated(const kernels::plan::Machine& like, const CpuMeasured& measured);

/// Launches of two nodes on this machine that send `bytes` by so many commands; the quickest.
struct CommandRun {
  double fused_us = 0, unfused_us = 0;
  double compute_us = 0;  ///< of the unfused form
  double bytes = 0;       ///< that a rank sends
  double commands = 0;
};
/// Of CPUs, through daemons. 0: not measured, or lost in the noise; the number stays.
struct CommandsMeasured {
  double command_us = 0;    ///< a command's, besides its bytes
  double step_us = 0;       ///< a flag's: who waits for a chunk is woken
  double network_gb_s = 0;  ///< of the daemons' links, with the copies at their ends
  bool in_turns = false;    ///< ranks and daemons had fewer cores than threads
};
/// From the same bytes in few and in many commands. `cores`: of this process.
CommandsMeasured commands_of(const CommandRun& few, const CommandRun& many, std::uint32_t cores);
/// Starts daemons and ranks; takes some seconds.
Result<CommandsMeasured> measure_commands(const std::function<void(const std::string&)>& progress);
kernels::plan::Machine calibrated(const kernels::plan::Machine& like,
                                  const CommandsMeasured& measured);
/// Cores that this process may use.
std::uint32_t cores_here();

struct GpuMeasured {
  std::string name;
  std::uint32_t sms = 0;
  double product_us_256 = 0;  ///< 8192 x 8192 x 4096, tiles of 128 x 256, and so on
  double product_us_128 = 0;
  double product_us_64 = 0;
  double attention_us = 0;  ///< 32 heads of 128, 8192 rows, no mask
  double memory_gb_s = 0;   ///< read plus written by copies within the GPU
  double peer_gb_s = 0;     ///< copy engines, to one other GPU
};
/// Of the calling thread's GPU. kUnsupported without one, or in builds without the kernels.
Result<GpuMeasured> measure_gpu();
/// The machine keeps its name, by which tuned.json knows it. What its numbers are scaled by is what
/// they predict of the same measurements.
kernels::plan::Machine calibrated(const kernels::plan::Machine& like, const GpuMeasured& measured);

}  // namespace mk::bench
