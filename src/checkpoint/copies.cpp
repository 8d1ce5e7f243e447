#include "checkpoint/copies.h"

#include "base/result.h"
#include "checkpoint/bundle.h"
#include "checkpoint/exchange.h"
#include "checkpoint/pieces.h"
#include "formats/checkpoint_folder.h"
#include "sys/files.h"

#include <algorithm>
#include <optional>
#include <span>

namespace cohort::checkpoint {
namespace {

/// Files as pieces, none of which spans two of them. The receiver waits for as many bytes as were announced, so what
/// cannot be read is sent as zeros, and refused there for its digest.
class Outgoing {
 public:
  Outgoing(std::string folder, std::vector<std::string> files, const Digests& digests)
      : folder_(std::move(folder)), files_(std::move(files)), digests_(digests), piece_(kPiece) {}

  bool at_end() const { return left_ == 0 && next_ == files_.size(); }

  /// Good until the next call; empty at the end.
  std::span<const std::byte> next() {
    while (left_ == 0) {
      if (at_end()) return {};
      open(files_[next_++]);
    }
    const auto piece = std::span(piece_).first(static_cast<std::size_t>(std::min<std::uint64_t>(left_, kPiece)));
    left_ -= piece.size();
    if (auto done = file_ ? file_->read(piece) : Result<void>(); !done) give_up(done.error());
    if (!file_) std::fill(piece.begin(), piece.end(), std::byte{0});
    return piece;
  }

  const std::optional<Error>& error() const { return error_; }

 private:
  void open(const std::string& name) {
    left_ = digests_.at(name).bytes;
    auto file = sys::FileReader::open(folder_ + "/" + name);
    if (file)
      file_ = std::move(*file);
    else
      give_up(file.error());
  }
  void give_up(const Error& error) {
    file_.reset();
    if (!error_) error_ = error;
  }

  const std::string folder_;
  const std::vector<std::string> files_;
  const Digests& digests_;
  std::vector<std::byte> piece_;
  std::size_t next_ = 0;
  std::uint64_t left_ = 0;  // of the file under way
  std::optional<sys::FileReader> file_;
  std::optional<Error> error_;
};

/// A piece to one rank while another comes from one, so that links are used both ways.
class Passage {
 public:
  Passage(Communicator& comm, Outgoing& outgoing, int to, int from)
      : comm_(comm), outgoing_(outgoing), to_(to), from_(from) {}

  void step(std::span<std::byte> into) {
    const auto piece = outgoing_.next();
    Work received, sent;
    if (!into.empty())
      received = comm_.recv(Buffer(into.data(), static_cast<std::int64_t>(into.size()), DType::UInt8), from_);
    if (!piece.empty())
      sent = comm_.send(ConstBuffer(piece.data(), static_cast<std::int64_t>(piece.size()), DType::UInt8), to_);
    // Where one throws, the other's destructor waits for it: they use memory of the callers.
    received.wait();
    sent.wait();
  }

 private:
  Communicator& comm_;
  Outgoing& outgoing_;
  const int to_, from_;
};

/// One file as it comes. Takes all of its bytes, also where they cannot be written: the sender does not know.
void receive_file(Passage& passage, std::span<std::byte> piece, const std::string& hidden, const std::string& name,
                  const formats::FileDigest& expected, std::optional<Error>& error) {
  std::uint64_t left = expected.bytes;
  const auto take = [&] {
    const auto into = piece.first(static_cast<std::size_t>(std::min<std::uint64_t>(left, piece.size())));
    left -= into.size();
    passage.step(into);
    return into;
  };
  const auto digest = formats::write_checkpoint_file(hidden, name, [&](const formats::Sink& sink) {
    Result<void> done;
    while (done && left > 0) done = sink(take());
    return done;
  });
  while (left > 0) take();
  if (error) return;
  if (!digest)
    error = digest.error();
  else if (*digest != expected)
    error =
        Error(ErrorCode::Corrupt,
              fmt::format("{}/{}: what came from the host that wrote it differs from what it wrote there -- look at "
                          "that host's disk and memory",
                          hidden, name));
}

}  // namespace

Copies::Copies(const Sight& sight, int copies) : keeps_(sight.keeps()) {
  std::map<int, std::size_t> seats;
  for (int rank = 0; rank < static_cast<int>(sight.keepers.size()); ++rank) {
    const int keeper = sight.keeper_of(rank);
    if (seats.emplace(keeper, keepers_.size()).second) keepers_.push_back(keeper);
    seats_.emplace(part_file(rank), seats.at(keeper));
  }
  first_ = seats.at(sight.keeper_of(0));
  seat_ = seats.at(sight.keeper_of(sight.rank));
  further_ = std::min(static_cast<std::size_t>(copies), keepers_.size()) - 1;
}

std::size_t Copies::seat_of(const std::string& file) const {
  const auto part = seats_.find(file);
  return part != seats_.end() ? part->second : first_;
}

bool Copies::is_here(const std::string& file) const { return seat_before(seat_of(file)) <= further_; }

std::vector<std::string> Copies::files_of(std::size_t seat, const Digests& digests) const {
  std::vector<std::string> files;
  for (const auto& [name, digest] : digests) {
    if (seat_of(name) == seat) files.push_back(name);
  }
  return files;
}

void Copies::make(Communicator& comm, const std::string& hidden, const Digests& digests) const {
  for (std::size_t distance = 0; distance < further_; ++distance) {
    // What came from the neighbour before goes on to the next one.
    std::optional<Outgoing> outgoing;
    std::vector<std::byte> piece;
    agree(comm, attempt([&] {
            if (!keeps_) return;
            outgoing.emplace(hidden, files_of(seat_before(distance), digests), digests);
            piece.resize(kPiece);
          }));
    std::optional<Error> error;
    if (keeps_) {
      Passage passage(comm, *outgoing, keepers_[(seat_ + 1) % keepers_.size()], keepers_[seat_before(1)]);
      for (const std::string& name : files_of(seat_before(distance + 1), digests))
        receive_file(passage, piece, hidden, name, digests.at(name), error);
      while (!outgoing->at_end()) passage.step({});
      if (outgoing->error()) error = outgoing->error();
    }
    agree(comm, error);
  }
}

}  // namespace cohort::checkpoint
