// A journal that is written anew again and again: whatever it is cut at, and whenever its writer is killed, it has what
// was appended.

#include "ps/journal.h"
#include "base/files.h"
#include "base/unique_fd.h"
#include "net/rpc.h"
#include "net/served_store.h"
#include "ps/replication.h"
#include "ps/server_map.h"
#include "ps/tests/testing.h"

#include <cohort/ps.h>

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort::ps {
namespace {

constexpr std::size_t kTail = 2048;
constexpr std::uint64_t kIncarnation = 1;

class Folder {
 public:
  Folder() {
    path_ = std::filesystem::temp_directory_path() / "cohort-journal-XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp");
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::string image_of(State& state) {
  std::string all;
  Image image(state.freeze());
  while (const auto piece = image.next()) all += *piece;
  return all;
}

/// A server's state and its journal, as primary.cpp has them. One worker pushes to a table that steps at once and to
/// one whose pushes wait for the end of its clock.
class Kept {
 public:
  explicit Kept(const std::string& path) : journal_(value_or_throw(Journal::open(path, state_, kTail))) {
    if (state_.workers().count() > 0) return;
    Hello hello;
    hello.incarnation = kIncarnation;
    hello.servers = {"@somewhere"};
    note(Method::Joined, pack(hello));
    note(Method::Start, pack(Start{order(), 0}));
    for (const auto& [name, mode] : {std::pair("now", Mode::Async), std::pair("later", Mode::Sync)}) {
      TableOptions options;
      options.dim = 1;
      options.optimizer = optim::Sgd{.lr = 1};
      options.consistency.mode = mode;
      note(Method::Open, pack(Open{order(), name, options, 0}));
    }
  }
  /// Now and then the end of the worker's clock instead.
  void push() {
    if (mark() % 16 == 15) return note(Method::Commit, pack(Commit{order(), state_.workers().at(0).committed}));
    std::string body = pack(Change{order(), static_cast<std::uint32_t>(mark() % 2), 1, {}});
    const std::uint64_t key = mark() % 20;
    const float gradient = -1;
    body.append(reinterpret_cast<const char*>(&key), sizeof key);
    note(Method::Push, body.append(reinterpret_cast<const char*>(&gradient), sizeof gradient));
  }
  /// The number of the latest change.
  std::uint64_t mark() const { return state_.workers().at(0).mark; }
  State& state() { return state_; }
  const Journal& journal() const { return journal_; }
  std::vector<std::string> images;  ///< after each command
  std::uint64_t appended = 0;       ///< bytes of all commands

 private:
  Order order() const { return {mark() + 1, mark()}; }
  void note(Method method, const std::string& body) {
    const Command command{1, method, 0, kIncarnation, body};
    value_or_throw(journal_.append(method, record_head(command), body));
    state_.run(command);
    journal_.compact_if_long(state_);
    images.push_back(image_of(state_));
    appended += kRecordHead + body.size();
  }
  State state_;
  Journal journal_;
};

/// Until it has been written anew so often.
void push_until_compacted(Kept& kept, int times) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (std::uint64_t before = kept.journal().size(); times > 0; before = kept.journal().size()) {
    kept.push();
    if (kept.journal().size() < before) --times;
    // While the disk is waited for, little should come behind the image.
    if (kept.journal().size() > 2 * kTail) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error("it is not written anew");
  }
}

TEST(CompactJournal, HasWhatItsCommandsHaveMade) {
  const Folder folder;
  std::string whole;
  {
    Kept kept(folder.file("journal"));
    push_until_compacted(kept, 3);
    for (int i = 0; i < 10; ++i) kept.push();
    whole = image_of(kept.state());
    EXPECT_LT(kept.journal().size(), kept.appended);
  }
  EXPECT_FALSE(std::filesystem::exists(folder.file("journal.new")));
  Kept again(folder.file("journal"));
  EXPECT_EQ(image_of(again.state()), whole);
  push_until_compacted(again, 1);
}

TEST(CompactJournal, CutAtAnyByteHasTheWholeRecordsBeforeOrIsRefused) {
  const Folder folder;
  std::vector<std::string> images;
  {
    Kept kept(folder.file("journal"));
    push_until_compacted(kept, 2);
    for (int i = 0; i < 10; ++i) kept.push();
    images = kept.images;
  }
  const auto bytes = value_or_throw(sys::read_file(folder.file("journal")));
  const std::size_t magic = bytes.text().find('\n') + 1;
  std::vector<std::size_t> ends;  // of the records after the image
  std::size_t image = 0;
  for (std::string_view rest = bytes.text().substr(magic); const auto command = next_record(rest);) {
    if (command->method == Method::Piece)
      image = bytes.size() - rest.size();
    else
      ends.push_back(bytes.size() - rest.size());
  }
  ASSERT_GT(image, magic);
  ASSERT_GE(ends.size(), 10U);
  ASSERT_EQ(ends.back(), bytes.size());
  const std::string cut = folder.file("cut");
  for (std::size_t size = magic + 1; size <= bytes.size(); ++size) {
    std::filesystem::remove(cut + ".cut-1");
    std::filesystem::remove(cut);  // some file systems wait for the disk where a file is written over
    std::ofstream(cut, std::ios::binary) << bytes.text().substr(0, size);
    State state;
    const auto journal = Journal::open(cut, state, kTail);
    if (size < image) {
      // Within its first record there is nothing that says that there was an image.
      if (!journal) {
        EXPECT_EQ(journal.error().code(), ErrorCode::Corrupt);
        EXPECT_EQ(std::filesystem::file_size(cut), size) << "it is as it was";
      } else {
        EXPECT_EQ(state.workers().count(), 0U) << size;
      }
      continue;
    }
    ASSERT_TRUE(journal) << size << ": " << journal.error().what();
    const auto whole = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), size) - ends.begin());
    ASSERT_EQ(image_of(state), images[images.size() - 1 - (ends.size() - whole)]) << size;
  }
}

