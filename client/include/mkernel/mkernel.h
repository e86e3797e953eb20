/// \file
/// libmkclient: attach to this node's mkerneld, share buffers with it and with the other ranks of
/// the job, and run fused multi-GPU, multi-node operators.
///
///     auto options = mk::AttachOptions::from_environment();  // torchrun, srun, mpirun
///     auto session = mk::Session::attach(*options);          // returns when the job is up
///     auto op = mk::GemmAllReduce::create(*session, {.m_max = 4096, .n = 4096, .k = 512});
///     auto stats = op->launch(a, b, c, m);                   // C = sum over ranks of A B
///
/// **Threads.** A Session may be used by several threads. All ranks of the job must make its
/// collective calls (exchange, barrier, creating and launching operators) in the same order. One
/// thread at a time uses an operator. The operators of a session launch one after the other.
///
/// **Memory.** Matrices are the caller's. Inputs must not change, and outputs must not be read,
/// until the launch has returned (`launch_on`: until the stream has passed it).
///
/// **Errors.** Every call returns mk::Result. Nothing throws, except std::bad_alloc when the
/// process is out of memory. A session that failed (a rank died, the daemon went away, a link
/// broke) stays failed: every later call returns the same error. Attach anew to go on.
#pragma once

#include "mkernel/all_gather.h"
#include "mkernel/all_gather_gemm.h"
#include "mkernel/gemm_all_reduce.h"
#include "mkernel/gemm_combine.h"
#include "mkernel/gemm_reduce_scatter.h"
#include "mkernel/moe_dispatch_gemm.h"
#include "mkernel/reduce_scatter.h"
#include "mkernel/ring_attention.h"
#include "mkernel/session.h"
#include "mkernel/types.h"
