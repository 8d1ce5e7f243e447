// Cohort itself, measured by the same loop as the others.
//   cohort_peer FOLDER RANK RANKS
//   cohort_peer FOLDER [FORMAT]          as a rank of `cohort run`; what float32 travels as between hosts: int8, ...
#include "peer_loop.h"

#include <cohort/cohort.h>

#include <sys/prctl.h>

#include <csignal>
#include <cstdlib>
#include <optional>
#include <vector>

namespace {

using peers::Collective;

cohort::DType dtype_of(peers::Type type) {
  switch (type) {
    case peers::Type::Float16: return cohort::DType::Float16;
    case peers::Type::BFloat16: return cohort::DType::BFloat16;
    case peers::Type::Int64: return cohort::DType::Int64;
    case peers::Type::Float32: break;
  }
  return cohort::DType::Float32;
}

cohort::WireFormat format_of(std::string_view name) {
  for (int i = 0; i < cohort::kWireFormatCount; ++i) {
    if (name == to_string(static_cast<cohort::WireFormat>(i))) return static_cast<cohort::WireFormat>(i);
  }
  throw std::invalid_argument("there is no such format");
}

class CohortLibrary {
 public:
  explicit CohortLibrary(cohort::WireFormat wire)
      : comm_(cohort::init({.timeout = std::chrono::seconds(peers::kSecondsPerCommand)})), wire_(wire) {}
  CohortLibrary(const std::string& folder, int rank, int size)
      : comm_(cohort::init({.init_method = "file://" + folder + "/meet",
                            .rank = rank,
                            .world_size = size,
                            .timeout = std::chrono::seconds(peers::kSecondsPerCommand)})) {}

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  std::string name() const { return "Cohort"; }
  bool supports(Collective, peers::Type, peers::Memory) const { return true; }
  void* allocate(std::size_t bytes, peers::Memory memory) {
    if (memory == peers::Memory::Heap) {
      void* const data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
      if (data == nullptr) throw std::runtime_error("no memory");
      return data;
    }
    arena_.push_back(comm_.allocate(bytes));
    return arena_.back().data();
  }
  void progress() {}  // an operation that has been waited for leaves nothing to do
  void call(Collective collective, peers::Type type, const void* data, void* output, std::size_t elements) {
    const cohort::DType dtype = dtype_of(type);
    const auto count = static_cast<std::int64_t>(elements);
    const std::int64_t all = count * comm_.size();
    const auto in = [&](std::int64_t n) { return cohort::ConstBuffer(data, n, dtype); };
    const auto out = [&](std::int64_t n) { return cohort::Buffer(output, n, dtype); };
    switch (collective) {
      case Collective::AllReduce: comm_.all_reduce(out(count), {.wire_format = wire_}).wait(); break;
      case Collective::Reduce: comm_.reduce(in(count), out(count)).wait(); break;
      case Collective::Broadcast: comm_.broadcast(out(count)).wait(); break;
      case Collective::AllGather: comm_.all_gather(in(count), out(all)).wait(); break;
      case Collective::Gather: comm_.gather(in(count), out(all)).wait(); break;
      case Collective::Scatter: comm_.scatter(in(all), out(count)).wait(); break;
      case Collective::ReduceScatter: comm_.reduce_scatter(in(all), out(count)).wait(); break;
      case Collective::AllToAll: comm_.all_to_all(in(all), out(all)).wait(); break;
      case Collective::SendRecv:
        if (rank() == 0) {
          comm_.send(in(count), 1).wait();
          comm_.recv(out(count), 1).wait();
        } else if (rank() == 1) {
          comm_.recv(out(count), 0).wait();
          comm_.send(in(count), 0).wait();
        }
        break;
      case Collective::Barrier: comm_.barrier().wait(); break;
    }
  }

 private:
  cohort::Communicator comm_;
  std::vector<cohort::Memory> arena_;
  cohort::WireFormat wire_ = cohort::WireFormat::None;
};

}  // namespace

int main(int argc, char** argv) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (argc < 2 || argc > 4) return 2;
  try {
    if (argc <= 3) {
      CohortLibrary library(argc == 3 ? format_of(argv[2]) : cohort::WireFormat::None);
      return peers::serve(library, argv[1]);
    }
    CohortLibrary library(argv[1], std::atoi(argv[2]), std::atoi(argv[3]));
    return peers::serve(library, argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cohort_peer: %s\n", error.what());
    return 1;
  }
}
