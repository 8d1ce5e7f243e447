// The network: TCP connections between hosts, whose ports have a finite rate and whose links can be cut, and
// connections by Unix names on a host. The thread whose turn it is.
#pragma once

#include "kernel/kernel.h"

#include <memory>
#include <string>
#include <vector>

namespace sim {

class Socket;

struct Piece {
  std::string bytes;
  std::vector<FilePtr> files;  ///< SCM_RIGHTS
  bool end = false;
  bool reset = false;
};

/// One direction of a connection: what has arrived, and what is on its way.
struct Flow {
  Host* from = nullptr;
  Host* to = nullptr;
  Socket* writer = nullptr;
  Socket* reader = nullptr;
  std::vector<Piece> arrived;
  std::size_t waiting = 0;  ///< bytes that have arrived and are not read
  std::size_t on_way = 0;
  std::size_t offset = 0;  ///< read bytes of the first piece
  bool end = false, reset = false;
  std::vector<Piece> stuck;      ///< sent while the link was cut, in order
  Nanoseconds last_arrival = 0;  ///< of what has been sent, which is in order
  Nanoseconds last_heard = 0;
};

constexpr std::size_t kWindow = std::size_t{4} << 20;
constexpr Nanoseconds kRetry = 200 * kMillisecond;  ///< until what got no answer is sent again

class Socket : public File {
 public:
  Socket(int family, int type) : family_(family), type_(type), host_(here()->host), pid_(here()->pid) {}
  Socket(const Socket& listener)
      : family_(listener.family_),
        type_(listener.type_),
        host_(listener.host_),
        pid_(listener.pid_),
        port_(listener.port_) {}
  ~Socket() override;

  short ready() override;
  ssize_t read(void* bytes, std::size_t size, int flags) override { return receive(bytes, size, flags, nullptr); }
  ssize_t write(const void* bytes, std::size_t size, int flags) override { return send(bytes, size, flags, {}); }
  ssize_t receive(void* bytes, std::size_t size, int flags, std::vector<FilePtr>* files);
  ssize_t send(const void* bytes, std::size_t size, int flags, std::vector<FilePtr> files);
  Nanoseconds receive_limit() const override { return receive_limit_; }

  int family_, type_;
  Host* host_;
  pid_t pid_, peer_pid_ = 0;
  std::string name_;  ///< "tcp:PORT" or "unix:NAME" where it is bound
  std::uint16_t port_ = 0, peer_port_ = 0;
  std::uint32_t address_ = 0, peer_address_ = 0;
  bool bound_ = false, listening_ = false, connecting_ = false, only_v6_ = false, shut_ = false, linger_reset_ = false;
  int error_ = 0;
  std::vector<std::shared_ptr<Socket>> queue_;  ///< of a listener
  std::shared_ptr<Flow> in_, out_;
  Nanoseconds receive_limit_ = kNever;
  bool keep_alive_ = false;
  int idle_s_ = 7200, between_s_ = 75, probes_ = 9;
  std::string unix_name_, peer_unix_name_;
};

/// Puts bytes, descriptors or an end on their way.
void launch(const std::shared_ptr<Flow>& flow, Piece piece);
/// Since when nothing has come through from the peer's kernel; kNever: it answers.
Nanoseconds broken_since(const Socket& socket);
/// A listener's end of the new connection; nullptr if nothing listens there.
std::shared_ptr<Socket> answer(const std::shared_ptr<Socket>& client, Host& host, const std::string& name);
/// Sends what opens a connection, again and again while the link is cut.
void try_connect(const std::weak_ptr<Socket>& weak, Host* host, const std::string& name, int attempt);

}  // namespace sim
