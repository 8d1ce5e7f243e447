/* A network of two layers by hand, trained on the digits by any number of ranks: what a C program needs of Cohort. */
#include <cohort/c_api.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { PIXELS = 64, HIDDEN = 32, CLASSES = 10, BATCH = 120, EPOCHS = 30 };

static void check(int32_t status) {
  if (status == COHORT_OK) return;
  fprintf(stderr, "%s: %s\n", cohort_error_name(status), cohort_last_error());
  exit(1);
}

/* The bytes of an IDX file behind its head, and how many items it has. */
static unsigned char* read_idx(const char* folder, const char* name, int head, int item, int* items) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* file = fopen(path, "rb");
  if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
    perror(path);
    exit(1);
  }
  const long bytes = ftell(file) - head;
  unsigned char* all = malloc((size_t)bytes);
  fseek(file, head, SEEK_SET);
  if (fread(all, 1, (size_t)bytes, file) != (size_t)bytes) exit(1);
  fclose(file);
  *items = (int)(bytes / item);
  return all;
}

static float w1[HIDDEN][PIXELS + 1], w2[CLASSES][HIDDEN + 1]; /* the last column is the bias */
static float g1[HIDDEN][PIXELS + 1], g2[CLASSES][HIDDEN + 1];

/* The probabilities of an image's classes; returns the likeliest. */
static int forward(const unsigned char* image, float* x, float* h, float* p) {
  for (int i = 0; i < PIXELS; ++i) x[i] = (float)image[i] / 255;
  x[PIXELS] = h[HIDDEN] = 1;
  for (int j = 0; j < HIDDEN; ++j) {
    float sum = 0;
    for (int i = 0; i <= PIXELS; ++i) sum += w1[j][i] * x[i];
    h[j] = tanhf(sum);
  }
  float all = 0;
  int best = 0;
  for (int k = 0; k < CLASSES; ++k) {
    float sum = 0;
    for (int j = 0; j <= HIDDEN; ++j) sum += w2[k][j] * h[j];
    all += p[k] = expf(sum);
    if (p[k] > p[best]) best = k;
  }
  for (int k = 0; k < CLASSES; ++k) p[k] /= all;
  return best;
}

int main(int argc, char** argv) {
  const char* folder = argc > 1 ? argv[1] : "data/digits";
  int count, tests, ignored;
  unsigned char* images = read_idx(folder, "train-images-idx3-ubyte", 16, PIXELS, &count);
  unsigned char* labels = read_idx(folder, "train-labels-idx1-ubyte", 8, 1, &ignored);
  unsigned char* test_images = read_idx(folder, "t10k-images-idx3-ubyte", 16, PIXELS, &tests);
  unsigned char* test_labels = read_idx(folder, "t10k-labels-idx1-ubyte", 8, 1, &ignored);
  srand(1);
  for (int j = 0; j < HIDDEN; ++j)
    for (int i = 0; i < PIXELS; ++i) w1[j][i] = ((float)rand() / (float)RAND_MAX - 0.5f) / 4;
  for (int k = 0; k < CLASSES; ++k)
    for (int j = 0; j < HIDDEN; ++j) w2[k][j] = ((float)rand() / (float)RAND_MAX - 0.5f) / 2;

  cohort_comm* world; /* of what `cohort run`, mpirun or srun has started, else of this process alone */
  check(cohort_init(NULL, &world));
  const int rank = cohort_rank(world), size = cohort_size(world);
  cohort_gradients* gradients; /* buckets, reduced while the rest is computed */
  check(cohort_gradients_create(world, NULL, &gradients));
  check(cohort_gradients_add(gradients, "w1", w1, g1, HIDDEN * (PIXELS + 1), COHORT_FLOAT32));  /* number 0 */
  check(cohort_gradients_add(gradients, "w2", w2, g2, CLASSES * (HIDDEN + 1), COHORT_FLOAT32)); /* number 1 */

  static float xs[BATCH][PIXELS + 1], hs[BATCH][HIDDEN + 1], ps[BATCH][CLASSES];
  for (int step = 0; step < EPOCHS * count / BATCH; ++step) {
    const int first = BATCH * rank / size, mine = BATCH * (rank + 1) / size - first; /* this rank's part of the batch */
    check(cohort_gradients_begin(gradients, mine));
    for (int k = 0; k < CLASSES; ++k)
      for (int j = 0; j <= HIDDEN; ++j) g2[k][j] = 0;
    for (int n = 0; n < mine; ++n) {
      const int item = (step * BATCH + first + n) % count;
      forward(images + item * PIXELS, xs[n], hs[n], ps[n]);
      ps[n][labels[item]] -= 1;
      for (int k = 0; k < CLASSES; ++k)
        for (int j = 0; j <= HIDDEN; ++j) g2[k][j] += ps[n][k] * hs[n][j] / (float)mine;
    }
    check(cohort_gradients_ready(gradients, 1));
    for (int j = 0; j < HIDDEN; ++j)
      for (int i = 0; i <= PIXELS; ++i) g1[j][i] = 0;
    for (int n = 0; n < mine; ++n)
      for (int j = 0; j < HIDDEN; ++j) {
        float back = 0;
        for (int k = 0; k < CLASSES; ++k) back += ps[n][k] * w2[k][j];
        back *= (1 - hs[n][j] * hs[n][j]) / (float)mine;
        for (int i = 0; i <= PIXELS; ++i) g1[j][i] += back * xs[n][i];
      }
    check(cohort_gradients_ready(gradients, 0));
    check(cohort_gradients_wait(gradients)); /* g1 and g2 are averages over the whole batch now */
    for (int i = 0; i < HIDDEN * (PIXELS + 1); ++i) (&w1[0][0])[i] -= 0.5f * (&g1[0][0])[i];
    for (int i = 0; i < CLASSES * (HIDDEN + 1); ++i) (&w2[0][0])[i] -= 0.5f * (&g2[0][0])[i];
  }

  int64_t right = 0; /* each rank tests its part */
  for (int item = tests * rank / size; item < tests * (rank + 1) / size; ++item)
    right += forward(test_images + item * PIXELS, xs[0], hs[0], ps[0]) == test_labels[item];
  check(cohort_all_reduce(world, &right, &right, 1, COHORT_INT64, COHORT_SUM, NULL));
  if (rank == 0) printf("accuracy %.2f on %d digits, %d ranks\n", (double)right / tests, tests, size);
  check(cohort_gradients_free(gradients));
  check(cohort_finalize(world));
  return 0;
}
