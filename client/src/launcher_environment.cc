/// \file
/// AttachOptions::from_environment: what each launcher tells its processes.

#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "mkernel/mkernel.h"
#include "shm/host/result.h"

namespace mk {
namespace {

/// The variables of one launcher, by meaning; null where it has none.
struct Launcher {
  const char* name;
  const char* rank;  ///< its presence selects the launcher
  const char* world;
  const char* local_rank;
  const char* local_size;
  const char* node_rank;
  const char* job;
  const char* job_suffix;
};

// torchrun: https://pytorch.org/docs/stable/elastic/run.html#environment-variables. Slurm: man
// srun, "OUTPUT ENVIRONMENT VARIABLES". Open MPI: its FAQ's list for MPI processes
// (OMPI_COMM_WORLD_NODE_RANK is not the node's number, so unused).
constexpr Launcher kLaunchers[] = {
    {"mkernel", "MKERNEL_RANK", "MKERNEL_WORLD_SIZE", "MKERNEL_LOCAL_RANK", "MKERNEL_LOCAL_SIZE",
     "MKERNEL_NODE_RANK", "MKERNEL_JOB", nullptr},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
     "TORCHELASTIC_RUN_ID", nullptr},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr, "PMIX_NAMESPACE", nullptr},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
     "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID"},
};

const char* text_of(const char* variable) {
  if (variable == nullptr) return nullptr;
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

Result<std::optional<std::uint32_t>> number_of(const char* variable) {
  const char* text = text_of(variable);
  if (text == nullptr) return std::nullopt;
  const std::string_view digits(text);
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    return fail(ErrorCode::kInvalidArgument,
                "environment variable {}='{}' is not a whole number of 32 bits", variable, digits);
  }
  return value;
}

Result<std::uint32_t> required(const Launcher& launcher, const char* variable) {
  MK_ASSIGN_OR_RETURN(const auto value, number_of(variable));
  if (value) return *value;
  return fail(ErrorCode::kInvalidArgument,
              "{} is set, so {} started this process, but {} is missing", launcher.rank,
              launcher.name, variable);
}

}  // namespace

Result<AttachOptions> AttachOptions::from_environment() {
  const Launcher* launcher = nullptr;
  for (const Launcher& candidate : kLaunchers) {
    if (text_of(candidate.rank) != nullptr) {
      launcher = &candidate;
      break;
    }
  }
  if (launcher == nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "no launcher's environment found (none of MKERNEL_RANK, RANK, "
                "OMPI_COMM_WORLD_RANK, SLURM_PROCID is set): "
                "start with torchrun, srun or mpirun, or fill in AttachOptions");
  }
  AttachOptions options;
  MK_ASSIGN_OR_RETURN(options.rank, required(*launcher, launcher->rank));
  MK_ASSIGN_OR_RETURN(options.world, required(*launcher, launcher->world));
  MK_ASSIGN_OR_RETURN(options.local_rank, required(*launcher, launcher->local_rank));
  MK_ASSIGN_OR_RETURN(const auto local_size, number_of(launcher->local_size));
  MK_ASSIGN_OR_RETURN(const auto node_rank, number_of(launcher->node_rank));
  if (local_size) {
    options.local_size = *local_size;
  } else {
    // Slurm sets SLURM_NTASKS_PER_NODE only when it was asked for; the node count always is there.
    MK_ASSIGN_OR_RETURN(const auto nodes, number_of("SLURM_NNODES"));
    if (!nodes || *nodes == 0 || options.world % *nodes != 0) {
      return fail(ErrorCode::kInvalidArgument, "{} did not say how many ranks a node has: set {}",
                  launcher->name, launcher->local_size);
    }
    options.local_size = options.world / *nodes;
  }
  if (options.local_size == 0 || options.world % options.local_size != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{} ranks do not fill nodes of {}: every node must run the same number of ranks",
                options.world, options.local_size);
  }
  options.nodes = options.world / options.local_size;
  options.node_rank = node_rank.value_or(options.rank / options.local_size);
  const std::uint32_t node_major = options.node_rank * options.local_size + options.local_rank;
  if (node_major != options.rank) {
    return fail(ErrorCode::kInvalidArgument,
                "{} numbered this process rank {}, but node {} and local rank {} of {} make {}: "
                "place the ranks node by "
                "node (srun --distribution=block, mpirun --map-by slot)",
                launcher->name, options.rank, options.node_rank, options.local_rank,
                options.local_size, node_major);
  }
  if (const char* job = text_of("MKERNEL_JOB")) {
    options.job = job;
  } else {
    job = text_of(launcher->job);
    // torchrun says "none" unless it was given an id; its rendezvous port then tells runs apart.
    if (job != nullptr && std::string_view(job) == "none") job = text_of("MASTER_PORT");
    options.job = job != nullptr ? job : "default";
    if (const char* suffix = text_of(launcher->job_suffix))
      options.job += fmt::format(".{}", suffix);
  }
  return options;
}

}  // namespace mk
