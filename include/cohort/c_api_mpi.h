/* A world over an MPI communicator, for programs of MPI; include after <mpi.h>, or let it include that. The functions
   are compiled by the program's own compiler, since MPI libraries share no binary interface. */
#ifndef COHORT_C_API_MPI_H
#define COHORT_C_API_MPI_H

#include <cohort/c_api.h>
#include <mpi.h>

static inline int cohort_share_over_mpi(void* context, char* text, size_t bytes) {
  return MPI_Bcast(text, (int)bytes, MPI_CHAR, 0, *(MPI_Comm*)context) == MPI_SUCCESS ? 0 : 1;
}

/* Forms a world of the ranks of `mpi`, numbered as there, which learn by one MPI_Bcast where to meet. Collective.
   `options` may be null; its rank, world_size and share are set here. A group_name belongs to one communicator: worlds
   over others have other names. */
static inline int32_t cohort_init_over_mpi(MPI_Comm mpi, const cohort_init_options* options, cohort_comm** comm) {
  cohort_init_options all = COHORT_INIT_OPTIONS;
  int rank, size;
  if (options) all = *options;
  MPI_Comm_rank(mpi, &rank);
  MPI_Comm_size(mpi, &size);
  all.rank = rank;
  all.world_size = size;
  all.alone = size == 1;
  all.share = size == 1 ? 0 : cohort_share_over_mpi;
  all.share_context = &mpi;
  return cohort_init(&all, comm);
}

/* The same for Fortran's handle of a communicator. */
static inline int32_t cohort_init_over_mpi_f(MPI_Fint mpi, const cohort_init_options* options, cohort_comm** comm) {
  return cohort_init_over_mpi(MPI_Comm_f2c(mpi), options, comm);
}

#endif
