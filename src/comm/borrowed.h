// Borrowed buffers: blocks of a result that a plane has left in the memory of the ranks that brought them, which this
// rank reads in place. Only for who asks for it (Request::borrowed), takes the blocks from there itself, and sees to it
// that the others do not write there meanwhile: to the plane they may once the operation is over. Plain values.
#pragma once

#include "sys/memory.h"

#include <cstddef>
#include <memory>

namespace cohort::comm {

struct Borrowed {
  std::size_t at = 0;  ///< bytes from the result's beginning
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const sys::Mapping> memory = {};  ///< of a peer, as long as somebody keeps it; null: this rank's own
};

}  // namespace cohort::comm
