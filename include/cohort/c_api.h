/* Cohort's C interface, for C, Fortran (share/cohort/cohort.f90) and whatever calls C. Its binary interface keeps its
   meaning: functions and fields are only added, and COHORT_C_API_VERSION grows with them. Link libcohort_c:
   cc program.c $(cohort --cflags).

   Functions return COHORT_OK or an error's number; cohort_last_error() then has the text: what failed, on which rank
   and host, why, and what to do. A handle belongs to the caller until the function that ends it. One thread at a time
   may use a communicator and what was made from it; cohort_abort and the functions that only ask may be called from any
   thread. All ranks call the operations of a communicator in the same order. */
#ifndef COHORT_C_API_H
#define COHORT_C_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COHORT_C_API_VERSION 1
/* The version that the library implements: at least that of the header a program was compiled with. */
int32_t cohort_c_api_version(void);
/* Cohort's version, "0.1.0". */
const char* cohort_version(void);

/* ---- errors ---- */

enum {
  COHORT_OK = 0,
  COHORT_INVALID_ARGUMENT = 1, /* the request has no meaning; nothing was done */
  COHORT_UNAVAILABLE = 2,      /* a resource or a service is not there */
  COHORT_TIMEOUT = 3,          /* a deadline passed; the communicator is unusable afterwards */
  COHORT_PEER_LOST = 4,        /* a peer died or left; unusable afterwards */
  COHORT_MISMATCH = 5,         /* ranks asked for different things; refused on all, the communicator stays usable */
  COHORT_ABORTED = 6,          /* another rank failed first, or called cohort_abort; unusable afterwards */
  COHORT_IO = 7,               /* the operating system refused to read or write */
  COHORT_CORRUPT = 8,          /* bytes from outside are damaged */
  COHORT_NON_FINITE = 9,       /* a value is NaN or infinite and must not be; refused on all ranks */
  COHORT_INTERNAL = 10         /* a bug in Cohort */
};
/* The text of this thread's last call that failed, until its next one fails; "" if none has. */
const char* cohort_last_error(void);
/* The rank that the error is about (it was lost, it has not come); -1 if it is about none. */
int32_t cohort_last_error_peer(void);
/* "PeerLost"; "" for a number that is none. */
const char* cohort_error_name(int32_t status);

/* ---- a world ---- */

typedef struct cohort_comm cohort_comm;

/* The program's own channel, by which ranks on several hosts learn where to meet: copies rank 0's `bytes` at `text` to
   all ranks, as MPI_Bcast does, and returns 0. Called once, within cohort_init. */
typedef int (*cohort_share)(void* context, char* text, size_t bytes);

/* Start with COHORT_INIT_OPTIONS; null and -1 mean the default. <cohort/init_options.h> says more of each. */
typedef struct cohort_init_options {
  size_t struct_bytes;      /* sizeof(cohort_init_options), by which later versions know what a program gives */
  const char* init_method;  /* "tcp://HOST:PORT", "file:///PATH", ...; default: what the launcher set up, else alone */
  const char* group_name;   /* worlds of one process have different names */
  const char* secret_file;  /* the job's secret, for worlds without `cohort run` */
  int32_t rank, world_size; /* with `share`, or where the init_method needs them */
  int64_t init_timeout_ms;  /* until all ranks are there: 5 minutes */
  int64_t timeout_ms;       /* of an operation: COHORT_TIMEOUT, else 30 minutes */
  cohort_share share;       /* instead of an init_method, with rank and world_size */
  void* share_context;
  int32_t trust_network; /* 1: ranks on several hosts may meet without a secret */
  int32_t alone;         /* 1: a world of one on purpose */
} cohort_init_options;
#define COHORT_INIT_OPTIONS \
  { sizeof(cohort_init_options), 0, 0, 0, -1, -1, -1, -1, 0, 0, 0, 0 }

/* Forms a world, and sets *comm. Collective; blocks. `options` may be null. */
int32_t cohort_init(const cohort_init_options* options, cohort_comm** comm);
/* Leaves the world, and frees the handle. Waits for this rank's operations that have not ended. Null does nothing. */
int32_t cohort_finalize(cohort_comm* comm);
int32_t cohort_rank(const cohort_comm* comm);
int32_t cohort_size(const cohort_comm* comm);
int32_t cohort_local_rank(const cohort_comm* comm);
int32_t cohort_local_size(const cohort_comm* comm);
/* This rank's host, as long as `comm` is there. */
const char* cohort_host(const cohort_comm* comm);
/* Forms a world of the ranks of each color, numbered by key; a negative color: this rank is in none, *part is null.
   Collective; blocks. */
int32_t cohort_split(cohort_comm* comm, int32_t color, int32_t key, cohort_comm** part);
/* Ends the world: operations of all ranks fail with COHORT_ABORTED and this reason. */
int32_t cohort_abort(cohort_comm* comm, const char* reason);

/* Memory that operations read and write in place, without copies: aligned to 4096 bytes, zero. Lives until cohort_free.
 */
int32_t cohort_allocate(cohort_comm* comm, size_t bytes, void** memory);
int32_t cohort_free(void* memory);

/* ---- operations ---- */

