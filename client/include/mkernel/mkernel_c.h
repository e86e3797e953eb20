/* libmkclient's C ABI.
 *
 * Errors: every function that can fail returns an mk_status: 0, or a code of shm/error_code.h. The
 * function mk_last_error() of the same thread has its sentence, valid until that thread's next
 * call.
 *
 * Ownership: an `out` argument's object is the caller's. Give it to the matching _destroy, _detach
 * or _free function. Matrices are the caller's, as in mkernel.h.
 *
 * Structs carry their size, so that fields can be added at the end: set `struct_bytes` to sizeof,
 * and what you do not name to 0. Fields that an older caller's shorter struct lacks are 0.
 *
 * Threads: as in mkernel.h. Collective calls come in the same order on all ranks.
 *
 * All operators have the same functions (mk_op_...). Each operator has two structs of its own, its
 * shape and its arguments. */
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
typedef struct mk_op mk_op;
typedef struct mk_blobs mk_blobs;

enum { MK_BF16 = 1, MK_F16 = 2, MK_F32 = 3 }; /* MK_F32: mk_collective_shape's only */
enum { MK_KN = 0, MK_NK = 1 };
/* What computes an operator: see mk::Executor. */
enum { MK_CPU = 0, MK_CUDA = 1 };
/* How a launch runs; MK_AUTO is the usual choice: see mk::LaunchMode. */
enum { MK_FUSED = 0, MK_UNFUSED = 1, MK_AUTO = 2 };
/* Where a buffer lies: see mk::MemoryKind. */
enum { MK_HOST = 0, MK_DEVICE = 1 };

MK_C_EXPORT const char* mk_version(void);
/* The calling thread's last error sentence; empty after success. */
MK_C_EXPORT const char* mk_last_error(void);
/* The name of a code: "timeout" for kTimeout, and so on. Never null. */
MK_C_EXPORT const char* mk_status_name(mk_status status);

/* --- Sessions --- */

/* See mk::AttachOptions. `socket` and `job` are zero-terminated; a null or empty socket means the
 * default. A path has at most 107 bytes, a job's name 1 to 128 of printable ASCII without spaces.
 * A session is its process's alone. In a child of fork() mk_session_detach and mk_op_destroy free
 * what they are given and tell nobody. All other calls answer "unsupported". */
typedef struct mk_attach_options {
  size_t struct_bytes; /* sizeof(mk_attach_options) */
  const char* socket;
  const char* job;
  uint32_t rank, world, node_rank, nodes, local_rank, local_size;
  uint32_t lanes;         /* 0: default */
  uint32_t timeout_ms;    /* 0: default */
  const void* job_secret; /* any bytes; null: $MKERNEL_JOB_SECRET, else none */
  uint64_t job_secret_bytes;
  uint32_t arrival_flags;        /* 0: default */
  uint32_t heartbeat_timeout_ms; /* 0: default */
  const char* gpu; /* PCI address of the rank's GPU; null: see mk::AttachOptions::gpu */
  uint32_t rail;   /* 1 + the rail's number; 0: the daemon's choice */
} mk_attach_options;

/* Where a rank is in its job. */
typedef struct mk_place {
  size_t struct_bytes; /* in: sizeof(mk_place) */
  uint32_t rank, world, node_rank, nodes, local_rank, local_size;
} mk_place;

/* Attaches; returns when the whole job is up: see mk::Session::attach. */
MK_C_EXPORT mk_status mk_session_attach(const mk_attach_options* options, mk_session** out);
/* The same with the launcher's environment (MKERNEL_*, torchrun, Open MPI, MPICH, Intel MPI, PALS,
 * Flux, Slurm, PMIx): see mk::AttachOptions::from_environment. The argument `options` may be null.
 * Its place (rank to local_size) is not read. Each other field that is neither null nor 0 goes
 * before the environment's. */
MK_C_EXPORT mk_status mk_session_attach_from_environment(const mk_attach_options* options,
                                                         mk_session** out);
/* A session of some of the job's ranks: see mk::AttachOptions::of_group. When `from_environment` is
 * 1, `options` is as for mk_session_attach_from_environment, else as for mk_session_attach. The
 * place is the one in the whole job. The name may be null. */
MK_C_EXPORT mk_status mk_session_attach_group(const mk_attach_options* options,
                                              uint32_t from_environment, const uint32_t* ranks,
                                              uint64_t count, const char* name, mk_session** out);
