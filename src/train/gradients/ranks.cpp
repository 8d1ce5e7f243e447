#include "train/gradients/ranks.h"

#include <algorithm>
#include <utility>

namespace cohort::gradients {

namespace {

// The Work's destructor waits, so what it works on may go after it; unless a stream waits for it.
class PendingWork final : public Pending {
 public:
  PendingWork(Work work, std::shared_ptr<const void> keep) : keep_(std::move(keep)), work_(std::move(work)) {}
  void wait() override { work_.wait(); }
  void synchronize(const Device& stream) override {
    work_.synchronize(stream);
    if (!work_.done()) work_.on_done([keep = std::move(keep_)] {});
  }
  std::optional<bool> finite() const override { return work_.finite(); }

 private:
  std::shared_ptr<const void> keep_;
  Work work_;
};

class RanksOfCommunicator final : public Ranks {
 public:
  explicit RanksOfCommunicator(Communicator comm) : comm_(std::move(comm)) {}
  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  int local_size() const override { return comm_.local_size(); }
  const std::string& host() const override { return comm_.host(); }
  Memory allocate(std::size_t bytes) override { return comm_.allocate(bytes); }
  std::unique_ptr<Pending> start(const char* /*name*/, const Start& start, std::shared_ptr<const void> keep) override {
    return std::make_unique<PendingWork>(start(comm_), std::move(keep));
  }

 private:
  Communicator comm_;
};

}  // namespace

ErrorContext Ranks::where(const char* operation) const {
  ErrorContext where;
  where.rank = rank();
  where.host = host();
  where.operation = operation;
  return where;
}

std::vector<std::vector<std::uint64_t>> gather_rows(Ranks& ranks, const std::vector<std::uint64_t>& mine) {
  const std::size_t width = mine.size() + 1;
  std::vector<std::uint64_t> table(width * static_cast<std::size_t>(ranks.size()));
  const std::size_t row = width * static_cast<std::size_t>(ranks.rank());
  table[row] = 1;
  std::copy(mine.begin(), mine.end(), table.begin() + static_cast<std::ptrdiff_t>(row + 1));
  ranks.run("all_reduce", table,
            [](Communicator& comm, auto span) { return comm.all_reduce(span, {.op = ReduceOp::Sum}); });
  std::vector<std::vector<std::uint64_t>> rows(static_cast<std::size_t>(ranks.size()));
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    const auto begin = table.begin() + static_cast<std::ptrdiff_t>(rank * width);
    if (*begin != 0) rows[rank].assign(begin + 1, begin + static_cast<std::ptrdiff_t>(width));
  }
  return rows;
}

std::shared_ptr<Ranks> ranks_of(Communicator comm) { return std::make_shared<RanksOfCommunicator>(std::move(comm)); }

}  // namespace cohort::gradients
