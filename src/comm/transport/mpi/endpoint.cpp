#include "comm/transport/mpi/endpoint.h"

#include "base/log.h"
#include "base/thread.h"
#include "net/secret.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

namespace cohort::mpi {

Result<PacketHead> read_head(const std::byte* bytes, std::size_t count, int size) {
  PacketHead head;
  if (count < sizeof head || count > kMostPacket) return fail(ErrorCode::Corrupt, "a packet of {} bytes", count);
  std::memcpy(&head, bytes, sizeof head);
  if (head.mark != PacketHead().mark) return fail(ErrorCode::Corrupt, "a packet that is not of this version");
  if (head.from < 0 || head.from >= size) return fail(ErrorCode::Corrupt, "a packet of rank {} of {}", head.from, size);
  const std::size_t payload = count - sizeof head;
  const auto demand = [&](bool good) -> Result<PacketHead> {
    if (!good) return fail(ErrorCode::Corrupt, "a packet of kind {} with wrong lengths", static_cast<int>(head.kind));
    return head;
  };
  switch (head.kind) {
    case PacketKind::Whole: return demand(payload <= kMostWhole && head.total == payload && head.offset == 0);
    case PacketKind::Offer: return demand(payload == 0 && head.total > kMostWhole && head.offset == 0);
    case PacketKind::Grant: return demand(payload == 0 && head.total == 0 && head.offset == 0);
    case PacketKind::Piece:
      return demand(payload > 0 && head.offset <= head.total && payload <= head.total - head.offset);
  }
  return fail(ErrorCode::Corrupt, "a packet of an unknown kind");
}

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int kReceives = 16;
constexpr int kSends = 48;
constexpr int kMeeting = kReceives + kSends;  // the slot of `meet`
constexpr int kSlots = kMeeting + 1;
constexpr int kTag = 7;
constexpr std::size_t kMostSpare = 32;                 // buffers
constexpr std::size_t kSmall = std::size_t{16} << 10;  // stored packets up to this size are copied out of their buffer
constexpr std::size_t kMostEarly = std::size_t{256} << 20;
constexpr auto kNap = 1ms;
constexpr auto kCancelling = 1s;
constexpr int kJobBytes = 16;

std::string words(const CohortMpi& mpi, int code) {
  char text[512] = "";
  if (mpi.explain(code, text, sizeof text) != 0 || text[0] == '\0') return fmt::format("MPI's error {}", code);
  std::string result = text;
  std::replace(result.begin(), result.end(), '\n', ' ');
  return result;
}

tl::unexpected<Error> not_up(const CohortMpi& mpi, std::string_view what, int code) {
  return fail(ErrorCode::Unavailable, "MPI ({}): {} failed -- {}", mpi.made_for, what, words(mpi, code));
}

tl::unexpected<Error> late(const CohortMpi& mpi) {
  return fail(
      ErrorCode::Timeout,
      "MPI ({}): its processes did not all come in time -- every process that mpirun or srun has started has to "
      "call init with the transport mpi",
      mpi.made_for);
}

}  // namespace

