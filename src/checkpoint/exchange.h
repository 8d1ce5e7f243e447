// What checkpoints say between ranks: texts of different lengths, and errors, so that all ranks go on or all throw.
// Every function is collective and waits; one thread per communicator. An empty communicator stands for a world of one.
#pragma once

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cohort::checkpoint {

/// Of texts within what other ranks say.
inline constexpr std::size_t kLongestText = std::size_t{1} << 31;

int rank_of(const Communicator& comm) noexcept;
int size_of(const Communicator& comm) noexcept;

/// The error of the lowest rank that brings one, with its rank in the context, on all ranks.
std::optional<Error> first_error(Communicator& comm, const std::optional<Error>& error);
/// Throws it.
void agree(Communicator& comm, const std::optional<Error>& error);
/// True if it is true on any rank.
bool any(Communicator& comm, bool mine);
/// The highest of all ranks' numbers.
std::int64_t highest(Communicator& comm, std::int64_t mine);
/// The root's text, on all ranks.
std::string share(Communicator& comm, const std::string& text, int root = 0);
/// Overwrites `bytes` (of the same size on all ranks) with the root's.
void share_bytes(Communicator& comm, std::span<std::byte> bytes, int root = 0);
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
    return Error(ErrorCode::Internal, std::string("the checkpoint failed: ") + error.what());
  }
  return std::nullopt;
}

}  // namespace cohort::checkpoint
