/* Each operation of <cohort/c_api.h> against what it has to give, and the errors; prints "all is well" on each rank. */
#ifndef OVER_MPI
#define _POSIX_C_SOURCE 200809L
#endif
#include <cohort/c_api.h>
#ifdef OVER_MPI
#include <cohort/c_api_mpi.h>
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define REQUIRE(what)                                                                         \
  do {                                                                                        \
    if (!(what)) {                                                                            \
      printf("%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #what, cohort_last_error()); \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)
#define OK(call) REQUIRE((call) == COHORT_OK)

#ifndef OVER_MPI
static int pipes[2];
/* Rank 0 writes for the one other rank. */
static int through_a_pipe(void* context, char* text, size_t bytes) {
  const int rank = *(const int*)context;
  const ssize_t moved = rank == 0 ? write(pipes[1], text, bytes) : read(pipes[0], text, bytes);
  return moved == (ssize_t)bytes ? 0 : 7;
}
#endif

static void operations(cohort_comm* world) {
  const int32_t rank = cohort_rank(world), size = cohort_size(world);
  REQUIRE(cohort_local_rank(world) >= 0 && cohort_local_size(world) <= size && strlen(cohort_host(world)) > 0);
  float mine[3] = {(float)rank, 1, -(float)rank}, sum[3], own = (float)rank;
  const float total = (float)(size * (size - 1)) / 2;
  OK(cohort_all_reduce(world, mine, sum, 3, COHORT_FLOAT32, COHORT_SUM, NULL));
  REQUIRE(sum[0] == total && sum[1] == (float)size && sum[2] == -total && mine[0] == (float)rank);
  OK(cohort_all_reduce_weighted(world, mine, sum, 3, COHORT_FLOAT32, rank + 1, NULL));
  REQUIRE(sum[1] == 1);
  OK(cohort_reduce(world, mine, sum, 3, COHORT_FLOAT32, COHORT_MAX, size - 1, NULL));
  if (rank == size - 1) REQUIRE(sum[0] == (float)(size - 1) && sum[2] == 0);
  double told = rank == 0 ? 2.5 : 0;
  OK(cohort_broadcast(world, &told, 1, COHORT_FLOAT64, 0, NULL));
  REQUIRE(told == 2.5);
  float *all = calloc((size_t)size, sizeof *all), *back = calloc((size_t)size, sizeof *back);
  cohort_work* work;
  OK(cohort_all_gather(world, &own, all, 1, COHORT_FLOAT32, &work));
  int32_t done = 0;
  while (!done) OK(cohort_test(work, &done));
  OK(cohort_wait(work));
  for (int r = 0; r < size; ++r) REQUIRE(all[r] == (float)r);
  OK(cohort_reduce_scatter(world, all, &own, 1, COHORT_FLOAT32, COHORT_SUM, NULL));
  REQUIRE(own == (float)(rank * size));
  OK(cohort_all_to_all(world, all, back, 1, COHORT_FLOAT32, NULL));
  for (int r = 0; r < size; ++r) REQUIRE(back[r] == (float)rank);
  if (size > 1) {
    int64_t sent = rank, got = -1;
    OK(cohort_send(world, &sent, 1, COHORT_INT64, (rank + 1) % size, 5, &work));
    OK(cohort_recv(world, &got, 1, COHORT_INT64, (rank + size - 1) % size, 5, NULL));
    OK(cohort_wait(work));
    REQUIRE(got == (rank + size - 1) % size);
  }
  free(all);
  free(back);
  void* memory;
  OK(cohort_allocate(world, 4096, &memory));
  ((int32_t*)memory)[0] = rank;
  OK(cohort_all_reduce(world, memory, memory, 1, COHORT_INT32, COHORT_MAX, NULL));
  REQUIRE(((int32_t*)memory)[0] == size - 1);
  OK(cohort_free(memory));
  REQUIRE(cohort_free(memory) == COHORT_INVALID_ARGUMENT);
  cohort_comm* part;
  OK(cohort_split(world, rank == 0 ? 0 : -1, 0, &part));
  REQUIRE((part != NULL) == (rank == 0));
  if (part != NULL) REQUIRE(cohort_size(part) == 1);
  OK(cohort_finalize(part));
  OK(cohort_barrier(world));
}

/* Tensors of which one is large, one is used by rank 0 alone and one by nobody, with samples that differ. */
static void gradients_of(cohort_comm* world) {
  enum { LARGE = 3 << 20 };
  const int32_t rank = cohort_rank(world), size = cohort_size(world);
  static float weights[4], small[4], large[LARGE], first[2], unused[2];
  cohort_gradients* plan;
  cohort_gradients_options options = COHORT_GRADIENTS_OPTIONS;
  options.raise_non_finite = 1;
  OK(cohort_gradients_create(world, &options, &plan));
  REQUIRE(cohort_gradients_begin(plan, 1) == COHORT_INVALID_ARGUMENT);
  OK(cohort_gradients_add(plan, "small", weights, small, 4, COHORT_FLOAT32));
  OK(cohort_gradients_add(plan, "large", NULL, large, LARGE, COHORT_FLOAT32));
  OK(cohort_gradients_add(plan, "first", NULL, first, 2, COHORT_FLOAT32));
  OK(cohort_gradients_add(plan, "unused", NULL, unused, 2, COHORT_FLOAT32));
  REQUIRE(cohort_gradients_add(plan, "small", NULL, small, 4, COHORT_FLOAT32) == COHORT_INVALID_ARGUMENT);
  REQUIRE(cohort_gradients_add(plan, "ints", NULL, small, 4, COHORT_INT32) == COHORT_INVALID_ARGUMENT);
  REQUIRE(strstr(cohort_last_error(), "'ints' is of int32") != NULL);
  double samples = 0, weighted = 0;
  for (int r = 0; r < size; ++r) samples += r + 1, weighted += (r + 1) * (double)r;
  for (int step = 0; step < 4; ++step) {
    OK(cohort_gradients_begin(plan, rank + 1));
    REQUIRE(cohort_gradients_begin(plan, 1) == COHORT_INVALID_ARGUMENT);
    for (int i = 0; i < 4; ++i) small[i] = (float)rank;
    for (int i = 0; i < LARGE; ++i) large[i] = (float)(rank + step);
    first[0] = first[1] = 6;
    unused[0] = 13;
    OK(cohort_gradients_ready(plan, 0));
    if (rank == 0) OK(cohort_gradients_ready(plan, 2));
    OK(cohort_gradients_ready(plan, 1));
    REQUIRE(cohort_gradients_ready(plan, 1) == COHORT_INVALID_ARGUMENT);
    REQUIRE(cohort_gradients_ready(plan, 4) == COHORT_INVALID_ARGUMENT);
    OK(cohort_gradients_wait(plan));
    REQUIRE(fabs(small[3] - weighted / samples) < 1e-5);
    REQUIRE(fabs(large[LARGE - 1] - step - weighted / samples) < 1e-5);
    REQUIRE(fabs(first[1] - 6 / samples) < 1e-5);
    REQUIRE(unused[0] == 13);
  }
  /* A NaN of one rank is refused on all, and the next step is as ever. */
  OK(cohort_gradients_begin(plan, -1));
  for (int i = 0; i < 4; ++i) small[i] = rank == size - 1 ? NAN : 1;
  OK(cohort_gradients_ready(plan, 0));
  REQUIRE(cohort_gradients_wait(plan) == COHORT_NON_FINITE);
  REQUIRE(strstr(cohort_last_error(), "small") != NULL);
  REQUIRE(cohort_gradients_wait(plan) == COHORT_INVALID_ARGUMENT);
  OK(cohort_gradients_begin(plan, -1));
  for (int i = 0; i < 4; ++i) small[i] = (float)rank;
  OK(cohort_gradients_ready(plan, 0));
  OK(cohort_gradients_wait(plan));
  REQUIRE(fabs(small[0] - (float)(size - 1) / 2) < 1e-6);
  /* Weights that differ are named on all ranks. */
  if (size > 1) {
    weights[2] = rank == 1 ? 0.5f : 0;
    int32_t status = COHORT_OK;
    for (int step = 0; step < 2 && status == COHORT_OK; ++step) {
      OK(cohort_gradients_begin(plan, -1));
      OK(cohort_gradients_ready(plan, 0));
      status = cohort_gradients_wait(plan);
    }
    REQUIRE(status == COHORT_MISMATCH && strstr(cohort_last_error(), "small") != NULL);
    REQUIRE(strstr(cohort_last_error(), "0.5") != NULL);
  }
  OK(cohort_gradients_free(plan));
}

static void errors(cohort_comm* world) {
  const int32_t rank = cohort_rank(world), size = cohort_size(world);
  float values[2] = {0, 0};
  REQUIRE(cohort_all_reduce(NULL, values, values, 2, COHORT_FLOAT32, COHORT_SUM, NULL) == COHORT_INVALID_ARGUMENT);
  REQUIRE(cohort_all_reduce(world, values, values, 2, 99, COHORT_SUM, NULL) == COHORT_INVALID_ARGUMENT);
  REQUIRE(cohort_all_reduce(world, values, values, 2, COHORT_FLOAT32, 99, NULL) == COHORT_INVALID_ARGUMENT);
  REQUIRE(cohort_all_reduce(world, values, values, -1, COHORT_FLOAT32, COHORT_SUM, NULL) == COHORT_INVALID_ARGUMENT);
  REQUIRE(strlen(cohort_last_error()) > 0 &&
          strcmp(cohort_error_name(COHORT_INVALID_ARGUMENT), "InvalidArgument") == 0);
  REQUIRE(cohort_rank(NULL) == -1 && cohort_wait(NULL) == COHORT_OK && strcmp(cohort_error_name(77), "") == 0);
  cohort_init_options options = COHORT_INIT_OPTIONS;
  options.struct_bytes = 100000;
  cohort_comm* none;
  REQUIRE(cohort_init(&options, &none) == COHORT_INVALID_ARGUMENT && none == NULL);
  if (size > 1) {
    REQUIRE(cohort_all_reduce(world, values, values, rank == 0 ? 1 : 2, COHORT_FLOAT32, COHORT_SUM, NULL) ==
            COHORT_MISMATCH);
    OK(cohort_barrier(world)); /* it stays usable */
    if (rank == 0) OK(cohort_abort(world, "had enough"));
    REQUIRE(cohort_barrier(world) == COHORT_ABORTED);
    REQUIRE(strstr(cohort_last_error(), "had enough") != NULL);
  }
}

int main(int argc, char** argv) {
  cohort_init_options options = COHORT_INIT_OPTIONS;
  cohort_comm* world;
  int rank = 0;
  (void)argv;
  REQUIRE(cohort_c_api_version() >= COHORT_C_API_VERSION && strlen(cohort_version()) > 0);
#ifdef OVER_MPI
  REQUIRE(MPI_Init(&argc, &argv) == MPI_SUCCESS);
  OK(cohort_init_over_mpi(MPI_COMM_WORLD, &options, &world));
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  REQUIRE(cohort_rank(world) == rank);
#else
  if (argc > 1) {
    REQUIRE(pipe(pipes) == 0);
    rank = fork() == 0;
    options.share = through_a_pipe;
    options.share_context = &rank;
    options.rank = rank;
    options.world_size = 2;
  }
  OK(cohort_init(argc > 1 ? &options : NULL, &world));
#endif
  operations(world);
  gradients_of(world);
  errors(world);
  OK(cohort_finalize(world));
  printf("all is well\n");
#ifdef OVER_MPI
  MPI_Finalize();
#else
  if (argc > 1 && rank == 0) {
    int status = 1;
    REQUIRE(wait(&status) > 0 && status == 0);
  }
#endif
  return 0;
}
