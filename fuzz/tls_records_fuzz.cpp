// An attacker between two authenticated ends: records are dropped, repeated, exchanged, damaged, or come from an
// earlier connection of the same secret. The data delivered is always a prefix of the data sent.
#include "net/tls.h"

#include <fuzzer/FuzzedDataProvider.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

using namespace cohort::net;

constexpr std::size_t kHeader = 5;

void expect(const cohort::Result<void>& done) {
  if (!done) std::abort();
}

struct Pair {
  std::unique_ptr<TlsSession> server, client;
  std::string recorded;  ///< of the client, while they met
};

Pair meet() {
  std::array<std::uint8_t, Secret::kBytes> bytes{};
  bytes.fill(7);
  const Secret secret = Secret::from_bytes(bytes);
  Pair pair{*TlsSession::make(true, secret, "store"), *TlsSession::make(false, secret, "store"), {}};
  bool server_done = false, client_done = false;
  for (int turns = 0; turns < 8 && !(server_done && client_done); ++turns) {
    client_done = pair.client->handshake().value();
    const std::string said = pair.client->take_output();
    pair.recorded += said;
    if (!said.empty()) expect(pair.server->feed(said));
    server_done = pair.server->handshake().value();
    const std::string answer = pair.server->take_output();
    if (!answer.empty()) expect(pair.client->feed(answer));
  }
  if (!server_done || !client_done) std::abort();
  return pair;
}

std::vector<std::string> records_of(std::string_view bytes) {
  std::vector<std::string> records;
  while (bytes.size() >= kHeader) {
    const std::size_t length = kHeader + (static_cast<std::size_t>(static_cast<unsigned char>(bytes[3])) << 8) +
                               static_cast<unsigned char>(bytes[4]);
    records.emplace_back(bytes.substr(0, length));
    bytes.remove_prefix(std::min(bytes.size(), length));
  }
  return records;
}

/// Records sent by an earlier connection of the same secret.
const std::vector<std::string>& earlier() {
  static const std::vector<std::string> records = [] {
    Pair pair = meet();
    expect(pair.client->write("an earlier message"));
    auto all = records_of(pair.recorded);
    for (std::string& record : records_of(pair.client->take_output())) all.push_back(std::move(record));
    return all;
  }();
  return records;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  Pair pair = meet();
  std::string sent, got;
  std::vector<std::string> records = records_of(pair.recorded);  // as he has recorded them
  const std::size_t old = records.size();
  for (int i = input.ConsumeIntegralInRange(1, 4); i > 0; --i) {
    const std::string text = "message " + input.ConsumeRandomLengthString(32);
    expect(pair.client->write(text));
    sent += text;
    for (std::string& record : records_of(pair.client->take_output())) records.push_back(std::move(record));
  }
  std::size_t next = old;
  for (int steps = 0; steps < 32 && (input.remaining_bytes() > 0 || next < records.size()); ++steps) {
    std::string record;
    switch (input.ConsumeIntegralInRange(0, 5)) {
      case 0:  // in order
        if (next < records.size()) record = records[next++];
        break;
      case 1: record = records[input.ConsumeIntegralInRange<std::size_t>(0, records.size() - 1)]; break;
      case 2: record = earlier()[input.ConsumeIntegralInRange<std::size_t>(0, earlier().size() - 1)]; break;
      case 3:
        if (next < records.size()) record = records[next++];
        if (!record.empty()) {
          char& byte = record[input.ConsumeIntegralInRange<std::size_t>(0, record.size() - 1)];
          byte = static_cast<char>(static_cast<unsigned char>(byte) ^ input.ConsumeIntegralInRange(1, 255));
        }
        break;
      case 4: record = input.ConsumeRandomLengthString(64); break;
      default:
        if (next < records.size()) ++next;  // dropped
    }
    if (record.empty()) continue;
    if (!pair.server->feed(record)) break;
    std::string plain;
    const auto open = pair.server->read(plain);
    got += plain;
    if (!sent.starts_with(got)) std::abort();
    if (!open || !*open) break;
  }
  return 0;
}
