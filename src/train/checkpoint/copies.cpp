#include "train/checkpoint/copies.h"

#include "base/files.h"
#include "base/result.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/exchange.h"
#include "train/formats/checkpoint_folder.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

namespace cohort::checkpoint {
namespace {

/// Files in pieces, none of which spans two files. The receiver waits for the announced number of bytes, so bytes that
/// cannot be read are sent as zeros, and the receiver then refuses the file because its digest is wrong.
class Outgoing {
 public:
  Outgoing(std::string folder, std::vector<std::string> files, const Digests& digests)
      : folder_(std::move(folder)), files_(std::move(files)), digests_(digests), piece_(kPiece) {}

  bool at_end() const { return left_ == 0 && next_ == files_.size(); }

  /// Returns a piece, valid until the next call; empty at the end.
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
  std::uint64_t left_ = 0;  // bytes left of the file under way
  std::optional<sys::FileReader> file_;
  std::optional<Error> error_;
};

/// Sends files to one rank while receiving others from another, so that links are used in both directions. While the
/// caller processes a piece, the next one is under way.
class Passage {
 public:
  struct Ends {
    int to = 0, from = 0;
  };
  /// `sizes`: sizes of the files to receive.
  Passage(Communicator& comm, Outgoing outgoing, Ends ends, std::vector<std::uint64_t> sizes)
      : comm_(comm), outgoing_(std::move(outgoing)), ends_(ends), sizes_(std::move(sizes)) {}

  void start() { begin(); }
  /// Returns the next piece of the file being received; valid until the next call.
  std::span<const std::byte> next() {
    end();
    const auto piece = coming_;
    begin();
    return piece;
  }
  /// Sends the rest, when everything has been received.
  void finish() {
    end();
    while (!outgoing_.at_end()) {
      begin();
      end();
    }
  }
  const std::optional<Error>& error() const { return outgoing_.error(); }

 private:
  void begin() {
    std::swap(piece_, before_);  // the caller still uses the last piece
    while (left_ == 0 && next_ < sizes_.size()) left_ = sizes_[next_++];
    coming_ = std::span(piece_).first(static_cast<std::size_t>(std::min<std::uint64_t>(left_, kPiece)));
    left_ -= coming_.size();
    const auto piece = outgoing_.next();
    if (!coming_.empty())
      received_ =
          comm_.recv(Buffer(coming_.data(), static_cast<std::int64_t>(coming_.size()), DType::UInt8), ends_.from);
    if (!piece.empty())
      sent_ = comm_.send(ConstBuffer(piece.data(), static_cast<std::int64_t>(piece.size()), DType::UInt8), ends_.to);
  }
  /// If one wait throws, the destructor of the other Work waits for it.
  void end() {
    std::exchange(received_, {}).wait();
    std::exchange(sent_, {}).wait();
  }

  Communicator& comm_;
  Outgoing outgoing_;
  const Ends ends_;
  const std::vector<std::uint64_t> sizes_;
  std::size_t next_ = 0;    // in sizes_
  std::uint64_t left_ = 0;  // bytes left of the file being received
  std::vector<std::byte> piece_ = std::vector<std::byte>(kPiece), before_ = std::vector<std::byte>(kPiece);
  std::span<std::byte> coming_;  // view of piece_
  Work received_, sent_;         // declared last, since they use the buffers above
};

/// Receives one file. Takes all of its bytes even if they cannot be written, since the sender does not learn of that.
void receive_file(Passage& passage, const std::string& hidden, const std::string& name,
                  const formats::FileDigest& expected, std::optional<Error>& error) {
  std::uint64_t left = expected.bytes;
  const auto take = [&] {
    const auto piece = passage.next();
    left -= piece.size();
    return piece;
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

Copies::Copies(const SharedFolder& folder, int copies) : keeps_(folder.keeps()) {
  std::map<int, std::size_t> seats;
  for (int rank = 0; rank < static_cast<int>(folder.keepers.size()); ++rank) {
    const int keeper = folder.keeper_of(rank);
    if (seats.emplace(keeper, keepers_.size()).second) keepers_.push_back(keeper);
    seats_.emplace(part_file(rank), seats.at(keeper));
  }
  first_ = seats.at(folder.keeper_of(0));
  seat_ = seats.at(folder.keeper_of(folder.rank));
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
    // Forwards the files received from the previous neighbour to the next one.
    std::vector<std::string> files;
    std::optional<Passage> passage;
    agree(comm, attempt([&] {
            if (!keeps_) return;
            files = files_of(seat_before(distance + 1), digests);
            std::vector<std::uint64_t> sizes;
            for (const std::string& name : files) sizes.push_back(digests.at(name).bytes);
            const Passage::Ends ends{keepers_[(seat_ + 1) % keepers_.size()], keepers_[seat_before(1)]};
            passage.emplace(comm, Outgoing(hidden, files_of(seat_before(distance), digests), digests), ends,
                            std::move(sizes));
          }));
    std::optional<Error> error;
    if (keeps_) {
      passage->start();
      for (const std::string& name : files) receive_file(*passage, hidden, name, digests.at(name), error);
      passage->finish();
      if (passage->error()) error = passage->error();
    }
    agree(comm, error);
  }
}

}  // namespace cohort::checkpoint