Result<std::shared_ptr<Endpoint>> Endpoint::open(const CohortMpi& mpi, net::Deadline deadline) {
  CohortMpiPort* port = nullptr;
  if (const int code = mpi.open(kSlots, &port); code != 0) return not_up(mpi, "MPI_Comm_idup", code);
  int ready = 0;
  int rank = 0;
  int size = 0;
  while (true) {
    if (const int code = mpi.opened(port, &ready, &rank, &size); code != 0) return not_up(mpi, "MPI_Comm_idup", code);
    if (ready != 0) break;
    if (net::passed(deadline)) return late(mpi);
    std::this_thread::sleep_for(kNap);
  }
  // Process 0 names the job. The memory stays allocated if the request never ends.
  auto* const job = new std::string(kJobBytes, '\0');
  if (rank == 0) {
    const net::Secret random = value_or_throw(net::Secret::generate());
    std::memcpy(job->data(), random.bytes().data(), kJobBytes);
  }
  if (const int code = mpi.share(port, 0, job->data(), kJobBytes); code != 0) return not_up(mpi, "MPI_Ibcast", code);
  std::vector<CohortMpiEvent> events(kSlots);
  for (int count = 0; count == 0;) {
    if (const int code = mpi.test(port, events.data(), kSlots, &count); code != 0)
      return not_up(mpi, "MPI_Ibcast", code);
    if (count > 0 && events[0].error != 0) return not_up(mpi, "MPI_Ibcast", events[0].error);
    if (count > 0) break;
    if (net::passed(deadline)) return late(mpi);
    std::this_thread::sleep_for(kNap);
  }
  std::shared_ptr<Endpoint> endpoint(new Endpoint(mpi, port, rank, size));
  endpoint->job_ = *job;
  delete job;
  char library[512] = "";
  if (mpi.library(library, sizeof library) == 0) endpoint->library_ = library;
  endpoint->library_ = endpoint->library_.substr(0, endpoint->library_.find_first_of(",\n"));
  if (endpoint->library_.empty()) endpoint->library_ = mpi.made_for;
  return endpoint;
}

Endpoint::Endpoint(const CohortMpi& mpi, CohortMpiPort* port, int rank, int size)
    : mpi_(mpi), port_(port), rank_(rank), size_(size), receiving_(kReceives), sending_(kSlots), events_(kSlots) {
  for (int slot = kMeeting - 1; slot >= kReceives; --slot) free_.push_back(slot);
  for (int slot = 0; slot < kReceives; ++slot) {
    receiving_[static_cast<std::size_t>(slot)] = std::make_unique<std::byte[]>(kMostPacket);
    post_receive(slot);
  }
}

std::string Endpoint::explain(int code) const { return words(mpi_, code); }

void Endpoint::post_receive(int slot) {
  std::byte* const to = receiving_[static_cast<std::size_t>(slot)].get();
  const int code = mpi_.receive(port_, slot, to, static_cast<int>(kMostPacket), -1, kTag);
  if (code != 0) fail_all(fmt::format("MPI cannot receive any more ({})", explain(code)));
}

void Endpoint::fail_all(std::string why) {
  failed_ = true;
  if (!broken_) broken_ = std::move(why);
}

// --- worlds ---

void Endpoint::enlist(std::uint64_t world) {
  const Lock lock(mutex_);
  worlds_.insert(world);
  for (const Packet& packet : boxes_[world]) early_bytes_ -= packet.count;
}

void Endpoint::retire(std::uint64_t world) {
  const Lock lock(mutex_);
  worlds_.erase(world);
  gone_.insert(world);
  boxes_.erase(world);
  std::erase_if(under_way_, [&](const auto& each) { return each.first.first == world; });
}

// --- packets ---

std::unique_ptr<std::byte[]> Endpoint::buffer() {
  const Lock lock(mutex_);
  if (buffers_.empty()) return std::make_unique<std::byte[]>(kMostPacket);
  auto one = std::move(buffers_.back());
  buffers_.pop_back();
  return one;
}

void Endpoint::give_back(Packet packet) {
  if (packet.count <= kSmall) return;  // its memory may be shorter than a buffer
  const Lock lock(mutex_);
  if (buffers_.size() < kMostSpare) buffers_.push_back(std::move(packet.bytes));
}

bool Endpoint::send(std::uint64_t world, int peer, Packet& packet) {
  const Lock lock(mutex_);
  if (closed_ || broken_ || free_.empty()) return false;
  const int slot = free_.back();
  const int code = mpi_.send(port_, slot, packet.bytes.get(), static_cast<int>(packet.count), peer, kTag);
  if (code != 0) {
    failed_ = true;
    failures_.emplace(peer, fmt::format("MPI cannot send to it ({})", explain(code)));
    return false;
  }
  free_.pop_back();
  sending_[static_cast<std::size_t>(slot)] = {world, peer, std::move(packet)};
  ++under_way_[{world, peer}];
  return true;
}

