#include "client/src/job_plan.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/plan/operator_plan.h"
#include "shm/host/result.h"
#include "shm/limits.h"

namespace mk {
namespace {

namespace plan = kernels::plan;

/// What each rank says of itself, followed by the reason if `code` is not 0.
struct Announcement {
  std::uint32_t code = 0;  ///< an ErrorCode
  std::uint32_t n = 0;
  std::uint32_t k = 0;
  std::uint32_t text_bytes = 0;
  std::uint64_t text_hash = 0;
};

std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

std::vector<std::byte> pack(const Announcement& head, std::string_view reason = {}) {
  std::vector<std::byte> bytes(sizeof head + reason.size());
  std::memcpy(bytes.data(), &head, sizeof head);
  std::copy_n(reinterpret_cast<const std::byte*>(reason.data()), reason.size(),
              bytes.begin() + sizeof head);
  return bytes;
}

Result<std::vector<Announcement>> unpack_all(const std::vector<std::vector<std::byte>>& blobs) {
  std::vector<Announcement> all(blobs.size());
  for (std::size_t rank = 0; rank < blobs.size(); ++rank) {
    const std::vector<std::byte>& blob = blobs[rank];
    if (blob.size() < sizeof(Announcement))
      return fail(ErrorCode::kProtocol, "rank {} announced its plan in {} bytes", rank,
                  blob.size());
    std::memcpy(&all[rank], blob.data(), sizeof(Announcement));
    if (all[rank].code == 0) continue;
    const std::string reason(reinterpret_cast<const char*>(blob.data()) + sizeof(Announcement),
                             blob.size() - sizeof(Announcement));
    return fail(static_cast<ErrorCode>(all[rank].code), "rank {}: {}", rank, reason);
  }
  return all;
}

/// What the caller named, or the environment's.
std::string named(const std::string& by_tuning, const char* variable) {
  if (!by_tuning.empty()) return by_tuning;
  const char* const text = std::getenv(variable);
  return text != nullptr ? text : "";
}

/// All ranks' texts, in as many exchanges as the longest takes.
Result<std::vector<std::string>> exchange_texts(const PlanExchange& ranks,
                                                const std::vector<Announcement>& all,
                                                const std::string& own) {
  std::size_t longest = 0;
  for (const Announcement& one : all) longest = std::max<std::size_t>(longest, one.text_bytes);
  const std::size_t piece = shm::exchange_blob_bytes_max(static_cast<std::uint32_t>(all.size()));
  std::vector<std::string> texts(all.size());
  for (std::size_t at = 0; at < longest; at += piece) {
    const std::string_view sent =
        at < own.size() ? std::string_view(own).substr(at, piece) : std::string_view();
    MK_ASSIGN_OR_RETURN(const auto blobs,
                        ranks.exchange("plan-text", std::as_bytes(std::span(sent)), false));
    for (std::size_t rank = 0; rank < texts.size(); ++rank)
      texts[rank].append(reinterpret_cast<const char*>(blobs[rank].data()), blobs[rank].size());
  }
  return texts;
}

/// Rank 0's, but for the machine if there are several kinds.
Result<plan::JobPlan> plan_of(const std::vector<std::string>& texts, bool tell) {
  constexpr int kLinesMax = 8;
  MK_ASSIGN_OR_RETURN(plan::JobPlan job, plan::parse_job_plan(texts[0]));
  std::vector<plan::Machine> machines = {job.machine};
  std::vector<std::pair<std::uint32_t, plan::JobPlan>> others;
  for (std::uint32_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    MK_ASSIGN_OR_RETURN(plan::JobPlan other, plan::parse_job_plan(texts[rank]));
    // Another file for the same GPU: rank 0's counts.
    if (other.machine.name != job.machine.name) machines.push_back(other.machine);
    others.emplace_back(rank, std::move(other));
  }
  job.machine = plan::slowest(machines);
  int lines = 0;
  const auto say = [&](const std::string& difference) {
    if (tell && !difference.empty() && lines++ < kLinesMax)
      std::fprintf(stderr, "mkernel: %s\n", difference.c_str());
  };
  // Rank 0 itself, where another's machine is the slower.
  say(plan::difference(job, {machines[0], job.tuned}, 0));
  for (const auto& [rank, other] : others) say(plan::difference(job, other, rank));
  return job;
}

}  // namespace

Result<plan::Machine> own_machine(const NetworkSeen& network, const Tuning& tuning,
                                  const plan::Machine& here) {
  plan::Machine own = here;
  const std::string name = named(tuning.machine_file, "MKERNEL_MACHINE");
  if (!name.empty()) {
    const auto shipped = plan::shipped_machine(name);
    MK_ASSIGN_OR_RETURN(own, shipped ? shipped : plan::load_machine(name));
  }
  const bool on_cpu = here.kind == plan::MachineKind::kCpu;
  if (own.kind != here.kind) {
    if (!on_cpu || !tuning.machine_file.empty())
      return fail(ErrorCode::kInvalidArgument,
                  "machine '{}' is not of the kind that computes here ('{}'); name another, or "
                  "leave it out",
                  name, here.name);
    own = here;
  }
  // What a rank has is not more than its GPU has; a CPU's numbers are those of a core.
  own.sms = on_cpu ? here.sms : std::min(own.sms, here.sms);
  return plan::machine_on_fabric(own, network.fabric, network.bytes_per_s);
}

Result<plan::JobPlan> own_plan(std::uint32_t nodes, std::uint32_t locals,
                               const NetworkSeen& network, const Tuning& tuning,
                               const kernels::MachineRates& rates, const plan::Machine& machine) {
  plan::JobPlan own;
  MK_ASSIGN_OR_RETURN(const plan::Machine its, own_machine(network, tuning, machine));
  own.machine = plan::with_rates(its, rates);
  plan::Tuned all = plan::shipped_tuned();
  if (const std::string path = named(tuning.tuned_file, "MKERNEL_TUNED"); !path.empty()) {
    MK_ASSIGN_OR_RETURN(all, plan::load_tuned(path));
  }
  for (plan::TunedEntry& entry : all.entries) {
    if (entry.nodes == nodes && entry.locals == locals)
      own.tuned.entries.push_back(std::move(entry));
  }
  return own;
}

Result<AgreedPlan> agree_plan(const PlanExchange& ranks, JobPlanSeen& seen,
                              const kernels::Shape& shape, const Result<plan::JobPlan>& own) {
  if (!own) {
    // The others need not wait for their deadline to hear of it.
    const Announcement refusal{static_cast<std::uint32_t>(own.error().code), 0, 0, 0, 0};
    const std::size_t most = shm::exchange_blob_bytes_max(ranks.world) - sizeof refusal;
    const std::string_view why = std::string_view(own.error().message).substr(0, most);
    (void)ranks.exchange("plan", pack(refusal, why), true);
    return propagate(own);
  }
  const std::string text = plan::job_plan_text(*own);
  const Announcement head{0, shape.n, shape.k, static_cast<std::uint32_t>(text.size()),
                          hash_of(text)};
  MK_ASSIGN_OR_RETURN(const auto blobs, ranks.exchange("plan", pack(head), false));
  MK_ASSIGN_OR_RETURN(const std::vector<Announcement> all, unpack_all(blobs));
  AgreedPlan agreed;
  agreed.shape = shape;
  std::vector<std::uint64_t> hashes;
  for (const Announcement& one : all) {
    agreed.shape.n = std::max(agreed.shape.n, one.n);
    agreed.shape.k = std::max(agreed.shape.k, one.k);
    hashes.push_back(one.text_hash);
  }
  if (seen.job == nullptr || seen.hashes != hashes) {
    MK_ASSIGN_OR_RETURN(const std::vector<std::string> texts, exchange_texts(ranks, all, text));
    MK_ASSIGN_OR_RETURN(plan::JobPlan job, plan_of(texts, ranks.is_first));
    seen.job = std::make_shared<const plan::JobPlan>(std::move(job));
    seen.hashes = std::move(hashes);
  }
  agreed.job = seen.job;
  return agreed;
}

Result<AgreedPlan> expected_plan(const JobPlanSeen& seen, const kernels::Shape& shape,
                                 const Result<plan::JobPlan>& own) {
  if (seen.job != nullptr) return AgreedPlan{seen.job, shape};
  if (!own) return propagate(own);
  return AgreedPlan{std::make_shared<const plan::JobPlan>(*own), shape};
}

}  // namespace mk
