/// \file
/// A job of some of the launcher's ranks.

#include <fmt/format.h>

#include <algorithm>

#include "client/src/gpu_place.h"
#include "mkernel/session.h"
#include "shm/host/result.h"
#include "shm/host/text.h"
#include "shm/limits.h"

namespace mk {
namespace {

// FNV-1a: the same number in every process, for the same ranks.
std::uint32_t digest_of(std::span<const std::uint32_t> ranks) {
  std::uint32_t digest = 2166136261u;
  for (const std::uint32_t rank : ranks) {
    for (int byte = 0; byte < 4; ++byte) {
      digest ^= (rank >> (8 * byte)) & 0xFF;
      digest *= 16777619u;
    }
  }
  return digest;
}

Status check_ranks(const AttachOptions& whole, std::span<const std::uint32_t> ranks) {
  constexpr auto kBad = ErrorCode::kInvalidArgument;
  if (whole.local_size == 0 || whole.world == 0 || whole.rank >= whole.world) {
    return fail(kBad, "a group needs the place of the whole job: rank {} of {}, {} on each node",
                whole.rank, whole.world, whole.local_size);
  }
  if (ranks.empty()) return fail(kBad, "a group of no ranks");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] >= whole.world) {
      return fail(kBad, "a group has rank {}, but the job has ranks 0 to {}", ranks[i],
                  whole.world - 1);
    }
    if (i > 0 && ranks[i] <= ranks[i - 1]) {
      return fail(kBad,
                  "a group has rank {} behind rank {}; give its ranks in rising order, each once",
                  ranks[i], ranks[i - 1]);
    }
  }
  if (!std::binary_search(ranks.begin(), ranks.end(), whole.rank))
    return fail(kBad, "rank {} is none of the group's", whole.rank);
  return {};
}

}  // namespace

Result<AttachOptions> AttachOptions::of_group(const AttachOptions& whole,
                                              std::span<const std::uint32_t> ranks,
                                              std::string_view name) {
  MK_RETURN_IF_ERROR(check_ranks(whole, ranks));
  const auto node_of = [&](std::uint32_t rank) { return rank / whole.local_size; };
  AttachOptions group = whole;
  group.world = static_cast<std::uint32_t>(ranks.size());
  group.nodes = 0;
  for (std::size_t first = 0; first < ranks.size();) {
    const std::uint32_t node = node_of(ranks[first]);
    std::size_t end = first;
    while (end < ranks.size() && node_of(ranks[end]) == node) ++end;
    const auto here = static_cast<std::uint32_t>(end - first);
    if (first == 0) group.local_size = here;
    if (here != group.local_size) {
      return fail(ErrorCode::kInvalidArgument,
                  "a group has {} ranks on node {} and {} on node {}; every node must have as many",
                  group.local_size, node_of(ranks[0]), here, node);
    }
    if (node == node_of(whole.rank)) group.node_rank = group.nodes;
    ++group.nodes;
    first = end;
  }
  const auto self = std::lower_bound(ranks.begin(), ranks.end(), whole.rank);
  group.rank = static_cast<std::uint32_t>(self - ranks.begin());
  group.local_rank = group.rank % group.local_size;
  // Which GPU it has goes by its place in the launch.
  if (group.gpu.empty()) group.gpu = client::own_gpu(whole.local_rank);
  group.job = fmt::format("{}.{}.{:08x}", whole.job, name, digest_of(ranks));
  if (!shm::is_job_name(group.job)) {
    return fail(ErrorCode::kInvalidArgument,
                "the group's job would be '{}'; a job name has 1 to {} bytes of printable ASCII "
                "without spaces: choose a shorter name for the job or the group",
                shm::plain_text(group.job, 2 * shm::kJobNameBytesMax), shm::kJobNameBytesMax);
  }
  return group;
}

}  // namespace mk
