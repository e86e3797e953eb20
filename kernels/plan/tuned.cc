#include "kernels/plan/tuned.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <tuple>

#include "kernels/plan/shipped_machines.h"
#include "shm/host/result.h"

namespace mk::kernels::plan {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 1;
constexpr std::size_t kFileBytesMax = 16 << 20;
constexpr std::uint64_t kWarpgroupsMax = 384;  ///< of 128 SMs

constexpr const char* kSums[] = {"warpgroups", "own", "once"};
constexpr const char* kExchanges[] = {"auto", "one-shot", "two-shot"};

std::uint32_t round_side(std::uint32_t side) {
  if (side <= 4) return side;
  const std::uint32_t quarter = std::bit_floor(side - 1) / 4;
  return (side + quarter - 1) / quarter * quarter;
}

auto key_of(const TunedEntry& entry) {
  return std::tuple(entry.op, entry.machine, entry.nodes, entry.locals, entry.bucket.m,
                    entry.bucket.n, entry.bucket.k);
}

/// Reads an entry's keys one by one, and then says which it did not know.
class Reader {
 public:
  Reader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  std::uint32_t number(const char* key, std::uint64_t least, std::uint64_t most) {
    const Json* value = at(key);
    if (value == nullptr) return 0;
    if (!value->is_number_unsigned() || value->get<std::uint64_t>() < least ||
        value->get<std::uint64_t>() > most) {
      refuse(key, *value, fmt::format("a whole number of {} to {}", least, most));
      return 0;
    }
    return value->get<std::uint32_t>();
  }
  double time_us(const char* key) {
    const Json* value = at(key);
    if (value == nullptr) return 0;
    if (!value->is_number() || !(value->get<double>() > 0)) {
      refuse(key, *value, "a time of more than 0");
      return 0;
    }
    return value->get<double>();
  }
  bool flag(const char* key) {
    const Json* value = at(key);
    if (value == nullptr) return false;
    if (!value->is_boolean()) refuse(key, *value, "true or false");
    return value->is_boolean() && value->get<bool>();
  }
  bool has(const char* key) const { return json_.contains(key); }
  std::string text(const char* key) {
    const Json* value = at(key);
    if (value == nullptr) return {};
    if (!value->is_string() || value->get<std::string>().empty()) {
      refuse(key, *value, "a text that is not empty");
      return {};
    }
    return value->get<std::string>();
  }
  void refuse(const char* key, const Json& value, std::string_view wanted) {
    if (status_)
      status_ = fail(ErrorCode::kInvalidArgument, "{}: '{}' is {}; it must be {}", where_, key,
                     value.dump(), wanted);
  }
  Status done() {
    if (!status_) return status_;
    for (const auto& [key, value] : json_.items()) {
      if (std::find(known_.begin(), known_.end(), key) == known_.end())
        return fail(ErrorCode::kInvalidArgument, "{}: '{}' is unknown; remove it", where_, key);
    }
    return {};
  }
  const Json& json() const { return json_; }

 private:
  const Json* at(const char* key) {
    known_.emplace_back(key);
    const auto found = json_.find(key);
    if (found != json_.end()) return &*found;
    if (status_) status_ = fail(ErrorCode::kInvalidArgument, "{}: '{}' is missing", where_, key);
    return nullptr;
  }

