// Rows in Redis, timed as ps_bench times a parameter server: MGET of so many keys, and MSET of their rows (which is no
// step of an optimizer), four calls under way on one connection; and the time of a call of 100 keys.
//   redis_peer SOCKET|HOST:PORT SERVER_PID ROWS BATCH SECONDS
#include <hiredis/hiredis.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kRow = 256;  // bytes: 64 floats
constexpr int kRounds = 7;
constexpr std::size_t kFew = 100, kUnderWay = 4;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double at(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

[[noreturn]] void give_up(const char* why) {
  std::fprintf(stderr, "redis_peer: %s\n", why);
  std::exit(1);
}

class Peer {
 public:
  Peer(const std::string& place, std::uint64_t rows) : rows_(rows) {
    const std::size_t colon = place.find(':');
    context_.reset(colon == std::string::npos
                       ? redisConnectUnix(place.c_str())
                       : redisConnect(place.substr(0, colon).c_str(), std::atoi(place.c_str() + colon + 1)));
    if (!context_ || context_->err != 0) give_up(context_ ? context_->errstr : "no memory");
  }

  void begin(bool reads, std::size_t count) {
    std::vector<std::uint64_t> keys(count);
    for (std::uint64_t& key : keys) key = random_() % rows_;
    send(reads, keys);
  }
  void send(bool reads, const std::vector<std::uint64_t>& keys) {
    std::vector<const char*> words{reads ? "MGET" : "MSET"};
    std::vector<std::size_t> lengths{4};
    for (const std::uint64_t& key : keys) {
      words.push_back(reinterpret_cast<const char*>(&key));
      lengths.push_back(sizeof key);
      if (reads) continue;
      words.push_back(row_.data());
      lengths.push_back(row_.size());
    }
    if (redisAppendCommandArgv(context_.get(), static_cast<int>(words.size()), words.data(), lengths.data()) !=
        REDIS_OK)
      give_up(context_->errstr);
    int done = 0;
    while (done == 0) {
      if (redisBufferWrite(context_.get(), &done) != REDIS_OK) give_up(context_->errstr);
    }
  }
  /// Copies the rows out, as a worker would.
  void finish(bool reads) {
    void* given = nullptr;
    if (redisGetReply(context_.get(), &given) != REDIS_OK) give_up(context_->errstr);
    const std::unique_ptr<void, void (*)(void*)> held(given, freeReplyObject);
    const auto* reply = static_cast<const redisReply*>(given);
    if (reply->type == REDIS_REPLY_ERROR) give_up(reply->str);
    if (!reads) return;
    out_.resize(std::max(out_.size(), reply->elements * kRow));
    for (std::size_t i = 0; i < reply->elements; ++i) {
      if (reply->element[i]->type != REDIS_REPLY_STRING) give_up("a row is missing");
      std::copy_n(reply->element[i]->str, kRow, out_.data() + i * kRow);
    }
  }

 private:
  struct Free {
    void operator()(redisContext* context) const { redisFree(context); }
  };
  std::unique_ptr<redisContext, Free> context_;
  const std::uint64_t rows_;
  const std::string row_ = std::string(kRow, 'r');
  std::vector<char> out_;
  std::mt19937_64 random_{1};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) give_up("SOCKET|HOST:PORT SERVER_PID ROWS BATCH SECONDS");
  const auto rows = std::strtoull(argv[3], nullptr, 10);
  const auto batch = static_cast<std::size_t>(std::strtoull(argv[4], nullptr, 10));
  const double share = std::atof(argv[5]) / kRounds / 4;
  clockid_t clock;
  if (::clock_getcpuclockid(std::atoi(argv[2]), &clock) != 0) give_up("no such server");
  const auto used = [clock] {
    timespec time{};
    ::clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  Peer peer(argv[1], rows);
  for (std::uint64_t row = 0; row < rows;) {
    std::vector<std::uint64_t> keys;
    for (; keys.size() < 4096 && row < rows; ++row) keys.push_back(row);
    peer.send(false, keys);
    peer.finish(false);
  }
  std::vector<double> by_clock[2], of_a_core[2], times[2];
  for (int round = 0; round < kRounds; ++round) {
    for (const bool reads : {true, false}) {
      const auto begin = Clock::now();
      const double before = used();
      std::size_t sent = 0, done = 0;
      while (since(begin) < share) {
        peer.begin(reads, batch);
        if (++sent - done < kUnderWay) continue;
        peer.finish(reads);
        ++done;
      }
      for (; done < sent; ++done) peer.finish(reads);
      const double total = static_cast<double>(sent * batch) / 1e6;
      by_clock[reads].push_back(total / since(begin));
      of_a_core[reads].push_back(total / (used() - before));
    }
    for (const bool reads : {true, false}) {
      const auto begin = Clock::now();
      while (since(begin) < share) {
        const auto one = Clock::now();
        peer.begin(reads, std::min(kFew, batch));
        peer.finish(reads);
        times[reads].push_back(since(one) * 1e6);
      }
    }
  }
  std::printf("{");
  for (const bool reads : {true, false}) {
    const char* const what = reads ? "pull" : "push";
    std::printf("\"%s\": %.4f, \"%s_of_a_server_core\": %.4f, \"%s_us\": %.2f, \"%s_us_99\": %.2f%s", what,
                at(by_clock[reads], 0.5), what, at(of_a_core[reads], 0.5), what, at(times[reads], 0.5), what,
                at(times[reads], 0.99), reads ? ", " : "}\n");
  }
  return 0;
}
