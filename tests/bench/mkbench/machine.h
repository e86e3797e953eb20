/// \file
/// What machine a figure was taken on.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "kernels/plan/machine.h"

namespace mk::bench {

/// CPU model, cores this process may use, memory, GPUs, kernel, compiler and build type of this
/// program.
nlohmann::json describe_machine();

/// The machine's GPUs ("4 x NVIDIA H200"), or "none". `folder`: where the driver lists them.
/// Whether a run used them is the command's --executor.
std::string describe_gpus(const std::filesystem::path& folder);

/// How many bytes per second this machine copies from memory to memory with all the cores this
/// process may use, measured for about a tenth of a second.
double copy_bytes_per_second();

/// What the planner knows of what a run is on: this CPU, or the shipped file nearest to the GPUs.
kernels::plan::Machine planned_machine(const std::string& executor);

/// UTC now, "2026-01-31T12:34:56Z".
std::string utc_now();

}  // namespace mk::bench
