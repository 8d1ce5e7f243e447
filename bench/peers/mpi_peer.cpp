// An MPI library as a peer; compiled once by each library's own wrapper.
//   mpirun -np N mpi_peer FOLDER
#include <mpi.h>

#include "peer_loop.h"

#include <cstdlib>

namespace {

using peers::Collective;

/// MPI_DATATYPE_NULL where the library has none. Sums of 16 bits need MPICH 5: Open MPI has no such types, and MPICH 4
/// aborts in the sum of its MPIX_C_FLOAT16.
MPI_Datatype datatype_of(peers::Type type) {
  switch (type) {
    case peers::Type::Float32: return MPI_FLOAT;
    case peers::Type::Int64: return MPI_INT64_T;
#ifdef MPIX_BFLOAT16
    case peers::Type::Float16: return MPIX_C_FLOAT16;
    case peers::Type::BFloat16: return MPIX_BFLOAT16;
#else
    case peers::Type::Float16:
    case peers::Type::BFloat16: break;
#endif
  }
  return MPI_DATATYPE_NULL;
}

class MpiLibrary {
 public:
  MpiLibrary() {
    MPI_Init(nullptr, nullptr);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(text, &length);
    name_ = text;
    name_ = name_.substr(0, name_.find_first_of(",\n"));
    for (char& c : name_) {
      if (c == '\t' || c == '"' || c == '\\') c = ' ';
    }
  }
  ~MpiLibrary() { MPI_Finalize(); }
  MpiLibrary(const MpiLibrary&) = delete;
  MpiLibrary& operator=(const MpiLibrary&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::string name() const { return name_; }
  bool supports(Collective, peers::Type type, peers::Memory memory) const {
    return datatype_of(type) != MPI_DATATYPE_NULL && memory == peers::Memory::Heap;
  }
  void* allocate(std::size_t bytes, peers::Memory) {
    void* const data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (data == nullptr) throw std::runtime_error("no memory");
    return data;
  }
  void progress() {
    int flag = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
  }
  void call(Collective collective, peers::Type element, const void* input, void* output, std::size_t elements) {
    const int count = static_cast<int>(elements);
    const MPI_Comm world = MPI_COMM_WORLD;
    const MPI_Datatype type = datatype_of(element);
    switch (collective) {
      case Collective::AllReduce: MPI_Allreduce(MPI_IN_PLACE, output, count, type, MPI_SUM, world); break;
      case Collective::Reduce: MPI_Reduce(input, output, count, type, MPI_SUM, 0, world); break;
      case Collective::Broadcast: MPI_Bcast(output, count, type, 0, world); break;
      case Collective::AllGather: MPI_Allgather(input, count, type, output, count, type, world); break;
      case Collective::Gather: MPI_Gather(input, count, type, output, count, type, 0, world); break;
      case Collective::Scatter: MPI_Scatter(input, count, type, output, count, type, 0, world); break;
      case Collective::ReduceScatter: MPI_Reduce_scatter_block(input, output, count, type, MPI_SUM, world); break;
      case Collective::AllToAll: MPI_Alltoall(input, count, type, output, count, type, world); break;
      case Collective::SendRecv:
        if (rank_ == 0) {
          MPI_Send(output, count, type, 1, 0, world);
          MPI_Recv(output, count, type, 1, 0, world, MPI_STATUS_IGNORE);
        } else if (rank_ == 1) {
          MPI_Recv(output, count, type, 0, 0, world, MPI_STATUS_IGNORE);
          MPI_Send(output, count, type, 0, 0, world);
        }
        break;
      case Collective::Barrier: MPI_Barrier(world); break;
    }
  }

 private:
  int rank_ = 0, size_ = 1;
  std::string name_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  MpiLibrary library;
  return peers::serve(library, argv[1]);
}
