#include "tests/bench/mkbench/report.h"

#include <fmt/format.h>

#include "mkernel/mkernel.h"
#include "shm/files/standard_output.h"
#include "tests/bench/mkbench/machine.h"

namespace mk::bench {
namespace {

std::string megabytes(double bytes) { return fmt::format("{:.2f} MB", bytes * 1e-6); }

std::string counted(std::uint32_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

void print_verification(const Verification& v, bool outputs_are_equal) {
  if (!v.asked) {
    print_out("result          NOT CHECKED (--verify none)\n");
  } else if (v.launches_checked == 0) {
    print_out("result          NOT CHECKED: no launch was checked by all its ranks\n");
  } else if (v.passed()) {
    print_out(
        "result          correct: {} of {} launches checked, {} values against float64, largest "
        "error: {:.0f}% of the allowed rounding error{}\n",
        v.launches_checked, v.launches, v.elements_compared, 100 * v.worst_ratio,
        outputs_are_equal ? "; all ranks bitwise equal" : "");
  } else {
    print_out(
        "result          WRONG: {} of {} values outside the allowed rounding error (largest error: "
        "{:.3g} times it), {} "
        "launches in which ranks differ that must not\n",
        v.wrong, v.elements_compared, v.worst_ratio, v.launches_with_differing_ranks);
  }
}

void print_mode(const char* name, const ModeFigures& figures) {
  if (figures.total_ms.count == 0) return;
  print_out("  {:<8} {:9.2f} ms median   ({:.2f} .. {:.2f}, {} launches; compute part {:.2f} ms)\n",
            name, figures.total_ms.median, figures.total_ms.min, figures.total_ms.max,
            figures.total_ms.count, figures.compute_ms.median);
}

void print_links(const nlohmann::json& by_node) {
  for (std::size_t node = 0; node < by_node.size(); ++node) {
    const auto& links = by_node[node].is_object()
                            ? by_node[node].value("links", nlohmann::json::array())
                            : by_node[node];
    for (const auto& link : links) {
      const auto number = [&](const char* key) {
        const auto found = link.find(key);
        if (found == link.end()) return 0.0;
        return found->is_string() ? std::stod(found->get<std::string>()) : found->get<double>();
      };
      print_out("  node {} -> node {:.0f}, rail {:.0f}: {} in {:.0f} messages, {:.0f} errors\n",
                node, number("peer"), number("rail"), megabytes(number("bytes")),
                number("messages"), number("errors"));
    }
  }
}

}  // namespace

void print_report(const OperatorCase& operation, const BenchOptions& options,
                  const BenchResult& result) {
  const BenchSpec& spec = options.spec;
  print_out("{}, {} x {}: {}\n", operation.title(), counted(spec.nodes, "node"),
            counted(spec.local, "rank"), operation.describe(spec));
  print_out("network         {}{}{}\n", result.fabric,
            result.link_bandwidth.empty()
                ? ""
                : fmt::format(", each link paced to {}", result.link_bandwidth),
            options.link_latency.empty() ? "" : fmt::format(", latency {}", options.link_latency));
  print_verification(result.verification, operation.outputs_are_equal());
  print_out("time            slowest rank of each launch\n");
  print_mode("fused", result.fused);
  print_mode("unfused", result.unfused);
  if (result.speedup > 0) print_out("  fused is {:.2f}x as fast as unfused\n", result.speedup);
  if (result.bound) {
    const Bound& bound = *result.bound;
    print_out(
        "bound           {:.2f} ms by {} (compute {:.2f}, network {:.2f}, local {:.2f}); fused "
        "reaches {:.0f}%\n",
        bound.ms, bound.limit, bound.compute_ms, bound.network_ms, bound.local_ms,
        bound.fused_share * 100);
  }
  print_out(
      "estimates       fused {:.2f} ms, unfused {:.2f} ms: what LaunchMode::kAuto goes by{}\n",
      result.estimates.fused_ms, result.estimates.unfused_ms,
      doubt_of(result.estimates, result.fused, result.unfused));
  const ModeFigures& mode = result.fused.total_ms.count > 0 ? result.fused : result.unfused;
  print_out("network         {} in {} commands per rank and launch{}\n",
            megabytes(static_cast<double>(mode.network_bytes_per_rank)), mode.commands_per_rank,
            result.links.empty() ? ""
            : spec.lead == 0     ? "; over all launches:"
                                 : "; over all launches, with those that lead up to them:");
  print_links(result.links);
}

void print_summary(const std::string& heading, const std::vector<SummaryRow>& rows) {
  print_out("{:<20}{:>10}{:>12}{:>10}{:>17}{:>22}{:>9}{:>11}  {}\n", heading, "fused ms",
            "unfused ms", "speed-up", "links paced to", "bound ms", "reached", "GFLOP/s",
            "checked");
  for (const auto& [name, result] : rows) {
    std::string bound = "-";
    std::string reached = "-";
    if (result.bound) {
      bound = fmt::format("{:.1f} ({})", result.bound->ms, result.bound->limit);
      reached = fmt::format("{:.0f}%", result.bound->fused_share * 100);
    }
    const Verification& v = result.verification;
    std::string checked = "NOT CHECKED";
    if (v.launches_checked > 0)
      checked = fmt::format("{} values, {}", v.elements_compared, v.passed() ? "right" : "WRONG");
    print_out("{:<20}{:>10.1f}{:>12.1f}{:>9.2f}x{:>17}{:>22}{:>9}{:>11.1f}  {}\n", name,
              result.fused.total_ms.median, result.unfused.total_ms.median, result.speedup,
              result.link_bandwidth.empty() ? "not paced" : result.link_bandwidth, bound, reached,
              result.work.all_ranks.flops / result.fused.total_ms.median * 1e-6, checked);
  }
}

nlohmann::json json_of(const BenchOptions& options, const BenchResult& result) {
  nlohmann::json json = {
      {"spec", options.spec},
      {"fabric", result.fabric},
      {"rails", options.rails},
      {"link_bandwidth", result.link_bandwidth},
      {"link_latency", options.link_latency},
      {"baseline",
       "unfused: the same executor and data path, computation and collective one after the other"},
      {"fused", result.fused},
      {"unfused", result.unfused},
      {"speedup_median", result.speedup},
      {"work", result.work},
      {"estimates", result.estimates},
      {"verification", result.verification},
      {"correct",
       result.verification.asked ? nlohmann::json(result.verification.passed()) : nlohmann::json()},
      {"links", result.links}};
  if (result.bound) json["bound"] = *result.bound;
  return json;
}

nlohmann::json document(const std::string& tool, const std::string& command, nlohmann::json body) {
  body["tool"] = tool;
  body["version"] = version();
  body["date"] = utc_now();
  body["command"] = command;
  body["machine"] = describe_machine();
  return body;
}

}  // namespace mk::bench
