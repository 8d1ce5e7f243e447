// What checkpoints say between ranks: texts of different lengths, and errors, so that all ranks go on or all throw.
// Every function is collective and waits; one thread per rank. An empty communicator stands for a world of one.
#pragma once

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cohort::checkpoint {

int rank_of(const Communicator& comm) noexcept;
int size_of(const Communicator& comm) noexcept;

/// Throws on all ranks if any rank brings an error: that of the lowest such rank, with its rank in the context.
void agree(Communicator& comm, const std::optional<Error>& error);
/// Rank 0's text, or throws rank 0's error, on all ranks.
std::string share(Communicator& comm, const std::string& text, const std::optional<Error>& error);
/// Overwrites `bytes` (of the same size on all ranks) with rank 0's.
void share_bytes(Communicator& comm, std::span<std::byte> bytes);
/// All ranks' texts, by rank.
std::vector<std::string> gather(Communicator& comm, const std::string& text);

/// Runs `work` and gives back what it throws: cohort::Error as it is, anything else (libtorch's, memory) as Internal.
template <class Work>
std::optional<Error> attempt(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorCode::Unavailable,
                 "not enough memory for the checkpoint -- free some, or use fewer processes per host");
  } catch (const std::exception& error) {
    return Error(ErrorCode::Internal, std::string("libtorch failed at the checkpoint: ") + error.what());
  }
  return std::nullopt;
}

}  // namespace cohort::checkpoint
