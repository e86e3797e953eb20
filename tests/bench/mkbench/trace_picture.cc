#include "tests/bench/mkbench/trace_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

namespace mk::bench {
namespace {

constexpr double kLabelWidth = 92, kPlotWidth = 780, kLaneHeight = 11, kRankGap = 6;
constexpr double kPanelHead = 20, kPanelFoot = 10, kPictureHead = 42;
/// Two of each: neighbours differ, so that single tiles and chunks show.
constexpr const char* kComputeColours[] = {"#3b6fb6", "#6a94cd"};
constexpr const char* kNetworkColours[] = {"#d9822b", "#eeb069"};
constexpr const char* kLocalColour = "#4a9d5b";
constexpr const char* kWaitColour = "#dcdcdc";

struct Bar {
  std::uint64_t begin_ns = 0, end_ns = 0;
  const char* colour = "";
};

/// The bars of one lane, neighbours of one colour joined where no eye would see the gap.
std::vector<Bar> joined(std::vector<Bar> bars, std::uint64_t invisible_ns) {
  std::stable_sort(bars.begin(), bars.end(),
                   [](const Bar& a, const Bar& b) { return a.begin_ns < b.begin_ns; });
  std::vector<Bar> result;
  for (const Bar& bar : bars) {
    if (!result.empty() && result.back().colour == bar.colour &&
        bar.begin_ns <= result.back().end_ns + invisible_ns) {
      result.back().end_ns = std::max(result.back().end_ns, bar.end_ns);
    } else {
      result.push_back(bar);
    }
  }
  return result;
}

struct Lane {
  const char* name;
  std::vector<Bar> bars;
};

std::vector<Lane> lanes_of(const LaunchTrace& launch, std::uint32_t rank) {
  Lane compute{"compute", {}};
  Lane local{"node", {}};
  Lane network{"network", {}};
  std::vector<Bar> waits;
  std::size_t tiles = 0;
  std::size_t chunks = 0;
  for (const Span& span : launch.spans) {
    if (span.rank != rank || span.begin_ns == span.end_ns) continue;
    if (span.kind == "tile")
      compute.bars.push_back({span.begin_ns, span.end_ns, kComputeColours[tiles++ % 2]});
    if (span.kind == "wait" && span.role == "compute")
      waits.push_back({span.begin_ns, span.end_ns, kWaitColour});
    if (span.kind == "sum" || span.kind == "copy")
      local.bars.push_back({span.begin_ns, span.end_ns, kLocalColour});
  }
  // Work of one block shows over waits of another.
  compute.bars.insert(compute.bars.begin(), waits.begin(), waits.end());
  std::map<std::uint32_t, std::uint64_t> busy_until;  // by receiving rank
  for (const Transfer& transfer : launch.transfers()) {
    if (transfer.from != rank) continue;
    std::uint64_t& busy_ns = busy_until[transfer.to];
    const std::uint64_t begin_ns = std::max(transfer.committed_ns, busy_ns);
    if (begin_ns < transfer.arrived_ns)
      network.bars.push_back({begin_ns, transfer.arrived_ns, kNetworkColours[chunks++ % 2]});
    busy_ns = std::max(busy_ns, transfer.arrived_ns);
  }
  std::vector<Lane> lanes;
  lanes.push_back(std::move(compute));
  if (launch.local > 1 || !local.bars.empty()) lanes.push_back(std::move(local));
  if (launch.nodes > 1) lanes.push_back(std::move(network));
  return lanes;
}

class Picture {
 public:
  explicit Picture(double ns_per_pixel) : ns_per_pixel_(ns_per_pixel) {}

  void add(const LaunchTrace& launch) {
    const std::uint64_t begin_ns = launch.begin_ns();
    text(0, y_ + 13, 12,
         fmt::format("{}: {:.1f} ms", launch.title,
                     static_cast<double>(launch.end_ns() - begin_ns) * 1e-6));
    y_ += kPanelHead;
    for (std::uint32_t rank = 0; rank < launch.nodes * launch.local; ++rank) {
      for (const Lane& lane : lanes_of(launch, rank)) {
        text(0, y_ + 8.5, 9, fmt::format("rank {} {}", rank, lane.name));
        rectangle(kLabelWidth, kPlotWidth, "#f6f6f6");
        // Waits first, so that work lies on top.
        for (const bool waits : {true, false}) {
          std::vector<Bar> bars;
          for (const Bar& bar : lane.bars)
            if ((bar.colour == kWaitColour) == waits) bars.push_back(bar);
          for (const Bar& bar :
               joined(std::move(bars), static_cast<std::uint64_t>(ns_per_pixel_ * 0.4))) {
            rectangle(kLabelWidth + pixels(bar.begin_ns - begin_ns),
                      std::max(0.4, pixels(bar.end_ns - bar.begin_ns)), bar.colour);
          }
        }
        y_ += kLaneHeight;
      }
      y_ += kRankGap;
    }
    y_ += kPanelFoot;
  }

  std::string finish(const std::string& title) {
    std::string legend;
    double x = 0;
    const auto entry = [&](const char* colour, const char* what) {
      legend += fmt::format(R"(<rect x="{:.0f}" y="24" width="10" height="10" fill="{}"/>)"
                            R"(<text x="{:.0f}" y="33" font-size="10">{}</text>)"
                            "\n",
                            x, colour, x + 14, what);
      x += 26 + 5.4 * static_cast<double>(std::char_traits<char>::length(what));
    };
    entry(kComputeColours[0], "computing tiles");
    entry(kWaitColour, "compute blocks waiting");
    entry(kLocalColour, "sums and copies within the node");
    entry(kNetworkColours[0], "chunks on their way to another node");
    return fmt::format(R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 {:.0f} {:.0f}" )"
                       R"(font-family="sans-serif"><rect x="-8" y="-4" width="100%" height="100%" )"
                       R"(fill="#ffffff"/>)"
                       "\n"
                       R"(<text x="0" y="13" font-size="13">{}</text>)"
                       "\n",
                       kLabelWidth + kPlotWidth + 16, y_ + 4, title) +
           legend + body_ + "</svg>\n";
  }

 private:
  double pixels(std::uint64_t ns) const { return static_cast<double>(ns) / ns_per_pixel_; }
  void text(double x, double y, int size, const std::string& words) {
    body_ += fmt::format(R"(<text x="{:.0f}" y="{:.1f}" font-size="{}">{}</text>)"
                         "\n",
                         x, y, size, words);
  }
  void rectangle(double x, double width, const char* colour) {
    body_ += fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.0f}" fill="{}"/>)"
                         "\n",
                         x, y_, width, kLaneHeight - 1, colour);
  }

  double ns_per_pixel_;
  double y_ = kPictureHead;
  std::string body_;
};

}  // namespace

std::string trace_picture(std::span<const LaunchTrace> launches, const std::string& title) {
  std::uint64_t longest_ns = 1;
  for (const LaunchTrace& launch : launches)
    longest_ns = std::max(longest_ns, launch.end_ns() - launch.begin_ns());
  Picture picture(static_cast<double>(longest_ns) / kPlotWidth);
  for (const LaunchTrace& launch : launches) picture.add(launch);
  return picture.finish(title);
}

}  // namespace mk::bench
