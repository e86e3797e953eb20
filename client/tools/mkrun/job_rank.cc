#include <algorithm>

#include "client/tools/executor_matrices.h"
#include "client/tools/launch/process.h"
#include "client/tools/mkrun/job.h"
#include "client/tools/mkrun/operators.h"
#include "mkernel/mkernel.h"

namespace mk::tools {

Status run_job_rank(const Job& job, std::uint32_t rank, const std::string& socket,
                    const std::string& name, int report_fd) {
  const JobOperator* op = find_job_operator(job.op);
  if (op == nullptr) return fail(ErrorCode::kNotFound, "there is no operator '{}'", job.op);
  Tensors tensors;
  for (const auto& [input, from] : job.inputs) {
    MK_ASSIGN_OR_RETURN(auto tensor, Tensor::open(from.file, from.name));
    tensors.emplace(input, std::move(tensor));
  }
  MK_ASSIGN_OR_RETURN(auto out, SafetensorsPart::open(UniqueFd(job.out_fd), job.out.file));
  std::shared_ptr<gpu::Driver> driver;
  if (job.executor == "cuda") {
    MK_ASSIGN_OR_RETURN(driver, choose_gpu(rank));
  }
  auto attach = AttachOptions::of_rank(name, rank, job.nodes, job.local);
  attach.socket = socket;
  attach.timeout = std::chrono::milliseconds{job.timeout_ms};
  MK_ASSIGN_OR_RETURN(auto session, Session::attach(attach));
  {
    MK_ASSIGN_OR_RETURN(const auto work, op->start(session, job, rank, tensors));
    for (std::uint64_t first = 0; first < job.rows; first += job.rows_per_launch) {
      MK_RETURN_IF_ERROR(session.barrier(attach.timeout));
      MK_ASSIGN_OR_RETURN(const LaunchStats stats,
                          work->launch(first, std::min(job.rows_per_launch, job.rows - first)));
      LaunchDone done;
      done.total_ns = stats.total_ns;
      done.network_bytes = stats.network_bytes;
      done.nonfinite_partials = stats.nonfinite_partials;
      if (job.check) {
        const Comparison comparison = work->check();
        done.copy_hash = work->copy_hash();
        done.compared = comparison.compared;
        done.wrong = comparison.wrong;
        done.worst_ratio = std::min(comparison.worst_ratio, 1e30);  // JSON has no infinity
      }
      MK_RETURN_IF_ERROR(work->write(out));
      MK_RETURN_IF_ERROR(report_line(report_fd, nlohmann::json(done).dump()));
    }
    MK_RETURN_IF_ERROR(session.barrier(attach.timeout));
  }
  return session.detach();
}

}  // namespace mk::tools
