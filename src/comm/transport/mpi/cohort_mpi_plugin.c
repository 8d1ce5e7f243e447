/* The plug-in: implements Cohort's table (cohort_mpi.h) with the MPI that this file is compiled for. `cohort build-mpi`
 * compiles this file; by hand: mpicc -O2 -fPIC -shared -o cohort-mpi-SITE.so cohort_mpi_plugin.c. Needs MPI 3. */
#include "cohort_mpi.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_OF(number) #number
#define TEXT(number) TEXT_OF(number)

#if defined(OPEN_MPI)
#define FAMILY "openmpi"
#define MADE_FOR "Open MPI " TEXT(OMPI_MAJOR_VERSION) "." TEXT(OMPI_MINOR_VERSION) "." TEXT(OMPI_RELEASE_VERSION)
#elif defined(I_MPI_VERSION)
#define FAMILY "mpich"
#define MADE_FOR "Intel MPI " I_MPI_VERSION
#elif defined(MVAPICH2_VERSION)
#define FAMILY "mpich"
#define MADE_FOR "MVAPICH2 " MVAPICH2_VERSION
#elif defined(MPICH_VERSION)
#define FAMILY "mpich"
#define MADE_FOR "MPICH " MPICH_VERSION
#elif defined(MPI_ABI_VERSION)
#define FAMILY "abi"
#define MADE_FOR "MPI's standard ABI " TEXT(MPI_ABI_VERSION) "." TEXT(MPI_ABI_SUBVERSION)
#else
#define FAMILY "other"
#define MADE_FOR "MPI " TEXT(MPI_VERSION) "." TEXT(MPI_SUBVERSION)
#endif

struct CohortMpiPort {
  MPI_Comm comm;
  MPI_Request opening;
  int32_t slots;
  MPI_Request* requests;
  int* indices;
  MPI_Status* statuses;
};

static void (*before_finalize_call)(void) = NULL;

static int plugin_library(char* text, int32_t room) {
  char buffer[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  const int code = MPI_Get_library_version(buffer, &length);
  if (code != MPI_SUCCESS) return code;
  snprintf(text, (size_t)room, "%.*s", length, buffer);
  return 0;
}

static int32_t level_of(int level) {
  if (level >= MPI_THREAD_MULTIPLE) return COHORT_MPI_MULTIPLE;
  if (level >= MPI_THREAD_SERIALIZED) return COHORT_MPI_SERIALIZED;
  return level >= MPI_THREAD_FUNNELED ? COHORT_MPI_FUNNELED : COHORT_MPI_SINGLE;
}

static int plugin_state(int32_t* state, int32_t* level) {
  int begun = 0;
  int over = 0;
  int provided = MPI_THREAD_SINGLE;
  int code = MPI_Initialized(&begun);
  if (code == MPI_SUCCESS) code = MPI_Finalized(&over);
  if (code == MPI_SUCCESS && begun && !over) code = MPI_Query_thread(&provided);
  *state = over ? COHORT_MPI_OVER : begun ? COHORT_MPI_RUNNING : COHORT_MPI_NOT_BEGUN;
  *level = level_of(provided);
  return code;
}

static int plugin_initialize(int32_t* level) {
  int provided = MPI_THREAD_SINGLE;
  const int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
  *level = level_of(provided);
  return code;
}

static int plugin_finalize(void) { return MPI_Finalize(); }

static int self_is_deleted(MPI_Comm comm, int key, void* value, void* extra) {
  (void)comm;
  (void)key;
  (void)value;
  (void)extra;
  if (before_finalize_call != NULL) before_finalize_call();
  return MPI_SUCCESS;
}

/* Uses that MPI_Finalize begins by deleting the attributes of MPI_COMM_SELF. */
static int plugin_before_finalize(void (*call)(void)) {
  int key = MPI_KEYVAL_INVALID;
  int code = MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, self_is_deleted, &key, NULL);
  if (code == MPI_SUCCESS) code = MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
  if (code == MPI_SUCCESS) before_finalize_call = call;
  return code;
}

static void discard(struct CohortMpiPort* port) {
  free(port->requests);
  free(port->indices);
  free(port->statuses);
  free(port);
}

