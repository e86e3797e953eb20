/// \file
/// AttachOptions::from_environment: what each launcher tells its processes. Whatever several
/// variables say about one number must agree, and so must the numbers with each other. A stale or
/// foreign variable is named at once, with its value, instead of a job that waits for ranks which
/// nobody has started.

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "mkernel/mkernel.h"
#include "shm/host/result.h"
#include "shm/host/text.h"
#include "shm/limits.h"

namespace mk {
namespace {

/// The numbers of a rank's place.
enum Number { kRank, kWorld, kLocalRank, kLocalSize, kNodeRank, kNodes, kNumbers };

/// Names of variables; null: no more.
using Names = std::array<const char*, 5>;

/// What one launcher sets.
struct Launcher {
  const char* name;
  /// Set all, they tell that this launcher started the process.
  Names marks;
  /// By Number: the variables that state it, the launcher's own first.
  std::array<Names, kNumbers> numbers;
  /// Ranks of each node, "4(x2),3": states three numbers at once, and whether nodes are even.
  Names lists;
  /// The run's name: the first of `job` that is set, then `job_suffix` after a dot.
  Names job;
  const char* job_suffix;
  /// How to place ranks node by node.
  const char* placement;
};

constexpr const char* kOwnJob = "MKERNEL_JOB";

// Their documentation: torchrun: docs.pytorch.org, "Torch Distributed Elastic, environment
// variables". Slurm: man srun, "OUTPUT ENVIRONMENT VARIABLES"; what begins with SLURM_STEP_ is of
// the step, the rest may be of the allocation. Open MPI: "Environment variables set for MPI
// applications" (OMPI_COMM_WORLD_NODE_RANK is not the node's number, so unused). MPICH and Intel
// MPI: Hydra sets PMI_* and MPI_LOCAL*, PALS its own PMI_LOCAL_*, PRRTE's MPICH support
// MPI_LOCALNRANKID. Flux: man flux-environment. PMIx: its standard defines PMIX_RANK and
// PMIX_NAMESPACE alone.
//
// In order: who starts processes inside another launcher's comes first. PMI_* alone do not tell
// where a rank is, and Slurm and Flux set them, too.
constexpr Launcher kLaunchers[] = {
    {"mkernel",
     {"MKERNEL_RANK"},
     {{{"MKERNEL_RANK"},
       {"MKERNEL_WORLD_SIZE"},
       {"MKERNEL_LOCAL_RANK"},
       {"MKERNEL_LOCAL_SIZE"},
       {"MKERNEL_NODE_RANK"},
       {}}},
     {},
     {},
     nullptr,
     "rank = node rank * local size + local rank"},
    {"torchrun",
     {"RANK"},
     {{{"RANK"},
       {"WORLD_SIZE", "MKERNEL_WORLD_SIZE"},
       {"LOCAL_RANK", "MKERNEL_LOCAL_RANK"},
       {"LOCAL_WORLD_SIZE", "MKERNEL_LOCAL_SIZE"},
       {"GROUP_RANK", "MKERNEL_NODE_RANK"},
       {"GROUP_WORLD_SIZE"}}},
     {},
     {"TORCHELASTIC_RUN_ID"},
     nullptr,
     "torchrun --nproc-per-node"},
    {"Open MPI",
     {"OMPI_COMM_WORLD_RANK"},
     {{{"OMPI_COMM_WORLD_RANK", "PMIX_RANK"},
       {"OMPI_COMM_WORLD_SIZE", "MKERNEL_WORLD_SIZE"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "MKERNEL_LOCAL_RANK"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "MKERNEL_LOCAL_SIZE"},
       {"MKERNEL_NODE_RANK"},
       {}}},
     {},
     {"PMIX_NAMESPACE"},
     nullptr,
     "mpirun --map-by slot"},
    {"MPICH or Intel MPI",
     {"PMI_RANK", "MPI_LOCALRANKID"},
     {{{"PMI_RANK"},
       {"PMI_SIZE", "MKERNEL_WORLD_SIZE"},
       {"MPI_LOCALRANKID", "MKERNEL_LOCAL_RANK"},
       {"MPI_LOCALNRANKS", "MKERNEL_LOCAL_SIZE"},
       {"MKERNEL_NODE_RANK"},
       {}}},
     {},
     {"PMI_JOBID"},
     nullptr,
     "mpiexec -ppn"},
    {"PALS",
     {"PMI_RANK", "PMI_LOCAL_RANK"},
     {{{"PMI_RANK", "PALS_RANKID"},
       {"PMI_SIZE", "PALS_NRANKS", "MKERNEL_WORLD_SIZE"},
       {"PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MKERNEL_LOCAL_RANK"},
       {"PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "MKERNEL_LOCAL_SIZE"},
       {"PALS_NODEID", "MKERNEL_NODE_RANK"},
       {}}},
     {},
     {"PALS_APID"},
     nullptr,
     "mpiexec --ppn"},
    {"PRRTE for MPICH",
     {"PMI_RANK", "MPI_LOCALNRANKID"},
     {{{"PMI_RANK", "PMIX_RANK"},
       {"PMI_SIZE", "MKERNEL_WORLD_SIZE"},
       {"MPI_LOCALNRANKID", "MKERNEL_LOCAL_RANK"},
       {"MPI_LOCALNRANKS", "MKERNEL_LOCAL_SIZE"},
       {"MKERNEL_NODE_RANK"},
       {}}},
     {},
     {"PMIX_NAMESPACE"},
     nullptr,
     "prun --map-by slot"},
    {"Flux",
     {"FLUX_TASK_RANK"},
     {{{"FLUX_TASK_RANK", "PMI_RANK"},
       {"FLUX_JOB_SIZE", "PMI_SIZE", "MKERNEL_WORLD_SIZE"},
       {"FLUX_TASK_LOCAL_ID", "MKERNEL_LOCAL_RANK"},
       {"MKERNEL_LOCAL_SIZE"},
       {"MKERNEL_NODE_RANK"},
       {"FLUX_JOB_NNODES"}}},
     {},
     {"FLUX_JOB_ID"},
     nullptr,
     "flux run -o taskmap=block"},
    {"Slurm",
     {"SLURM_PROCID"},
     {{{"SLURM_PROCID", "PMI_RANK", "PMIX_RANK"},
       {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", "PMI_SIZE", "MKERNEL_WORLD_SIZE"},
       {"SLURM_LOCALID", "MKERNEL_LOCAL_RANK"},
       {"SLURM_NTASKS_PER_NODE", "MKERNEL_LOCAL_SIZE"},
       {"SLURM_NODEID", "MKERNEL_NODE_RANK"},
       {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}}},
     {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"},
     {"SLURM_JOB_ID"},
     "SLURM_STEP_ID",
     "srun --distribution=block"},
    {"PMI",
     {"PMI_RANK"},
     {{{"PMI_RANK"},
       {"PMI_SIZE", "MKERNEL_WORLD_SIZE"},
       {"MKERNEL_LOCAL_RANK"},
       {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MKERNEL_LOCAL_SIZE"},
       {"MKERNEL_NODE_RANK"},
       {}}},
     {},
     {"PMI_JOBID"},
     nullptr,
     "mpiexec -ppn"},
    {"PMIx",
     {"PMIX_RANK"},
     {{{"PMIX_RANK"},
       {"MKERNEL_WORLD_SIZE"},
       {"MKERNEL_LOCAL_RANK"},
       {"MKERNEL_LOCAL_SIZE"},
       {"MKERNEL_NODE_RANK"},
       {}}},
     {},
     {"PMIX_NAMESPACE"},
     nullptr,
     "prun --map-by slot"},
};

const char* text_of(const char* variable) {
  if (variable == nullptr) return nullptr;
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

bool started_by(const Launcher& launcher) {
  return std::ranges::all_of(launcher.marks, [](const char* variable) {
    return variable == nullptr || text_of(variable) != nullptr;
  });
}

/// The whole of `digits` as a number.
std::optional<std::uint32_t> parsed(std::string_view digits) {
  std::uint32_t value = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stopped, error] = std::from_chars(digits.data(), end, value);
  if (error != std::errc() || stopped != end) return std::nullopt;
  return value;
}

/// A number, and who says so: "SLURM_NTASKS=8".
struct Statement {
  std::uint32_t value = 0;
  std::string says;
};

/// What the environment says about one rank's place.
class Place {
 public:
  explicit Place(const Launcher& launcher) : launcher_(launcher) {}

  /// Reads all variables; an error when one makes no sense, or two say different things.
  Status read() {
    for (std::size_t number = 0; number < kNumbers; ++number) {
      for (const char* variable : launcher_.numbers[number]) {
        const char* text = text_of(variable);
        if (text == nullptr) continue;
        const auto value = parsed(text);
        if (!value) {
          return fail(ErrorCode::kInvalidArgument,
                      "environment variable {}='{}' is not a whole number of 32 bits", variable,
                      text);
        }
        MK_RETURN_IF_ERROR(state(static_cast<Number>(number), *value, variable, text));
      }
    }
    for (const char* variable : launcher_.lists) {
      if (const char* text = text_of(variable)) MK_RETURN_IF_ERROR(read_list(variable, text));
    }
    return {};
  }

  /// The place, once all is known and fits together.
  Result<AttachOptions> options() {
    for (const Number number : {kRank, kWorld, kLocalRank}) MK_RETURN_IF_ERROR(require(number));
    MK_RETURN_IF_ERROR(derive_nodes());
    const std::uint64_t room = std::uint64_t{value(kNodes)} * value(kLocalSize);
    if (room != value(kWorld)) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} ranks ({}) are not {} nodes ({}) of {} ranks ({}): every node must run the "
                  "same number of ranks",
                  value(kWorld), says(kWorld), value(kNodes), says(kNodes), value(kLocalSize),
                  says(kLocalSize));
    }
    MK_RETURN_IF_ERROR(require_below(kRank, kWorld, "rank", "ranks"));
    MK_RETURN_IF_ERROR(require_below(kLocalRank, kLocalSize, "local rank", "ranks on a node"));
    if (!stated_[kNodeRank]) {
      derive(kNodeRank, value(kRank) / value(kLocalSize), {kRank, kLocalSize});
    }
    MK_RETURN_IF_ERROR(require_below(kNodeRank, kNodes, "node rank", "nodes"));
    const std::uint64_t node_major =
        std::uint64_t{value(kNodeRank)} * value(kLocalSize) + value(kLocalRank);
    if (node_major != value(kRank)) {
      return fail(
          ErrorCode::kInvalidArgument,
          "{} numbered this process rank {} ({}), but node {} ({}) and local rank {} ({}) of "
          "{} ({}) make {}: ranks must be numbered node by node ({})",
          launcher_.name, value(kRank), says(kRank), value(kNodeRank), says(kNodeRank),
          value(kLocalRank), says(kLocalRank), value(kLocalSize), says(kLocalSize), node_major,
          launcher_.placement);
    }
    AttachOptions options;
    options.rank = value(kRank);
    options.world = value(kWorld);
    options.local_rank = value(kLocalRank);
    options.local_size = value(kLocalSize);
    options.node_rank = value(kNodeRank);
    options.nodes = value(kNodes);
    return options;
  }

 private:
  std::uint32_t value(Number number) const { return stated_[number]->value; }
  const std::string& says(Number number) const { return stated_[number]->says; }

  Status state(Number number, std::uint64_t value, const char* variable, const char* text) {
    std::optional<Statement>& known = stated_[number];
    if (known && known->value != value) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} contradicts {}={}: unset the one that is not {}'s or stale, or say it all by "
                  "MKERNEL_RANK, MKERNEL_WORLD_SIZE, MKERNEL_LOCAL_RANK and MKERNEL_LOCAL_SIZE",
                  known->says, variable, text, launcher_.name);
    }
    if (!known) known = {static_cast<std::uint32_t>(value), fmt::format("{}={}", variable, text)};
    return {};
  }

