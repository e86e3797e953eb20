#include "tests/bench/mkbench/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/plan/bound.h"

namespace mk::bench {
namespace {

constexpr double kTrustedFactor = 3;  ///< between an estimate and what was measured

}  // namespace

ModeFigures figures_of(const Reports& reports, bool fused) {
  ModeFigures figures;
  std::vector<double> compute;
  for (const auto& launch : reports) {
    if (launch.front().fused != fused || !launch.front().timed) continue;
    std::uint64_t total_ns = 0;
    std::uint64_t compute_ns = 0;
    for (const LaunchReport& rank : launch) {
      total_ns = std::max(total_ns, rank.total_ns);
      compute_ns = std::max(compute_ns, rank.compute_ns);
      figures.network_bytes_per_rank = std::max(figures.network_bytes_per_rank, rank.network_bytes);
      figures.commands_per_rank = std::max(figures.commands_per_rank, rank.network_commands);
    }
    figures.samples_ms.push_back(static_cast<double>(total_ns) * 1e-6);
    compute.push_back(static_cast<double>(compute_ns) * 1e-6);
    const auto core = std::ranges::max(launch, {}, &LaunchReport::core_ns);
    const double core_ms = static_cast<double>(core.core_ns) * 1e-6;
    if (core_ms > 0 && (figures.core_ms == 0 || core_ms < figures.core_ms))
      figures.core_ms = core_ms;
  }
  figures.total_ms = summarise(figures.samples_ms);
  figures.compute_ms = summarise(compute);
  return figures;
}

Verification verification_of(const Reports& reports, bool outputs_are_equal, bool asked) {
  Verification verification;
  verification.asked = asked;
  for (const auto& launch : reports) {
    ++verification.launches;
    bool same = true;
    bool checked = true;
    for (const LaunchReport& rank : launch) {
      same = same && rank.output_hash == launch.front().output_hash;
      checked = checked && rank.verified;
      verification.elements_compared += rank.compared;
      verification.wrong += rank.wrong;
      verification.worst_ratio = std::max(verification.worst_ratio, rank.worst_ratio);
      verification.max_error = std::max(verification.max_error, rank.max_error);
    }
    if (!same && outputs_are_equal) ++verification.launches_with_differing_ranks;
    if (checked) ++verification.launches_checked;
  }
  return verification;
}

WorkFigures work_of(const Reports& reports) {
  WorkFigures figures;
  const auto raise = [](Work& most, const Work& work) {
    most.flops = std::max(most.flops, work.flops);
    most.network_bytes = std::max(most.network_bytes, work.network_bytes);
    most.link_bytes = std::max(most.link_bytes, work.link_bytes);
  };
  for (const auto& launch : reports) {
    Work all;
    for (const LaunchReport& rank : launch) {
      raise(figures.per_rank, rank.work);
      all.flops += rank.work.flops;
      all.network_bytes += rank.work.network_bytes;
      all.link_bytes += rank.work.link_bytes;
    }
    raise(figures.all_ranks, all);
  }
  return figures;
}

double links_at_once(const WorkFigures& work, const BenchSpec& spec, std::uint32_t rails) {
  if (!(work.per_rank.link_bytes > 0)) return 1;
  const std::uint32_t ranks_per_rail = (spec.local + rails - 1) / rails;
  return work.per_rank.network_bytes / work.per_rank.link_bytes / ranks_per_rail;
}

double link_bytes(const ModeFigures& figures, const WorkFigures& work, const BenchSpec& spec,
                  std::uint32_t rails) {
  if (!(work.per_rank.network_bytes > 0)) return 0;
  return static_cast<double>(figures.network_bytes_per_rank) / links_at_once(work, spec, rails);
}

Estimates estimates_of(const Reports& reports) {
  Estimates estimates;
  for (const LaunchReport& rank : reports.back()) {
    estimates.fused_ms =
        std::max(estimates.fused_ms, static_cast<double>(rank.estimated_fused_ns) * 1e-6);
    estimates.unfused_ms =
        std::max(estimates.unfused_ms, static_cast<double>(rank.estimated_unfused_ns) * 1e-6);
  }
  return estimates;
}

std::string doubt_of(const Estimates& estimates, const ModeFigures& fused,
                     const ModeFigures& unfused) {
  double worst = 1;
  const auto compare = [&worst](double estimate, const ModeFigures& measured) {
    const double median = measured.total_ms.median;
    if (measured.total_ms.count == 0 || !(estimate > 0) || !(median > 0)) return;
    const double ratio = median / estimate;
    if (std::abs(std::log(ratio)) > std::abs(std::log(worst))) worst = ratio;
  };
  compare(estimates.fused_ms, fused);
  compare(estimates.unfused_ms, unfused);
  if (worst <= kTrustedFactor && worst * kTrustedFactor >= 1) return {};
  return fmt::format(
      "; measured is {}x that: the estimates are for ranks and daemons with a CPU or GPU each, "
      "so kAuto may choose wrongly here",
      worst < 10 ? fmt::format("{:.2g}", worst) : fmt::format("{:.0f}", worst));
}

namespace {

double count_of(const nlohmann::json& link, const char* key) {
  const auto found = link.find(key);
  if (found == link.end()) return 0;
  return found->is_string() ? std::stod(found->get<std::string>()) : found->get<double>();
}

nlohmann::json* find_link(nlohmann::json& answer, const nlohmann::json& wanted) {
  if (!answer.is_object() || !answer.contains("links")) return nullptr;
  for (nlohmann::json& link : answer["links"]) {
    const bool same = std::ranges::all_of(std::array{"rail", "peer", "peer_rail"}, [&](auto* key) {
      return link.value(key, -1) == wanted.value(key, -1);
    });
    if (same) return &link;
  }
  return nullptr;
}

}  // namespace

nlohmann::json links_since(const nlohmann::json& before, nlohmann::json after) {
  for (const nlohmann::json& old : before.value("links", nlohmann::json::array())) {
    nlohmann::json* const link = find_link(after, old);
    constexpr std::array kCounters = {"bytes", "messages", "batches", "completed", "errors"};
    // Where a counter fell, the daemon was started again and has begun at nothing.
    const auto fell = [&](const char* key) { return count_of(*link, key) < count_of(old, key); };
    if (link == nullptr || std::ranges::any_of(kCounters, fell)) continue;
    for (const char* key : kCounters) {
      if (!link->contains(key)) continue;
      (*link)[key] = static_cast<std::uint64_t>(count_of(*link, key) - count_of(old, key));
    }
  }
  return after;
}

std::optional<Bound> bound_of(const BenchSpec& spec, std::uint32_t rails,
                              const std::vector<kernels::plan::Problem>& problems,
                              const kernels::plan::Machine& machine, const WorkFigures& work,
                              const ModeFigures& fused, const ModeFigures& unfused,
                              const RunRates& rates) {
  namespace plan = kernels::plan;
  if (fused.total_ms.count == 0 || unfused.total_ms.count == 0 || spec.sizes != "fixed")
    return std::nullopt;
  if (spec.nodes > 1 && !(rates.link_bytes_per_s > 0)) return std::nullopt;
  plan::Measured measured;
  measured.local_gb_s = rates.local_bytes_per_s * 1e-9;
  measured.network_gb_s = rates.link_bytes_per_s * links_at_once(work, spec, rails) * 1e-9;
  plan::Bound legs;
  for (const plan::Problem& problem : problems) {
    const auto one = plan::bound_of(problem, machine, measured);
    if (!one) return std::nullopt;
    legs += *one;
  }
  double compute_ms = unfused.compute_ms.min;
  if (fused.core_ms > 0) compute_ms = std::min(compute_ms, fused.core_ms);
  // (A collective on a GPU has no such leg: what it measured are copies and sums.)
  if (compute_ms > 0 && legs.compute_us > 0) legs.compute_us = compute_ms * 1e3;
  Bound bound;
  bound.compute_ms = legs.compute_us * 1e-3;
  bound.network_ms = legs.network_us * 1e-3;
  bound.local_ms = legs.local_us * 1e-3;
  bound.ms = legs.longest_us() * 1e-3;
  bound.limit = legs.limit();
  bound.fused_share = bound.ms / fused.total_ms.median;
  return bound;
}

}  // namespace mk::bench