/* 0 while the session is well; else why it failed. */
MK_C_EXPORT mk_status mk_session_status(mk_session* session);
/* Collective: returns when every rank has called it. timeout_ms 0: 60 s. */
MK_C_EXPORT mk_status mk_session_barrier(mk_session* session, uint32_t timeout_ms);
MK_C_EXPORT uint32_t mk_session_rank(const mk_session* session);
MK_C_EXPORT uint32_t mk_session_world(const mk_session* session);
MK_C_EXPORT mk_status mk_session_place(const mk_session* session, mk_place* out);
/* The network between the nodes, e.g. "loopback"; valid as long as the session. */
MK_C_EXPORT const char* mk_session_fabric(const mk_session* session);
/* Detaches and frees the session, also when it fails; null is allowed. */
MK_C_EXPORT mk_status mk_session_detach(mk_session* session);

/* An all-gather of small blobs over the job: see mk::Session::exchange for the lengths. The tag is
 * zero-terminated and the same on all ranks. timeout_ms 0: 60 s. */
MK_C_EXPORT mk_status mk_session_exchange(mk_session* session, const char* tag, const void* blob,
                                          uint64_t bytes, uint32_t timeout_ms, mk_blobs** out);
/* A rank's blob, valid until mk_blobs_free; null and 0 for a rank that the job has not. */
MK_C_EXPORT const void* mk_blobs_at(const mk_blobs* blobs, uint32_t rank, uint64_t* bytes);
MK_C_EXPORT void mk_blobs_free(mk_blobs* blobs);

/* Memory that the daemon, its NIC and the local ranks can reach. It belongs to the session, and
 * goes with it: see mk::Session::alloc_buffer. */
typedef struct mk_buffer {
  size_t struct_bytes; /* in: sizeof(mk_buffer) */
  void* data;          /* MK_DEVICE: a device address */
  uint64_t bytes;
  uint32_t handle;
} mk_buffer;

/* `name` is zero-terminated and shows in the daemon's listings; `kind` is MK_HOST or MK_DEVICE. */
MK_C_EXPORT mk_status mk_session_alloc_buffer(mk_session* session, uint64_t bytes, const char* name,
                                              uint32_t kind, mk_buffer* out);
MK_C_EXPORT mk_status mk_session_free_buffer(mk_session* session, const mk_buffer* buffer);

/* --- Operators --- */

/* Choices of a rank for any operator; 0: the default. See mk::Tuning and mk::MachineRates. */
typedef struct mk_tuning {
  size_t struct_bytes; /* sizeof(mk_tuning) */
  uint32_t executor;   /* MK_CPU, MK_CUDA */
  uint32_t tile_m, tile_n, chunk_bytes;
  /* SMs of each role on a GPU, threads on CPUs. */
  uint32_t compute_sms, reduce_sms, send_sms, receive_sms, share_sms, pull_sms;
  uint32_t wait_timeout_ms;
  uint32_t count_nonfinite; /* 1 counts in mk_launch_stats.nonfinite_partials */
  double flops_per_s, local_bytes_per_s, network_bytes_per_s, command_ns, step_ns;
  /* 1: a row's bits do not depend on how many rows there are, for every operator and executor; the
   * same on all ranks (mk::Tuning::batch_invariant). */
  uint32_t batch_invariant;
  uint32_t
      own_workspace; /* 1: shares it with no equal operator, so MK_INPUT and MK_OUTPUT are there */
  /* Files that launches are planned by; NULL: the environment's. See mk::Tuning. */
  const char* machine_file;
  const char* tuned_file;
  /* GEMM+AllReduce over three nodes or more: 0 chosen, 1 one-shot, 2 two-shot (mk::Exchange). */
  uint32_t exchange;
  /* 0 planned, 1 adaptive (mk::Partition). Wide, as callers from before it have padding here. */
  uint64_t partition;
  /* Ring Attention, MoE Dispatch on GPUs: 0 chosen, 1 copy engines, 2 SMs (mk::Transport). */
  uint64_t transport;
} mk_tuning;

typedef struct mk_launch_stats {
  size_t struct_bytes;  /* in: sizeof(mk_launch_stats) */
  uint32_t epoch, mode; /* mode: as run, MK_FUSED or MK_UNFUSED */
  uint64_t total_ns, compute_ns, compute_wait_ns, network_bytes, network_commands;
  uint64_t estimated_fused_ns, estimated_unfused_ns; /* what MK_AUTO goes by */
  uint64_t nonfinite_partials;                       /* if asked for: see mk::LaunchStats */
  /* The adaptive partition: see mk::LaunchStats. Filled in if struct_bytes has room for all. */
  uint32_t partition_first, partition_last;
  uint64_t partition_moves, partition_turns;
} mk_launch_stats;

