// Who holds a port: the socket's inode from /proc/net, its owner from /proc/PID/fd.
#include "net/socket.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>

namespace cohort::net {
namespace {

std::string inode_of_tcp_listener(std::uint16_t port) {
  const std::string wanted = fmt::format(":{:04X}", port);
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(path);
    std::string line;
    while (std::getline(table, line)) {
      // sl local_address rem_address st tx:rx tr:tm retrnsmt uid timeout inode
      std::istringstream fields(line);
      std::array<std::string, 10> field;
      for (std::string& text : field) fields >> text;
      if (field[1].ends_with(wanted) && field[3] == "0A") return field[9];
    }
  }
  return {};
}

std::string inode_of_unix_listener(const std::string& name) {
  std::ifstream table("/proc/net/unix");
  std::string line;
  while (std::getline(table, line)) {
    // Num RefCount Protocol Flags Type St Inode Path; flag 00010000 marks a listener
    std::istringstream fields(line);
    std::array<std::string, 8> field;
    for (std::string& text : field) fields >> text;
    if (field[7] == "@" + name && field[3] == "00010000") return field[6];
  }
  return {};
}

bool has_socket(const std::string& process, const std::string& link) {
  const std::string folder = "/proc/" + process + "/fd";
  const std::unique_ptr<DIR, int (*)(DIR*)> descriptors(::opendir(folder.c_str()), ::closedir);
  if (!descriptors) return false;
  while (const dirent* entry = ::readdir(descriptors.get())) {
    char target[64];
    const ssize_t n = ::readlink((folder + "/" + entry->d_name).c_str(), target, sizeof target);
    if (n > 0 && std::string_view(target, static_cast<std::size_t>(n)) == link) return true;
  }
  return false;
}

std::string command_line(const std::string& process) {
  std::ifstream file("/proc/" + process + "/cmdline", std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  while (!text.empty() && text.back() == '\0') text.pop_back();
  // It is another process's text: keep it on one line and printable.
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\0'; }, ' ');
  std::replace_if(
      text.begin(), text.end(), [](char c) { return std::iscntrl(static_cast<unsigned char>(c)) != 0; }, '?');
  if (text.size() > 120) text = text.substr(0, 117) + "...";
  return text;
}

}  // namespace

std::string describe_holder(const Endpoint& endpoint) {
  const std::string inode =
      endpoint.is_unix() ? inode_of_unix_listener(endpoint.unix_name) : inode_of_tcp_listener(endpoint.tcp.port);
  if (inode.empty() || inode == "0") return {};
  const std::string link = "socket:[" + inode + "]";
  const std::unique_ptr<DIR, int (*)(DIR*)> processes(::opendir("/proc"), ::closedir);
  if (!processes) return {};
  while (const dirent* entry = ::readdir(processes.get())) {
    const std::string process = entry->d_name;
    if (process.find_first_not_of("0123456789") != std::string::npos) continue;
    if (has_socket(process, link)) return fmt::format("pid {} ({})", process, command_line(process));
  }
  return {};
}

}  // namespace cohort::net
