// One operation of the plan on one rank: calling it, and comparing what came out with what has to. Belongs to the
// rank's thread.
#pragma once

#include "bench/buffers.h"
#include "bench/collective.h"

#include <cohort/communicator.h>

#include <cstdint>
#include <optional>

namespace cohort::app::bench {

struct Operation {
  Collective collective = Collective::AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  int root = 0;
  bool in_place = true;
  Shape shape;
  Buffers buffers;
  Device device;                    ///< where they are
  Buffers mirror;                   ///< of a GPU's buffers, in the host's memory; else the buffers themselves
  std::optional<GpuSums> gpu_sums;  ///< none: what COHORT_GPU_SUMS says
};

/// Calls it and waits for it. A send_recv is there and back between ranks 0 and 1; a sendrecv goes round the ring.
void call(Communicator& comm, const Operation& operation);

/// Writes what this rank brings into its input, and what must not remain into its output.
void write_input(const Communicator& comm, const Operation& operation);

/// Writes zeros into both: they stay zeros however often they are summed.
void clear(const Operation& operation);

/// After `write_input` and `call` on all ranks: elements of this rank's output that are not what they have to be.
std::int64_t wrong_elements(const Communicator& comm, const Operation& operation);

}  // namespace cohort::app::bench
