#include "kernels/plan/machine.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>

#include "kernels/plan/shipped_machines.h"
#include "shm/host/result.h"

namespace mk::kernels::plan {
namespace {

struct Number {
  const char* key;
  double Machine::*place;
};

// Every number of a machine file.
constexpr Number kGpuNumbers[] = {
    {"step_us_256", &Machine::step_us_256},
    {"step_us_128", &Machine::step_us_128},
    {"step_us_64", &Machine::step_us_64},
    {"step_us_64_rows", &Machine::step_us_64_rows},
    {"step_us_box", &Machine::step_us_box},
    {"l2_share_128", &Machine::l2_share_128},
    {"l2_mb_128", &Machine::l2_mb_128},
    {"weights_gb_s", &Machine::weights_gb_s},
    {"weights_sm_gb_s", &Machine::weights_sm_gb_s},
    {"l2_mb", &Machine::l2_mb},
    {"weights_overlap", &Machine::weights_overlap},
    {"tile_us_256", &Machine::tile_us_256},
    {"tile_us_128", &Machine::tile_us_128},
    {"attention_share", &Machine::attention_share},
    {"experts_share", &Machine::experts_share},
    {"power_slowdown", &Machine::power_slowdown},
    {"power_slowdown_128", &Machine::power_slowdown_128},
    {"power_after_us", &Machine::power_after_us},
    {"whole_waves_share", &Machine::whole_waves_share},
    {"link_gb_s", &Machine::link_gb_s},
    {"rows_link_gb_s", &Machine::rows_link_gb_s},
    {"link_sharpness", &Machine::link_sharpness},
    {"crowding", &Machine::crowding},
    {"copy_gb_s", &Machine::copy_gb_s},
    {"pass_on_gb_s", &Machine::pass_on_gb_s},
    {"chunk_flag_us", &Machine::chunk_flag_us},
    {"last_part_share", &Machine::last_part_share},
    {"many_parts_share", &Machine::many_parts_share},
    {"copy_beside_share", &Machine::copy_beside_share},
    {"engine_gb_s", &Machine::engine_gb_s},
    {"engine_copy_us", &Machine::engine_copy_us},
    {"engine_each_us", &Machine::engine_each_us},
    {"hbm_gb_s", &Machine::hbm_gb_s},
    {"sum_gb_s", &Machine::sum_gb_s},
    {"sum_out_gb_s", &Machine::sum_out_gb_s},
    {"sums_link_gb_s", &Machine::sums_link_gb_s},
    {"sum_sent_gb_s", &Machine::sum_sent_gb_s},
    {"sum_sent_ar_gb_s", &Machine::sum_sent_ar_gb_s},
    {"sum_come_gb_s", &Machine::sum_come_gb_s},
    {"store_beside_share", &Machine::store_beside_share},
    {"last_wave_share", &Machine::last_wave_share},
    {"own_share", &Machine::own_share},
    {"network_gb_s", &Machine::network_gb_s},
    {"network_latency_us", &Machine::network_latency_us},
    {"network_fill_chunks", &Machine::network_fill_chunks},
    {"network_command_us", &Machine::network_command_us},
    {"network_fill_tiles", &Machine::network_fill_tiles},
    {"sockets_gb_s", &Machine::sockets_gb_s},
    {"sockets_latency_us", &Machine::sockets_latency_us},
    {"copy_for_network_us", &Machine::copy_for_network_us},
    {"launch_us_ag", &Machine::launch_us_ag},
    {"launch_us_rs", &Machine::launch_us_rs},
    {"launch_us_ar", &Machine::launch_us_ar},
    {"overlap_ag", &Machine::overlap_ag},
    {"overlap_rs", &Machine::overlap_rs},
    {"overlap_ar", &Machine::overlap_ar},
    {"launch_us_accounted", &Machine::launch_us_accounted},
    {"overlap_accounted", &Machine::overlap_accounted},
    {"arrival_tiles", &Machine::arrival_tiles},
    {"unfused_us_ag", &Machine::unfused_us_ag},
    {"unfused_us_rs", &Machine::unfused_us_rs},
    {"unfused_us_ar", &Machine::unfused_us_ar},
    {"unfused_link_ag", &Machine::unfused_link_ag},
    {"unfused_link_rs", &Machine::unfused_link_rs},
    {"unfused_link_ar", &Machine::unfused_link_ar},
    {"unfused_network_ag", &Machine::unfused_network_ag},
    {"unfused_network_rs", &Machine::unfused_network_rs},
    {"unfused_network_ar", &Machine::unfused_network_ar},
    {"unfused_sum_share", &Machine::unfused_sum_share},
};
constexpr Number kCpuNumbers[] = {
    {"network_gb_s", &Machine::network_gb_s},
    {"cpu_gflops", &Machine::cpu_gflops},
    {"cpu_f32_gflops", &Machine::cpu_f32_gflops},
    {"cpu_memory_gb_s", &Machine::cpu_memory_gb_s},
    {"cpu_step_us", &Machine::cpu_step_us},
    {"cpu_step_in_turns_us", &Machine::cpu_step_in_turns_us},
    {"cpu_command_us", &Machine::cpu_command_us},
    {"cpu_network_in_turns_gb_s", &Machine::cpu_network_in_turns_gb_s},
};

std::span<const Number> numbers_of(MachineKind kind) {
  return kind == MachineKind::kGpu ? std::span<const Number>(kGpuNumbers)
                                   : std::span<const Number>(kCpuNumbers);
}

// What something is divided by, besides rates; exponents among them.
constexpr std::string_view kDivisors[] = {
    "step_us_256",       "step_us_128",     "step_us_64",      "step_us_64_rows", "overlap_ag",
    "overlap_rs",        "overlap_ar",      "weights_overlap", "link_sharpness",  "power_after_us",
    "overlap_accounted", "attention_share", "experts_share"};

bool must_be_more_than_0(std::string_view key) {
  return key.ends_with("_gb_s") || key.ends_with("gflops") ||
         std::find(std::begin(kDivisors), std::end(kDivisors), key) != std::end(kDivisors);
}

constexpr std::uint32_t kSmsMax = 4096;
constexpr std::size_t kFileBytesMax = 1 << 20;

Result<double> number_at(const nlohmann::json& json, const char* key, std::string_view source) {
  const auto found = json.find(key);
  if (found == json.end())
    return fail(ErrorCode::kInvalidArgument,
                "{}: the machine file has no '{}'; measure it, or take it from a shipped file",
                source, key);
  if (!found->is_number() || !std::isfinite(found->get<double>()) || found->get<double>() < 0)
    return fail(ErrorCode::kInvalidArgument, "{}: '{}' is {}; it must be a number of at least 0",
                source, key, found->dump());
  return found->get<double>();
}

Result<Machine> machine_of(const nlohmann::json& json, std::string_view source) {
  if (!json.is_object())
    return fail(ErrorCode::kInvalidArgument, "{}: a machine file is one JSON object", source);
  Machine machine;
  const auto kind = json.find("kind");
  if (kind == json.end() || (*kind != "gpu" && *kind != "cpu"))
    return fail(ErrorCode::kInvalidArgument, "{}: 'kind' must be \"gpu\" or \"cpu\"", source);
  machine.kind = *kind == "gpu" ? MachineKind::kGpu : MachineKind::kCpu;
  const auto name = json.find("name");
  if (name == json.end() || !name->is_string() || name->get<std::string>().empty())
    return fail(ErrorCode::kInvalidArgument, "{}: 'name' must be a text that is not empty", source);
  machine.name = name->get<std::string>();
  MK_ASSIGN_OR_RETURN(const double sms, number_at(json, "sms", source));
  if (sms < 1 || sms > kSmsMax || sms != std::floor(sms))
    return fail(ErrorCode::kInvalidArgument, "{}: 'sms' is {}; 1 to {} are possible", source, sms,
                kSmsMax);
  machine.sms = static_cast<std::uint32_t>(sms);
  for (const Number& number : numbers_of(machine.kind)) {
    MK_ASSIGN_OR_RETURN(machine.*number.place, number_at(json, number.key, source));
  }
  for (const auto& [key, value] : json.items()) {
    bool known = key == "kind" || key == "name" || key == "sms" || key == "comment";
    for (const Number& number : numbers_of(machine.kind)) known = known || key == number.key;
    if (!known)
      return fail(ErrorCode::kInvalidArgument, "{}: a {} has no '{}'; remove it, or mend its name",
                  source, kind->get<std::string>(), key);
  }
  for (const Number& number : numbers_of(machine.kind)) {
    if (machine.*number.place > 0 || !must_be_more_than_0(number.key)) continue;
    return fail(ErrorCode::kInvalidArgument, "{}: '{}' is 0; it must be more", source, number.key);
  }
  return machine;
}

}  // namespace

Result<Machine> parse_machine(std::string_view text, std::string_view source) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return fail(ErrorCode::kInvalidArgument, "{}: this is no JSON", source);
  return machine_of(json, source);
}

