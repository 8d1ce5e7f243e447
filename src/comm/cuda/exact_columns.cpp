// Sums with the CPU's bits on several hosts that have equally many ranks: those of a host first, and then, in columns
// of one rank on each host, the hosts' sums.
#include "comm/cuda/exact_pieces.h"
#include "comm/cuda/exact_sums.h"

#include <utility>

namespace cohort::comm::cuda {

// A slice for each rank of the host, and of it a part for each host: two exchanges there, and the same way back.
void ExactSums::add_columns(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const int hosts = static_cast<int>(world_.on.size());
  const int own_host = world_.hosts[static_cast<std::size_t>(world_.rank)];
  const std::vector<int>& here = world_.on[static_cast<std::size_t>(own_host)];
  for (std::int64_t begin = 0; begin < request.input_count;) {
    const std::int64_t count =
        most_of(static_cast<std::size_t>(request.input_count - begin) * element, element, most_at_once_,
                [&](std::size_t bytes) { return scratch_of_slices(bytes, world_); });
    const std::size_t slot = slot_of_slice(static_cast<std::size_t>(count) * element, world_.columns);
    const std::size_t part_slot = slot_of_slice(slot, hosts);
    std::byte* const room = take(scratch_of_slices(static_cast<std::size_t>(count) * element, world_));
    std::byte* const part_room = room + slot * static_cast<std::size_t>(world_.columns);
    const auto slice = [&](int local) { return slice_of(count, element, local, world_.columns, 0); };
    const Slice own = slice(world_.local);
    const auto part = [&](int host) { return slice_of(own.count(), element, host, hosts, 0); };

    const std::size_t first = current_;
    Inputs inputs(static_cast<std::size_t>(world_.size));
    for (int local = 0; local < world_.columns; ++local) {
      const int rank = here[static_cast<std::size_t>(local)];
      std::byte* const from = room + static_cast<std::size_t>(local) * slot;
      inputs[static_cast<std::size_t>(rank)] = from;
      send(step(first), at(request.input, begin + slice(local).begin, element), bytes_of(slice(local), element), rank);
      receive(step(first), from, bytes_of(own, element), rank);
    }
    inputs[static_cast<std::size_t>(world_.rank)] = at(request.input, begin + own.begin, element);
    std::byte* const partial = room + static_cast<std::size_t>(world_.local) * slot;
    if (own.count() > 0) step(first).folds.push_back(sum_of(request, here, inputs, partial, own.count()));

    std::byte* const result = at(request.output, begin + own.begin, element);
    ExactFold last = sum_of_hosts(request, at(result, part(own_host).begin, element), part(own_host).count());
    for (int host = 0; host < hosts; ++host) {
      const int rank = world_.on[static_cast<std::size_t>(host)][static_cast<std::size_t>(world_.local)];
      std::byte* const from = part_room + static_cast<std::size_t>(host) * part_slot;
      last.inputs.push_back(host == own_host ? at(partial, part(host).begin, element) : from);
      send(step(first + 1), at(partial, part(host).begin, element), bytes_of(part(host), element), rank);
      receive(step(first + 1), from, bytes_of(part(own_host), element), rank);
      // And back, once it has been folded.
      send(step(first + 2), at(result, part(own_host).begin, element), bytes_of(part(own_host), element), rank);
      receive(step(first + 2), at(result, part(host).begin, element), bytes_of(part(host), element), rank);
    }
    if (part(own_host).count() > 0) step(first + 1).folds.push_back(std::move(last));
    for (int local = 0; local < world_.columns; ++local) {
      const int rank = here[static_cast<std::size_t>(local)];
      send(step(first + 3), result, bytes_of(own, element), rank);
      receive(step(first + 3), at(request.output, begin + slice(local).begin, element), bytes_of(slice(local), element),
              rank);
    }
    begin += count;
  }
}

// What the ranks of a column keep is summed by the one of each host, and goes to where it is kept.
void ExactSums::add_parts_of_columns(const Request& request) {
  const std::size_t element = size_of(request.dtype);
  const std::int64_t longest = longest_part(request, world_.size);
  const std::size_t hosts = world_.on.size();
  const auto own_host = static_cast<std::size_t>(world_.hosts[static_cast<std::size_t>(world_.rank)]);
  const std::vector<int>& here = world_.on[own_host];
  for (std::int64_t begin = 0, count = 0; begin < longest; begin += count) {
    count = most_of(static_cast<std::size_t>(longest - begin) * element, element, most_at_once_,
                    [&](std::size_t bytes) { return scratch_of_parts(bytes, world_); });
    const std::size_t slot = lines(static_cast<std::size_t>(count) * element) * kLine;
    std::byte* const room = take(scratch_of_parts(static_cast<std::size_t>(count) * element, world_));
    std::byte* const part_room = room + slot * static_cast<std::size_t>(world_.size);
    const std::size_t first = current_;
    const Slice own = stretch_of(request, world_.rank, begin, count);
    ExactFold last = sum_of_hosts(request, kept_at(request, world_.rank, own), own.count());
    for (std::size_t host = 0; host < hosts; ++host) {
      const int keeper = world_.on[host][static_cast<std::size_t>(world_.local)];
      const Slice kept = stretch_of(request, keeper, begin, count);
      Inputs inputs(static_cast<std::size_t>(world_.size));
      for (std::size_t local = 0; local < here.size(); ++local) {
        const Slice theirs = stretch_of(request, world_.on[host][local], begin, count);
        std::byte* const from = room + (host * here.size() + local) * slot;
        inputs[static_cast<std::size_t>(here[local])] = from;
        send(step(first), at(request.input, theirs.begin, element), bytes_of(theirs, element), here[local]);
        receive(step(first), from, bytes_of(kept, element), here[local]);
      }
      inputs[static_cast<std::size_t>(world_.rank)] = at(request.input, kept.begin, element);
      std::byte* const partial = room + (host * here.size() + static_cast<std::size_t>(world_.local)) * slot;
      if (kept.count() > 0) step(first).folds.push_back(sum_of(request, here, inputs, partial, kept.count()));
      std::byte* const from = part_room + host * slot;
      last.inputs.push_back(host == own_host ? partial : from);
      send(step(first + 1), partial, bytes_of(kept, element), keeper);
      receive(step(first + 1), from, bytes_of(own, element), keeper);
    }
    if (own.count() > 0) step(first + 1).folds.push_back(std::move(last));
  }
}

}  // namespace cohort::comm::cuda
