/* libmkclient's C ABI. Every function that can fail returns an mk_status: 0, or a code of
 * shm/error_code.h; the sentence that belongs to it is mk_last_error() of the same thread, valid
 * until that thread's next call. Pointers returned through `out` arguments are the caller's, to be
 * given to the matching _destroy/_detach function. Structs carry their size, so that fields can be
 * added at the end. */
#ifndef MKERNEL_MKERNEL_C_H_
#define MKERNEL_MKERNEL_C_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MK_C_EXPORT __attribute__((visibility("default")))
#else
#define MK_C_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t mk_status; /* 0 is success */
typedef struct mk_session mk_session;
typedef struct mk_gemm_ar mk_gemm_ar;

enum { MK_BF16 = 1, MK_F16 = 2 };
enum { MK_KN = 0, MK_NK = 1 };
/* What computes an operator: see mk::Executor. */
enum { MK_CPU = 0, MK_CUDA = 1 };
/* How a launch runs; MK_AUTO is the usual choice: see mk::LaunchMode. */
enum { MK_FUSED = 0, MK_UNFUSED = 1, MK_AUTO = 2 };

/* See mk::AttachOptions. `socket` and `job` are zero-terminated; a null or empty socket means the
 * default. A path has at most 107 bytes, a job's name 1 to 128 of printable ASCII without spaces.
 * A session is its process's alone: in a child of fork() mk_session_detach and the _destroy
 * functions free what they are given and tell nobody; all other calls answer "unsupported". */
typedef struct mk_attach_options {
  size_t struct_bytes; /* sizeof(mk_attach_options) */
  const char* socket;
  const char* job;
  uint32_t rank, world, node_rank, nodes, local_rank, local_size;
  uint32_t lanes;      /* 0: default */
  uint32_t timeout_ms; /* 0: default */
} mk_attach_options;

typedef struct mk_gemm_ar_shape {
  size_t struct_bytes; /* sizeof(mk_gemm_ar_shape) */
  uint64_t m_max, n, k;
  uint32_t dtype;           /* MK_BF16, MK_F16 */
  uint32_t b_layout;        /* MK_KN, MK_NK */
  uint32_t wait_timeout_ms; /* 0: default */
  uint32_t executor;        /* MK_CPU, MK_CUDA */
  /* May be left away (struct_bytes): 1 counts in mk_launch_stats.nonfinite_partials. See
   * mk::Tuning::count_nonfinite. */
  uint32_t count_nonfinite;
} mk_gemm_ar_shape;

typedef struct mk_launch_stats {
  size_t struct_bytes;  /* in: sizeof(mk_launch_stats) */
  uint32_t epoch, mode; /* mode: as run, MK_FUSED or MK_UNFUSED */
  uint64_t total_ns, compute_ns, network_bytes, network_commands;
  uint64_t estimated_fused_ns, estimated_unfused_ns; /* what MK_AUTO goes by */
  uint64_t nonfinite_partials;                       /* if asked for: see mk::LaunchStats */
} mk_launch_stats;

MK_C_EXPORT const char* mk_version(void);
/* The calling thread's last error sentence; empty after success. */
MK_C_EXPORT const char* mk_last_error(void);
/* "timeout" for the code of kTimeout, and so on. */
MK_C_EXPORT const char* mk_status_name(mk_status status);

MK_C_EXPORT mk_status mk_session_attach(const mk_attach_options* options, mk_session** out);
/* Like mk_session_attach with the launcher's environment (MKERNEL_*, torchrun, Open MPI, MPICH,
 * Intel MPI, PALS, Flux, Slurm, PMIx): see mk::AttachOptions::from_environment. */
MK_C_EXPORT mk_status mk_session_attach_from_environment(mk_session** out);
MK_C_EXPORT mk_status mk_session_status(mk_session* session);
MK_C_EXPORT mk_status mk_session_barrier(mk_session* session, uint32_t timeout_ms);
MK_C_EXPORT uint32_t mk_session_rank(const mk_session* session);
MK_C_EXPORT uint32_t mk_session_world(const mk_session* session);
/* Detaches and frees the session, also when it fails; null is allowed. */
MK_C_EXPORT mk_status mk_session_detach(mk_session* session);

MK_C_EXPORT mk_status mk_gemm_ar_create(mk_session* session, const mk_gemm_ar_shape* shape,
                                        mk_gemm_ar** out);
/* The memory that the creation takes on this rank, which also refuses by it: see
 * mk::GemmAllReduce::workspace_bytes. Every operator has such a function. */
MK_C_EXPORT mk_status mk_gemm_ar_workspace_bytes(mk_session* session, const mk_gemm_ar_shape* shape,
                                                 uint64_t* bytes);
/* `c` and `stats` may be null. */
MK_C_EXPORT mk_status mk_gemm_ar_launch(mk_gemm_ar* op, const void* a, const void* b, void* c,
                                        uint64_t m, uint32_t mode, mk_launch_stats* stats);
