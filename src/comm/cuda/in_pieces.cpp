#include "comm/cuda/in_pieces.h"

#include "comm/borrowed.h"
#include "comm/finite_check.h"

#include <cohort/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {
namespace {

class InPieces final : public Pieces {
 public:
  InPieces(Gpu& gpu, const Request& request, StreamMarks marks, Chunking cut, std::shared_ptr<Ring> ring, int rank)
      : gpu_(gpu),
        request_(request),
        marks_(std::move(marks)),
        chunking_(std::move(cut)),
        ring_(std::move(ring)),
        rank_(rank) {}

  void run(const Round& agreed, Clock::time_point deadline, Plane& plane) override {
    try {
      go_through(agreed, deadline, plane);
    } catch (...) {
      ring_->settle();  // the caller's memory is used no longer, if that can be had
      throw;
    }
  }

 private:
  struct Turn {
    Ring::Slot* slot;
    Piece piece;
  };

  void go_through(const Round& agreed, Clock::time_point deadline, Plane& plane) {
    // Others than the root bring something if it has joined.
    const bool brings = request_.kind != Kind::Broadcast || rank_ == request_.root || !agreed.everyone;
    const auto wait = [&](MarkPtr& mark) {
      if (mark) gpu_.wait(*mark, deadline, [&] { plane.attend(); });
      mark = nullptr;
    };
    const std::size_t pieces = chunking_.pieces();
    bool finite = true;
    // What only moves goes to the GPU out of the slot of the rank that brought it. That rank has the fourth piece after
    // it come there once all have come to the second after it; so nobody comes to that before it has read this one.
    const bool borrows = !is_reduction(request_.kind) && agreed.everyone;
    MarkPtr last, before_last;
    Turn coming = begin(0, brings);
    for (std::size_t number = 0; number < pieces; ++number) {
      Turn turn = std::move(coming);
      if (number + 1 < pieces) coming = begin(number + 1, brings);
      Piece& piece = turn.piece;
      wait(turn.slot->departed);  // of an earlier piece, where nothing has come after it
      wait(turn.slot->arrived);
      wait(before_last);  // of the second before this one
      borrowed_.clear();
      if (borrows) piece.request.borrowed = &borrowed_;
      if (request_.finite_check) {
        piece.request.finite_check = std::make_shared<FiniteCheck>(
            ConstBuffer(piece.request.output, piece.request.output_count, request_.dtype));
      }
      carry_out(piece.request, number, plane);
      if (request_.finite_check) finite = finite && piece.request.finite_check->finite();
      before_last = std::exchange(last, depart(turn, borrows && brings));
      turn.slot->departed = last;
    }
    wait(before_last);
    wait(last);
    if (request_.finite_check) request_.finite_check->note(finite);
  }

  Turn begin(std::size_t number, bool brings) {
    Ring::Slot& slot = ring_->next();
    Turn turn{&slot, chunking_.piece(number, slot.data)};
    if (!brings || turn.piece.input.empty()) return turn;
    std::vector<Transfer> copies;
    for (const ByteRange& one : turn.piece.input)
      copies.push_back({slot.data + one.in_room, static_cast<const std::byte*>(request_.input) + one.at, one.bytes});
    const MarkPtr after[] = {marks_.input, slot.departed};
    slot.arrived = gpu_.copy_to_host(copies, after);
    return turn;
  }
  /// Null: there is nothing to do. `stays`: what this rank has brought is in its place already, where that is the same.
  MarkPtr depart(const Turn& turn, bool stays) {
    std::vector<Transfer> copies;
    const auto* const result = static_cast<const std::byte*>(turn.piece.request.output);
    for (const ByteRange& one : turn.piece.output) {
      std::byte* const to = static_cast<std::byte*>(request_.output) + one.at;
      const auto brought = [&](const ByteRange& own) {
        return to == static_cast<const std::byte*>(request_.input) + own.at;
      };
      if (stays && std::any_of(turn.piece.input.begin(), turn.piece.input.end(), brought)) continue;
      const std::byte* from = turn.slot->data + one.in_room;
      const auto at = static_cast<std::size_t>(from - result);
      const auto borrowed =
          std::find_if(borrowed_.begin(), borrowed_.end(), [at](const Borrowed& block) { return block.at == at; });
      if (borrowed != borrowed_.end()) from = taken(*borrowed, turn.slot->data + one.in_room);
      copies.push_back({to, from, one.bytes});
    }
    return copies.empty() ? nullptr : gpu_.copy_to_device(copies, {&marks_.output, 1});
  }

  /// Where the GPU reads it. What it could read only slowly is copied to `room` after all.
  const std::byte* taken(const Borrowed& block, std::byte* room) {
    if (!block.memory || ring_->pin(block.memory)) return block.data;
    std::memcpy(room, block.data, block.bytes);
    return room;
  }

  void carry_out(const Request& piece, std::size_t number, Plane& plane) const {
    try {
      plane.carry_out(piece);
    } catch (const Error& error) {
      throw Error(error.code(),
                  fmt::format("{} -- it is piece {} of {} of {}({}[{}]) of a GPU's memory", error.what(), number + 1,
                              chunking_.pieces(), name_of(request_.kind), to_string(request_.dtype),
                              std::max(request_.input_count, request_.output_count)),
                  error.context());
    }
  }

  Gpu& gpu_;
  const Request request_;
  const StreamMarks marks_;
  const Chunking chunking_;
  const std::shared_ptr<Ring> ring_;
  const int rank_;
  std::vector<Borrowed> borrowed_;  // of the piece that is carried out
};

class Alone final : public Pieces {
 public:
  Alone(Gpu& gpu, const Request& request, StreamMarks marks) : gpu_(gpu), marks_(std::move(marks)) {
    if (request.output == request.input || request.output_count == 0) return;
    const MarkPtr after[] = {marks_.input, marks_.output};
    copied_ = gpu.copy_on_gpu({request.output, request.input, request.output_bytes()}, after);
  }
  ~Alone() override { settled(gpu_, copied_, end_of_patience()); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

  void run(const Round&, Clock::time_point deadline, Plane& plane) override {
    plane.carry_out({});  // it counts
    for (const MarkPtr& mark : {marks_.input, marks_.output, copied_}) {
      if (mark) gpu_.wait(*mark, deadline, [&] { plane.attend(); });
    }
    copied_ = nullptr;
  }

 private:
  Gpu& gpu_;
  const StreamMarks marks_;
  MarkPtr copied_;
};

}  // namespace

std::shared_ptr<Pieces> in_pieces(Gpu& gpu, const Request& request, StreamMarks marks, Chunking cut,
                                  std::shared_ptr<Ring> ring, int rank) {
  return std::make_shared<InPieces>(gpu, request, std::move(marks), std::move(cut), std::move(ring), rank);
}

bool is_copy(const Request& request) noexcept {
  const bool scaled = is_reduction(request.kind) && (request.prescale != 1 || request.postscale != 1);
  return request.kind < Kind::Barrier && !scaled && !(request.weighted && request.weight == 0) && !request.finite_check;
}

std::shared_ptr<Pieces> copy_alone(Gpu& gpu, const Request& request, StreamMarks marks) {
  return std::make_shared<Alone>(gpu, request, std::move(marks));
}

}  // namespace cohort::comm::cuda
