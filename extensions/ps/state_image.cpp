// The image of a state: pieces of several kinds, from which a state is made that continues with the same bits. Rows are
// stored by their places, since the order of eviction depends on them.
#include "ps/state.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::ps {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

enum class Kind : std::uint8_t { Begin, Worker, Refused, Table, Rows, Seen, Staged, End };

struct Beginning {
  std::optional<Hello> introduced = {};
  std::uint32_t workers = 0;
  std::int64_t settled = 0;
};
void visit_fields(auto& m, auto& a, const Beginning*) {
  a(m.introduced, m.workers, m.settled);
  a.demand(m.workers <= kMostWorkers, "more workers than there may be");
}

struct Earlier {
  std::uint64_t incarnation = 0;
  std::int64_t ended = 0;
};
void visit_fields(auto& m, auto& a, const Earlier*) { a(m.incarnation, m.ended); }
/// A worker, followed by its refused changes in pieces of their own.
struct OfWorker {
  std::uint32_t number = 0;
  Worker worker = {};
};
void visit_fields(auto& m, auto& a, const OfWorker*) {
  auto& w = m.worker;
  std::vector<Earlier> earlier;
  for (const auto& [incarnation, ended] : w.earlier) earlier.push_back({incarnation, ended});
  a(m.number, codec::below(w.phase, 4, "a worker in an unknown phase"), w.fenced, w.incarnation, w.nonce, w.mark,
    w.committed, w.barrier, w.banned, earlier, codec::longest(w.host, 300));
  if constexpr (!std::is_const_v<std::remove_reference_t<decltype(m)>>)
    for (const Earlier& one : earlier) w.earlier.emplace(one.incarnation, one.ended);
}

/// A change that was refused.
struct OfRefused {
  std::uint32_t worker = 0;
  std::uint64_t sequence = 0;
  std::optional<Error> error = {};
};
void visit_fields(auto& m, auto& a, const OfRefused*) { a(m.worker, m.sequence, m.error); }

struct OfTable {
  std::string name;
  TableOptions options;
  std::int64_t elements = 0;
};
void visit_fields(auto& m, auto& a, const OfTable*) {
  a(codec::longest(m.name, 512), m.options, m.elements);
  a.demand(!m.name.empty() && m.elements >= 0, "a table without a name");
}

/// The head of rows, or counters, of the last table, which follow it.
struct Some {
  std::uint64_t count = 0;
};
void visit_fields(auto& m, auto& a, const Some*) { a(m.count); }

struct OfStaged {
  std::uint32_t worker = 0;
  std::int64_t clock = 0;
  std::uint32_t table = 0;
  std::optional<double> lr = {};
  std::uint64_t count = 0;
};
void visit_fields(auto& m, auto& a, const OfStaged*) { a(m.worker, m.clock, m.table, m.lr, m.count); }

struct Shapes {
  std::vector<TableShape> shapes = {};
};
void visit_fields(auto& m, auto& a, const Shapes*) { a(m.shapes); }

void demand(bool holds, const char* otherwise) {
  if (!holds) throw Error(ErrorCode::Corrupt, otherwise);
}

template <class T>
std::string piece_of(Kind kind, const T& record) {
  return std::string(1, static_cast<char>(kind)).append(pack(record));
}

}  // namespace

void visit_fields(auto& m, auto& a, const TableShape*) { a(m.end, m.first_free, m.hand, m.seen, m.counts); }

Image::Image(std::shared_ptr<const FrozenState> of) : of_(std::move(of)) {
  ready_.push_back(piece_of(Kind::Begin, Beginning{of_->introduced, of_->workers.count(), of_->settled}));
  for (std::uint32_t number = 0; number < of_->workers.count(); ++number) {
    const Worker& worker = of_->workers.at(number);
    ready_.push_back(piece_of(Kind::Worker, OfWorker{number, worker}));
    for (const auto& [sequence, error] : worker.refused)
      ready_.push_back(piece_of(Kind::Refused, OfRefused{number, sequence, error}));
  }
  begin_table();
}

/// Writes the table's description and its counters.
void Image::begin_table() {
  place_ = 0;
  if (table_ == of_->tables.all.size()) return;
  const auto& [table, elements] = of_->tables.all[table_];
  ready_.push_back(piece_of(Kind::Table, OfTable{table.name(), table.options(), elements}));
  std::string counters;
  const auto spill = [&] {
    if (!counters.empty()) ready_.push_back(piece_of(Kind::Seen, Some{counters.size() / kSeenBytes}).append(counters));
    counters.clear();
  };
  table.for_each_seen([&](std::uint64_t key, std::uint32_t count) {
    append_bytes(counters, &key, sizeof key);
    append_bytes(counters, &count, sizeof count);
    if (counters.size() >= kPieceBytes) spill();
  });
  spill();
}

