#include "train/checkpoint/exchange.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace cohort::checkpoint {
namespace {

Buffer buffer_of(std::span<std::byte> bytes) {
  return {bytes.data(), static_cast<std::int64_t>(bytes.size()), DType::UInt8};
}

/// Returns the root's `text` on all ranks.
std::string broadcast_text(Communicator& comm, const std::string& text, int root) {
  std::int64_t size = static_cast<std::int64_t>(text.size());
  comm.broadcast(Buffer(&size, 1, DType::Int64), {.root = root}).wait();
  std::string all = comm.rank() == root ? text : std::string(static_cast<std::size_t>(size), '\0');
  if (size > 0) comm.broadcast(buffer_of(std::as_writable_bytes(std::span(all))), {.root = root}).wait();
  return all;
}

/// Returns the root's error on all ranks.
Error spread(Communicator& comm, const std::optional<Error>& error, int root) {
  const bool mine = comm.rank() == root;
  std::string message = mine ? std::string(1, static_cast<char>(error->code())) + error->what() : std::string();
  message = broadcast_text(comm, message, root);
  ErrorContext context = mine ? error->context() : ErrorContext();
  context.rank = root;
  return {static_cast<ErrorCode>(message.at(0)),
          mine ? message.substr(1) : "rank " + std::to_string(root) + ": " + message.substr(1), context};
}

}  // namespace

int rank_of(const Communicator& comm) noexcept { return comm ? comm.rank() : 0; }
int size_of(const Communicator& comm) noexcept { return comm ? comm.size() : 1; }

std::optional<Error> first_error(Communicator& comm, const std::optional<Error>& error) {
  if (size_of(comm) == 1) return error;
  constexpr std::int64_t kNobody = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = error ? comm.rank() : kNobody;
  comm.all_reduce(Buffer(&first, 1, DType::Int64), {.op = ReduceOp::Min}).wait();
  if (first == kNobody) return std::nullopt;
  return spread(comm, error, static_cast<int>(first));
}

void agree(Communicator& comm, const std::optional<Error>& error) {
  if (auto first = first_error(comm, error)) throw *std::move(first);
}

std::int64_t highest(Communicator& comm, std::int64_t mine) {
  if (size_of(comm) > 1) comm.all_reduce(Buffer(&mine, 1, DType::Int64), {.op = ReduceOp::Max}).wait();
  return mine;
}

bool any(Communicator& comm, bool mine) { return highest(comm, mine ? 1 : 0) != 0; }

std::string share(Communicator& comm, const std::string& text, int root) {
  return size_of(comm) == 1 ? text : broadcast_text(comm, text, root);
}

void share_bytes(Communicator& comm, std::span<std::byte> bytes, int root) {
  if (size_of(comm) > 1 && !bytes.empty()) comm.broadcast(buffer_of(bytes), {.root = root}).wait();
}

std::vector<std::string> gather(Communicator& comm, const std::string& text) {
  if (size_of(comm) == 1) return {text};
  const auto ranks = static_cast<std::size_t>(comm.size());
  const auto mine = static_cast<std::int64_t>(text.size());
  std::vector<std::int64_t> sizes(ranks);
  comm.all_gather(ConstBuffer(&mine, 1, DType::Int64), Buffer(sizes.data(), comm.size(), DType::Int64)).wait();
  const auto longest = static_cast<std::size_t>(*std::max_element(sizes.begin(), sizes.end()));
  if (longest == 0) return std::vector<std::string>(ranks);
  std::string padded = text;
  padded.resize(longest, '\0');
  std::string all(longest * ranks, '\0');
  comm.all_gather(ConstBuffer(padded.data(), static_cast<std::int64_t>(longest), DType::UInt8),
                  Buffer(all.data(), static_cast<std::int64_t>(all.size()), DType::UInt8))
      .wait();
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    texts.push_back(all.substr(rank * longest, static_cast<std::size_t>(sizes[rank])));
  }
  return texts;
}

namespace {

void send(Communicator& comm, std::span<const std::byte> bytes, int to) {
  comm.send(ConstBuffer(bytes.data(), static_cast<std::int64_t>(bytes.size()), DType::UInt8), to).wait();
}

void receive(Communicator& comm, std::span<std::byte> bytes, int from) {
  comm.recv(Buffer(bytes.data(), static_cast<std::int64_t>(bytes.size()), DType::UInt8), from).wait();
}

}  // namespace

PieceSender::PieceSender(Communicator& comm, int to) : comm_(comm), to_(to) { piece_.reserve(kPiece); }

void PieceSender::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), kPiece - piece_.size()));
    piece_.insert(piece_.end(), part.begin(), part.end());
    bytes = bytes.subspan(part.size());
    if (piece_.size() == kPiece) flush();
  }
}

void PieceSender::flush() {
  if (!piece_.empty()) send(comm_, piece_, to_);
  piece_.clear();
}

PieceReceiver::PieceReceiver(Communicator& comm, int from, std::uint64_t bytes)
    : comm_(comm),
      from_(from),
      left_(bytes),
      piece_(static_cast<std::size_t>(std::min<std::uint64_t>(bytes, kPiece))) {}

std::span<const std::byte> PieceReceiver::next() {
  const auto piece = std::span(piece_).first(static_cast<std::size_t>(std::min<std::uint64_t>(left_, piece_.size())));
  receive(comm_, piece, from_);
  left_ -= piece.size();
  return piece;
}

void send_bytes(Communicator& comm, std::span<const std::byte> bytes, int to) {
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(bytes.size(), kPiece)))
    send(comm, bytes.first(std::min(bytes.size(), kPiece)), to);
}

void receive_bytes(Communicator& comm, std::span<std::byte> bytes, int from) {
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(bytes.size(), kPiece)))
    receive(comm, bytes.first(std::min(bytes.size(), kPiece)), from);
}

}  // namespace cohort::checkpoint