/* Something one thread of a launch did: see mk::TraceSpan. */
typedef struct mk_trace_span {
  const char* role;
  uint32_t block;
  const char* kind;
  uint32_t index[2];
  uint32_t rank;
  uint64_t begin_ns, end_ns;
} mk_trace_span;

/* The name of the index-th operator of this library, or null: "ag-gemm", "gemm-rs", "gemm-ar",
 * "moe", "combine", "ring", "all-gather", "reduce-scatter". */
MK_C_EXPORT const char* mk_op_name(uint32_t index);

/* Creates the operator of that name. Collective: the C++ class says in what ranks may differ.
 * `shape` is its mk_..._shape, which must start with struct_bytes. The operator must not outlive
 * its session. */
MK_C_EXPORT mk_status mk_op_create(mk_session* session, const char* name, const void* shape,
                                   mk_op** out);
/* Bytes that the creation takes on this rank; it is refused where they are not there. An operator
 * that shares an equal one's workspace (mk_tuning.own_workspace) takes none. Not collective. */
MK_C_EXPORT mk_status mk_op_workspace_bytes(mk_session* session, const char* name,
                                            const void* shape, uint64_t* bytes);
/* Collective; returns when the output is complete. `arguments` is the operator's mk_..._arguments;
 * `stats` may be null. */
MK_C_EXPORT mk_status mk_op_launch(mk_op* op, const void* arguments, uint32_t mode,
                                   mk_launch_stats* stats);
/* MK_CUDA: puts a launch on the stream (a cudaStream_t) and returns at once; what the arguments
 * point at is in the GPU's memory. See launch_on, status and finish of the C++ classes. */
MK_C_EXPORT mk_status mk_op_launch_on(mk_op* op, void* stream, const void* arguments,
                                      uint32_t mode);
MK_C_EXPORT mk_status mk_op_status(const mk_op* op);
MK_C_EXPORT mk_status mk_op_finish(mk_op* op, void* stream, mk_launch_stats* stats);

/* The questions of mk_op_query. Memory is the operator's, and lives as long. */
enum {
  /* ag-gemm, all-gather: where the rank's rows may lie that then need no copy for the network, in
   * bytes; null in a job of one rank. See mk::AllGatherGemm::input. */
  MK_INPUT = 1,
  /* gemm-ar: where the operator keeps C itself, in bytes. See mk::GemmAllReduce::output. */
  MK_OUTPUT = 2,
  /* moe, of the last launch: mk_moe_row, one for each row of y. MK_CUDA: in the GPU's memory, as
   * many as the last launch that ended by mk_op_launch or mk_op_finish gave. */
  MK_ROWS = 3,
  /* moe, of the last launch: uint32_t, one more than this rank has experts. Expert first + i has
   * the rows [offsets[i], offsets[i + 1]) of y. MK_CUDA: in the GPU's memory. */
  MK_EXPERT_OFFSETS = 4,
  /* moe, combine: `count` is the number of this rank's first expert. */
  MK_FIRST_EXPERT = 5
};
/* `data` and `count` may be null. "unsupported" when the operator has no such thing. */
MK_C_EXPORT mk_status mk_op_query(const mk_op* op, uint32_t what, void** data, uint64_t* count);
/* Whether later launches keep what their threads did when; costs a little time. */
MK_C_EXPORT mk_status mk_op_set_trace(mk_op* op, uint32_t on);
/* Spans of the last launch, valid until the next call of this function; none unless traced. */
MK_C_EXPORT mk_status mk_op_trace(mk_op* op, const mk_trace_span** spans, uint64_t* count);
/* Null is allowed. */
MK_C_EXPORT void mk_op_destroy(mk_op* op);

/* The rows [*first, *first + *count) that a rank has when `rows` rows are dealt out over the job:
 * see mk::rows_of_rank. `first` and `count` may be null. */
MK_C_EXPORT void mk_rows_of_rank(uint64_t rows, uint32_t world, uint32_t rank, uint64_t* first,
                                 uint64_t* count);

/* --- ag-gemm, gemm-rs, gemm-ar: mk::AllGatherGemm, mk::GemmReduceScatter, mk::GemmAllReduce --- */