TEST(CompactJournal, AKilledWriterHasLostNothingThatItHadAppended) {
  const Folder folder;
  std::mt19937 random(3);
  std::uint64_t reached = 0, smallest = ~std::uint64_t{0};
  for (int kill = 0; kill < 40; ++kill) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
      try {
        Kept kept(folder.file("journal"));
        while (true) {
          kept.images.clear();
          kept.push();
          const std::uint64_t mark = kept.mark();
          if (::write(ends[1], &mark, sizeof mark) != sizeof mark) ::_exit(1);
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
      ::_exit(2);
    }
    ::close(ends[1]);
    std::uint64_t acknowledged = 0;
    for (auto left = 1 + random() % 3000; left > 0; --left)
      ASSERT_EQ(::read(ends[0], &acknowledged, sizeof acknowledged), static_cast<ssize_t>(sizeof acknowledged));
    ::kill(pid, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    while (::read(ends[0], &acknowledged, sizeof acknowledged) == static_cast<ssize_t>(sizeof acknowledged)) {
    }
    ::close(ends[0]);
    Kept kept(folder.file("journal"));
    EXPECT_GE(kept.mark(), acknowledged);
    EXPECT_LE(kept.mark(), acknowledged + 1);
    EXPECT_GT(acknowledged, reached);
    reached = kept.mark();
    smallest = std::min(smallest, kept.journal().size() / reached);
    float sum = 0;
    for (std::uint64_t key = 0; key < 20; ++key) {
      float value = 0;
      kept.state().tables().at(0).read(reinterpret_cast<const char*>(&key), 1, reinterpret_cast<char*>(&value), 1);
      sum += value;
    }
    // Changes 1 to 3 are the beginning and the tables; each second one after is a push that counts at once.
    EXPECT_EQ(static_cast<std::uint64_t>(sum), (kept.mark() - 3) / 2);
  }
  RecordProperty("pushes", std::to_string(reached));
  EXPECT_LT(smallest, kRecordHead) << "bytes of each change: it has not been written anew";
}

TEST(CompactJournal, IsFollowedWhereALinkLeadsAndRemovesWhatADeadWriterLeft) {
  const Folder folder;
  std::filesystem::create_symlink("real", folder.file("link"));
  std::ofstream(folder.file("real.new")) << "half of an image";
  Kept kept(folder.file("link"));
  EXPECT_FALSE(std::filesystem::exists(folder.file("real.new")));
  push_until_compacted(kept, 1);
  EXPECT_TRUE(std::filesystem::is_symlink(folder.file("link")));
  EXPECT_EQ(std::filesystem::file_size(folder.file("real")), kept.journal().size());
  State state;
  const auto second = Journal::open(folder.file("link"), state, kTail);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), ErrorCode::Unavailable);
}