int Endpoint::under_way(std::uint64_t world, int peer) {
  const Lock lock(mutex_);
  const auto found = under_way_.find({world, peer});
  return found == under_way_.end() ? 0 : found->second;
}

bool Endpoint::poll() {
  const Lock lock(mutex_);
  if (closed_ || broken_) return false;
  int count = 0;
  if (const int code = mpi_.test(port_, events_.data(), static_cast<int>(events_.size()), &count); code != 0) {
    fail_all(fmt::format("MPI makes no progress any more ({})", explain(code)));
    return false;
  }
  for (int i = 0; i < count; ++i) {
    const CohortMpiEvent& event = events_[static_cast<std::size_t>(i)];
    if (event.slot < kReceives) {
      on_received(event);
    } else {
      on_sent(event);
    }
  }
  return count > 0;
}

void Endpoint::on_received(const CohortMpiEvent& event) {
  auto& own = receiving_[static_cast<std::size_t>(event.slot)];
  if (event.error != 0) {
    const std::string why = fmt::format("MPI could not receive from it ({})", explain(event.error));
    if (event.peer < 0 || event.peer >= size_) return fail_all(why);
    failed_ = true;
    failures_.emplace(event.peer, why);
    return post_receive(event.slot);
  }
  const auto count = static_cast<std::size_t>(std::max(event.bytes, 0));
  const auto head = read_head(own.get(), count, std::numeric_limits<int>::max());
  if (!head) {
    failed_ = true;
    failures_.emplace(event.peer, fmt::format("it sent what is none of ours ({})", head.error().what()));
    return post_receive(event.slot);
  }
  const bool known = worlds_.contains(head->world);
  if (gone_.contains(head->world)) return post_receive(event.slot);
  if (!known && early_bytes_ + count > kMostEarly) {
    failed_ = true;
    failures_.emplace(event.peer, "it sends to a world that this rank does not form");
    return post_receive(event.slot);
  }
  if (!known) early_bytes_ += count;
  Packet packet;
  packet.count = count;
  if (count <= kSmall) {
    packet.bytes = std::make_unique<std::byte[]>(count);
    std::memcpy(packet.bytes.get(), own.get(), count);
  } else {
    packet.bytes = std::move(own);
    if (buffers_.empty()) {
      own = std::make_unique<std::byte[]>(kMostPacket);
    } else {
      own = std::move(buffers_.back());
      buffers_.pop_back();
    }
  }
  boxes_[head->world].push_back(std::move(packet));
  post_receive(event.slot);
}

void Endpoint::on_sent(const CohortMpiEvent& event) {
  Sending done = std::exchange(sending_[static_cast<std::size_t>(event.slot)], Sending());
  free_.push_back(event.slot);
  if (const auto found = under_way_.find({done.world, done.peer}); found != under_way_.end() && --found->second == 0)
    under_way_.erase(found);
  if (buffers_.size() < kMostSpare) buffers_.push_back(std::move(done.packet.bytes));
  if (event.error == 0) return;
  failed_ = true;
  failures_.emplace(done.peer, fmt::format("MPI could not send to it ({})", explain(event.error)));
}

std::vector<Packet> Endpoint::take(std::uint64_t world) {
  const Lock lock(mutex_);
  std::vector<Packet> taken;
  const auto box = boxes_.find(world);
  if (box == boxes_.end()) return taken;
  taken.assign(std::make_move_iterator(box->second.begin()), std::make_move_iterator(box->second.end()));
  box->second.clear();
  return taken;
}

std::optional<std::string> Endpoint::failure(int peer) {
  const Lock lock(mutex_);
  if (broken_) return broken_;
  if (closed_) return "MPI has been finalized in this process, while the communicator was there";
  const auto found = failures_.find(peer);
  return found == failures_.end() ? std::nullopt : std::optional(found->second);
}