  /// "4(x2),3": two nodes of four ranks and one of three.
  Status read_list(const char* variable, std::string_view text) {
    std::uint64_t nodes = 0;
    std::optional<std::uint32_t> each;
    for (std::string_view left = text; !left.empty() || nodes == 0;) {
      const std::string_view item = left.substr(0, left.find(','));
      left.remove_prefix(std::min(left.size(), item.size() + 1));
      const std::size_t open = item.find("(x");
      const auto ranks = parsed(item.substr(0, open));
      std::optional<std::uint32_t> times = 1;
      if (open != item.npos) {
        times = item.ends_with(')') ? parsed(item.substr(open + 2, item.size() - open - 3))
                                    : std::nullopt;
      }
      if (!ranks || !times || *times == 0) {
        return fail(ErrorCode::kInvalidArgument,
                    "environment variable {}='{}' is not a list of ranks per node like '4(x2)'",
                    variable, text);
      }
      if (each && *each != *ranks) {
        return fail(ErrorCode::kInvalidArgument,
                    "{}={}: some nodes run {} ranks and others {}; every node must run the same "
                    "number of ranks (srun --ntasks-per-node)",
                    variable, text, *each, *ranks);
      }
      each = ranks;
      nodes += *times;
      if (nodes > shm::kNodesMax) {
        return fail(ErrorCode::kInvalidArgument,
                    "{}={}: a job has at most {} nodes, not {} or more: split it", variable, text,
                    shm::kNodesMax, nodes);
      }
    }
    const std::string value(text);
    MK_RETURN_IF_ERROR(state(kLocalSize, *each, variable, value.c_str()));
    MK_RETURN_IF_ERROR(state(kNodes, nodes, variable, value.c_str()));
    return state(kWorld, nodes * *each, variable, value.c_str());
  }

