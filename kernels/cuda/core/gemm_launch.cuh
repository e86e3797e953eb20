/// \file
/// Launching a kernel built on the GEMM core.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/core/gemm_core.cuh"

namespace mk::kernels::cuda {

/// Loads the kernel and allows it its shared memory on the current device. Once per device, before
/// the first launch; for kernels that wait for each other, before the first launch of any of them
/// (CUDA loads lazily, and waits to do it).
template <class Config, class Order, class Gate, class Store, class Epilogue = RoundedSums>
cudaError_t prepare_gemm() {
  return cudaFuncSetAttribute(gemm_kernel<Config, Order, Gate, Store, Epilogue>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(SharedOf<Config, Gate, Store, Order>)));
}

/// How many clusters of so many blocks fit on the current device at one time.
template <class Config, class Order, class Gate, class Store, class Epilogue = RoundedSums>
cudaError_t clusters_of_gemm(int blocks, int* count) {
  if (cudaError_t error = prepare_gemm<Config, Order, Gate, Store, Epilogue>();
      error != cudaSuccess)
    return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = sizeof(SharedOf<Config, Gate, Store, Order>);
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(count, gemm_kernel<Config, Order, Gate, Store, Epilogue>,
                                        &config);
}

/// Launches `workers` workers (clusters of Config::kCluster blocks, or of params.splits); all of
/// them must fit on the device at once if a gate or a store of theirs waits for another. Single
/// blocks are launched without attributes: those whose numbers follow each other then fill one GPC
/// after the other, and what neighbouring tiles read is read near by. With a cluster's size, be it
/// one, they are dealt out otherwise: GEMM+ReduceScatter takes 10% longer so
/// (decisions/block_placement.md).
template <class Config, class Order, class Gate, class Store, class Epilogue>
cudaError_t launch_gemm(const GemmParams<Order, Gate, Store, Epilogue>& params, int workers,
                        cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  const int blocks = Config::kSplitsK ? params.splits : Config::kCluster;  // of a cluster
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(workers * blocks));
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = sizeof(SharedOf<Config, Gate, Store, Order>);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, gemm_kernel<Config, Order, Gate, Store, Epilogue>, params);
}

}  // namespace mk::kernels::cuda