  const Json& json_;
  std::string where_;
  std::vector<std::string> known_;
  Status status_;
};

Result<TunedEntry> entry_of(const Json& json, const std::string& where) {
  if (!json.is_object())
    return fail(ErrorCode::kInvalidArgument, "{}: an entry is an object", where);
  constexpr std::uint64_t kRanksMax = 65535;
  Reader reader(json, where);
  TunedEntry entry;
  const std::string op = reader.text("op");
  entry.machine = reader.text("machine");
  entry.nodes = reader.number("nodes", 1, kRanksMax);
  entry.locals = reader.number("locals", 1, kRanksMax);
  entry.bucket.m = reader.number("m", 1, kSideMax);
  entry.bucket.n = reader.number("n", 1, kSideMax);
  entry.bucket.k = reader.number("k", 1, kSideMax);
  entry.measured_us = reader.time_us("measured_us");
  Candidate& candidate = entry.candidate;
  const std::string form = reader.text("form");
  const std::string sums = reader.text("sums");
  // Of GEMM+AllReduce over three nodes and more alone.
  const std::string exchange = reader.has("exchange") ? reader.text("exchange") : kExchanges[0];
  candidate.engines = reader.flag("engines");
  candidate.tiling.tile_m = reader.number("tile_m", 1, 1024);
  candidate.tiling.tile_n = reader.number("tile_n", 8, 1024);
  candidate.tiling.chunk_bytes = reader.number("chunk_bytes", 1, 1u << 30);
  candidate.tiling.banks = reader.number("banks", 0, kBanksMax);
  candidate.tiling.local_banks = reader.number("local_banks", 0, kBanksMax);
  candidate.stream_warpgroups = reader.number("stream_warpgroups", 0, kWarpgroupsMax);
  candidate.receive_warpgroups = reader.number("receive_warpgroups", 0, kWarpgroupsMax);
  candidate.send_warpgroups = reader.number("send_warpgroups", 0, kWarpgroupsMax);
  MK_RETURN_IF_ERROR(reader.done());
  MK_ASSIGN_OR_RETURN(entry.op, op_named(op));
  if (!is_product(entry.op))
    return fail(ErrorCode::kInvalidArgument, "{}: {} has no tuned choices; remove the entry", where,
                op);
  if (form != "fused" && form != "unfused")
    return fail(ErrorCode::kInvalidArgument, "{}: 'form' is \"{}\"; it must be fused or unfused",
                where, form);
  candidate.form = form == "fused" ? Mode::kFused : Mode::kUnfused;
  const auto* const found = std::find(std::begin(kSums), std::end(kSums), sums);
  if (found == std::end(kSums))
    return fail(ErrorCode::kInvalidArgument,
                "{}: 'sums' is \"{}\"; it must be warpgroups, own or once", where, sums);
  candidate.sums = static_cast<Sums>(found - std::begin(kSums));
  const auto* const named = std::find(std::begin(kExchanges), std::end(kExchanges), exchange);
  if (named == std::end(kExchanges))
    return fail(ErrorCode::kInvalidArgument,
                "{}: 'exchange' is \"{}\"; it must be one-shot or two-shot", where, exchange);
  candidate.tiling.exchange = static_cast<Exchange>(named - std::begin(kExchanges));
  const Shape shape{entry.bucket.m, entry.bucket.n, entry.bucket.k};
  if (!(bucket_of(shape) == entry.bucket))
    return fail(ErrorCode::kInvalidArgument,
                "{}: {} x {} x {} is no bucket; the shape's would be {} x {} x {}", where, shape.m,
                shape.n, shape.k, bucket_of(shape).m, bucket_of(shape).n, bucket_of(shape).k);
  return entry;
}

}  // namespace

Bucket bucket_of(const Shape& shape) {
  return {round_side(shape.m), round_side(shape.n), round_side(shape.k)};
}

const TunedEntry* Tuned::find(const Problem& problem, std::string_view machine) const {
  const Bucket bucket = bucket_of(problem.shape);
  for (const TunedEntry& entry : entries) {
    if (entry.op == problem.op && entry.machine == machine && entry.nodes == problem.nodes &&
        entry.locals == problem.locals && entry.bucket == bucket) {
      return &entry;
    }
  }
  return nullptr;
}

void Tuned::put(TunedEntry entry) {
  for (TunedEntry& old : entries) {
    if (key_of(old) != key_of(entry)) continue;
    old = std::move(entry);
    return;
  }
  entries.push_back(std::move(entry));
}