enum {
  COHORT_FLOAT32 = 0,
  COHORT_FLOAT64 = 1,
  COHORT_FLOAT16 = 2,
  COHORT_BFLOAT16 = 3,
  COHORT_INT8 = 4,
  COHORT_INT16 = 5,
  COHORT_INT32 = 6,
  COHORT_INT64 = 7,
  COHORT_UINT8 = 8,
  COHORT_UINT16 = 9,
  COHORT_UINT32 = 10,
  COHORT_UINT64 = 11,
  COHORT_BOOL = 12,
  COHORT_COMPLEX64 = 13,
  COHORT_COMPLEX128 = 14
};
enum {
  COHORT_SUM = 0,
  COHORT_AVERAGE = 1,
  COHORT_MIN = 2,
  COHORT_MAX = 3,
  COHORT_PRODUCT = 4,
  COHORT_BIT_AND = 5,
  COHORT_BIT_OR = 6,
  COHORT_BIT_XOR = 7
};

/* An operation under way. */
typedef struct cohort_work cohort_work;
/* Waits for an operation, frees the handle, and returns the operation's status. Null: COHORT_OK. */
int32_t cohort_wait(cohort_work* work);
/* Sets *done to 1 if the operation has ended, with or without an error, else to 0; cohort_wait is still due. */
int32_t cohort_test(cohort_work* work, int32_t* done);

/* In all of these, `count` is a number of elements, `input` may be `output` where C++'s operation allows that
   (<cohort/communicator.h>), and with `work` null the call waits; else it returns at once, and the buffers belong to
   the operation until cohort_wait. */
int32_t cohort_all_reduce(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype, int32_t op,
                          cohort_work** work);
/* The average by weights, as numbers of samples: sum(weight * x) / sum(weight). */
int32_t cohort_all_reduce_weighted(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype,
                                   double weight, cohort_work** work);
int32_t cohort_reduce(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype, int32_t op,
                      int32_t root, cohort_work** work);
int32_t cohort_broadcast(cohort_comm* comm, void* data, int64_t count, int32_t dtype, int32_t root, cohort_work** work);
/* `count` is of one rank's part: `output` has size() * count elements. */
int32_t cohort_all_gather(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype,
                          cohort_work** work);
/* `count` is of one rank's part: `input` has size() * count elements. */
int32_t cohort_reduce_scatter(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype,
                              int32_t op, cohort_work** work);
int32_t cohort_all_to_all(cohort_comm* comm, const void* input, void* output, int64_t count, int32_t dtype,
                          cohort_work** work);
int32_t cohort_send(cohort_comm* comm, const void* data, int64_t count, int32_t dtype, int32_t peer, int32_t tag,
                    cohort_work** work);
int32_t cohort_recv(cohort_comm* comm, void* data, int64_t count, int32_t dtype, int32_t peer, int32_t tag,
                    cohort_work** work);
int32_t cohort_barrier(cohort_comm* comm);

/* ---- gradients: buckets and overlap without a framework ---- */

/* Averages gradients as cohort::nn::DistributedDataParallel does: many small ones together, in the order in which they
   come, while the rest is still computed. A step: cohort_gradients_begin, cohort_gradients_ready for each gradient as
   soon as it is there, cohort_gradients_wait. */
typedef struct cohort_gradients cohort_gradients;

/* Start with COHORT_GRADIENTS_OPTIONS. */
typedef struct cohort_gradients_options {
  size_t struct_bytes;
  int64_t bucket_bytes;       /* 25 MiB */
  int64_t first_bucket_bytes; /* 1 MiB */
  int32_t wire_format;        /* between hosts, of float32: 0 as it is, 1 bfloat16, 2 int8, 3 int4 */
  int32_t raise_non_finite;   /* 1: cohort_gradients_wait fails with COHORT_NON_FINITE on all ranks, naming the value */
} cohort_gradients_options;
#define COHORT_GRADIENTS_OPTIONS \
  { sizeof(cohort_gradients_options), -1, -1, 0, 0 }

/* `comm` has to outlive the handle. `options` may be null. */
int32_t cohort_gradients_create(cohort_comm* comm, const cohort_gradients_options* options,
                                cohort_gradients** gradients);
/* Adds a tensor of `count` elements, before the first begin: the same ones in the same order on all ranks; the first
   has number 0. `gradient` is where the program writes its gradient, and finds the average. `parameter`, which may be
   null, is its weights, of which some are compared over the ranks in each step: replicas that drift apart are an error.
 */
int32_t cohort_gradients_add(cohort_gradients* gradients, const char* name, const void* parameter, void* gradient,
                             int64_t count, int32_t dtype);
/* Begins a step. `samples`: of this rank's batch, by which the average is weighted, on all ranks; 0: this rank has
   none, and its gradients are dropped; negative: all ranks weigh the same. The first call compares the ranks' tensors.
 */
int32_t cohort_gradients_begin(cohort_gradients* gradients, int64_t samples);
/* The array belongs to the step from here to cohort_gradients_wait. Says that this step's gradient of tensor `number`
   is complete; it is reduced as soon as its bucket is. A tensor without a gradient in this step (an unused one) is left
   out; if no rank has one, its gradient stays as it is. */
int32_t cohort_gradients_ready(cohort_gradients* gradients, int32_t number);
/* Ends the step: all gradients are averages now. */
int32_t cohort_gradients_wait(cohort_gradients* gradients);
/* Frees the handle. Null does nothing. */
int32_t cohort_gradients_free(cohort_gradients* gradients);

#ifdef __cplusplus
}
#endif
#endif
