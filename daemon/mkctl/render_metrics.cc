#include <fmt/format.h>

#include <iterator>

#include "daemon/mkctl/render.h"

namespace mk::mkctl {
namespace {

/// A label's value or a help text as the format wants it.
std::string escaped(const std::string& text, bool quotes) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && quotes) {
      out += "\\\"";
    } else {
      out += c;
    }
  }
  return out;
}

std::string labels_of(const v1::Metric& metric, const std::string& bound = {}) {
  std::string out;
  for (const v1::Metric::Label& label : metric.labels()) {
    out += fmt::format("{}{}=\"{}\"", out.empty() ? "" : ",", label.name(),
                       escaped(label.value(), true));
  }
  if (!bound.empty()) out += fmt::format("{}le=\"{}\"", out.empty() ? "" : ",", bound);
  return out.empty() ? out : "{" + out + "}";
}

const char* type_of(const v1::MetricFamily& family) {
  switch (family.type()) {
    case v1::MetricFamily::TYPE_COUNTER:
      return "counter";
    case v1::MetricFamily::TYPE_HISTOGRAM:
      return "histogram";
    default:
      return "gauge";
  }
}

}  // namespace

std::string render(const v1::MetricsSample& metrics) {
  std::string text;
  const auto line = [&text]<class... Args>(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text), format, std::forward<Args>(args)...);
    text += '\n';
  };
  for (const v1::MetricFamily& family : metrics.families()) {
    line("# HELP {} {}", family.name(), escaped(family.help(), false));
    line("# TYPE {} {}", family.name(), type_of(family));
    for (const v1::Metric& metric : family.metrics()) {
      if (family.type() != v1::MetricFamily::TYPE_HISTOGRAM) {
        line("{}{} {}", family.name(), labels_of(metric), metric.value());
        continue;
      }
      for (const v1::Metric::Bucket& bucket : metric.buckets()) {
        line("{}_bucket{} {}", family.name(),
             labels_of(metric, fmt::format("{}", bucket.upper_bound())), bucket.cumulative_count());
      }
      line("{}_bucket{} {}", family.name(), labels_of(metric, "+Inf"), metric.sample_count());
      line("{}_sum{} {}", family.name(), labels_of(metric), metric.sample_sum());
      line("{}_count{} {}", family.name(), labels_of(metric), metric.sample_count());
    }
  }
  return text;
}

}  // namespace mk::mkctl
