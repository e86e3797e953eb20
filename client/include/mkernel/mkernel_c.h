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
enum { MK_FUSED = 0, MK_UNFUSED = 1 };

/* See mk::AttachOptions. `socket` and `job` are zero-terminated; a null or empty socket means the
 * default. */
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
} mk_gemm_ar_shape;

typedef struct mk_launch_stats {
  size_t struct_bytes; /* in: sizeof(mk_launch_stats) */
  uint32_t epoch, mode;
  uint64_t total_ns, compute_ns, network_bytes, network_commands;
} mk_launch_stats;

MK_C_EXPORT const char* mk_version(void);
/* The calling thread's last error sentence; empty after success. */
MK_C_EXPORT const char* mk_last_error(void);
/* "timeout" for the code of kTimeout, and so on. */
MK_C_EXPORT const char* mk_status_name(mk_status status);

MK_C_EXPORT mk_status mk_session_attach(const mk_attach_options* options, mk_session** out);
/* Like mk_session_attach with the launcher's environment (torchrun, Slurm, Open MPI, MKERNEL_*). */
MK_C_EXPORT mk_status mk_session_attach_from_environment(mk_session** out);
MK_C_EXPORT mk_status mk_session_status(mk_session* session);
MK_C_EXPORT mk_status mk_session_barrier(mk_session* session, uint32_t timeout_ms);
MK_C_EXPORT uint32_t mk_session_rank(const mk_session* session);
MK_C_EXPORT uint32_t mk_session_world(const mk_session* session);
/* Detaches and frees the session, also when it fails; null is allowed. */
MK_C_EXPORT mk_status mk_session_detach(mk_session* session);

MK_C_EXPORT mk_status mk_gemm_ar_create(mk_session* session, const mk_gemm_ar_shape* shape,
                                        mk_gemm_ar** out);
/* `c` and `stats` may be null. */
MK_C_EXPORT mk_status mk_gemm_ar_launch(mk_gemm_ar* op, const void* a, const void* b, void* c,
                                        uint64_t m, uint32_t mode, mk_launch_stats* stats);
MK_C_EXPORT const void* mk_gemm_ar_output(const mk_gemm_ar* op);
MK_C_EXPORT void mk_gemm_ar_destroy(mk_gemm_ar* op);

#ifdef __cplusplus
}
#endif
#endif /* MKERNEL_MKERNEL_C_H_ */
