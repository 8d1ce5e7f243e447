#include "launch/record/payload_transfer.h"

#include "net/address.h"
#include "store/served_store.h"
#include "store/store.h"
#include "sys/files.h"

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

constexpr auto kPatience = std::chrono::seconds(60);  // with a server in this process

std::shared_ptr<store::MeetingStore> connect(const PayloadTransferOptions& options, net::Deadline deadline) {
  return store::connect_tcp_store("127.0.0.1", options.store_port, options.secret, deadline);
}

template <class Act>
Result<void> reported(const char* what, Act act) {
  try {
    act();
    return {};
  } catch (const Error& error) {
    return fail(error.code(), "{} -- {}", what, error.what());
  } catch (const std::exception& error) {
    return fail(ErrorCode::Io, "{} -- {}", what, error.what());
  }
}

}  // namespace

bool has_payloads(const std::string& owner_folder) {
  std::error_code error;
  return !owner_folder.empty() && fs::is_directory(fs::path(owner_folder) / "to-ranks", error);
}

Result<void> bring_to_ranks(const PayloadTransferOptions& options) {
  return reported("what the owner sends to the ranks does not arrive", [&] {
    const net::Deadline deadline = net::deadline_in(kPatience);
    const auto store = connect(options, deadline);
    for (const auto& entry : fs::directory_iterator(fs::path(options.folder) / "to-ranks")) {
      if (!entry.is_regular_file()) continue;
      const sys::FileBytes bytes = value_or_throw(sys::read_file(entry.path().string()));
      store::set_large(*store, "owner/to-ranks/" + entry.path().filename().string(), bytes.text());
    }
  });
}

Result<void> bring_from_ranks(const PayloadTransferOptions& options, int world_size) {
  return reported("what the ranks send to the owner: not all of it arrives", [&] {
    const net::Deadline deadline = net::deadline_in(kPatience);
    const auto store = connect(options, deadline);
    const fs::path folder = fs::path(options.folder) / "from-ranks";
    fs::create_directory(folder);
    std::vector<int> lost;
    std::string why;
    for (int rank = 0; rank < world_size; ++rank) {
      const auto brought = reported("it is lost on its way", [&] {
        const auto value = store::try_get_large(*store, fmt::format("owner/from-ranks/{}", rank), deadline);
        if (value) value_or_throw(sys::write_file_atomically((folder / std::to_string(rank)).string(), *value));
      });
      if (brought) continue;
      if (lost.empty()) why = brought.error().what();
      lost.push_back(rank);
    }
    if (lost.empty()) return;
    const std::string others = lost.size() > 1 ? fmt::format(" and {} more", lost.size() - 1) : std::string();
    raise(ErrorCode::Io, "of rank {}{}: {}", lost.front(), others, why);
  });
}

}  // namespace cohort::launch
