#include "ps/tables.h"

#include "ps/optimizer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::ps {
namespace {

constexpr std::uint32_t kVerifiedRows = 256;  // rows

/// Text as in Python: "Bounded(4)".
std::string described(const Consistency& consistency) {
  if (consistency.mode == Mode::Async) return "Async()";
  if (consistency.mode == Mode::Bounded) return fmt::format("Bounded({})", consistency.staleness);
  return "Sync()";
}

/// Lists how two workers' options for one table differ: "dim 8 and 16; the initializer".
std::string differences(const TableOptions& one, const TableOptions& other) {
  constexpr const char* kRules[] = {"Sgd", "Adagrad", "RowAdagrad", "Adam", "AdamW", "Ftrl"};
  std::vector<std::string> found;
  const auto differ = [&](auto member) {
    TableOptions mixed = one;
    mixed.*member = other.*member;
    return codec::encode(mixed) != codec::encode(one);
  };
  if (one.dim != other.dim) found.push_back(fmt::format("dim {} and {}", one.dim, other.dim));
  if (differ(&TableOptions::optimizer)) {
    const auto lr = [](const TableOptions& of) {
      return std::visit([](const auto& rule) { return rule.lr; }, of.optimizer);
    };
    found.push_back(fmt::format("the optimizer: {} (lr {}) and {} (lr {})", kRules[one.optimizer.index()], lr(one),
                                kRules[other.optimizer.index()], lr(other)));
  }
  if (differ(&TableOptions::initializer)) found.emplace_back("the initializer");
  if (differ(&TableOptions::consistency)) {
    found.push_back(
        fmt::format("the consistency: {} and {}", described(one.consistency), described(other.consistency)));
  }
  if (one.admission != other.admission)
    found.push_back(fmt::format("admission {} and {}", one.admission, other.admission));
  if (differ(&TableOptions::eviction)) found.emplace_back("max_age, max_rows or victim");
  if (one.seed != other.seed) found.push_back(fmt::format("seed {} and {}", one.seed, other.seed));
  return fmt::format("{}", fmt::join(found, "; "));
}

}  // namespace

std::optional<std::uint32_t> Tables::find(std::string_view name) const noexcept {
  for (std::uint32_t i = 0; i < all_.size(); ++i) {
    if (all_[i].table.name() == name) return i;
  }
  return std::nullopt;
}

Result<void> Tables::check_open(const Open& open, std::size_t limit) const {
  if (open.name.empty()) return fail(ErrorCode::InvalidArgument, "a table without a name");
  if (auto ok = ps::check(open.options); !ok) return ok;
  if (const auto known = find(open.name)) {
    const Served& served = all_[*known];
    if (codec::encode(served.table.options()) == codec::encode(open.options) && served.elements == open.elements)
      return {};
    const std::string differ = served.elements != open.elements
                                   ? fmt::format("{} and {} elements (0: a table)", served.elements, open.elements)
                                   : differences(served.table.options(), open.options);
    return fail(ErrorCode::Mismatch,
                "\"{}\" is there already, and described in another way -- {}, there and here -- say the same at all "
                "workers, or take another name",
                open.name, differ);
  }
  if (all_.size() >= 4096) return fail(ErrorCode::Unavailable, "more than 4096 tables");
  if (bytes() + SparseTable(open.name, open.options).bytes_with(1) > limit)
    return fail(ErrorCode::Unavailable,
                "no memory for table \"{}\": it needs {} bytes, and {} of {} are taken -- more "
                "memory for the server (`memory`)",
                open.name, SparseTable(open.name, open.options).bytes_with(1), bytes(), limit);
  return {};
}

