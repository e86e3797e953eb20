#include "kernels/cuda/transport/dma_queue.h"

namespace mk::kernels::cuda {

DmaQueue::~DmaQueue() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  if (done_ != nullptr) cudaEventDestroy(done_);
  if (marked_ != nullptr) cudaEventDestroy(marked_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  cudaFreeHost(host_word_);
  cudaFree(word_);
}

Status DmaQueue::check(cudaError_t error) const {
  if (error == cudaSuccess) return {};
  return fail(ErrorCode::kSystem, "{}: the DMA engines: {}", op_, cudaGetErrorString(error));
}

Status DmaQueue::create() {
  constexpr unsigned kSince = 12000;  // of the CUDA version whose form of it this is
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &function,
                                                             kSince, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || function == nullptr) {
    return fail(ErrorCode::kUnsupported,
                "{}: this driver has no cuStreamBatchMemOp; update it, or have groups share rows",
                op_);
  }
  memory_operations_ = reinterpret_cast<decltype(memory_operations_)>(function);
  MK_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
  MK_RETURN_IF_ERROR(check(cudaEventCreateWithFlags(&marked_, cudaEventDisableTiming)));
  MK_RETURN_IF_ERROR(check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming)));
  MK_RETURN_IF_ERROR(check(cudaMalloc(&word_, sizeof(std::uint32_t))));
  MK_RETURN_IF_ERROR(check(cudaMallocHost(&host_word_, sizeof(std::uint32_t))));
  // What the first copy of a kind sets up is not set up beside a kernel.
  MK_RETURN_IF_ERROR(yield());
  return check(cudaStreamSynchronize(stream_));
}

Status DmaQueue::mark(cudaStream_t stream) { return check(cudaEventRecord(marked_, stream)); }

namespace {

CUstreamBatchMemOpParams wait_for(std::uint32_t* word, std::uint32_t value, unsigned how) {
  CUstreamBatchMemOpParams operation = {};
  operation.waitValue = {.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32,
                         .address = reinterpret_cast<CUdeviceptr>(word),
                         .value = value,
                         .flags = how,
                         .alias = 0};
  return operation;
}

CUstreamBatchMemOpParams write_of(std::uint32_t* word, std::uint32_t value) {
  CUstreamBatchMemOpParams operation = {};
  operation.writeValue = {.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32,
                          .address = reinterpret_cast<CUdeviceptr>(word),
                          .value = value,
                          .flags = CU_STREAM_WRITE_VALUE_DEFAULT,
                          .alias = 0};
  return operation;
}

}  // namespace

Status DmaQueue::begin(std::uint32_t* go) {
  MK_RETURN_IF_ERROR(check(cudaStreamWaitEvent(stream_, marked_, 0)));
  CUstreamBatchMemOpParams operations[] = {wait_for(go, 1, CU_STREAM_WAIT_VALUE_EQ),
                                           write_of(go, 0)};
  return order(operations, 2);
}

Status DmaQueue::await(std::uint32_t* word, std::uint32_t least) {
  CUstreamBatchMemOpParams operation = wait_for(word, least, CU_STREAM_WAIT_VALUE_GEQ);
  return order(&operation, 1);
}

Status DmaQueue::write(std::uint32_t* word, std::uint32_t value) {
  CUstreamBatchMemOpParams operation = write_of(word, value);
  return order(&operation, 1);
}

Status DmaQueue::order(CUstreamBatchMemOpParams* operations, unsigned count) {
  if (const CUresult result = memory_operations_(stream_, count, operations, 0);
      result != CUDA_SUCCESS) {
    return fail(ErrorCode::kSystem, "{}: the DMA engines cannot wait for the kernel: error {}", op_,
                static_cast<int>(result));
  }
  return {};
}

Status DmaQueue::copy(const CopyJob& job) {
  if (job.rows == 1) return copy(job.targets[0], job.source, job.row_bytes);
  return check(cudaMemcpy2DAsync(job.targets[0], job.target_stride, job.source, job.source_stride,
                                 job.row_bytes, job.rows, cudaMemcpyDeviceToDevice, stream_));
}

Status DmaQueue::copy(void* to, const void* from, std::size_t bytes) {
  return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
}

Status DmaQueue::yield() {
  return check(
      cudaMemcpyAsync(host_word_, word_, sizeof(std::uint32_t), cudaMemcpyDeviceToHost, stream_));
}

Status DmaQueue::join(cudaStream_t stream) {
  MK_RETURN_IF_ERROR(check(cudaEventRecord(done_, stream_)));
  return check(cudaStreamWaitEvent(stream, done_, 0));
}

}  // namespace mk::kernels::cuda