// Nobody can know what was behind it: the server does not start, and the file is as it was.
TEST(CompactJournal, ABitThatFlipsIsRefusedWhereverItIs) {
  const Folder folder;
  {
    Kept kept(folder.file("journal"));
    push_until_compacted(kept, 1);
    for (int i = 0; i < 10; ++i) kept.push();
  }
  const auto bytes = value_or_throw(sys::read_file(folder.file("journal")));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::string damaged(bytes.text());
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << at % 8));
    const std::string path = folder.file("damaged");
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary) << damaged;
    State state;
    const auto journal = Journal::open(path, state, kTail);
    ASSERT_FALSE(journal) << at;
    EXPECT_EQ(journal.error().code(), ErrorCode::Corrupt);
    EXPECT_NE(std::string(journal.error().what()).find(path), std::string::npos);
    ASSERT_EQ(value_or_throw(sys::read_file(path)).text(), damaged) << at;
  }
}

TEST(CompactJournal, KeepsWhatItCutsOff) {
  const Folder folder;
  std::string image;
  {
    Kept kept(folder.file("journal"));
    for (int i = 0; i < 10; ++i) kept.push();
    image = image_of(kept.state());
  }
  for (int turn = 1; turn <= 2; ++turn) {
    const std::uint64_t size = std::filesystem::file_size(folder.file("journal"));
    const std::string torn = record_head({.body = "0123456789"}) + "01234";
    std::ofstream(folder.file("journal"), std::ios::binary | std::ios::app) << torn;
    Kept again(folder.file("journal"));
    EXPECT_EQ(image_of(again.state()), image);
    EXPECT_EQ(std::filesystem::file_size(folder.file("journal")), size);
    EXPECT_EQ(value_or_throw(sys::read_file(folder.file("journal.cut-" + std::to_string(turn)))).text(), torn);
  }
}

TEST(CompactJournal, IsSetAsideOnceNobodyHasIt) {
  const Folder folder;
  const std::string path = folder.file("journal");
  const auto begin_anew = [&] {
    if (const auto done = Journal::set_aside(path); !done) return std::string(done.error().what());
    State state;
    const auto journal = Journal::open(path, state, kTail);
    EXPECT_EQ(state.workers().count(), 0U);
    return journal ? std::string() : std::string(journal.error().what());
  };
  {
    Kept kept(path);
    const std::uint64_t size = kept.journal().size();
    EXPECT_NE(begin_anew().find("another process has it"), std::string::npos);
    EXPECT_EQ(std::filesystem::file_size(path), size);
    kept.push();
  }
  EXPECT_EQ(begin_anew(), "");
  EXPECT_EQ(begin_anew(), "");  // there was nothing in it
  EXPECT_FALSE(std::filesystem::exists(path + ".earlier-2"));
  { const Kept kept(path); }
  EXPECT_EQ(begin_anew(), "");
  EXPECT_GT(std::filesystem::file_size(path + ".earlier"), std::filesystem::file_size(path + ".earlier-2"));
}

// A copy's journal has the image's pieces, too, which do not count as changes; an earlier copy's gives way.
TEST(CompactJournal, OfACopyBeginsWithItsImage) {
  const Folder folder;
  Kept kept(folder.file("primary"));
  for (int i = 0; i < 300; ++i) kept.push();
  const std::string path = folder.file("copy");
  for (int copy = 0; copy < 2; ++copy) {
    value_or_throw(Journal::remove(path));
    State state;
    auto journal = value_or_throw(Journal::open(path, state, 1));
    const auto append = [&](Method method, std::string_view body) {
      const Command command{1, method, 0, kIncarnation, body};
      value_or_throw(journal.append(method, record_head(command).append(body), {}));
      value_or_throw(state.replay(command));
      journal.compact_if_long(state);
    };
    Image image(kept.state().freeze());
    while (const auto piece = image.next()) append(Method::Piece, *piece);
    EXPECT_FALSE(std::filesystem::exists(path + ".new")) << "there is no change that it could do without";
    if (copy == 0)
      append(Method::Commit, pack(Commit{{kept.mark() + 1, kept.mark()}, state.workers().at(0).committed}));
    EXPECT_FALSE(Journal::remove(path)) << "it is in use";
  }
  State again;
  value_or_throw(Journal::open(path, again, kTail));
  EXPECT_EQ(image_of(again), image_of(kept.state()));
}

// A process that dies or is stopped while it receives a copy of a server's rows: workers do not wait for it.

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr char kEnd = 7;  // of an image's last piece

net::Deadline soon() { return net::deadline_in(seconds(10)); }