Result<void> Tables::check_change(Method method, std::string_view body, std::size_t limit) {
  const auto change = unpack<Change>(body);
  if (!change) return tl::unexpected(change.error());
  const std::uint32_t number = change->record.table;
  if (number >= all_.size()) return fail(ErrorCode::InvalidArgument, "there is no table {}", number);
  const SparseTable& table = all_[number].table;
  const std::size_t count = change->record.count;
  const std::size_t row = method == Method::Erase ? 0 : table.dim() * sizeof(float);
  if (change->payload.size() != count * (sizeof(std::uint64_t) + row))
    return fail(ErrorCode::Corrupt, "{} keys and rows of {} bytes in {} bytes", count, row, change->payload.size());
  if (method == Method::Erase) return {};
  const bool stays = method == Method::Push && table.options().consistency.mode != Mode::Async;
  const std::size_t staged = stays ? change->payload.size() + sizeof(Staged) : 0;
  const std::size_t rows = stays ? count : 0;
  // The exact need is computed only if an upper bound exceeds the limit.
  if (bytes_with(number, count, rows) + staged <= limit) return {};
  count_fresh();
  if (bytes_with(number, table.fresh(count, change->payload.data()), rows) + staged <= limit) return {};
  return fail(
      ErrorCode::Unavailable,
      "no memory for {} rows of table \"{}\": {} of {} bytes are taken{} -- more servers, more memory for them, or "
      "an eviction by rows",
      count, table.name(), bytes(), limit,
      staged_bytes_ > 0 ? ", and pushes wait that need more when their clock ends" : "");
}

/// Memory after the staged pushes have been made and the table has `fresh` more rows, including the sums of a clock's
/// pushes with `rows` more.
std::size_t Tables::bytes_with(std::uint32_t number, std::size_t fresh, std::size_t rows) const noexcept {
  std::size_t bytes = staged_bytes_, sum = sum_.bytes();
  for (std::uint32_t i = 0; i < all_.size(); ++i) {
    const Served& served = all_[i];
    const std::size_t more = served.fresh + (i == number ? fresh : 0);
    bytes += more > 0 ? served.table.bytes_with(more) : served.table.counts().bytes;
    if (served.table.options().consistency.mode == Mode::Sync)
      sum = std::max(sum, KeyedSum::bytes_for(served.waiting + (i == number ? rows : 0), served.table.dim()));
  }
  return bytes + sum;
}

void Tables::count_fresh() {
  for (Staged& one : staged_) {
    if (std::exchange(one.counted, true)) continue;
    Served& served = all_[one.table];
    served.fresh -= one.fresh;
    one.fresh = served.table.fresh(one.count, one.payload->data());
    served.fresh += one.fresh;
  }
}

Result<void> Tables::check_adopt(std::string_view body) const {
  const auto opened = unpack<Adopt>(body);
  if (!opened) return tl::unexpected(opened.error());
  const Adopt& given = opened->record;
  if (auto ok = ps::check(given.options); !ok) return ok;
  if (auto ok = check_open({{}, given.name, given.options, given.elements}, ~std::size_t{0}); !ok) return ok;
  const std::size_t dim = static_cast<std::size_t>(given.options.dim);
  const std::uint64_t row = sizeof(RowHeader) + (dim + slots_of(given.options.optimizer, dim)) * sizeof(float);
  if (given.rows > kLongestMessage || given.seen > kLongestMessage ||
      opened->payload.size() != given.rows * row + given.seen * kSeenBytes)
    return fail(ErrorCode::Corrupt, "{} rows of {} bytes and {} counters in {} bytes", given.rows, row, given.seen,
                opened->payload.size());
  return {};
}

void Tables::adopt(std::string_view body) {
  const auto opened = *unpack<Adopt>(body);
  const Adopt& given = opened.record;
  if (!find(given.name)) add(given.name, given.options, given.elements);
  SparseTable& table = all_[*find(given.name)].table;
  const char* at = opened.payload.data();
  for (std::uint64_t i = 0; i < given.rows; ++i) {
    RowHeader header;
    std::memcpy(&header, at, sizeof header);
    table.restore(header, at + sizeof header);
    at += sizeof header + table.floats() * sizeof(float);
  }
  for (std::uint64_t i = 0; i < given.seen; ++i, at += kSeenBytes) {
    std::uint64_t key;
    std::uint32_t count;
    std::memcpy(&key, at, sizeof key);
    std::memcpy(&count, at + sizeof key, sizeof count);
    table.restore_seen(key, count);
  }
}

