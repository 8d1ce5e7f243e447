// Messages between workers and servers of a parameter server, and changes that reach a server's state in any order:
// whatever a peer says, records come back as they were read, and the state accepts every change that its check let
// pass.
#include "ps/server_map.h"
#include "ps/snapshot.h"
#include "ps/state.h"

#include <cstdlib>

namespace {

using namespace cohort;
using namespace cohort::ps;

template <class T>
void there_and_back(std::string_view bytes) {
  if (const auto opened = unpack<T>(bytes)) {
    const std::string again = pack(opened->record);
    const auto twice = unpack<T>(again);
    if (!twice || pack(twice->record) != again) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view bytes(reinterpret_cast<const char*>(data), size);
  there_and_back<Hello>(bytes);
  there_and_back<Start>(bytes);
  there_and_back<Open>(bytes);
  there_and_back<Change>(bytes);
  there_and_back<Commit>(bytes);
  there_and_back<Leave>(bytes);
  there_and_back<Await>(bytes);
  there_and_back<Pull>(bytes);
  there_and_back<Barrier>(bytes);
  there_and_back<Settle>(bytes);
  there_and_back<Locate>(bytes);
  there_and_back<Located>(bytes);
  there_and_back<Follow>(bytes);
  there_and_back<Fetch>(bytes);
  there_and_back<Fetched>(bytes);
  there_and_back<Verify>(bytes);
  there_and_back<ServerMap>(bytes);
  there_and_back<Stats>(bytes);
  there_and_back<Answer>(bytes);
  there_and_back<Restore>(bytes);
  there_and_back<Adopt>(bytes);
  there_and_back<Snapshot>(bytes);
  (void)codec::decode<Written>(bytes);

  // A server's part of a snapshot: what it hands on, a state takes.
  State restored;
  Hello first;
  first.incarnation = 1;
  first.servers = {"@one"};
  restored.run({1, Method::Joined, 0, 1, pack(first)});
  SnapshotReader reader;
  reader.is_mine = [](const Adopt&, std::uint64_t key) { return key % 3 != 0; };
  reader.adopt = [&](const std::string& body) -> Result<void> {
    const Command command{1, Method::Adopt, 0, 0, body};
    if (auto ok = restored.tables().check_adopt(body); !ok) {
      if (restored.tables().count() == 0) std::abort();
      return ok;
    }
    restored.run(command);
    return {};
  };
  const auto more = [&, rest = std::string_view(bytes)](std::size_t taken, std::size_t) mutable {
    rest.remove_prefix(taken);
    return Result<std::string_view>(rest);
  };
  (void)read_snapshot(more, "snapshot", reader);
  (void)codec::decode<Welcome>(bytes);
  (void)codec::decode<Settled>(bytes);
  (void)codec::decode<Ended>(bytes);
  (void)codec::decode<Opened>(bytes);
  (void)codec::decode<TableCounts>(bytes);

  // Commands, as a journal has them: a byte that says of which kind and whose, two of length, the body.
  State state;
  while (bytes.size() >= 3) {
    const auto kind = static_cast<std::uint8_t>(bytes[0]);
    const std::size_t length =
        static_cast<std::uint8_t>(bytes[1]) + std::size_t{256} * static_cast<std::uint8_t>(bytes[2]);
    bytes.remove_prefix(3);
    const std::string_view body = bytes.substr(0, length);
    bytes.remove_prefix(body.size());
    const Command command{2, static_cast<Method>(kind % 32), static_cast<std::uint32_t>(kind >> 7), 1, body};
    if (is_change(command.method) && state.workers().count() > 1 && !state.check(command, std::size_t{64} << 20)) {
      continue;
    }
    const bool done = state.replay(command).has_value();
    const auto order = order_of(body);
    if (done && order && is_change(command.method) && state.workers().at(command.worker).mark != order->sequence) {
      std::abort();
    }
  }
  return 0;
}