void Endpoint::close() noexcept {
  const Lock lock(mutex_);
  if (std::exchange(closed_, true)) return;
  for (int slot = 0; slot < kReceives; ++slot) static_cast<void>(mpi_.cancel(port_, slot));
  // MPI_Finalize finishes sends that are under way.
  int left = kReceives;
  const auto limit = Clock::now() + kCancelling;
  while (left > 0 && Clock::now() < limit) {
    int count = 0;
    if (mpi_.test(port_, events_.data(), static_cast<int>(events_.size()), &count) != 0) return;
    for (int i = 0; i < count; ++i) left -= events_[static_cast<std::size_t>(i)].slot < kReceives ? 1 : 0;
  }
}

bool Endpoint::meet(net::Deadline deadline) {
  std::unique_lock lock(mutex_);
  if (mpi_.barrier(port_, kMeeting) != 0) return false;
  while (true) {
    int count = 0;
    if (mpi_.test(port_, events_.data(), static_cast<int>(events_.size()), &count) != 0) return false;
    for (int i = 0; i < count; ++i) {
      const CohortMpiEvent& event = events_[static_cast<std::size_t>(i)];
      if (event.slot == kMeeting) return event.error == 0;
    }
    if (net::passed(deadline)) return false;
    lock.unlock();
    std::this_thread::sleep_for(kNap);
    lock.lock();
  }
}

namespace {

constexpr std::string_view kLevels[] = {"MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED",
                                        "MPI_THREAD_MULTIPLE"};

constexpr std::chrono::seconds kFinalizing{15};

std::string_view level_name(int level) { return kLevels[static_cast<std::size_t>(std::clamp(level, 0, 3))]; }

// The endpoint, for MPI's callback, which has no context argument. Set once, before MPI can call it.
std::shared_ptr<Endpoint>& endpoint_of_process() {
  static auto* const endpoint = new std::shared_ptr<Endpoint>();
  return *endpoint;
}

void before_finalize() {
  if (endpoint_of_process()) endpoint_of_process()->close();
}

}  // namespace

Runtime& Runtime::of_process() {
  static auto* const runtime = new Runtime();
  return *runtime;
}

Result<std::shared_ptr<Endpoint>> Runtime::endpoint(net::Deadline deadline, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  if (begun_ && process_ != ::getpid())
    return fail(ErrorCode::InvalidArgument, "MPI cannot be used in a forked child of the process that began it");
  if (!begun_) {
    auto plugin = plugin_of_process();
    if (!plugin) return tl::unexpected(plugin.error());
    plugin_ = *std::move(plugin);
    process_ = ::getpid();
    begun_ = true;
    sys::start_without_signals([this, deadline] { serve(deadline); }).detach();
  }
  patience_ = std::max(patience_, patience);
  if (!changed_.wait_until(lock, deadline, [&] { return outcome_.has_value(); })) {
    return fail(ErrorCode::Timeout,
                "MPI ({}) did not begin in time: MPI_Init waits for all processes that mpirun or srun has started -- "
                "did one of them end, or not call init?",
                plugin_.mpi->made_for);
  }
  return *outcome_;
}

void Runtime::serve(net::Deadline deadline) {
  Outcome outcome = begin(deadline);
  std::unique_lock lock(mutex_);
  if (outcome) endpoint_of_process() = *outcome;
  // Runs before all handlers that were registered earlier. So MPI is finalized before Cohort and MPI disconnect the
  // process from its launcher, which they do in such handlers (MPICH 5: PMI).
  if (ours_) ::on_exit([](int status, void* runtime) { static_cast<Runtime*>(runtime)->at_exit(status); }, this);
  outcome_ = std::move(outcome);
  changed_.notify_all();
  if (!ours_) return;
  changed_.wait(lock, [&] { return ending_ == Ending::Wanted; });
  const net::Deadline all_here = net::deadline_in(patience_);
  lock.unlock();
  finalize(all_here);
}

void Runtime::finalize(net::Deadline all_here) {
  const bool met = endpoint_of_process()->meet(all_here);
  step_to(met ? Ending::Met : Ending::Alone);
  if (!met) return;
  const int code = plugin_.mpi->finalize();
  if (code != 0) log::warn("comm", "MPI_Finalize returned the error {}", code);
  step_to(Ending::Over);
}