Result<Machine> load_machine(const std::string& path) {
  std::ifstream file(path);
  if (!file)
    return fail(ErrorCode::kNotFound, "machine file {} cannot be opened; give one that exists",
                path);
  std::string text(kFileBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kFileBytesMax)
    return fail(ErrorCode::kInvalidArgument, "machine file {} has more than {} bytes", path,
                kFileBytesMax);
  return parse_machine(text, path);
}

std::string machine_text(const Machine& machine) {
  nlohmann::ordered_json json;
  json["kind"] = machine.kind == MachineKind::kGpu ? "gpu" : "cpu";
  json["name"] = machine.name;
  json["sms"] = machine.sms;
  for (const Number& number : numbers_of(machine.kind)) json[number.key] = machine.*number.place;
  return json.dump(2) + "\n";
}

Result<Machine> shipped_machine(std::string_view name) {
  std::string names;
  for (const ShippedMachine& shipped : kShippedMachines) {
    if (name == shipped.name) return parse_machine(shipped.text, shipped.name);
    names += names.empty() ? shipped.name : std::string(", ") + shipped.name;
  }
  return fail(ErrorCode::kNotFound, "no machine file is shipped for '{}'; there are {}", name,
              names);
}

Machine machine_on_fabric(const Machine& machine, std::string_view fabric, double bytes_per_s) {
  // So that a rate that is measured anew is mostly the same, and choices are.
  constexpr double kStepsOfDouble = 8;
  const bool sockets = fabric.starts_with("ofi:") && fabric.find("efa") == std::string_view::npos &&
                       fabric.find("verbs") == std::string_view::npos;
  Machine on = machine;
  if (sockets && machine.kind == MachineKind::kGpu) {
    on.network_gb_s = machine.sockets_gb_s;
    on.network_latency_us = machine.sockets_latency_us;
  }
  if (bytes_per_s > 0)
    on.network_gb_s =
        std::exp2(std::round(std::log2(bytes_per_s / 1e9) * kStepsOfDouble) / kStepsOfDouble);
  return on;
}

DerivedMachine machine_for_gpu(std::string_view device_name, std::uint32_t sms) {
  DerivedMachine derived;
  const bool h200 = device_name.find("H200") != std::string_view::npos;
  const bool h100 = device_name.find("H100") != std::string_view::npos;
  // A shipped file is ours: it parses (a test holds it to that).
  derived.machine = shipped_machine(h200 ? "H200" : "H100").value_or(Machine{});
  if ((h200 || h100) && sms == derived.machine.sms) return derived;
  derived.machine.name = device_name;
  derived.machine.sms = sms;
  derived.warning = fmt::format(
      "no machine file is shipped for '{}' with {} SMs; its choices go by the {}'s figures, which "
      "may be far off. `mkbench calibrate --executor cuda --out FILE` measures it; then set "
      "MKERNEL_MACHINE=FILE",
      device_name, sms, h200 ? "H200" : "H100");
  return derived;
}

}  // namespace mk::kernels::plan
