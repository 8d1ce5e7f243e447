/* What Cohort asks of an MPI library: a table of functions in plain C, which a plug-in compiled by the site's mpicc
 * fills in. Before MPI 5 its libraries share no binary interface, so nothing else of Cohort includes mpi.h or links
 * one. All functions return 0 or an MPI error code. The caller never calls two at once; `initialize` and `finalize` are
 * called on one thread. Change the layout or a meaning: count COHORT_MPI_ABI up. */
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
  int32_t error;     /* of MPI; 0: none */
  int32_t peer;      /* of a receive: who sent */
  int32_t cancelled; /* of a receive */
  int32_t bytes;     /* of a receive */
};

enum { COHORT_MPI_NOT_BEGUN = 0, COHORT_MPI_RUNNING = 1, COHORT_MPI_OVER = 2 };
enum { COHORT_MPI_SINGLE = 0, COHORT_MPI_FUNNELED = 1, COHORT_MPI_SERIALIZED = 2, COHORT_MPI_MULTIPLE = 3 };

struct CohortMpi {
  uint32_t abi;         /* COHORT_MPI_ABI of the header that the plug-in was compiled with */
  uint32_t bytes;       /* of this struct */
  const char* family;   /* whose launcher starts it: "openmpi", "mpich"; "abi": its library says; "other" */
  const char* made_for; /* "Open MPI 4.1.4": what mpi.h says */

  /* What the library says of itself; also before it is initialized. */
  int (*library)(char* text, int32_t room);
  int (*state)(int32_t* state, int32_t* level);
  int (*initialize)(int32_t* level);
  int (*finalize)(void);
  /* Has `call` called when MPI_Finalize begins, whoever calls that. */
  int (*before_finalize)(void (*call)(void));

  /* Begins to duplicate MPI_COMM_WORLD; `opened` says when it is there. */
  int (*open)(int32_t slots, struct CohortMpiPort** port);
  int (*opened)(struct CohortMpiPort* port, int32_t* ready, int32_t* rank, int32_t* size);
  /* Begin what ends as an event of the slot, which has to be free. -1 as peer of a receive: anybody. */
  int (*share)(struct CohortMpiPort* port, int32_t slot, void* bytes, int32_t count); /* from rank 0 to all */
  int (*barrier)(struct CohortMpiPort* port, int32_t slot);                           /* ends when all have begun it */
  int (*send)(struct CohortMpiPort* port, int32_t slot, const void* bytes, int32_t count, int32_t peer, int32_t tag);
  int (*receive)(struct CohortMpiPort* port, int32_t slot, void* to, int32_t room, int32_t peer, int32_t tag);
  int (*cancel)(struct CohortMpiPort* port, int32_t slot);
  /* Makes progress. `room` is at least the number of slots. */
  int (*test)(struct CohortMpiPort* port, struct CohortMpiEvent* events, int32_t room, int32_t* count);

  /* An error code in words. */
  int (*explain)(int32_t code, char* text, int32_t room);
};

const struct CohortMpi* cohort_mpi_plugin(void);

#ifdef __cplusplus
}
#endif

#endif
