#include "checkpoint/pieces.h"

#include <algorithm>

namespace cohort::checkpoint {
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