Result<Tuned> parse_tuned(std::string_view text, std::string_view source) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object())
    return fail(ErrorCode::kInvalidArgument, "{}: this is no JSON object", source);
  if (!json.contains("version") || json["version"] != kVersion)
    return fail(ErrorCode::kInvalidArgument, "{}: 'version' must be {}; tune again, or update",
                source, kVersion);
  if (json.size() != 2 || !json.contains("entries") || !json["entries"].is_array())
    return fail(ErrorCode::kInvalidArgument, "{}: it must hold 'version' and an array 'entries'",
                source);
  Tuned tuned;
  for (const Json& each : json["entries"]) {
    const std::string where = fmt::format("{}: entry {}", source, tuned.entries.size());
    MK_ASSIGN_OR_RETURN(TunedEntry entry, entry_of(each, where));
    const std::size_t before = tuned.entries.size();
    tuned.put(std::move(entry));
    if (tuned.entries.size() == before)
      return fail(ErrorCode::kInvalidArgument,
                  "{}: another entry is of the same operator, machine, world and bucket", where);
  }
  return tuned;
}

const Tuned& shipped_tuned() {
  // It is ours: it parses (a test holds it to that).
  static const Tuned tuned = parse_tuned(kShippedTuned, "the shipped tuned.json").value_or(Tuned{});
  return tuned;
}

Result<Tuned> load_tuned(const std::string& path) {
  std::ifstream file(path);
  if (!file)
    return fail(ErrorCode::kNotFound, "{} cannot be opened; give a file that exists", path);
  std::string text(kFileBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kFileBytesMax)
    return fail(ErrorCode::kInvalidArgument, "{} has more than {} bytes", path, kFileBytesMax);
  return parse_tuned(text, path);
}

std::string tuned_text(const Tuned& tuned) {
  // An entry a line, for users who compare two files.
  std::string text = fmt::format("{{\n  \"version\": {},\n  \"entries\": [", kVersion);
  for (const TunedEntry& entry : tuned.entries) {
    const Candidate& candidate = entry.candidate;
    nlohmann::ordered_json each;
    each["op"] = name_of(entry.op);
    each["machine"] = entry.machine;
    each["nodes"] = entry.nodes;
    each["locals"] = entry.locals;
    each["m"] = entry.bucket.m;
    each["n"] = entry.bucket.n;
    each["k"] = entry.bucket.k;
    each["measured_us"] = entry.measured_us;
    each["form"] = mk::kernels::name_of(candidate.form);
    each["sums"] = kSums[static_cast<std::size_t>(candidate.sums)];
    if (candidate.tiling.exchange != Exchange::kAuto)
      each["exchange"] = kExchanges[static_cast<std::size_t>(candidate.tiling.exchange)];
    each["engines"] = candidate.engines;
    each["tile_m"] = candidate.tiling.tile_m;
    each["tile_n"] = candidate.tiling.tile_n;
    each["chunk_bytes"] = candidate.tiling.chunk_bytes;
    each["banks"] = candidate.tiling.banks;
    each["local_banks"] = candidate.tiling.local_banks;
    each["stream_warpgroups"] = candidate.stream_warpgroups;
    each["receive_warpgroups"] = candidate.receive_warpgroups;
    each["send_warpgroups"] = candidate.send_warpgroups;
    text += &entry == tuned.entries.data() ? "\n    " : ",\n    ";
    text += each.dump();
  }
  return text + (tuned.entries.empty() ? "]\n}\n" : "\n  ]\n}\n");
}

Status save_tuned(const Tuned& tuned, const std::string& path) {
  const std::string beside = fmt::format("{}.{}.new", path, ::getpid());
  {
    std::ofstream file(beside, std::ios::trunc);
    file << tuned_text(tuned);
    file.flush();
    if (!file) {
      const int error = errno;
      std::remove(beside.c_str());
      return fail_errno(error, "{} cannot be written", beside);
    }
  }
  if (std::rename(beside.c_str(), path.c_str()) == 0) return {};
  const int error = errno;
  std::remove(beside.c_str());
  return fail_errno(error, "{} cannot be replaced", path);
}

}  // namespace mk::kernels::plan