std::optional<std::string> Image::next() {
  if (!ready_.empty()) {
    std::string piece = std::move(ready_.front());
    ready_.pop_front();
    return piece;
  }
  if (table_ < of_->tables.all.size()) {
    const FrozenTable& table = of_->tables.all[table_].table;
    if (place_ < table.shape().end) {
      const std::size_t row = sizeof(RowHeader) + table.floats() * sizeof(float);
      const auto step =
          std::min(static_cast<std::uint32_t>(std::max<std::size_t>(1, kPieceBytes / row)), table.shape().end - place_);
      std::string rows = piece_of(Kind::Rows, Some{step});
      table.for_places(place_, step, [&](const RowHeader& header, const float* floats) {
        append_bytes(rows, &header, sizeof header);
        if (floats != nullptr) append_bytes(rows, floats, table.floats() * sizeof(float));
      });
      place_ += step;
      return rows;
    }
    ++table_;
    begin_table();
    return next();
  }
  if (staged_ < of_->tables.staged.size()) {
    const Staged& one = of_->tables.staged[staged_++];
    return piece_of(Kind::Staged, OfStaged{one.worker, one.clock, one.table, one.lr, one.count}).append(*one.payload);
  }
  if (std::exchange(ended_, true)) return std::nullopt;
  Shapes shapes;
  for (const auto& [table, elements] : of_->tables.all) shapes.shapes.push_back(table.shape());
  return piece_of(Kind::End, shapes);
}

Result<void> ImageReader::load(std::string_view piece, const Parts& parts) {
  return result_of([&] { take(piece, parts); });
}

void ImageReader::take(std::string_view piece, const Parts& parts) {
  auto& [introduced, workers, settled, tables] = parts;
  demand(!piece.empty(), "an empty piece of an image");
  const auto kind = static_cast<Kind>(piece.front());
  piece.remove_prefix(1);
  if (kind == Kind::Begin) {
    demand(!loading_ && workers.count() == 0 && tables.count() == 0, "an image that begins within another state");
    const auto beginning = value_or_throw(unpack<Beginning>(piece)).record;
    introduced = beginning.introduced;
    workers.expect(beginning.workers);
    settled = beginning.settled;
    loading_ = true;
    return;
  }
  demand(loading_, "a piece of an image that has not begun");
  switch (kind) {
    case Kind::Worker: {
      auto of = value_or_throw(unpack<OfWorker>(piece)).record;
      demand(of.number < workers.count(), "a worker beyond all");
      workers.at(of.number) = std::move(of.worker);
      return;
    }
    case Kind::Refused: {
      const auto of = value_or_throw(unpack<OfRefused>(piece)).record;
      demand(of.worker < workers.count() && of.error, "nothing that was refused");
      workers.at(of.worker).refused.emplace(of.sequence, *of.error);
      return;
    }
    case Kind::Table: {
      const auto of = value_or_throw(unpack<OfTable>(piece)).record;
      if (auto ok = ps::check(of.options); !ok) raise(ErrorCode::Corrupt, "{}", ok.error().what());
      tables.add(of.name, of.options, of.elements);
      return;
    }
    case Kind::Rows: {
      const auto [of, rows] = value_or_throw(unpack<Some>(piece));
      demand(tables.count() > 0, "rows of no table");
      SparseTable& table = tables.at(tables.count() - 1);
      std::string_view rest = rows;
      for (std::uint64_t i = 0; i < of.count; ++i) {
        RowHeader header;
        demand(rest.size() >= sizeof header, "an image ends within a row");
        std::memcpy(&header, rest.data(), sizeof header);
        rest.remove_prefix(sizeof header);
        const std::size_t size = header.last != 0 ? table.floats() * sizeof(float) : 0;
        demand(rest.size() >= size, "an image ends within a row");
        table.load_place(header, rest.data());
        rest.remove_prefix(size);
      }
      demand(rest.empty(), "a piece of an image is longer than its rows");
      return;
    }
    case Kind::Seen: {
      const auto [of, counters] = value_or_throw(unpack<Some>(piece));
      demand(tables.count() > 0 && of.count <= kLongestMessage && counters.size() == of.count * kSeenBytes,
             "counters that are none");
      for (std::uint64_t i = 0; i < of.count; ++i) {
        std::uint64_t key;
        std::uint32_t count;
        std::memcpy(&key, counters.data() + i * kSeenBytes, sizeof key);
        std::memcpy(&count, counters.data() + i * kSeenBytes + sizeof key, sizeof count);
        tables.at(tables.count() - 1).restore_seen(key, count);
      }
      return;
    }
    case Kind::Staged: {
      const auto [of, payload] = value_or_throw(unpack<OfStaged>(piece));
      demand(of.worker < workers.count() && of.table < tables.count() && of.count <= kMostKeys &&
                 payload.size() == of.count * (sizeof(std::uint64_t) + tables.at(of.table).dim() * sizeof(float)),
             "a push that cannot have been one");
      tables.stage(
          {of.worker, of.clock, of.table, of.lr, of.count, std::make_shared<const std::string>(payload), of.count});
      return;
    }
    case Kind::End: {
      const auto shapes = value_or_throw(unpack<Shapes>(piece)).record.shapes;
      demand(shapes.size() == tables.count(), "an image without its end");
      for (std::size_t i = 0; i < tables.count(); ++i) {
        if (!tables.at(i).end_load(shapes[i]))
          raise(ErrorCode::Corrupt, "the rows of table \"{}\" are not those of its image", tables.at(i).name());
      }
      loading_ = false;
      return;
    }
    default: raise(ErrorCode::Corrupt, "a piece of an image of an unknown kind");
  }
}

}  // namespace cohort::ps