std::optional<Verify> Tables::some_rows(std::uint64_t turn) const {
  std::uint64_t slices = 0;
  for (const Served& served : all_) slices += (served.table.shape().end + kVerifiedRows - 1) / kVerifiedRows;
  if (slices == 0) return std::nullopt;
  std::uint64_t slice = turn % slices;
  for (std::uint32_t number = 0; number < all_.size(); ++number) {
    const SparseTable& table = all_[number].table;
    const std::uint64_t here = (table.shape().end + kVerifiedRows - 1) / kVerifiedRows;
    if (slice >= here) {
      slice -= here;
      continue;
    }
    const auto first = static_cast<std::uint32_t>(slice * kVerifiedRows);
    return Verify{number, first, kVerifiedRows, table.digest(first, kVerifiedRows)};
  }
  return std::nullopt;
}

Result<void> Tables::verify(std::string_view body) const {
  const auto opened = unpack<Verify>(body);
  if (!opened) return tl::unexpected(opened.error());
  const Verify& rows = opened->record;
  if (rows.table >= all_.size()) return fail(ErrorCode::Corrupt, "there is no table {}", rows.table);
  const SparseTable& table = all_[rows.table].table;
  if (table.digest(rows.first, std::min(rows.count, kVerifiedRows)) == rows.digest) return {};
  return fail(ErrorCode::Corrupt, "rows {} to {} of table \"{}\" are not what they are where they were stepped first",
              rows.first, rows.first + kVerifiedRows - 1, table.name());
}

void Tables::stage(Staged staged) {
  staged_bytes_ += staged.payload->size() + sizeof(Staged);
  all_[staged.table].waiting += staged.count;
  all_[staged.table].fresh += staged.fresh;
  staged_.push_back(std::move(staged));
}

void Tables::step_staged(std::int64_t clock, std::uint32_t now) {
  for (std::uint32_t number = 0; number < all_.size(); ++number) {
    SparseTable& table = all_[number].table;
    if (!is_sync(number)) continue;
    std::vector<const Staged*> due;
    for (const Staged& one : staged_) {
      if (one.table == number && one.clock <= clock) due.push_back(&one);
    }
    if (due.empty()) continue;
    std::stable_sort(due.begin(), due.end(), [](const Staged* a, const Staged* b) { return a->worker < b->worker; });
    std::size_t most = 0;
    for (const Staged* one : due) most += one->count;
    sum_.begin(table.dim(), most);
    for (const Staged* one : due) {
      const KeyedRows rows = rows_of(*one->payload, one->count);
      for (std::size_t i = 0; i < rows.count; ++i) {
        std::uint64_t key;
        std::memcpy(&key, static_cast<const char*>(rows.keys) + i * sizeof key, sizeof key);
        sum_.add(key, static_cast<const char*>(rows.rows) + i * table.dim() * sizeof(float));
      }
    }
    table.step({sum_.keys().data(), sum_.sums(), sum_.size()}, now, due.front()->lr);
    unstage([&](const Staged& one) { return one.table == number && one.clock <= clock; });
  }
}

SparseTable::Effort Tables::effort_of_staged() const {
  SparseTable::Effort all;
  for (const Served& served : all_) {
    if (served.waiting == 0) continue;
    const SparseTable::Effort one = served.table.effort(served.waiting);
    all.floats += 2 * one.floats;  // each is added up, then stepped
    all.copied += one.copied;
  }
  return all;
}

FrozenTables Tables::freeze() {
  FrozenTables frozen{{}, staged_, {}};
  frozen.all.reserve(all_.size());
  for (Served& served : all_) frozen.all.push_back({served.table.freeze(views_), served.elements});
  frozen_staged_ = staged_bytes_;
  views_->fetch_add(1, std::memory_order_acq_rel);
  frozen.in_use = {nullptr, [views = views_](void*) { views->fetch_sub(1, std::memory_order_acq_rel); }};
  return frozen;
}

std::size_t Tables::bytes() const noexcept {
  std::size_t bytes = staged_bytes_ + sum_.bytes();
  for (const Served& served : all_) bytes += served.table.counts().bytes;
  return bytes;
}

std::size_t Tables::copied() const noexcept {
  if (views_->load(std::memory_order_acquire) == 0) return 0;
  std::size_t bytes = frozen_staged_;
  for (const Served& served : all_) bytes += served.table.copied();
  return bytes;
}

}  // namespace cohort::ps
