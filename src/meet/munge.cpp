#include "meet/munge.h"

#include "meet/look_up.h"

#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <utility>

namespace cohort::meet {
namespace {

// libmunge's interface, as its header numbers it.
struct Context;
constexpr int kCipher = 0;
constexpr int kSocket = 8;
constexpr int kUserOnly = 9;
constexpr int kAes128 = 4;
constexpr int kMungeSuccess = 0;

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  return begin == std::string_view::npos ? std::string_view()
                                         : text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

}  // namespace

struct Munge::Library {
  Context* (*create)() = nullptr;
  void (*destroy)(Context*) = nullptr;
  int (*set)(Context*, int, ...) = nullptr;
  int (*encode)(char**, Context*, const void*, int) = nullptr;
  int (*decode)(const char*, Context*, void**, int*, uid_t*, gid_t*) = nullptr;
  const char* (*error_text)(int) = nullptr;
};

Result<std::shared_ptr<Munge>> Munge::load(const std::string& socket) {
  void* const handle = ::dlopen("libmunge.so.2", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = ::dlerror();
    return fail(ErrorCode::Unavailable, "MUNGE's library cannot be loaded: {}", why == nullptr ? "unknown" : why);
  }
  auto library = std::make_shared<Library>();
  const bool complete =
      look_up(handle, "munge_ctx_create", library->create) && look_up(handle, "munge_ctx_destroy", library->destroy) &&
      look_up(handle, "munge_ctx_set", library->set) && look_up(handle, "munge_encode", library->encode) &&
      look_up(handle, "munge_decode", library->decode) && look_up(handle, "munge_strerror", library->error_text);
  if (!complete) return fail(ErrorCode::Unavailable, "libmunge.so.2 lacks functions");
  return std::shared_ptr<Munge>(new Munge(std::move(library), socket));
}

Result<std::string> Munge::seal(std::string_view bytes) const {
  const std::unique_ptr<Context, void (*)(Context*)> context(library_->create(), library_->destroy);
  if (!context) return fail(ErrorCode::Unavailable, "MUNGE: out of memory");
  int status = library_->set(context.get(), kUserOnly, ::geteuid());
  if (status == kMungeSuccess) status = library_->set(context.get(), kCipher, kAes128);
  if (status == kMungeSuccess && !socket_.empty()) status = library_->set(context.get(), kSocket, socket_.c_str());
  char* credential = nullptr;
  if (status == kMungeSuccess)
    status = library_->encode(&credential, context.get(), bytes.data(), static_cast<int>(bytes.size()));
  const std::unique_ptr<char, void (*)(void*)> held(credential, std::free);
  if (status != kMungeSuccess || credential == nullptr) {
    return fail(ErrorCode::Unavailable, "MUNGE makes no credential: {} -- does munged run on this host?",
                library_->error_text(status));
  }
  return std::string(credential);
}

Result<std::string> Munge::open(const std::string& credential) const {
  const std::unique_ptr<Context, void (*)(Context*)> context(library_->create(), library_->destroy);
  if (!context) return fail(ErrorCode::Unavailable, "MUNGE: out of memory");
  int status = kMungeSuccess;
  if (!socket_.empty()) status = library_->set(context.get(), kSocket, socket_.c_str());
  void* bytes = nullptr;
  int size = 0;
  uid_t user = 0;
  gid_t group = 0;
  if (status == kMungeSuccess)
    status = library_->decode(credential.c_str(), context.get(), &bytes, &size, &user, &group);
  const std::unique_ptr<void, void (*)(void*)> held(bytes, std::free);
  if (status != kMungeSuccess)
    return fail(ErrorCode::InvalidArgument, "MUNGE refuses a credential: {}", library_->error_text(status));
  if (user != ::geteuid())
    return fail(ErrorCode::InvalidArgument, "a credential of uid {}, and this process runs as uid {}", user,
                ::geteuid());
  if (bytes == nullptr || size <= 0) return std::string();
  std::string plain(static_cast<const char*>(bytes), static_cast<std::size_t>(size));
  ::explicit_bzero(bytes, plain.size());  // it may be a secret
  return plain;
}

std::string munge_socket_of(std::string_view slurm_conf) {
  std::string found;
  while (!slurm_conf.empty()) {
    std::string_view line = slurm_conf.substr(0, slurm_conf.find('\n'));
    slurm_conf.remove_prefix(std::min(slurm_conf.size(), line.size() + 1));
    line = trimmed(line.substr(0, line.find('#')));
    const std::size_t equals = line.find('=');
    if (equals == std::string_view::npos || lower(trimmed(line.substr(0, equals))) != "authinfo") continue;
    for (std::string_view rest = trimmed(line.substr(equals + 1)); !rest.empty();) {
      const std::string_view part = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), part.size() + 1));
      constexpr std::string_view kKey = "socket=";
      if (lower(part.substr(0, kKey.size())) == kKey) found = trimmed(part.substr(kKey.size()));
    }
  }
  return found;
}

}  // namespace cohort::meet