/* MK_CUDA: puts a launch on the stream (a cudaStream_t) and returns at once; the matrices are in
 * the GPU's memory. See launch_on, status and finish of the C++ class. */
MK_C_EXPORT mk_status mk_gemm_ar_launch_on(mk_gemm_ar* op, void* stream, const void* a,
                                           const void* b, void* c, uint64_t m, uint32_t mode);
MK_C_EXPORT mk_status mk_gemm_ar_status(const mk_gemm_ar* op);
MK_C_EXPORT mk_status mk_gemm_ar_finish(mk_gemm_ar* op, void* stream, mk_launch_stats* stats);
MK_C_EXPORT const void* mk_gemm_ar_output(const mk_gemm_ar* op);
MK_C_EXPORT void mk_gemm_ar_destroy(mk_gemm_ar* op);

/* The rows [*first, *first + *count) that a rank has when `rows` rows are dealt out over the job:
 * see mk::rows_of_rank. */
MK_C_EXPORT void mk_rows_of_rank(uint64_t rows, uint32_t world, uint32_t rank, uint64_t* first,
                                 uint64_t* count);

/* GEMM + ReduceScatter: see mk::GemmReduceScatter. */
typedef struct mk_gemm_rs mk_gemm_rs;
typedef mk_gemm_ar_shape mk_gemm_rs_shape;

MK_C_EXPORT mk_status mk_gemm_rs_create(mk_session* session, const mk_gemm_rs_shape* shape,
                                        mk_gemm_rs** out);
MK_C_EXPORT mk_status mk_gemm_rs_workspace_bytes(mk_session* session, const mk_gemm_rs_shape* shape,
                                                 uint64_t* bytes);
/* `c`: the rank's rows, mk_rows_of_rank(m, world, rank); may be null when they are none. `stats`
 * may be null. */
MK_C_EXPORT mk_status mk_gemm_rs_launch(mk_gemm_rs* op, const void* a, const void* b, void* c,
                                        uint64_t m, uint32_t mode, mk_launch_stats* stats);
/* MK_CUDA: puts a launch on the stream (a cudaStream_t) and returns at once; the matrices are in
 * the GPU's memory. See launch_on, status and finish of the C++ class. */
MK_C_EXPORT mk_status mk_gemm_rs_launch_on(mk_gemm_rs* op, void* stream, const void* a,
                                           const void* b, void* c, uint64_t m, uint32_t mode);
MK_C_EXPORT mk_status mk_gemm_rs_status(const mk_gemm_rs* op);
MK_C_EXPORT mk_status mk_gemm_rs_finish(mk_gemm_rs* op, void* stream, mk_launch_stats* stats);
MK_C_EXPORT void mk_gemm_rs_destroy(mk_gemm_rs* op);

/* AllGather + GEMM: see mk::AllGatherGemm. */
typedef struct mk_ag_gemm mk_ag_gemm;
typedef mk_gemm_ar_shape mk_ag_gemm_shape;

MK_C_EXPORT mk_status mk_ag_gemm_create(mk_session* session, const mk_ag_gemm_shape* shape,
                                        mk_ag_gemm** out);
MK_C_EXPORT mk_status mk_ag_gemm_workspace_bytes(mk_session* session, const mk_ag_gemm_shape* shape,
                                                 uint64_t* bytes);
/* `a_shard`: the rank's rows of A, mk_rows_of_rank(m, world, rank); may be null when they are none.
 * `gathered`: m x k, gets the whole A. It and `stats` may be null. */
MK_C_EXPORT mk_status mk_ag_gemm_launch(mk_ag_gemm* op, const void* a_shard, const void* b, void* c,
                                        void* gathered, uint64_t m, uint32_t mode,
                                        mk_launch_stats* stats);
/* MK_CUDA: puts a launch on the stream (a cudaStream_t) and returns at once; the matrices are in
 * the GPU's memory. See launch_on, status and finish of the C++ class. */
MK_C_EXPORT mk_status mk_ag_gemm_launch_on(mk_ag_gemm* op, void* stream, const void* a_shard,
                                           const void* b, void* c, void* gathered, uint64_t m,
                                           uint32_t mode);
/* Where the rank's rows may lie that then need no copy for the network; null in a job of one rank.
 * See input() of the C++ class. */
MK_C_EXPORT void* mk_ag_gemm_input(const mk_ag_gemm* op);
MK_C_EXPORT mk_status mk_ag_gemm_status(const mk_ag_gemm* op);
MK_C_EXPORT mk_status mk_ag_gemm_finish(mk_ag_gemm* op, void* stream, mk_launch_stats* stats);
MK_C_EXPORT void mk_ag_gemm_destroy(mk_ag_gemm* op);

