// Messages about checkpoints between ranks: texts of different lengths, and errors; all ranks continue or all throw.
// Every function is collective and waits; one thread per communicator. An empty communicator stands for a world of one.
// Transfers bytes between two ranks in pieces, so that neither needs memory for all bytes. Both ranks know the number
// of bytes. One thread per communicator; the buffers live as long as the objects.
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

/// Longest text within a message from another rank.
inline constexpr std::size_t kLongestText = std::size_t{1} << 31;

int rank_of(const Communicator& comm) noexcept;
int size_of(const Communicator& comm) noexcept;

/// Returns, on all ranks, the error of the lowest rank that has one, with that rank in the context.
std::optional<Error> first_error(Communicator& comm, const std::optional<Error>& error);
/// Throws the result of first_error, if there is one.
void agree(Communicator& comm, const std::optional<Error>& error);
/// Returns true if `mine` is true on any rank.
bool any(Communicator& comm, bool mine);
/// Returns the highest of all ranks' numbers.
std::int64_t highest(Communicator& comm, std::int64_t mine);
/// Returns the root's text on all ranks.
std::string share(Communicator& comm, const std::string& text, int root = 0);
/// Overwrites `bytes` (of the same size on all ranks) with the root's.
void share_bytes(Communicator& comm, std::span<std::byte> bytes, int root = 0);
/// Returns all ranks' texts, by rank.
std::vector<std::string> gather(Communicator& comm, const std::string& text);

/// Runs `work` and returns what it throws: cohort::Error unchanged, std::bad_alloc as Unavailable, others as Internal.
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

/// Largest size of a piece.
inline constexpr std::size_t kPiece = std::size_t{4} << 20;

class PieceSender {
 public:
  PieceSender(Communicator& comm, int to);
  void add(std::span<const std::byte> bytes);
  /// Sends the last piece, when everything has been added.
  void flush();

 private:
  Communicator& comm_;
  const int to_;
  std::vector<std::byte> piece_;
};

class PieceReceiver {
 public:
  PieceReceiver(Communicator& comm, int from, std::uint64_t bytes);
  bool at_end() const noexcept { return left_ == 0; }
  /// Receives a piece, valid until the next call.
  std::span<const std::byte> next();

 private:
  Communicator& comm_;
  const int from_;
  std::uint64_t left_;
  std::vector<std::byte> piece_;
};

void send_bytes(Communicator& comm, std::span<const std::byte> bytes, int to);
void receive_bytes(Communicator& comm, std::span<std::byte> bytes, int from);

}  // namespace cohort::checkpoint
