#include "launch/output/other_hosts.h"

#include "base/files.h"
#include "launch/output/run_folder.h"
#include "net/address.h"
#include "net/served_store.h"
#include "net/store.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::launch {

ClockSync::Next ClockSync::begin(std::int64_t now_ns) {
  if (asked_ > 0) return {};
  best_.reset();
  return ask(now_ns);
}

ClockSync::Next ClockSync::ask(std::int64_t now_ns) {
  ++asked_;
  asked_ns_ = now_ns;
  return {.ask = ++number_};
}

ClockSync::Next ClockSync::answer(std::uint64_t number, std::int64_t there_ns, std::int64_t now_ns) {
  if (asked_ == 0 || number != number_ || there_ns < 0) return {};
  const std::int64_t there_and_back = now_ns - asked_ns_;
  const std::int64_t half = there_and_back / 2 + there_and_back % 2;
  if (!best_ || half < best_->uncertainty_ns) best_ = {there_ns, there_ns - (asked_ns_ + there_and_back / 2), half};
  const int wanted = best_->uncertainty_ns > kSoon ? kMostQuestions : kQuestions;
  return asked_ < wanted ? ask(now_ns) : end();
}

ClockSync::Next ClockSync::end() {
  asked_ = 0;
  return {.found = std::exchange(best_, std::nullopt)};
}

std::string log_name(Role role, int number, Stream stream) {
  return file_name(role, number) + (stream == Stream::Stdout ? ".out" : ".err");
}

Result<void> KeptFile::open(const std::string& folder, const std::string& name) {
  if (fd || given_up) return {};
  given_up = true;
  if (::mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST)
    return fail(ErrorCode::Io, "{}: {}", name, errno_text(errno));
  const auto opened = open_folder(folder);
  if (!opened) return tl::unexpected(opened.error());
  auto file = made ? continue_file(opened->get(), name, 0666) : make_file(opened->get(), name, 0666);
  if (!file) return tl::unexpected(file.error());
  fd = *std::move(file);
  made = true;
  given_up = false;
  return {};
}

bool KeptFile::write(std::string_view bytes) {
  if (write_or_close(fd, bytes)) return true;
  given_up = true;
  return false;
}

std::string RemoteLogs::name_of(int process, Stream stream) const {
  return log_name(roles_.role_of(process), roles_.number_of(process), stream);
}

KeptFile& RemoteLogs::file(int process, Stream stream) {
  KeptFile& file = files_[{process, stream}];
  if (auto opened = file.open(folder_, name_of(process, stream)); !opened)
    troubles_.push_back(fmt::format("log {}/{}", folder_, opened.error().what()));
  return file;
}

void RemoteLogs::open(const std::vector<int>& processes) {
  for (const int process : processes) {
    file(process, Stream::Stdout);
    file(process, Stream::Stderr);
  }
}

void RemoteLogs::close(int process) {
  for (const Stream stream : {Stream::Stdout, Stream::Stderr}) {
    if (const auto found = files_.find({process, stream}); found != files_.end()) found->second.fd.reset();
  }
}

void RemoteLogs::keep(const Output& output) {
  if (!file(output.rank, output.stream).write(output.bytes))
    troubles_.push_back(fmt::format("{}/{} ends here, the job goes on: {}", folder_,
                                    name_of(output.rank, output.stream), errno_text(errno)));
}

std::string TracePieces::path_of(const status::HostTrace& host) const {
  return fmt::format("{}/host-{}.json", folder_, host.index);
}

TracePieces::File& TracePieces::file(const status::HostTrace& host) {
  const auto [place, is_new] = files_.try_emplace(host.index);
  File& file = place->second;
  if (auto opened = file.open(folder_, fmt::format("host-{}.json", host.index)); !opened)
    troubles_.push_back(fmt::format("there is no trace of {}: {}", host.name, opened.error().what()));
  if (!is_new || !file.fd) return file;
  std::string description;
  host.append_description(description);
  write(file, host, status::begin_list(description));
  return file;
}

void TracePieces::close(int host) {
  if (const auto found = files_.find(host); found != files_.end()) found->second.fd.reset();
}

void TracePieces::keep(const status::HostTrace& host, std::int64_t base_ns, std::string_view events) {
  File& to = file(host);
  write(to, host, events);
  if (to.base_ns) return;
  to.base_ns = base_ns;
  for (const ClockOffset& offset : std::exchange(to.early, {})) keep_offset(host, offset);
}

void TracePieces::keep_offset(const status::HostTrace& host, const ClockOffset& offset) {
  File& to = file(host);
  if (!to.base_ns) return to.early.push_back(offset);
  std::string event;
  host.append_offset(event, *to.base_ns, offset.there_ns, offset.offset_ns, offset.uncertainty_ns);
  write(to, host, event);
}

void TracePieces::write(File& file, const status::HostTrace& host, std::string_view bytes) {
  if (file.fd && file.bytes + bytes.size() > kMostBytes) {
    file.fd.reset();
    file.given_up = true;
    troubles_.push_back(fmt::format("{} ends here, the job goes on: it has {} GiB", path_of(host), kMostBytes >> 30));
  }
  file.bytes += bytes.size();
  if (!file.write(bytes))
    troubles_.push_back(fmt::format("{} ends here, the job goes on: {}", path_of(host), errno_text(errno)));
}

namespace {

namespace fs = std::filesystem;

constexpr auto kPatience = std::chrono::seconds(60);  // limit of transfers with a server in this process

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