/* The function of the whole sum, after the bias: see mk::Activation. Gated: n / 2 columns of C. */
enum {
  MK_ACTIVATION_NONE = 0,
  MK_ACTIVATION_RELU = 1,
  MK_ACTIVATION_GELU = 2,
  MK_ACTIVATION_SILU = 3,
  MK_ACTIVATION_GATED_SILU = 4
};
/* The type in which partial sums travel: see mk::Partials. */
enum { MK_PARTIALS_ELEMENT = 0, MK_PARTIALS_F32 = 1 };

typedef struct mk_gemm_shape {
  size_t struct_bytes;     /* sizeof(mk_gemm_shape) */
  const mk_tuning* tuning; /* may be null */
  uint64_t m_max, n, k;
  uint32_t dtype;      /* MK_BF16, MK_F16 */
  uint32_t b_layout;   /* MK_KN, MK_NK */
  uint32_t activation; /* MK_ACTIVATION_NONE, ... */
  uint32_t bias;       /* 1: launches bring one */
  uint32_t partials;   /* gemm-rs, gemm-ar: MK_PARTIALS_ELEMENT, MK_PARTIALS_F32. ag-gemm: 0 */
} mk_gemm_shape;

typedef struct mk_gemm_arguments {
  size_t struct_bytes; /* sizeof(mk_gemm_arguments) */
  /* ag-gemm: the rank's rows of A, mk_rows_of_rank(m, world, rank); null when they are none. */
  const void* a;
  const void* b;
  /* gemm-ar: may be null, see MK_OUTPUT. gemm-rs: the rank's rows of C; null when they are none. */
  void* c;
  uint64_t m;
  void* gathered;    /* ag-gemm: m x k, gets the whole A; may be null. The others: null */
  const void* bias;  /* n elements, if the shape has a bias; else null */
  uint64_t lda, ldb; /* elements from row to row; 0: without gaps. See mk::GemmArguments */
  uint64_t ldc;
  uint64_t tag; /* see mk::LaunchOptions; 0: none */
} mk_gemm_arguments;

/* --- all-gather, reduce-scatter: mk::AllGather, mk::ReduceScatter --- */

typedef struct mk_collective_shape {
  size_t struct_bytes;     /* sizeof(mk_collective_shape) */
  const mk_tuning* tuning; /* may be null */
  uint64_t m_max, n;       /* rows of the whole, elements of a row */
  uint32_t dtype;          /* MK_BF16, MK_F16, MK_F32 */
  uint32_t partials;       /* reduce-scatter: MK_PARTIALS_ELEMENT, MK_PARTIALS_F32. Else 0 */
} mk_collective_shape;

typedef struct mk_collective_arguments {
  size_t struct_bytes; /* sizeof(mk_collective_arguments) */
  /* all-gather: the rank's rows, mk_rows_of_rank(m, world, rank), to all m. reduce-scatter: m rows,
   * to the sums of the rank's. Null where it has none. */
  const void* input;
  void* output;
  uint64_t m;
  uint64_t tag; /* see mk::LaunchOptions; 0: none */
} mk_collective_arguments;

/* --- moe: mk::MoeDispatchGemm --- */

/* Gated: an expert's weights have 2 features columns, all gates then all up projections, or a gate
 * and its up projection in turn. */
enum { MK_NO_EPILOGUE = 0, MK_GATED_SILU = 1, MK_GATED_SILU_INTERLEAVED = 2 };

typedef struct mk_moe_shape {
  size_t struct_bytes;     /* sizeof(mk_moe_shape) */
  const mk_tuning* tuning; /* may be null */
  uint64_t tokens_max, hidden, features;
  uint64_t rows_max; /* 0: enough for any routing */
  uint32_t experts, top_k;
  uint32_t dtype;    /* MK_BF16, MK_F16 */
  uint32_t b_layout; /* MK_KN, MK_NK: of an expert's weights */
  uint32_t epilogue; /* MK_NO_EPILOGUE, MK_GATED_SILU, MK_GATED_SILU_INTERLEAVED */
  uint32_t unused;   /* padding of older callers */
  uint32_t bias;     /* 1: launches bring one element for each column of an expert's weights */
} mk_moe_shape;

