// Gloo's C++ library as a peer, the way PyTorch calls it: TCP over the loopback or ADDRESS, new-style algorithms with
// the library's own choice. Ranks meet in files under FOLDER.
//   gloo_peer FOLDER RANK RANKS [ADDRESS]
#include "peer_loop.h"

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/config.h>
#include <gloo/gather.h>
#include <gloo/math.h>
#include <gloo/reduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/scatter.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/types.h>

#include <sys/prctl.h>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

using peers::Collective;

class GlooLibrary {
 public:
  GlooLibrary(const std::string& folder, const char* address, int rank, int size) : rank_(rank), size_(size) {
    gloo::transport::tcp::attr where;
    where.hostname = address;
    gloo::rendezvous::FileStore store(folder);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    auto device = gloo::transport::tcp::CreateDevice(where);
    context->connectFullMesh(store, device);
    context_ = std::move(context);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::string name() const {
    return "Gloo " + std::to_string(GLOO_VERSION_MAJOR) + "." + std::to_string(GLOO_VERSION_MINOR) + " (C++)";
  }
  bool supports(Collective collective, peers::Type type, peers::Memory memory) const {
    return memory == peers::Memory::Heap && type != peers::Type::BFloat16 && collective != Collective::ReduceScatter;
  }
  void* allocate(std::size_t bytes, peers::Memory) {
    void* const data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (data == nullptr) throw std::runtime_error("no memory");
    return data;
  }
  void progress() {}  // its own thread does that
  void call(Collective collective, peers::Type type, const void* input, void* output, std::size_t count) {
    if (type == peers::Type::Float32) {
      run(collective, static_cast<const float*>(input), static_cast<float*>(output), count);
    } else if (type == peers::Type::Int64) {
      run(collective, static_cast<const std::int64_t*>(input), static_cast<std::int64_t*>(output), count);
    } else {
      run(collective, static_cast<const gloo::float16*>(input), static_cast<gloo::float16*>(output), count);
    }
  }

 private:
  template <class T>
  void run(Collective collective, const T* constant_input, T* output, std::size_t count) {
    T* const input = const_cast<T*>(constant_input);  // its interface knows no const
    const auto parts = static_cast<std::size_t>(size_);
    const auto sum = [](void* out, const void* a, const void* b, std::size_t n) { gloo::sum<T>(out, a, b, n); };
    switch (collective) {
      case Collective::AllReduce: {
        gloo::AllreduceOptions options(context_);
        options.setOutput(output, count);
        options.setReduceFunction(sum);
        gloo::allreduce(options);
        break;
      }
      case Collective::Reduce: {
        gloo::ReduceOptions options(context_);
        options.setInput(input, count);
        options.setOutput(output, count);
        options.setRoot(0);
        options.setReduceFunction(sum);
        gloo::reduce(options);
        break;
      }
      case Collective::Broadcast: {
        gloo::BroadcastOptions options(context_);
        options.setOutput(output, count);
        options.setRoot(0);
        gloo::broadcast(options);
        break;
      }
      case Collective::AllGather: {
        gloo::AllgatherOptions options(context_);
        options.setInput(input, count);
        options.setOutput(output, count * parts);
        gloo::allgather(options);
        break;
      }
      case Collective::Gather: {
        gloo::GatherOptions options(context_);
        options.setInput(input, count);
        if (rank_ == 0) options.setOutput(output, count * parts);
        options.setRoot(0);
        gloo::gather(options);
        break;
      }
      case Collective::Scatter: {
        gloo::ScatterOptions options(context_);
        std::vector<T*> inputs;
        for (std::size_t part = 0; rank_ == 0 && part < parts; ++part) inputs.push_back(input + part * count);
        if (rank_ == 0) options.setInputs(inputs, count);
        options.setOutput(output, count);
        options.setRoot(0);
        gloo::scatter(options);
        break;
      }
      case Collective::AllToAll: {
        gloo::AlltoallOptions options(context_);
        options.setInput(input, count * parts);
        options.setOutput(output, count * parts);
        gloo::alltoall(options);
        break;
      }
      case Collective::SendRecv: {
        if (rank_ > 1) break;
        const auto buffer = context_->createUnboundBuffer(output, count * sizeof(T));
        for (int leg = 0; leg < 2; ++leg) {
          if (rank_ == leg) {
            buffer->send(1 - rank_, 0);
            buffer->waitSend();
          } else {
            buffer->recv(1 - rank_, 0);
            buffer->waitRecv();
          }
        }
        break;
      }
      case Collective::Barrier: {
        gloo::BarrierOptions options(context_);
        gloo::barrier(options);
        break;
      }
      case Collective::ReduceScatter: break;  // not among the new-style algorithms
    }
  }

  int rank_, size_;
  std::shared_ptr<gloo::Context> context_;
};

}  // namespace

int main(int argc, char** argv) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (argc != 4 && argc != 5) return 2;
  try {
    GlooLibrary library(argv[1], argc == 5 ? argv[4] : "127.0.0.1", std::atoi(argv[2]), std::atoi(argv[3]));
    return peers::serve(library, argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gloo_peer: %s\n", error.what());
    return 1;
  }
}
