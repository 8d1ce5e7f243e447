// Memory of large sums between hosts (stripes.cpp, parts.cpp), kept from operation to operation, so that it is touched
// once. Belongs to the thread that runs operations.
#pragma once

#include "comm/control/contributors.h"
#include "comm/request.h"
#include "comm/slices.h"
#include "transport/transport.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace cohort::comm::hosts {

/// What the ranks of a host reduce and gather at once.
struct Block {
  std::int64_t begin = 0;  // in elements of the buffer
  std::int64_t count = 0;
  std::int64_t left = 0;               // elements of the slice that have not been through the wire
  Slice slice;                         // this stripe's share, in elements of the block
  const std::byte* partial = nullptr;  // this host's sum of the slice
  std::byte* result = nullptr;         // of the slice
  std::vector<std::byte> partial_bytes, result_bytes, whole_bytes;
  std::shared_ptr<const Counts> shares;  // by local rank, elements of the block
  std::uint64_t borrowed = 0;            // until those beside this rank have read the result
};
/// What goes over the wire at once.
struct Piece {
  std::int64_t number = 0;
  std::int64_t block = 0;
  std::int64_t first = 0;  // in elements of the block's slice
  std::int64_t count = 0;
  bool sending = false;
  std::vector<std::byte> raw_bytes;                      // by host, what they bring to the part that this one folds
  std::vector<std::byte> narrow_bytes;                   // as bfloat16: what is sent, then what comes back
  std::vector<float> wide;                               // by host, as raw_bytes
  std::vector<transport::Outgoing> raw_out, folded_out;  // by host
  std::vector<transport::Incoming> raw_in, folded_in;
};
/// A chunk of what each rank keeps of a reduce_scatter.
struct Chunk {
  std::vector<std::byte> packed_bytes;  // what this rank brings to it, as the host sums it
  std::vector<std::byte> sum_bytes;
  std::vector<const std::byte*> sums;    // by host, of what its rank of this stripe keeps
  std::vector<std::byte> raw_bytes;      // by host, what they bring to what this rank keeps
  std::vector<bool> sends;               // by host
  std::vector<transport::Outgoing> out;  // by host
  std::vector<transport::Incoming> in;
};

struct SumMemory {
  Contributors contributors;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Piece>> pieces;
  std::vector<std::unique_ptr<Chunk>> chunks;
};

}  // namespace cohort::comm::hosts
