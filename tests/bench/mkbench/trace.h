/// \file
/// What every block of every rank did in one launch, put together from the ranks' reports.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mkernel/types.h"

namespace mk::bench {

/// One thing that a block of a rank did; mk::TraceSpan has the meaning of its parts.
struct Span {
  std::uint32_t rank = 0;  ///< whose block
  std::string role;
  std::uint32_t block = 0;
  std::string kind;
  std::uint32_t index[2] = {};
  std::uint32_t other = 0;  ///< the span's own rank: to whom, from whom, whose
  std::uint64_t begin_ns = 0, end_ns = 0;
};

/// One chunk on its way from node to node: from the commit of its command to when the receiving
/// rank saw its arrival.
struct Transfer {
  std::uint32_t from = 0, to = 0;  ///< ranks
  std::uint32_t chunk = 0, origin_node = 0;
  std::uint64_t committed_ns = 0, arrived_ns = 0;
};

struct LaunchTrace {
  std::string title;  ///< "fused", "unfused"
  std::uint32_t nodes = 1, local = 1;
  std::vector<Span> spans;
  /// What the launch is, for readers of the trace: "operator", "shape", "launch".
  nlohmann::json about = nlohmann::json::object();

  std::uint64_t begin_ns() const;  ///< the earliest span's
  std::uint64_t end_ns() const;    ///< the latest's
  /// Every "send" with the "arrival" that the receiver saw of the same chunk, by commit. (A
  /// receiver gets each chunk of each node's data once in a launch.) Sends without an arrival, and
  /// arrivals without a send, are left out.
  std::vector<Transfer> transfers() const;
};

/// A rank's spans in its report, and back.
nlohmann::json json_of_spans(const std::vector<TraceSpan>& spans);
void add_spans(std::uint32_t rank, const nlohmann::json& spans, LaunchTrace& trace);

}  // namespace mk::bench
