#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "client/tools/launch/process.h"
#include "client/tools/mkrun/job.h"
#include "client/tools/numeric/elements.h"
#include "client/tools/numeric/gemm_reference.h"
#include "mkernel/mkernel.h"

namespace mk::tools {
namespace {

using Elements = std::vector<std::uint16_t>;

/// Element `index` of a tensor's data, as a float. Tensors may lie unaligned in a file.
float element_at(const std::string& dtype, std::span<const std::byte> data, std::uint64_t index) {
  if (dtype == "F32") {
    float value = 0;
    std::memcpy(&value, data.data() + index * 4, 4);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, data.data() + index * 2, 2);
  return dtype == "BF16" ? bf16_to_float(bits) : f16_to_float(bits);
}

/// The block rows [row, row + rows) x columns [column, column + columns) of a row-major matrix, in
/// the operator's type.
Elements block_of(const TensorInfo& info, std::span<const std::byte> data, std::uint64_t row,
                  std::uint64_t rows, std::uint64_t column, std::uint64_t columns, DataType type) {
  Elements block(rows * columns);
  for (std::uint64_t i = 0; i < rows; ++i) {
    for (std::uint64_t j = 0; j < columns; ++j) {
      block[i * columns + j] =
          from_float(type, element_at(info.dtype, data, (row + i) * info.shape[1] + column + j));
    }
  }
  return block;
}

double largest(const Elements& elements, DataType type) {
  double most = 0;
  for (const std::uint16_t bits : elements)
    most = std::max(most, std::fabs(double{to_float(type, bits)}));
  return most;
}

class JobRank {
 public:
  JobRank(const GemmArJob& job, std::uint32_t rank, SafetensorsFile a_file, SafetensorsFile b_file)
      : job_(job),
        rank_(rank),
        type_(job.dtype == "f16" ? DataType::kF16 : DataType::kBf16),
        a_file_(std::move(a_file)),
        b_file_(std::move(b_file)) {}

  Status run(const std::string& socket, const std::string& name, int report_fd);

 private:
  /// B's slice of `rank`, K x N whatever the file's layout (for the reference), or as it lies in
  /// the file.
  Elements b_slice(std::uint32_t rank, bool as_kn) const;
  void check_rows(std::uint64_t first, std::uint64_t rows, const Elements& c, RowsDone& done) const;

