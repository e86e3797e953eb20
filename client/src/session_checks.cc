#include "client/src/session_checks.h"

#include <algorithm>

#include "shm/host/text.h"
#include "shm/limits.h"

namespace mk {
namespace {

constexpr std::chrono::milliseconds kTimeoutMax = std::chrono::hours{24};

Status check_job(const AttachOptions& o) {
  if (!shm::is_job_name(o.job)) {
    return fail(
        ErrorCode::kInvalidArgument,
        "the job's name must have 1 to {} bytes of printable ASCII without spaces; '{}' has "
        "{} bytes",
        shm::kJobNameBytesMax, shm::plain_text(o.job, 2 * shm::kJobNameBytesMax), o.job.size());
  }
  if (o.job_secret.size() > shm::kJobSecretBytesMax) {
    return fail(
        ErrorCode::kInvalidArgument,
        "the job's secret (AttachOptions::job_secret, MKERNEL_JOB_SECRET) must have at most "
        "{} bytes, not {}",
        shm::kJobSecretBytesMax, o.job_secret.size());
  }
  return {};
}

Status check_place(const AttachOptions& o) {
  if (o.nodes == 0 || o.local_size == 0 || std::uint64_t{o.nodes} * o.local_size != o.world) {
    return fail(ErrorCode::kInvalidArgument, "world size {} is not {} nodes times {} local ranks",
                o.world, o.nodes, o.local_size);
  }
  if (o.world > shm::kWorldMax || o.nodes > shm::kNodesMax || o.local_size > shm::kLocalRanksMax) {
    return fail(ErrorCode::kLimitExceeded,
                "a job has at most {} ranks on {} nodes with {} ranks each; asked for {}, {}, {}: "
                "split it into smaller jobs",
                shm::kWorldMax, shm::kNodesMax, shm::kLocalRanksMax, o.world, o.nodes,
                o.local_size);
  }
  if (o.node_rank >= o.nodes || o.local_rank >= o.local_size ||
      o.rank != o.node_rank * o.local_size + o.local_rank) {
    return fail(ErrorCode::kInvalidArgument,
                "rank {} does not fit node {} of {} and local rank {} of {}: ranks are numbered "
                "node by node, rank = node_rank * local_size + local_rank",
                o.rank, o.node_rank, o.nodes, o.local_rank, o.local_size);
  }
  return {};
}

Status check_sizes(const AttachOptions& o) {
  if (o.lanes == 0 || o.lanes > shm::kLanesMax) {
    return fail(ErrorCode::kInvalidArgument, "lanes must be 1 to {}, not {}", shm::kLanesMax,
                o.lanes);
  }
  if (o.arrival_flags < shm::kFlagGranule || o.arrival_flags > shm::kFlagsMax ||
      o.arrival_flags % shm::kFlagGranule != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "arrival_flags must be {} to {} in steps of {}, not {}", shm::kFlagGranule,
                shm::kFlagsMax, shm::kFlagGranule, o.arrival_flags);
  }
  return {};
}

}  // namespace

Status check_options(const AttachOptions& options) {
  MK_RETURN_IF_ERROR(check_job(options));
  MK_RETURN_IF_ERROR(check_place(options));
  if (!options.gpu.empty() && !shm::is_pci_address(options.gpu)) {
    return fail(ErrorCode::kInvalidArgument,
                "AttachOptions::gpu is '{}'; a PCI address is expected, as 0000:1b:00.0, in small "
                "letters",
                shm::plain_text(options.gpu, 64));
  }
  return check_sizes(options);
}

Status check_name(std::string_view what, std::string_view name) {
  if (name.size() <= shm::kNameBytesMax && shm::is_plain_text(name)) return {};
  return fail(
      ErrorCode::kInvalidArgument,
      "{} must have at most {} bytes of UTF-8 without control characters; '{}' has {} bytes", what,
      shm::kNameBytesMax, shm::plain_text(name, 2 * shm::kNameBytesMax), name.size());
}

Status check_blob(std::size_t bytes, std::uint32_t world) {
  const std::size_t most = shm::exchange_blob_bytes_max(world);
  if (bytes <= most) return {};
  return fail(ErrorCode::kInvalidArgument,
              "a rank of {} may put at most {} bytes into an exchange, not {}", world, most, bytes);
}

Result<std::chrono::milliseconds> checked_timeout(std::string_view what,
                                                  std::chrono::milliseconds timeout) {
  if (timeout.count() > 0) return std::min(timeout, kTimeoutMax);
  return fail(ErrorCode::kInvalidArgument, "{} must be positive, not {} ms", what, timeout.count());
}

}  // namespace mk