/// A job of two servers, of which the second is not what it says.
class Job {
 public:
  Job() {
    secret_ = value_or_throw(net::Secret::generate());
    store_ = std::make_unique<store::StoreServer>(store::StoreServerOptions{.secret = secret_});
    inherited_ = value_or_throw(secret_->to_sealed_memfd());
    ::setenv("COHORT_STORE", net::to_string(store_->endpoint()).c_str(), 1);
    ::setenv("COHORT_SECRET_FD", std::to_string(inherited_.get()).c_str(), 1);
    const std::string name = "@cohort-copy-" + std::to_string(::getpid());
    ServerOptions options;
    options.endpoint = name;
    options.replicas = 1;
    options.number = 0;
    options.servers = 2;
    server_ = std::make_unique<Server>(options);
    Membership::Options as;
    as.number = 1;
    as.servers = 2;
    as.replicas = 1;
    as.endpoint = name + "-nobody";
    membership_ = std::make_unique<Membership>(as);
    ClientOptions client;
    client.servers = {name};
    client.timeout = seconds(20);
    client_.emplace(Client::connect(client));
  }
  ~Job() {
    client_.reset();
    server_.reset();
    ::unsetenv("COHORT_STORE");
    ::unsetenv("COHORT_SECRET_FD");
  }
  Client& client() { return *client_; }

  /// Begins to get a copy, by the calls of a Follower.
  std::unique_ptr<net::RpcClient> follow(std::uint64_t copy) {
    std::unique_ptr<net::RpcClient> rpc;
    net::rpc_connect(value_or_throw(place_of(server_->endpoint(), "")), soon(),
                     [&](net::SecureConnection connection, const std::string& at, net::Deadline) {
                       rpc = std::make_unique<net::RpcClient>(std::move(connection), "parameter", at);
                     });
    const auto life = membership_->self().life;
    const std::string said =
        rpc->call(static_cast<std::uint8_t>(Method::Follow), pack(Follow{0, 1, life, copy}), soon());
    EXPECT_FALSE(value_or_throw(unpack<Answer>(said)).record.error);
    received_ = 0;
    return rpc;
  }
  /// Number of records received, and whether the image ends with them.
  struct Got {
    std::size_t records = 0;
    bool whole = false;
  };
  Got fetch(net::RpcClient& rpc, std::uint64_t copy) {
    constexpr std::uint64_t kOne = 1;  // bytes: one record
    const std::string answer =
        rpc.call(static_cast<std::uint8_t>(Method::Fetch),
                 pack(Fetch{0, membership_->self().life, copy, received_, std::uint64_t{1} << 34, kOne}), soon());
    const auto opened = value_or_throw(unpack<Answer>(answer));
    if (opened.record.error) throw *opened.record.error;
    const auto fetched = value_or_throw(unpack<Fetched>(opened.payload));
    Got got;
    for (std::string_view rest = fetched.payload; const auto command = next_record(rest); ++got.records)
      got.whole = command->method == Method::Piece && command->body.front() == kEnd;
    EXPECT_EQ(got.records, fetched.record.count);
    received_ += got.records;
    return got;
  }

 private:
  std::optional<net::Secret> secret_;
  std::unique_ptr<store::StoreServer> store_;
  sys::UniqueFd inherited_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Membership> membership_;
  std::optional<Client> client_;
  std::uint64_t received_ = 0;
};

enum class How { Dies, IsSilent };

/// Has the image, and not all commands behind it: from then on answers wait for it.
void stop_near(How how) {
  Job job;
  Table table = job.client().table("t", testing::counters(Consistency::async()));
  const std::vector<std::uint64_t> keys{1};
  const std::vector<float> ones{-1};
  table.push(keys, ones).wait();
  auto rpc = job.follow(1);
  while (!job.fetch(*rpc, 1).whole) {
  }
  table.push(keys, ones).wait();
  ASSERT_EQ(job.fetch(*rpc, 1).records, 1U);
  const auto begun = steady_clock::now();
  Work late = table.push(keys, ones);
  if (how == How::Dies) rpc.reset();
  late.wait();
  EXPECT_LT(steady_clock::now() - begun, how == How::Dies ? kSilence : kSilence + seconds(15));
  float row = 0;
  table.pull(keys, std::span(&row, 1)).wait();
  EXPECT_EQ(row, 3);
}

TEST(Copies, WhoDiesOnceAnswersWaitForItHoldsNobodyUp) { stop_near(How::Dies); }
TEST(Copies, WhoIsSilentOnceAnswersWaitForItHoldsNobodyUp) { stop_near(How::IsSilent); }

TEST(Copies, WhoIsSilentWhileItGetsTheImageIsGivenUp) {
  Job job;
  Table table = job.client().table("t", testing::counters(Consistency::async()));
  const auto rpc = job.follow(1);
  ASSERT_EQ(job.fetch(*rpc, 1).records, 1U);
  std::this_thread::sleep_for(kSilence + seconds(1));
  EXPECT_THROW(job.fetch(*rpc, 1), Error);
}

}  // namespace
}  // namespace cohort::ps
