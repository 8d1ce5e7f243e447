#include "launch/record/trace_pieces.h"

#include "launch/own_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace cohort::launch {
namespace {

Result<sys::UniqueFd> make(const std::string& path, const std::string& name) {
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST)
    return fail(ErrorCode::Io, "{}: {}", path, errno_text(errno));
  const auto folder = open_folder(path);
  if (!folder) return tl::unexpected(folder.error());
  return make_file(folder->get(), name, 0666);
}

}  // namespace

TracePieces::TracePieces(std::string run_folder, std::function<void(std::string)> on_trouble)
    : folder_(std::move(run_folder) + "/trace"), on_trouble_(std::move(on_trouble)) {}

std::string TracePieces::path_of(const status::HostTrace& host) const {
  return fmt::format("{}/host-{}.pftrace", folder_, host.index);
}

TracePieces::File& TracePieces::file(const status::HostTrace& host) {
  const auto [place, is_new] = files_.try_emplace(host.index);
  File& file = place->second;
  if (!is_new) return file;
  auto made = make(folder_, fmt::format("host-{}.pftrace", host.index));
  if (!made) {
    on_trouble_(fmt::format("there is no trace of {}: {}", host.name, made.error().what()));
    return file;
  }
  file.fd = *std::move(made);
  std::string description;
  host.append_description(description);
  write(file, host, description);
  return file;
}

void TracePieces::keep(const status::HostTrace& host, std::int64_t base_ns, std::string_view packets) {
  File& to = file(host);
  write(to, host, packets);
  if (to.base_ns) return;
  to.base_ns = base_ns;
  for (const ClockOffset& offset : std::exchange(to.early, {})) keep_offset(host, offset);
}

void TracePieces::keep_offset(const status::HostTrace& host, const ClockOffset& offset) {
  File& to = file(host);
  if (!to.base_ns) return to.early.push_back(offset);
  std::string packets;
  host.append_offset(packets, *to.base_ns, offset.there_ns, offset.offset_ns, offset.uncertainty_ns);
  write(to, host, packets);
}

void TracePieces::write(File& file, const status::HostTrace& host, std::string_view bytes) {
  if (file.fd && file.bytes + bytes.size() > kMostBytes) {
    file.fd.reset();
    on_trouble_(fmt::format("{} ends here, the job goes on: it has {} GiB", path_of(host), kMostBytes >> 30));
  }
  while (file.fd && !bytes.empty()) {
    const ssize_t put = ::write(file.fd.get(), bytes.data(), bytes.size());
    if (put > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(put));
      file.bytes += static_cast<std::uint64_t>(put);
    } else if (put < 0 && errno != EINTR) {
      const int error = errno;
      file.fd.reset();
      on_trouble_(fmt::format("{} ends here, the job goes on: {}", path_of(host), errno_text(error)));
    }
  }
}

}  // namespace cohort::launch
