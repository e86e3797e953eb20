#include "tests/kernels/plan/recorded_runs.h"

#include <bit>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

namespace mk::kernels::plan {
namespace {

[[noreturn]] void give_up(const std::string& why) {
  std::cerr << MK_RECORDED_RUNS << ": " << why << "\n";
  std::abort();
}

using Row = std::map<std::string, std::string>;

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> cells;
  std::stringstream stream(line);
  for (std::string cell; std::getline(stream, cell, ',');) cells.push_back(cell);
  return cells;
}

std::uint32_t number(const Row& row, const char* column) {
  return static_cast<std::uint32_t>(std::stoul(row.at(column)));
}

/// What the operators chose where a row names no chunk (kernels/ops/*/sm90.cc then).
std::uint32_t default_chunk(const Problem& problem, const Tiling& tiling, bool engines) {
  constexpr std::uint64_t kKib = 1024;
  const Shape& shape = problem.shape;
  const std::uint64_t shard = (shape.m + problem.ranks() - 1) / problem.ranks();
  const auto large = [&](std::uint64_t sent) {
    return static_cast<std::uint32_t>(sent >= 32768 * kKib ? 512 * kKib : 256 * kKib);
  };
  if (problem.op != Op::kAgGemm) {
    if (problem.nodes == 1) return 128 * tiling.tile_n * kElementBytes;
    return large(problem.op == Op::kGemmAr ? std::uint64_t{shape.m} * shape.n / 8 * kElementBytes
                                           : (problem.nodes - 1) * shard * shape.n * kElementBytes);
  }
  const std::uint64_t sent = shard * shape.k * kElementBytes;
  if (problem.nodes > 1) return large(sent);
  if (engines)
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(
        std::max<std::uint64_t>(128ull * shape.k * kElementBytes, 128 * kKib), 8192 * kKib));
  if (shape.n < 3072 && shape.m <= 4096)
    return static_cast<std::uint32_t>(std::min(std::max(sent / 64, 32 * kKib), 64 * kKib));
  if (shape.n >= 6144 && shape.m <= 2048) return 128 * kKib;
  if (shape.m <= 4096) return 64 * kKib;
  if (shape.n < 3072 && shape.m <= 8192) return (problem.locals > 4 ? 32 : 64) * kKib;
  if (shape.n < 6144 && sent / (128 * kKib) >= 1024) return 256 * kKib;
  return 128 * kKib;
}

RecordedRun run_of(const Row& row) {
  RecordedRun run;
  run.file = row.at("file");
  run.present = row.at("present") == "1";
  run.sweep = row.at("sweep") == "1";
  run.screened = row.at("screened") == "1";
  run.gpu = row.at("gpu");
  const auto op = op_named(row.at("op"));
  if (!op) give_up(op.error().message);
  run.problem.op = *op;
  run.problem.nodes = number(row, "nodes");
  run.problem.locals = number(row, "locals");
  run.problem.shape = {number(row, "m"), number(row, "n"), number(row, "k")};
  run.problem.in_place = row.at("in_place") == "1";
  Candidate& candidate = run.candidate;
  candidate.form = row.at("form") == "fused" ? Mode::kFused : Mode::kUnfused;
  const std::string& sums = row.at("sums");
  candidate.sums = sums == "own" ? Sums::kOwn : sums == "once" ? Sums::kOnce : Sums::kWarpgroups;
  candidate.engines = row.at("dma") == "1";
  if (candidate.engines) candidate.tiling.banks = candidate.tiling.local_banks = 1;
  candidate.tiling.tile_m = number(row, "tile_m");
  candidate.tiling.tile_n = number(row, "tile_n");
  candidate.tiling.chunk_bytes = number(row, "chunk_bytes");
  if (candidate.tiling.chunk_bytes == 0)
    candidate.tiling.chunk_bytes = default_chunk(run.problem, candidate.tiling, candidate.engines);
  candidate.compute_blocks = number(row, "compute");
  candidate.stream_warpgroups = number(row, "stream");
  candidate.receive_warpgroups = number(row, "receive");
  candidate.send_warpgroups = run.problem.nodes > 1 ? 1 : 0;
  run.us = std::stod(row.at("us"));
  return run;
}

}  // namespace

std::vector<RecordedRun> recorded_runs() {
  std::ifstream file(MK_RECORDED_RUNS);
  std::string line;
  if (!std::getline(file, line)) give_up("cannot be read; gather_runs.py makes it");
  const std::vector<std::string> columns = split(line);
  std::vector<RecordedRun> runs;
  while (std::getline(file, line)) {
    const std::vector<std::string> cells = split(line);
    if (cells.size() != columns.size()) give_up("a row has other columns: " + line);
    Row row;
    for (std::size_t i = 0; i < cells.size(); ++i) row[columns[i]] = cells[i];
    runs.push_back(run_of(row));
  }
  return runs;
}

bool held_out(const Problem& problem) {
  const Shape& shape = problem.shape;
  const bool wide =
      problem.op == Op::kAgGemm ? shape.n >= 7168 && shape.k == 8192 : shape.k == 3584;
  std::uint32_t place = static_cast<std::uint32_t>(problem.op) + (wide ? 1 : 0) + 1;
  for (const std::uint32_t side : {shape.m, shape.n, shape.k})
    place += static_cast<std::uint32_t>(std::bit_width(side));
  return place % 2 == 1;
}

}  // namespace mk::kernels::plan
