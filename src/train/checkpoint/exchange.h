// Messages about checkpoints between ranks: texts of different lengths, and errors; all ranks go on or all throw.
// Every function is collective and waits; one thread per communicator. An empty communicator stands for a world of one.
// Bytes from one rank to another, in pieces, so that neither needs room for all of them. Both ranks know how many there
// are. One thread per communicator; the buffers live as long as the objects.
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

/// Longest text within what other ranks say.
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

/// Bytes of a piece, at most.
inline constexpr std::size_t kPiece = std::size_t{4} << 20;

class PieceSender {
 public:
  PieceSender(Communicator& comm, int to);
  void add(std::span<const std::byte> bytes);
  /// The last piece, once everything has been added.
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
  /// Good until the next call.
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