/* MoE Dispatch + GEMM: see mk::MoeDispatchGemm. */
typedef struct mk_moe_dispatch mk_moe_dispatch;

typedef struct mk_moe_dispatch_shape {
  size_t struct_bytes; /* sizeof(mk_moe_dispatch_shape) */
  uint64_t tokens_max, hidden, features;
  uint32_t experts, top_k;
  uint64_t rows_max;        /* 0: enough for any routing */
  uint32_t dtype;           /* MK_BF16, MK_F16 */
  uint32_t b_layout;        /* MK_KN, MK_NK: of an expert's weights */
  uint32_t wait_timeout_ms; /* 0: default */
} mk_moe_dispatch_shape;

typedef struct mk_moe_dispatch_input {
  size_t struct_bytes;  /* sizeof(mk_moe_dispatch_input) */
  const void* tokens;   /* count x hidden */
  const int32_t* ids;   /* count x top_k; -1: nowhere */
  const float* weights; /* count x top_k */
  uint64_t count;       /* 0 to tokens_max */
  const void* expert_weights;
} mk_moe_dispatch_input;

/* Where a row of the output comes from. */
typedef struct mk_moe_row {
  uint32_t rank, token, slot;
  float weight;
} mk_moe_row;

MK_C_EXPORT mk_status mk_moe_dispatch_create(mk_session* session,
                                             const mk_moe_dispatch_shape* shape,
                                             mk_moe_dispatch** out);
MK_C_EXPORT mk_status mk_moe_dispatch_workspace_bytes(mk_session* session,
                                                      const mk_moe_dispatch_shape* shape,
                                                      uint64_t* bytes);
/* `y` has room for `capacity` rows of `features`; `stats` may be null. */
MK_C_EXPORT mk_status mk_moe_dispatch_launch(mk_moe_dispatch* op,
                                             const mk_moe_dispatch_input* input, void* y,
                                             uint64_t capacity, uint32_t mode,
                                             mk_launch_stats* stats);
/* Of the last launch, valid until the next: one for each row of y. */
MK_C_EXPORT const mk_moe_row* mk_moe_dispatch_rows(const mk_moe_dispatch* op, uint64_t* count);
/* Of the last launch, valid until the next: this rank's expert `first_expert` + i has the rows
 * [offsets[i], offsets[i + 1]) of y, 0 <= i < experts. */
MK_C_EXPORT const uint32_t* mk_moe_dispatch_expert_offsets(const mk_moe_dispatch* op,
                                                           uint32_t* first_expert,
                                                           uint32_t* experts);
MK_C_EXPORT void mk_moe_dispatch_destroy(mk_moe_dispatch* op);

/* Ring Attention: see mk::RingAttention. */
typedef struct mk_ring_attention mk_ring_attention;

typedef struct mk_ring_attention_shape {
  size_t struct_bytes; /* sizeof(mk_ring_attention_shape) */
  uint64_t seq_max;    /* rows over all ranks */
  uint32_t query_heads, key_heads, head_dim;
  uint32_t causal;          /* 0 or 1 */
  uint32_t dtype;           /* MK_BF16, MK_F16 */
  uint32_t wait_timeout_ms; /* 0: default */
} mk_ring_attention_shape;

/* One rank's rows. Strides are in elements from row to row; 0: rows without gaps. */
typedef struct mk_ring_attention_tensors {
  size_t struct_bytes; /* sizeof(mk_ring_attention_tensors) */
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse; /* [row][query head]; may be null */
  uint64_t q_stride, k_stride, v_stride, out_stride;
  double scale; /* 0: 1 / sqrt(head_dim) */
} mk_ring_attention_tensors;

MK_C_EXPORT mk_status mk_ring_attention_create(mk_session* session,
                                               const mk_ring_attention_shape* shape,
                                               mk_ring_attention** out);
MK_C_EXPORT mk_status mk_ring_attention_workspace_bytes(mk_session* session,
                                                        const mk_ring_attention_shape* shape,
                                                        uint64_t* bytes);
/* `seq`: rows of the whole sequence; `stats` may be null. */
MK_C_EXPORT mk_status mk_ring_attention_launch(mk_ring_attention* op,
                                               const mk_ring_attention_tensors* tensors,
                                               uint64_t seq, uint32_t mode, mk_launch_stats* stats);
MK_C_EXPORT void mk_ring_attention_destroy(mk_ring_attention* op);
/* The rows of the sequence that a rank has, one after the other in its tensors: [first[0], first[0]
 * + count[0]) and, when causal, [first[1], first[1] + count[1]). See mk::sequence_rows_of_rank. */
MK_C_EXPORT void mk_sequence_rows_of_rank(uint64_t seq, uint32_t causal, uint32_t world,
                                          uint32_t rank, uint64_t first[2], uint64_t count[2]);

#ifdef __cplusplus
}
#endif
#endif /* MKERNEL_MKERNEL_C_H_ */