  const GemmArJob& job_;
  std::uint32_t rank_;
  DataType type_;
  SafetensorsFile a_file_, b_file_;
  TensorInfo a_, b_;
};

Elements JobRank::b_slice(std::uint32_t rank, bool as_kn) const {
  const std::uint64_t first = job_.k_first(rank);
  const std::uint64_t count = job_.k_last(rank) - first;
  if (!job_.b_transposed) return block_of(b_, b_file_.data(b_), first, count, 0, job_.n, type_);
  Elements slice = block_of(b_, b_file_.data(b_), 0, job_.n, first, count, type_);
  if (!as_kn) return slice;
  Elements turned(slice.size());
  for (std::uint64_t j = 0; j < job_.n; ++j) {
    for (std::uint64_t i = 0; i < count; ++i) turned[i * job_.n + j] = slice[j * count + i];
  }
  return turned;
}

void JobRank::check_rows(std::uint64_t first, std::uint64_t rows, const Elements& c,
                         RowsDone& done) const {
  // Every rank has the whole result and checks its share of the rows.
  const std::uint64_t begin = rows * rank_ / job_.world();
  const std::uint64_t count = rows * (rank_ + 1) / job_.world() - begin;
  if (count == 0) return;
  GemmReference reference(count, job_.n, job_.nodes, job_.local, type_);
  for (std::uint32_t rank = 0; rank < job_.world(); ++rank) {
    const std::uint64_t k = job_.k_last(rank) - job_.k_first(rank);
    const Elements a =
        block_of(a_, a_file_.data(a_), first + begin, count, job_.k_first(rank), k, type_);
    const Elements b = b_slice(rank, true);
    reference.add_rank(a.data(), b.data(), k, largest(a, type_), largest(b, type_));
  }
  const auto comparison = reference.compare(c.data() + begin * job_.n);
  done.compared = count * job_.n;
  done.wrong = comparison.wrong;
  done.worst_ratio = std::min(comparison.worst_ratio, 1e30);
}

Status JobRank::run(const std::string& socket, const std::string& name, int report_fd) {
  MK_ASSIGN_OR_RETURN(a_, a_file_.find(job_.a_name));
  MK_ASSIGN_OR_RETURN(b_, b_file_.find(job_.b_name));
  AttachOptions attach;
  attach.socket = socket;
  attach.job = name;
  attach.rank = rank_;
  attach.world = job_.world();
  attach.nodes = job_.nodes;
  attach.local_size = job_.local;
  attach.node_rank = rank_ / job_.local;
  attach.local_rank = rank_ % job_.local;
  attach.timeout = std::chrono::milliseconds{job_.timeout_ms};
  MK_ASSIGN_OR_RETURN(auto session, Session::attach(attach));
  const std::uint64_t k_first = job_.k_first(rank_);
  const std::uint64_t k = job_.k_last(rank_) - k_first;
  GemmAllReduce::Tuning tuning;
  tuning.wait_timeout = attach.timeout;
  const GemmAllReduce::Shape shape{job_.rows_per_launch, job_.n, k, type_,
                                   job_.b_transposed ? BLayout::kNK : BLayout::kKN};
  MK_ASSIGN_OR_RETURN(auto op, GemmAllReduce::create(session, shape, tuning));

  std::optional<SafetensorsWriter> writer;
  if (rank_ == 0) {
    const TensorInfo out{type_ == DataType::kF16 ? "F16" : "BF16",
                         {job_.m, job_.n},
                         0,
                         job_.m * job_.n * bytes_of(type_)};
    MK_ASSIGN_OR_RETURN(auto created, SafetensorsWriter::create(job_.out_file, job_.out_name, out));
    writer.emplace(std::move(created));
  }
  const Elements b = b_slice(rank_, false);
  for (std::uint64_t first = 0; first < job_.m; first += job_.rows_per_launch) {
    RowsDone done;
    done.first = first;
    done.rows = std::min(job_.rows_per_launch, job_.m - first);
    const Elements a = block_of(a_, a_file_.data(a_), first, done.rows, k_first, k, type_);
    Elements c(done.rows * job_.n, 0xffff);  // NaN, until the operator writes it
    MK_RETURN_IF_ERROR(session.barrier(attach.timeout));
    MK_ASSIGN_OR_RETURN(const LaunchStats stats,
                        op.launch(a.data(), b.data(), c.data(), done.rows));
    done.total_ns = stats.total_ns;
    done.network_bytes = stats.network_bytes;
    if (job_.check) check_rows(first, done.rows, c, done);
    if (writer) MK_RETURN_IF_ERROR(writer->append(std::as_bytes(std::span(c))));
    MK_RETURN_IF_ERROR(report_line(report_fd, nlohmann::json(done).dump()));
  }
  MK_RETURN_IF_ERROR(session.barrier(attach.timeout));
  if (writer) MK_RETURN_IF_ERROR(writer->finish());
  return session.detach();
}

}  // namespace

Status run_gemm_ar_job_rank(const GemmArJob& job, std::uint32_t rank, const std::string& socket,
                            const std::string& name, int report_fd) {
  MK_ASSIGN_OR_RETURN(auto a_file, SafetensorsFile::open(job.a_file));
  MK_ASSIGN_OR_RETURN(auto b_file, SafetensorsFile::open(job.b_file));
  return JobRank(job, rank, std::move(a_file), std::move(b_file)).run(socket, name, report_fd);
}

}  // namespace mk::tools