  /// The variables that state a number: "A or B".
  std::string names_of(Number number) const {
    std::string names;
    for (const char* variable : launcher_.numbers[number]) {
      if (variable != nullptr) names += fmt::format("{}{}", names.empty() ? "" : " or ", variable);
    }
    return names;
  }

  Status require(Number number) const {
    if (stated_[number]) return {};
    return fail(ErrorCode::kInvalidArgument,
                "{} is set, so {} started this process, but {} is missing", says(kRank),
                launcher_.name, names_of(number));
  }

  /// Below in the sense of an index and its count.
  Status require_below(Number index, Number count, const char* what, const char* of) const {
    if (value(index) < value(count)) return {};
    return fail(ErrorCode::kInvalidArgument, "{} {} ({}) is not below the number of {}, {} ({})",
                what, value(index), says(index), of, value(count), says(count));
  }

  /// Nodes and ranks per node, one from the other.
  Status derive_nodes() {
    if (!stated_[kNodes] && !stated_[kLocalSize]) {
      return fail(ErrorCode::kInvalidArgument, "{} did not say how many ranks a node has: set {}",
                  launcher_.name, names_of(kLocalSize));
    }
    if (stated_[kNodes] && stated_[kLocalSize]) return {};
    const bool nodes_known = stated_[kNodes].has_value();
    const Number from = nodes_known ? kNodes : kLocalSize;
    if (value(from) == 0 || value(kWorld) == 0 || value(kWorld) % value(from) != 0) {
      return fail(
          ErrorCode::kInvalidArgument,
          "{} ranks ({}) do not fill {} {} ({}) evenly: every node must run the same number "
          "of ranks",
          value(kWorld), says(kWorld), nodes_known ? "the number of nodes," : "nodes of",
          value(from), says(from));
    }
    derive(nodes_known ? kLocalSize : kNodes, value(kWorld) / value(from), {kWorld, from});
    return {};
  }