typedef struct mk_moe_arguments {
  size_t struct_bytes;  /* sizeof(mk_moe_arguments) */
  const void* tokens;   /* count x hidden */
  const int32_t* ids;   /* count x top_k; -1: nowhere */
  const float* weights; /* count x top_k */
  uint64_t count;       /* 0 to tokens_max */
  const void* expert_weights;
  void* y;           /* capacity x features */
  uint64_t capacity; /* rows that y has room for */
  uint64_t tag;      /* see mk::LaunchOptions; 0: none */
  const void* bias;  /* of this rank's experts, if the shape has one; else null */
} mk_moe_arguments;

/* Where a row of y comes from. */
typedef struct mk_moe_row {
  uint32_t rank, token, slot;
  float weight;
} mk_moe_row;

/* --- combine: mk::GemmCombine --- */

typedef struct mk_combine_shape {
  size_t struct_bytes;     /* sizeof(mk_combine_shape) */
  const mk_tuning* tuning; /* may be null */
  uint64_t tokens_max, hidden, features;
  uint32_t experts, top_k;
  uint32_t dtype;    /* MK_BF16, MK_F16 */
  uint32_t b_layout; /* MK_KN, MK_NK: of an expert's weights */
  uint32_t partials; /* MK_PARTIALS_ELEMENT, MK_PARTIALS_F32 */
} mk_combine_shape;

typedef struct mk_combine_arguments {
  size_t struct_bytes;            /* sizeof(mk_combine_arguments) */
  const void* y;                  /* row_count x features */
  const mk_moe_row* rows;         /* moe's MK_ROWS */
  uint64_t row_count;             /* 0 after a moe launch without room; MK_CUDA: room in y */
  const uint32_t* expert_offsets; /* moe's MK_EXPERT_OFFSETS */
  uint64_t expert_offset_count;   /* one more than this rank has experts */
  const void* expert_weights;
  const int32_t* ids;   /* count x top_k, as dispatched */
  uint64_t count;       /* of this rank's tokens, 0 to tokens_max */
  const void* residual; /* count x hidden; may be null */
  void* out;            /* count x hidden */
  uint64_t tag;         /* see mk::LaunchOptions; 0: none */
} mk_combine_arguments;

/* --- ring: mk::RingAttention --- */

typedef struct mk_ring_shape {
  size_t struct_bytes;     /* sizeof(mk_ring_shape) */
  const mk_tuning* tuning; /* may be null */
  uint64_t seq_max;        /* rows over all ranks */
  uint32_t query_heads, key_heads, head_dim;
  uint32_t causal;        /* 0 or 1 */
  uint32_t dtype;         /* MK_BF16, MK_F16 */
  uint32_t remote_passes; /* 0: default */
  uint32_t batch;         /* sequences of one length; 0: 1 */
  uint32_t sequences_max; /* of different lengths, seq_max rows in all; 0: one length */
} mk_ring_shape;

/* One rank's rows. Strides are in elements, `..._stride` from row to row; 0: as
 * [sequence][row][head] without gaps. On CPUs head strides and the strides of lse are 0. */
typedef struct mk_ring_arguments {
  size_t struct_bytes; /* sizeof(mk_ring_arguments) */
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;   /* [sequence][row][query head]; may be null */
  uint64_t seq; /* rows of the whole sequence */
  uint64_t q_stride, k_stride, v_stride, out_stride;
  double scale; /* 0: 1 / sqrt(head_dim) */
  uint64_t q_head_stride, k_head_stride, v_head_stride, out_head_stride;
  uint64_t q_batch_stride, k_batch_stride, v_batch_stride, out_batch_stride;
  uint64_t lse_stride, lse_head_stride, lse_batch_stride;
  const uint32_t* sequence_starts; /* with sequences_max: sequences + 1 row numbers, seq the last;
                                    * on a GPU in its memory, and seq the most the last may be */
  uint64_t sequences;
  uint64_t rows; /* with sequence_starts: that the tensors have room for; 0: enough, on a GPU for
                  * any lengths (mk::packed_rows_max) */
  uint64_t tag;  /* see mk::LaunchOptions; 0: none */
} mk_ring_arguments;

/* The rows of the sequence that a rank has, one after the other in its tensors: [first[0], first[0]
 * + count[0]) and, when causal, [first[1], first[1] + count[1]). See mk::sequence_rows_of_rank.
 * `first` and `count` may be null. */
MK_C_EXPORT void mk_sequence_rows_of_rank(uint64_t seq, uint32_t causal, uint32_t world,
                                          uint32_t rank, uint64_t first[2], uint64_t count[2]);

#ifdef __cplusplus
}
#endif
#endif /* MKERNEL_MKERNEL_C_H_ */
