// The agents of one job, one per host: starts them, lets them in (and nobody else), and knows how far each has come.
// What is said to them and what follows from what they say is the supervisor's. One thread.
#pragma once

#include "launch/channel.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/plan.h"
#include "launch/starter.h"
#include "net/secret.h"
#include "sys/unique_fd.h"

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// One agent, from its start to its end.
struct CrewMember {
  PlannedHost host;
  AgentProcess process;
  Watch ended;  ///< its process has
  std::unique_ptr<Channel> channel;
  bool started = false;       ///< its ranks run; the supervisor sets it
  bool all_gone = false;      ///< its ranks and all below them have ended; the supervisor sets it
  bool process_gone = false;  ///< and so has it, or the guard around it
};

class Crew {
 public:
  struct Events {
    std::function<void(CrewMember&)> on_joined;  ///< it can be talked to
    std::function<void(CrewMember&, Message)> on_message;
    std::function<void(CrewMember&, const std::optional<Error>&)> on_channel_closed;
    std::function<void(CrewMember&)> on_process_ended;
    std::function<void(std::string)> on_unfit;  ///< why one that came cannot be taken
  };
  /// Listens on loopback. Throws cohort::Error.
  Crew(Loop& loop, const net::Secret& secret, Events events);
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  /// Throws where one cannot be started; those before it run, until `let_go`.
  void start(const std::vector<PlannedHost>& hosts);
  /// Ends the lifelines: agents, and what they own, end by themselves.
  void let_go();
  /// To all that have joined.
  void broadcast(const Message& message);

  /// In the order of the hosts.
  const std::vector<std::unique_ptr<CrewMember>>& members() const noexcept { return members_; }
  bool all_started() const;
  /// No agent's process is left, and nothing that it said is on its way.
  bool all_ended() const;
  /// The hosts whose ranks do not run yet: "a, b".
  std::string missing() const;

 private:
  /// A connection that has not said who it is yet.
  struct Stranger {
    std::unique_ptr<Channel> channel;
    bool leaving = false;
    Timer limit;
  };
  void accept();
  void on_hello(Stranger& stranger, const Hello& hello);

  Loop& loop_;
  const net::Secret& secret_;
  Events events_;
  LocalStarter starter_;
  sys::UniqueFd listener_;
  Watch listener_watch_;
  std::vector<std::unique_ptr<CrewMember>> members_;
  std::list<Stranger> strangers_;
};

}  // namespace cohort::launch
