// The same measurement as all_reduce_bench over MPI: rewritten buffers, in place, the slowest rank's median.
//   mpirun -np N mpi_all_reduce BYTES ITERATIONS
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const std::size_t bytes = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::size_t{64} << 20;
  const int iterations = argc > 2 ? std::atoi(argv[2]) : 20;
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::vector<float> data(bytes / sizeof(float));
  std::vector<double> times;
  for (int i = 0; i < iterations + 3; ++i) {
    std::fill(data.begin(), data.end(), 1.0F);
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    const double end = MPI_Wtime();
    if (data.front() != static_cast<float>(size) || data.back() != data.front()) MPI_Abort(MPI_COMM_WORLD, 1);
    if (i >= 3) times.push_back((end - begin) * 1e6);
  }
  std::vector<double> slowest(times.size());
  MPI_Reduce(times.data(), slowest.data(), static_cast<int>(times.size()), MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    std::nth_element(slowest.begin(), slowest.begin() + static_cast<std::ptrdiff_t>(slowest.size() / 2), slowest.end());
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);
    std::printf("{\"library\": \"mpi\", \"ranks\": %d, \"bytes\": %zu, \"us\": %.2f, \"version\": \"%.40s\"}\n", size,
                bytes, slowest[slowest.size() / 2], version);
  }
  MPI_Finalize();
  return 0;
}
