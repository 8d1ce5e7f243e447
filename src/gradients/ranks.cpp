#include "gradients/ranks.h"

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

std::shared_ptr<Ranks> ranks_of(Communicator comm) { return std::make_shared<RanksOfCommunicator>(std::move(comm)); }

}  // namespace cohort::gradients