static int plugin_open(int32_t slots, struct CohortMpiPort** made) {
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  struct CohortMpiPort* const port = calloc(1, sizeof *port);
  int code = MPI_SUCCESS;
  int32_t i = 0;
  if (port == NULL) return MPI_ERR_NO_MEM;
  port->slots = slots;
  port->requests = calloc((size_t)slots, sizeof *port->requests);
  port->indices = calloc((size_t)slots, sizeof *port->indices);
  port->statuses = calloc((size_t)slots, sizeof *port->statuses);
  if (port->requests == NULL || port->indices == NULL || port->statuses == NULL) {
    discard(port);
    return MPI_ERR_NO_MEM;
  }
  for (i = 0; i < slots; ++i) port->requests[i] = MPI_REQUEST_NULL;
  /* Return errors meanwhile; the program's error handler is restored afterwards. */
  code = MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (code == MPI_SUCCESS) code = MPI_Comm_idup(MPI_COMM_WORLD, &port->comm, &port->opening);
  if (handler != MPI_ERRHANDLER_NULL) {
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
    MPI_Errhandler_free(&handler);
  }
  if (code != MPI_SUCCESS) {
    discard(port);
    return code;
  }
  *made = port;
  return 0;
}

static int plugin_opened(struct CohortMpiPort* port, int32_t* ready, int32_t* rank, int32_t* size) {
  int there = 0;
  int number = 0;
  int count = 0;
  int code = MPI_Test(&port->opening, &there, MPI_STATUS_IGNORE);
  *ready = 0;
  if (code != MPI_SUCCESS || !there) return code;
  code = MPI_Comm_set_errhandler(port->comm, MPI_ERRORS_RETURN);
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(port->comm, &number);
  if (code == MPI_SUCCESS) code = MPI_Comm_size(port->comm, &count);
  *ready = code == MPI_SUCCESS;
  *rank = number;
  *size = count;
  return code;
}

static int plugin_share(struct CohortMpiPort* port, int32_t slot, void* bytes, int32_t count) {
  return MPI_Ibcast(bytes, count, MPI_BYTE, 0, port->comm, &port->requests[slot]);
}

static int plugin_barrier(struct CohortMpiPort* port, int32_t slot) {
  return MPI_Ibarrier(port->comm, &port->requests[slot]);
}

static int plugin_send(struct CohortMpiPort* port, int32_t slot, const void* bytes, int32_t count, int32_t peer,
                       int32_t tag) {
  return MPI_Isend(bytes, count, MPI_BYTE, peer, tag, port->comm, &port->requests[slot]);
}

static int plugin_receive(struct CohortMpiPort* port, int32_t slot, void* to, int32_t room, int32_t peer, int32_t tag) {
  return MPI_Irecv(to, room, MPI_BYTE, peer < 0 ? MPI_ANY_SOURCE : peer, tag, port->comm, &port->requests[slot]);
}

static int plugin_cancel(struct CohortMpiPort* port, int32_t slot) {
  return port->requests[slot] == MPI_REQUEST_NULL ? 0 : MPI_Cancel(&port->requests[slot]);
}

static int plugin_test(struct CohortMpiPort* port, struct CohortMpiEvent* events, int32_t room, int32_t* count) {
  int done = 0;
  int i = 0;
  const int code = MPI_Testsome(port->slots, port->requests, &done, port->indices, port->statuses);
  *count = 0;
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
    int class = MPI_ERR_OTHER;
    if (MPI_Error_class(code, &class) != MPI_SUCCESS || class != MPI_ERR_IN_STATUS) return code;
  }
  if (done == MPI_UNDEFINED) return 0;
  for (i = 0; i < done && i < room; ++i) {
    struct CohortMpiEvent* const event = &events[i];
    int cancelled = 0;
    int bytes = 0;
    event->slot = port->indices[i];
    event->error = code == MPI_SUCCESS ? 0 : port->statuses[i].MPI_ERROR;
    event->peer = port->statuses[i].MPI_SOURCE;
    if (event->error == MPI_ERR_PENDING) event->error = 0;
    MPI_Test_cancelled(&port->statuses[i], &cancelled);
    if (!cancelled && event->error == 0) MPI_Get_count(&port->statuses[i], MPI_BYTE, &bytes);
    event->cancelled = cancelled;
    event->bytes = bytes == MPI_UNDEFINED ? 0 : bytes;
  }
  *count = i;
  return 0;
}

static int plugin_explain(int32_t code, char* text, int32_t room) {
  char buffer[MPI_MAX_ERROR_STRING];
  int length = 0;
  const int result = MPI_Error_string(code, buffer, &length);
  if (result != MPI_SUCCESS) return result;
  snprintf(text, (size_t)room, "%.*s", length, buffer);
  return 0;
}

const struct CohortMpi* cohort_mpi_plugin(void) {
  static const struct CohortMpi table = {
      COHORT_MPI_ABI,         sizeof(struct CohortMpi), FAMILY,        MADE_FOR,       plugin_library, plugin_state,
      plugin_initialize,      plugin_finalize,          plugin_before_finalize,        plugin_open,    plugin_opened,
      plugin_share,           plugin_barrier,           plugin_send,   plugin_receive, plugin_cancel,  plugin_test,
      plugin_explain};
  return &table;
}
