/// \file
/// libmkclient: attach to this node's mkerneld, share buffers with it and with the other ranks of
/// the job, and run fused multi-GPU, multi-node operators.
///
///     auto options = mk::AttachOptions::from_environment();          // torchrun, srun, mpirun, or
///     set by hand auto session = mk::Session::attach(*options);                  // returns when
///     the whole job is up auto op = mk::GemmAllReduce::create(*session, {.m_max = 4096, .n = 4096,
///     .k = 512}); auto stats = op->launch(a, b, c, m);                           // C = sum over
///     ranks of A B, on every rank
///
/// Threads: a Session may be used by several threads; its collective calls (exchange, barrier,
/// creating and launching operators) must be made in the same order on all ranks of the job. An
/// operator is used by one thread at a time, and the operators of one session launch one after the
/// other. Errors: every call answers mk::Result and
/// nothing throws, but for std::bad_alloc when the process is out of memory. A session that failed
/// (a rank died, the daemon went away, a link broke) stays failed: every later call answers the
/// same error. Attach anew to go on.
#pragma once

#include "mkernel/all_gather_gemm.h"
#include "mkernel/gemm_all_reduce.h"
#include "mkernel/gemm_combine.h"
#include "mkernel/gemm_reduce_scatter.h"
#include "mkernel/moe_dispatch_gemm.h"
#include "mkernel/ring_attention.h"
#include "mkernel/session.h"
#include "mkernel/types.h"
