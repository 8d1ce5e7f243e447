/* Cohort's interface to an MPI library: a table of functions in plain C, implemented by a plug-in that is compiled with
 * the site's mpicc. Before MPI 5, MPI libraries have no common ABI, so nothing else in Cohort includes mpi.h or links
 * an MPI library. All functions return 0 or an MPI error code. Calls never overlap; `initialize` and `finalize` are
 * called on one thread. When the layout or a meaning changes, increment COHORT_MPI_ABI. */
#ifndef COHORT_MPI_H
#define COHORT_MPI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COHORT_MPI_ABI 2u
#define COHORT_MPI_ENTRY "cohort_mpi_plugin"

/* A communicator of all processes that MPI's launcher has started, and requests in numbered slots. */
struct CohortMpiPort;

/* A request that is over. */
struct CohortMpiEvent {
  int32_t slot;
  int32_t error;     /* MPI's error code; 0: none */
  int32_t peer;      /* for a receive: the sender */
  int32_t cancelled; /* for a receive */
  int32_t bytes;     /* for a receive */
};

enum { COHORT_MPI_NOT_BEGUN = 0, COHORT_MPI_RUNNING = 1, COHORT_MPI_OVER = 2 };
enum { COHORT_MPI_SINGLE = 0, COHORT_MPI_FUNNELED = 1, COHORT_MPI_SERIALIZED = 2, COHORT_MPI_MULTIPLE = 3 };

struct CohortMpi {
  uint32_t abi;         /* COHORT_MPI_ABI of the header that the plug-in was compiled with */
  uint32_t bytes;       /* size of this struct */
  const char* family;   /* the launcher's MPI: "openmpi", "mpich", "other"; "abi": `library` tells */
  const char* made_for; /* version in mpi.h: "Open MPI 4.1.4" */

  /* Describes the library; works before initialization too. */
  int (*library)(char* text, int32_t room);
  int (*state)(int32_t* state, int32_t* level);
  int (*initialize)(int32_t* level);
  int (*finalize)(void);
  /* Registers `call` to be called when MPI_Finalize begins. */
  int (*before_finalize)(void (*call)(void));

  /* Begins to duplicate MPI_COMM_WORLD; `opened` reports when the duplicate is ready. */
  int (*open)(int32_t slots, struct CohortMpiPort** port);
  int (*opened)(struct CohortMpiPort* port, int32_t* ready, int32_t* rank, int32_t* size);
  /* Each begins a request in a free slot; `test` reports its end as an event. A receive from peer -1 accepts any. */
  int (*share)(struct CohortMpiPort* port, int32_t slot, void* bytes, int32_t count); /* from rank 0 to all */
  int (*barrier)(struct CohortMpiPort* port, int32_t slot);                           /* ends when all have begun it */
  int (*send)(struct CohortMpiPort* port, int32_t slot, const void* bytes, int32_t count, int32_t peer, int32_t tag);
  int (*receive)(struct CohortMpiPort* port, int32_t slot, void* to, int32_t room, int32_t peer, int32_t tag);
  int (*cancel)(struct CohortMpiPort* port, int32_t slot);
  /* Makes progress. `room` is at least the number of slots. */
  int (*test)(struct CohortMpiPort* port, struct CohortMpiEvent* events, int32_t room, int32_t* count);

  /* Writes a description of an error code. */
  int (*explain)(int32_t code, char* text, int32_t room);
};

const struct CohortMpi* cohort_mpi_plugin(void);

#ifdef __cplusplus
}
#endif

#endif