void Runtime::step_to(Ending step) {
  const std::lock_guard lock(mutex_);
  ending_ = step;
  changed_.notify_all();
}

Runtime::Outcome Runtime::begin(net::Deadline deadline) {
  const CohortMpi& mpi = *plugin_.mpi;
  int state = COHORT_MPI_NOT_BEGUN;
  int level = COHORT_MPI_SINGLE;
  if (mpi.state(&state, &level) != 0)
    return fail(ErrorCode::Unavailable, "MPI ({}) does not say whether it is initialized", mpi.made_for);
  if (state == COHORT_MPI_OVER) {
    return fail(ErrorCode::Unavailable,
                "MPI ({}) has been finalized in this process and cannot begin again -- call init before MPI_Finalize",
                mpi.made_for);
  }
  if (state == COHORT_MPI_RUNNING && level < COHORT_MPI_MULTIPLE) {
    return fail(ErrorCode::Unavailable,
                "the program has initialized MPI ({}) with {}, and the communicator's thread calls MPI beside the "
                "program's -- call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave MPI to init",
                mpi.made_for, level_name(level));
  }
  if (state == COHORT_MPI_NOT_BEGUN) {
    if (const int code = mpi.initialize(&level); code != 0)
      return fail(ErrorCode::Unavailable, "MPI_Init of {} failed with the error {}", mpi.made_for, code);
    const std::lock_guard lock(mutex_);
    ours_ = true;
  }
  if (level < COHORT_MPI_SERIALIZED) {
    return fail(ErrorCode::Unavailable,
                "MPI ({}) gives {}, and MPI_THREAD_SERIALIZED is the least that a communicator needs: its thread calls "
                "MPI when nobody waits -- use an MPI that was built for threads, or the transport tcp",
                mpi.made_for, level_name(level));
  }
  if (const int code = mpi.before_finalize(before_finalize); code != 0)
    return fail(ErrorCode::Unavailable, "MPI ({}): MPI_Comm_set_attr failed with the error {}", mpi.made_for, code);
  auto endpoint = Endpoint::open(mpi, deadline);
  if (endpoint) {
    log::info("comm", "MPI process {} of {}: {} (plug-in {}, {}, {})", (*endpoint)->rank(), (*endpoint)->size(),
              (*endpoint)->library(), plugin_.path, level_name(level),
              ours_ ? "initialized by Cohort" : "initialized by the program");
  }
  return endpoint;
}

// MPI_Finalize is collective. After a failure it would wait for processes that do not call it, so it is skipped. The
// launcher then sees that this process ended without it, and ends the others. Some versions do not return although all
// processes have called it, such as MPICH over UCX's tcp before 4.2 (pmodels/mpich#6596). So the wait for all processes
// and the call itself have separate limits.
void Runtime::at_exit(int status) {
  std::unique_lock lock(mutex_);
  if (process_ != ::getpid() || !ours_ || !outcome_ || !*outcome_ || ending_ != Ending::None) return;
  if (status != 0 || (**outcome_)->failed()) return;
  (**outcome_)->close();
  ending_ = Ending::Wanted;
  changed_.notify_all();
  changed_.wait_for(lock, patience_, [&] { return ending_ != Ending::Wanted; });
  if (ending_ < Ending::Met) {
    log::warn("comm", "not all ranks have come to MPI_Finalize (they may take {} ms); this process ends without it",
              patience_.count());
    return;
  }
  if (!changed_.wait_for(lock, kFinalizing, [&] { return ending_ == Ending::Over; })) {
    log::warn("comm",
              "MPI_Finalize of {} has not returned {} s after all ranks had come to it; this process ends without it, "
              "which its launcher may call a failure of the job -- the program itself has ended in order",
              plugin_.mpi->made_for, std::chrono::seconds(kFinalizing).count());
  }
}

}  // namespace cohort::mpi
