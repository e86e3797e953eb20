/// \file
/// `--partition planned|adaptive|N:M|adaptive:N:M` of the tools: who says which threads compute and
/// which communicate within the node, and with how many of each a launch starts.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "mkernel/types.h"

namespace mk::tools {

struct PartitionChoice {
  Partition partition = Partition::kPlanned;
  std::uint32_t compute = 0, communicate = 0;  ///< 0: as the operator chooses

  /// Nothing for words that are no choice.
  static std::optional<PartitionChoice> parse(std::string_view text) {
    constexpr std::string_view kAdaptive = "adaptive";
    PartitionChoice choice;
    if (text == "planned") return choice;
    if (text.starts_with(kAdaptive)) {
      choice.partition = Partition::kAdaptive;
      text.remove_prefix(kAdaptive.size());
      if (text.empty()) return choice;
      if (text.front() != ':') return std::nullopt;
      text.remove_prefix(1);
    }
    const std::size_t colon = text.find(':');
    if (colon == std::string_view::npos) return std::nullopt;
    if (!take(text.substr(0, colon), choice.compute)) return std::nullopt;
    if (!take(text.substr(colon + 1), choice.communicate)) return std::nullopt;
    return choice;
  }
  /// Empty, or what is wrong: for CLI11.
  static std::string check(const std::string& text) {
    if (parse(text)) return {};
    return "must be planned, adaptive, N:M (threads or SMs that compute, and that communicate "
           "within the node) or adaptive:N:M, not '" +
           text + "'";
  }
  /// Words that `check` has let through.
  template <class AnyTuning>
  static void apply(std::string_view text, AnyTuning& tuning) {
    const PartitionChoice choice = parse(text).value_or(PartitionChoice{});
    tuning.partition = choice.partition;
    if (choice.compute == 0) return;
    tuning.compute_sms = choice.compute;
    tuning.reduce_sms = tuning.share_sms = tuning.pull_sms = choice.communicate;
  }

 private:
  static bool take(std::string_view digits, std::uint32_t& value) {
    const char* const end = digits.data() + digits.size();
    const auto [last, error] = std::from_chars(digits.data(), end, value);
    return error == std::errc{} && last == end && value != 0;
  }
};

inline constexpr const char* kPartitionHelp =
    "planned: each thread or SM keeps its role; adaptive: roles change, of products' threads "
    "between tasks, else between launches; N:M: so many that compute, and that communicate within "
    "the node; adaptive:N:M starts so";

}  // namespace mk::tools