  void derive(Number number, std::uint32_t value, std::initializer_list<Number> from) {
    std::string because = "from";
    for (const Number of : from) because += " " + says(of);
    stated_[number] = {value, because};
  }

  const Launcher& launcher_;
  std::array<std::optional<Statement>, kNumbers> stated_;
};

/// The run's name, in characters that a job's name may have.
Result<std::string> job_of(const Launcher& launcher) {
  const char* variable = kOwnJob;
  const char* text = text_of(kOwnJob);
  const char* suffix = nullptr;
  if (text == nullptr) {
    suffix = text_of(launcher.job_suffix);
    for (const char* name : launcher.job) {
      if (text == nullptr && text_of(name) != nullptr) text = text_of(variable = name);
    }
    // torchrun says "none" unless it was given an id; its rendezvous port then tells runs apart.
    if (text != nullptr && std::string_view(text) == "none") {
      text = text_of(variable = "MASTER_PORT");
    }
  }
  std::string job = text != nullptr ? text : "default";
  // Flux writes its ids with a letter of its own in front.
  constexpr std::string_view kFluxLetter = "\xc6\x92";
  if (job.starts_with(kFluxLetter)) job.replace(0, kFluxLetter.size(), "f");
  if (suffix != nullptr) job += fmt::format(".{}", suffix);
  if (shm::is_job_name(job)) return job;
  return fail(ErrorCode::kInvalidArgument,
              "{}='{}' makes no job name, which has 1 to {} bytes of printable ASCII without "
              "spaces: set {}",
              variable, shm::plain_text(text, 2 * shm::kJobNameBytesMax), shm::kJobNameBytesMax,
              kOwnJob);
}

}  // namespace

Result<AttachOptions> AttachOptions::from_environment() {
  const auto* const launcher = std::ranges::find_if(kLaunchers, started_by);
  if (launcher == std::end(kLaunchers)) {
    return fail(ErrorCode::kInvalidArgument,
                "no launcher's environment found (none of MKERNEL_RANK, RANK, "
                "OMPI_COMM_WORLD_RANK, PMI_RANK, FLUX_TASK_RANK, SLURM_PROCID, PMIX_RANK is set): "
                "start with torchrun, srun, mpirun or flux run, or fill in AttachOptions");
  }
  Place place(*launcher);
  MK_RETURN_IF_ERROR(place.read());
  MK_ASSIGN_OR_RETURN(auto options, place.options());
  MK_ASSIGN_OR_RETURN(options.job, job_of(*launcher));
  return options;
}

}  // namespace mk
